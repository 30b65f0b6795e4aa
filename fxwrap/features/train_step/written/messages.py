"""What a written step tells: why it cannot be one program, and what is suspicious."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import TrainStepError

# By code of a step: how many steps were made of it and called once, since one of them was traced.
_called_once: Counter[Any] = Counter()
_SUSPICIOUS = 10


def refused(name: str, reasons: Sequence[str]) -> TrainStepError:
    """The error that says why a step of this name cannot be one program."""
    return TrainStepError(
        f"{name} cannot be one program",
        expected="a step that does the same work at every call, on whatever numbers",
        got="\n    ".join(["", *reasons]),
        remedy="change what is named, or take it out of the step",
    )


def note_first_call(name: str, code: object) -> None:
    """Warn where a step is made anew for each call, as in the body of a loop: none of them is ever traced."""
    _called_once[code] += code is not None
    if _called_once[code] == _SUSPICIOUS:
        warnings.warn(
            f"fxwrap: train_step was called {_SUSPICIOUS} times with {name}, and each step once, as it is written\n"
            "  what to do: make the step once, before the loop",
            stacklevel=4,
        )


def note_trace(code: object) -> None:
    """A step of this code was traced."""
    _called_once.pop(code, None)


def warn_too_many(name: str, programs: int, traced: Mapping[str, int], now: str) -> None:
    """Say that a step has as many programs as it may have, what they were traced for, and what is asked now."""
    reasons = ", ".join(f"{reason} ({count})" for reason, count in traced.items())
    warnings.warn(
        f"fxwrap: {name} has {programs} programs, and runs as it is written where none serves\n"
        f"  traced for: {reasons}; now: {now}\n"
        "  what to do: give numbers that change as tensors, or raise torch.compiler.config.recompile_limit",
        stacklevel=5,
    )


def warn_only_read(name: str, lines: Sequence[str]) -> None:
    """Say which lines read numbers of tensors with which nothing is computed."""
    for line in lines:
        warnings.warn(
            f"fxwrap: {name} reads a number of a tensor, which a replay does not\n  at {line}\n"
            "  what to do: return the tensor, and print or log its number outside of the step",
            stacklevel=7,
        )
