"""When storages are in use: the one table of first and last steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from . import Buffer
from .reserved import most_alive


class Lifetimes(dict[int, range]):
    """The steps in which storages are in use, from the first step to the last, by storage."""

    @classmethod
    def of(cls, steps: Iterable[Iterable[int]]) -> Lifetimes:
        """The lifetimes of the storages that each step uses."""
        lifetimes = cls()
        for step, used in enumerate(steps):
            for index in used:
                known = lifetimes.get(index)
                lifetimes[index] = range(step if known is None else known.start, step + 1)
        return lifetimes

    def peak(self, sizes: Mapping[int, int]) -> int:
        """The largest sum of sizes of storages that are in use in one step."""
        return most_alive(Buffer("", sizes[index], steps.start, steps.stop) for index, steps in self.items())
