"""Arithmetic: the functions that expressions of sizes call, by the names under which graphs are stored.

One table for the reader of wrapper lines, the classification of nodes and storage. It has all functions of numbers
that Python has, and torch for symbolic ones, so that another function in Inductor's text needs no change here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """The conditional expression of Inductor's wrapper, with both sides evaluated (they are arithmetic)."""
    return if_true if condition else if_false


_BUILTINS: tuple[Any, ...] = (abs, bool, float, int, max, min, pow, round, sum)
_OPERATORS = [name for name in operator.__all__ if f"__{name.strip('_')}__" in vars(int)]
_SYMBOLIC = ["sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt", "sym_sum"]
_SYMBOLIC += [f"_sym_{name}" for name in vars(math)]  # functions of ``math`` that take symbolic numbers

# What a wrapper line calls without a module.
BUILTINS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in _BUILTINS}
ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in (*_OPERATORS, "not_", "truth")},
    **{f"math.{name}": function for name, function in vars(math).items() if callable(function)},
    **{f"builtins.{name}": function for name, function in BUILTINS.items()},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC if hasattr(torch, name)},
    "fxwrap.select": select,
}
_KNOWN = frozenset(map(id, ARITHMETIC.values()))


def is_arithmetic(function: Any) -> bool:
    """Whether a function computes numbers from numbers, and does nothing else: it may run at any time, and again."""
    return id(function) in _KNOWN  # by identity: a kernel's function may have no hash
