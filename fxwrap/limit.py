"""A limit of memory for calls, what runs again so that a program keeps it, and how bytes are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import MemoryLimitError

_UNITS = "bytes", "KiB", "MiB", "GiB", "TiB"


@dataclass(frozen=True)
class Limit:
    """The most bytes that a call may take beside its inputs (option ``memory_limit``).

    Attributes:
        overhead: the part of these bytes that is not storages: gaps in an arena, static buffers of inputs. It is
            known once an arena is planned, and 0 at the first attempt.
        symbols: the sizes that it is for, by symbol; empty for those that the program was compiled for.
        workspace: bytes that calls are known to allocate at these sizes beyond what they return, by node, where that
            is not in the plan.
        given: bytes of inputs that are freed after their last use, by input: what a forward program has saved for
            this backward. They are within the limit, too.
    """

    nbytes: int
    overhead: int = 0
    symbols: Mapping[object, int] = field(default_factory=dict)
    workspace: Mapping[str, int] = field(default_factory=dict)
    given: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Repeated:
    """A node that runs again, because what it made was dropped to stay within ``memory_limit``.

    Attributes:
        node: its name in the graph.
        repeats: the node that it is a copy of.
        nbytes: of what it makes, which is not there between both runs.
        moved: bytes that it reads and writes, and its operations as bytes: what it costs.
    """

    node: str
    repeats: str
    nbytes: int
    moved: int


def does_not_fit(nbytes: int, least: int, unknown: str = "") -> MemoryLimitError:
    """The error of a program that takes at least so many bytes, and more than its limit of ``nbytes``.

    Args:
        unknown: what it takes besides, of which nobody knows yet how much.
    """
    size = f" ({binary(least)})" if least >= 1024 else ""
    error = MemoryLimitError(
        "a program does not fit into memory_limit",
        expected=f"at least {least} bytes{size}{unknown}",
        got=f"{nbytes} bytes",
        remedy="raise memory_limit, or make the batch smaller",
    )
    error.least = least
    return error


def binary(number: float) -> str:
    """A number of bytes in the unit that suits it: ``1.5 KiB``."""
    power = min(int(math.log2(max(number, 1))) // 10, len(_UNITS) - 1)
    return f"{number / 1024**power:,.{min(power, 1)}f} {_UNITS[power]}"
