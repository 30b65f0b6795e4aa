"""Arithmetic on sizes: the functions that expressions of sizes call, by the names under which graphs are stored.

The reader of wrapper lines, the classification of nodes and the storage of graphs use this one table. It has all of
Python's functions of numbers, and torch's for symbolic numbers, so that a new function in Inductor's text is in it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Python's conditional expression as a function. Both sides are evaluated, which is fine for arithmetic."""
    return if_true if condition else if_false


_BUILTINS: tuple[Any, ...] = (abs, bool, float, int, max, min, pow, round, sum)
_OPERATORS = [name for name in operator.__all__ if f"__{name.strip('_')}__" in vars(int)]
_SYMBOLIC = ["sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt", "sym_sum"]
_SYMBOLIC += [f"_sym_{name}" for name in vars(math)]  # functions of ``math`` that take symbolic numbers

# Functions that a wrapper line calls without a module's name.
BUILTINS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in _BUILTINS}
ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in (*_OPERATORS, "not_", "truth")},
    **{f"math.{name}": function for name, function in vars(math).items() if callable(function)},
    **{f"builtins.{name}": function for name, function in BUILTINS.items()},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC if hasattr(torch, name)},
    "fxwrap.select": select,
}
_IDS = frozenset(map(id, ARITHMETIC.values()))


def is_arithmetic(function: Any) -> bool:
    """Whether a function only computes numbers from numbers. Such a call may be moved and repeated."""
    return id(function) in _IDS  # by identity: a kernel's function may have no hash
