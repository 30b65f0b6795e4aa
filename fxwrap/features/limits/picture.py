"""The picture of a program's limits: how much memory it takes within each, and what that costs.

Each limit is planned, in milliseconds, on the host graph that Inductor has emitted. Nothing is compiled and nothing
runs: costs are bytes that the program moves, as the pass counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InputError, MemoryLimitError
from ...graphs.program import Program
from ...inspection.explanation import Explanation
from ...limit import Limit
from ...passes.memory.fit import timeline_of
from ...passes.memory.requirements import expected_sizes
from ...plan import ProgramPlan

_WIDTH = 40


@dataclass(frozen=True)
class WithinLimit:
    """A program within one limit, at the sizes that it was compiled for.

    Attributes:
        limit: bytes; None for no limit.
        peak: the most bytes that are in use at one time.
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

    Where graphs freeze addresses, an arena may take more than what is in use at one time; so may what libraries
    allocate.

    Raises:
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
    free = _within(program, None)
    try:
        least = _within(program, 1).peak
    except MemoryLimitError as error:
        least = error.least
    below = dict.fromkeys(free.peak - (free.peak - least) * n // count for n in range(1, count + 1))
    return Limits(program.name, (free, *(_within(program, limit) for limit in below)))


def _within(program: Program, limit: int | None) -> WithinLimit:
    given = None if limit is None else Limit(limit)
    plan: ProgramPlan = program.planner.partition(program.plan.inputs, program.recorder.capture_errors, given)
    timeline = timeline_of(plan, expected_sizes(plan.graph, plan.facts))
    return WithinLimit(limit, timeline.peak, len(plan.repeated), timeline.work)
