"""Buckets: calls with few rows are padded to the next of a few sizes, so that one recording serves many sizes.

It adds the option ``buckets``, and stands around compiled graphs (``AROUND_GRAPHS``). docs/buckets.md is its page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...hooks import AROUND_GRAPHS
from ...options import ADDED, AddedOption

OPTION = "buckets"


def _parsed(value: Any) -> Any:
    """Names with their sizes in ascending order; None if they are none."""
    if not isinstance(value, Mapping):
        return None
    sizes = {name: _sizes(value[name]) for name in value}
    wrong = not all(isinstance(name, str) and sizes[name] for name in sizes)
    return None if wrong else tuple(sorted(sizes.items()))


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, (tuple, list, set, frozenset, range)) else ()
    return tuple(sorted(set(sizes))) if all(type(size) is int and size >= 1 for size in sizes) else ()


ADDED[OPTION] = AddedOption(
    "sizes by name, such as {'batch': (1, 2, 4, 8)}: dimensions marked with fxwrap.mark_bucket are padded to the "
    "next of these sizes, so that one recording serves many",
    "a dictionary of names and sequences of sizes of at least 1, such as {'batch': (1, 2, 4, 8)}",
    _parsed,
    default=(),
)
AROUND_GRAPHS[OPTION] = "fxwrap.features.buckets.codegen.compiling:Buckets.of"
