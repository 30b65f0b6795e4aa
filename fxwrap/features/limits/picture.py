"""The picture of a program's limits: how much memory it takes within each, and what that costs.

Each limit is planned, in milliseconds, on the host graph that Inductor has emitted. Nothing is compiled and nothing
runs: costs are bytes that the program moves, as the pass counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InputError
from ...graphs.program import Program
from ...inspection.explanation import Explanation
from ...passes.memory.fit import timeline_of
from ...passes.memory.requirements import expected_sizes

_WIDTH = 40


@dataclass(frozen=True)
class WithinLimit:
    """A program within one limit, at the sizes that it was compiled for.

    Attributes:
        limit: bytes; None for no limit.
        peak: the most bytes that a call takes beside its inputs.
        repeated: how many nodes run again.
        moved: bytes that the program moves, its operations counted as bytes.
    """

    limit: int | None
    peak: int
    repeated: int
    moved: int


@dataclass(frozen=True)
class Limits:
    """The limits of one program, from none to the least that fits. Print it.

    Attributes:
        program: its name in logs and profiles.
    """

    program: str
    rows: tuple[WithinLimit, ...]

    @property
    def least(self) -> int:
        """The bytes of the lowest limit that fits."""
        return min(row.peak for row in self.rows)

    def __str__(self) -> str:
        whole = self.rows[0]
        lines = [f"{self.program}, by limit: bytes in use at most, and bytes moved beside those without a limit"]
        for row in self.rows:
            limit = "none" if row.limit is None else f"{row.limit:,}"
            bar = "#" * round(_WIDTH * row.peak / max(whole.peak, 1))
            cost = f"{row.moved / max(whole.moved, 1):.2f}, {row.repeated} nodes again"
            lines.append(f"{limit:>16} {row.peak:>16,} {bar:<{_WIDTH}} {cost}")
        return "\n".join(lines)


def limits(explanation: Explanation, count: int = 8) -> list[Limits]:
    """The limits of each program: none, and ``count`` from there to the least that fits.

    Where graphs freeze addresses, the arena counts, and what captures are known to take, as if all inputs moved that
    may.

    Raises:
        MemoryLimitError: data decide on what a program takes, so that it can have no limit.
        InputError: ``count`` is less than 1, or the report was read from a file.
    """
    if type(count) is not int or count < 1 or not explanation.graphs:
        raise InputError(
            "limits of a report",
            expected="a report on programs that are in use, and a count of at least 1",
            got=f"{len(explanation.graphs)} programs, count {count!r}",
        )
    return [_limits(graph.program, count) for graph in explanation.graphs]


def _limits(program: Program, count: int) -> Limits:
    recorder = program.recorder
    budget, call = recorder.budget, recorder.call_compiled_for()
    base = recorder.partition(None)

    def within(limit: int | None) -> WithinLimit:
        plan = base if limit is None else budget.within(limit, call, base, None, recorder.partition)[0]
        work = timeline_of(plan, expected_sizes(plan.graph, plan.facts)).work
        return WithinLimit(limit, budget.taken(plan, call), len(plan.repeated), work)

    free, least = within(None), budget.least(call, base, recorder.partition)
    below = dict.fromkeys(free.peak - (free.peak - least) * n // count for n in range(1, count + 1))
    return Limits(program.name, (free, *map(within, below)))
