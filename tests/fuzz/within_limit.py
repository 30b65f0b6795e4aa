"""Limits of memory that hold: calls that are measured, and the least limit that is said to fit, tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fxwrap.errors import MemoryLimitError
from fxwrap.graphs.compilation import Compilation
from fxwrap.graphs.devices.runtime import runtime_for
from fxwrap.torch_private.functions import allocations

T = TypeVar("T")


class DifferenceError(AssertionError):
    """Something is not as it is without fxwrap, or not as fxwrap says."""


class TakesMoreError(DifferenceError):
    """A call takes more than its limit, or the least limit does not fit."""


def measured(run: Callable[[], T]) -> tuple[T, int | None]:
    """What ``run`` returns, and the most bytes that it had at one time on the CPU.

    None where a profiler runs, or where fxwrap measures itself, which is not possible within this measurement.
    """
    results: list[T] = []
    try:
        changes = allocations(lambda: results.append(run()))
    except MemoryLimitError as error:
        if "without a profiler" not in error.remedy:
            raise
        return run(), None
    if changes is None and not results:
        return run(), None
    return results[0], None if changes is None else max(itertools.accumulate(changes), default=0)


class Limit:
    """The ``memory_limit`` of a compiled function whose calls run one program each.

    Attributes:
        nbytes: 0 for none. None fits into one byte: then the error says what the least is, and that is tried.
        room: by which the least is multiplied.
    """

    def __init__(self, compilation: Compilation, unknown: bool, device: torch.device) -> None:
        self._compilation, self._unknown = compilation, unknown
        self._is_measured = device.type == "cpu" and not runtime_for(device).frozen_addresses
        self.nbytes, self.room = 0, 1.0

    def set(self, nbytes: int) -> None:
        self.nbytes = nbytes
        for program in self._compilation.programs:
            program.set_memory_limit(nbytes)

    def run(self, call: Callable[[], Any], measures: bool = True) -> Any:
        """Make a call, and if it does not fit, within the least limit that does, or somewhat more.

        Args:
            measures: whether all that is allocated is the program's.

        Raises:
            TakesMoreError: it takes more, or the least is none.
        """
        if not self.nbytes:
            return call()
        programs = len(self._compilation.programs)
        try:
            result = self._measured(call) if measures else call()
        except MemoryLimitError as error:
            least, asked = error.least, self.nbytes
            if least <= asked:
                raise TakesMoreError(f"within {asked} bytes it does not fit, and least is {least}") from error
            self.set(int(least * self.room))
            try:
                result = self._measured(call) if measures else call()
            except MemoryLimitError as again:
                raise TakesMoreError(
                    f"least is {least}, and within {self.nbytes} it does not fit: {again}"
                ) from again
        if len(self._compilation.programs) != programs:
            self.set(self.nbytes)  # what is compiled later has no limit yet
        return result

    def _measured(self, call: Callable[[], Any]) -> Any:
        """What is compiled takes other memory; what no plan knows is measured when it warms up."""
        if not self._is_measured:
            return call()
        programs, replays = self._counts()
        result, peak = measured(call)
        compiled, replayed = (now - before for now, before in zip(self._counts(), (programs, replays), strict=True))
        if peak is not None and peak > self.nbytes and not compiled and (replayed or not self._unknown):
            raise TakesMoreError(f"within {self.nbytes} bytes it takes {peak}")
        return result

    def _counts(self) -> tuple[int, int]:
        programs = self._compilation.programs
        return len(programs), sum(program.counters.replays for program in programs)
