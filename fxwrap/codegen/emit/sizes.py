"""Arithmetic on symbolic sizes: torch's functions in place of Python's, which compute with the size of the example.

``max(s0, 6)`` compares, and is ``s0`` or 6 from then on. ``torch.sym_max(s0, 6)`` is the larger at every call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ...host_graph.arithmetic import select


def symbolic_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that computes the same from symbolic numbers; the function itself where that is no other one."""
    return _SYMBOLIC.get(id(function), function)


def _of_many(of_two: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *numbers: functools.reduce(of_two, numbers)


def _select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """``torch.sym_ite`` refuses a symbolic number beside a plain one."""
    symbolic = next((one for one in (if_true, if_false) if isinstance(one, torch.SymInt)), None)
    if symbolic is not None:
        if_true, if_false = (
            torch.SymInt(symbolic.node.wrap_int(one)) if type(one) is int else one for one in (if_true, if_false)
        )
    return torch.sym_ite(condition, if_true, if_false)


_SYMBOLIC: dict[int, Callable[..., Any]] = {
    id(max): _of_many(torch.sym_max),
    id(min): _of_many(torch.sym_min),
    id(int): torch.sym_int,
    id(float): torch.sym_float,
    id(select): _select,
    **{id(f): getattr(torch, f"_sym_{name}") for name, f in vars(math).items() if hasattr(torch, f"_sym_{name}")},
}
