"""Eager runs: the whole schedule of a program, with memory from torch's allocator and without device graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from ..host_graph.nodes import Kind, checks_on, constants, kind_of, output_node, schema_of
from ..plan import ProgramPlan
from ..torch_private import native_library
from ..torch_private.functions import profiling, retains_workspaces
from ..torch_private.native_units import CannotReplay
from .devices.runtime import current_stream
from .policy.eager_memory import GiveBack, can_run_again
from .record.capture import free_workspaces_of_warm_ups
from .record.flat import FlatBuilder
from .replay.flat_python import Part
from .replay.guards import Description
from .replay.ranges import partition_range
from .replay.units import make_unit

log = logging.getLogger(__name__)

# The eager run that makes a native unit for those after it. Most programs run eagerly only once.
_RUNS_BEFORE_UNIT = 3


class EagerRuns:
    """Runs the whole schedule eagerly: in Python at first, natively after the ``_RUNS_BEFORE_UNIT``-th run.

    Attributes:
        part: the schedule, whose registers are the inputs.
    """

    def __init__(self, name: str, part: Part, inputs: int) -> None:
        self.part = part
        self._name, self._inputs = name, inputs
        self._calls, self._tried = 0, False
        self._unit: Callable[[list[Any]], Any] | None = None
        self._missed: Any = None

    def __call__(self, inputs: list[Any]) -> Any:
        if (unit := self._unit) is None:
            self._calls += 1
            if self._calls >= _RUNS_BEFORE_UNIT and not self._tried:
                self._make_unit()
        elif (outputs := unit(inputs)) is not self._missed:
            return outputs
        return (self.part.run_profiled if profiling() else self.part.run)(inputs)

    def _make_unit(self) -> None:
        self._tried = True
        native = native_library.native_replay()
        if isinstance(native, str):
            return
        try:
            description = Description(self._inputs, True, give_back=self.part.give_back)
            unit = make_unit(native, [self.part], self._inputs, description)
            self._missed, self._unit = native.missed, unit  # in this order: another thread may call it at once
        except CannotReplay as error:
            log.info("%s: eager runs stay in Python: %s", self._name, str(error))


def calls_that_retain_nothing(plan: ProgramPlan) -> Mapping[Node, Callable[..., Any]]:
    """Functions for the library calls of a program that free at once the workspace which their library keeps.

    Within a limit an eager run takes no more for a product's workspace than the plan does: bytes that other storages
    have before and after it.
    """
    if not retains_workspaces(plan.device):
        return {}

    def retaining_nothing(node: Node) -> Callable[..., Any]:
        function = node.meta.get("call", node.target)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            free_workspaces_of_warm_ups(current_stream(plan.device))
            return result

        return call

    calls = (node for node in plan.schedule if kind_of(node) is Kind.EXTERN and schema_of(node) is not None)
    return {node: retaining_nothing(node) for node in calls}


def eager_function(
    plan: ProgramPlan,
    name: str,
    give_back: GiveBack | None,
    calls: Mapping[Node, Callable[..., Any]] = MappingProxyType({}),
) -> Part:
    """The whole schedule as one flat function that allocates from torch's allocator.

    Args:
        calls: functions to call in place of a node's own.
    """
    registers = {node: i for i, node in enumerate(plan.placeholders)}

    # A step that is out of memory is retried only where recordings keep memory that can be freed.
    def may_retry(node: Node) -> bool:
        return give_back is not None and can_run_again(plan, node)

    builder = FlatBuilder(constants(plan.graph), registers, may_retry=may_retry, calls=calls)
    for node in checks_on(plan.placeholders):
        if builder.available(node):
            builder.check(node)
    for partition in plan.partitions:
        builder.begin_range(partition_range(name, partition.index))
        builder.append_partition(plan, partition)
    builder.begin_range("")
    return builder.build(output_node(plan.graph).args[0], give_back=give_back)
