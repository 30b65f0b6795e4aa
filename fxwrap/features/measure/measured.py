"""What was measured, as plain data. Times are in microseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class MeasuredStep:
    """A launch or a library call.

    Attributes:
        node: its node in the host graph.
        name: the kernel's, or the operator's.
        module: the path of the module that it comes from; empty outside of modules.
        us: the median of its times.
        bytes: the bytes of the operands that it reads, and of those that it writes.
    """

    SHOWN: ClassVar = ("bytes_per_second",)

    node: str
    name: str
    module: str
    us: float
    bytes: int

    @property
    def bytes_per_second(self) -> float:
        """Bytes moved in a second; 0 if its time is too short to be measured."""
        return self.bytes / self.us * 1e6 if self.us else 0.0


@dataclass(frozen=True)
class MeasuredProgram:
    """The calls of one program.

    Attributes:
        why_not: why nothing was measured; empty if it was.
        runs: of how many runs each time is the median.
        call_us: the time of a call of the program: what Dynamo does before is not in it.
        between_us: the time of what runs between the steps: allocations, views, checks.
        in_graphs: whether device graphs replay the steps. Then each was measured outside of its graph, alone on the
            device. Its time includes a launch, and the times do not add up to the call's.
        steps: in the order in which they run.
    """

    SHOWN: ClassVar = ("steps_us", "host_us")

    why_not: str = ""
    runs: int = 0
    call_us: float = 0.0
    between_us: float = 0.0
    in_graphs: bool = False
    steps: tuple[MeasuredStep, ...] = ()

    @property
    def steps_us(self) -> float:
        """The sum of the steps' times."""
        return sum(step.us for step in self.steps)

    @property
    def host_us(self) -> float:
        """What a call takes beside its steps: what runs between them, and the call itself. 0 with ``in_graphs``."""
        return 0.0 if self.in_graphs else max(0.0, self.call_us - self.steps_us)

    def by(self, key: Callable[[MeasuredStep], str]) -> dict[str, list[MeasuredStep]]:
        """The steps in groups, the one that takes longest first."""
        groups: dict[str, list[MeasuredStep]] = defaultdict(list)
        for step in self.steps:
            groups[key(step)].append(step)
        return dict(sorted(groups.items(), key=lambda group: -sum(step.us for step in group[1])))


@dataclass(frozen=True)
class Measured:
    """What one call of a function took, by the names of the programs that ran."""

    programs: Mapping[str, MeasuredProgram] = field(default_factory=dict)
