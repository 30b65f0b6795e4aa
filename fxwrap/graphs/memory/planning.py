"""What plans one host graph, as programs see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from ...limit import Limit
from ...plan import InputFacts, MemoryPlan, PlacementHint, ProgramPlan, Reservations, SizedProgram


class Planner(Protocol):
    """Plans one host graph. Implemented by ``pipeline.HostGraphPlanner``."""

    def partition(
        self, inputs: InputFacts, capture_errors: Mapping[str, str] = MappingProxyType({}), limit: Limit | None = None
    ) -> ProgramPlan:
        """The plan for all sizes.

        Args:
            inputs: a program that is partitioned again takes them from its plan.
            capture_errors: the error of each operator whose capture failed; it is kept out of captured partitions.
            limit: work is repeated to stay below.

        Raises:
            MemoryLimitError: a call would take more than the limit.
        """

    def plan_memory(
        self,
        sized: SizedProgram,
        reserved: Reservations = MappingProxyType({}),
        hint: PlacementHint | None = None,
        previous: MemoryPlan | None = None,
    ) -> MemoryPlan:
        """Plan the memory of one recording (``passes.memory.planner.plan_program``), and verify the plan."""

    def bytes_of_call(self, sized: SizedProgram, in_pool: int) -> int:
        """The most bytes that a call takes beside its inputs (``passes.memory.planner.bytes_of_call``)."""

    def workspace(self, gm: GraphModule, symbols: Mapping[Any, int]) -> Mapping[str, int]:
        """Workspace of library calls in bytes at these sizes, by node: measured, where the host can measure it."""

    def unmeasured_calls(self, sized: SizedProgram) -> Collection[str]:
        """The calls whose own memory is not known at these sizes (``passes.memory.planner.unmeasured_calls``)."""

    def devices(self, sized: SizedProgram) -> Collection[torch.device]:
        """The devices on which a plan of a program has storages."""

    def plan_pair(
        self, first: SizedProgram, second: SizedProgram, saved_as: Mapping[int, Sequence[str]]
    ) -> tuple[PlacementHint, PlacementHint]:
        """Hints for a forward and its backward from a joint plan (``passes.memory.planner.plan_pair``)."""

    def for_graph(self, gm: GraphModule) -> Planner:
        """A planner with the same stages and options for another graph, a modified copy of this planner's."""

    @property
    def took(self) -> Mapping[str, tuple[int, float]]:
        """How often each stage ran, and its seconds, by the stage's name."""
