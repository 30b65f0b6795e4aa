"""An eager run that measures what calls allocate beyond the plan: custom operators, mostly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from ..errors import MemoryLimitError
from ..host_graph.nodes import operator_name
from ..torch_private.functions import allocations, most_beyond_result
from .devices.runtime import freezes_addresses
from .eager import eager_function
from .memory.budget import Budget
from .policy.specialization import Specialization
from .prepared import Prepared, ProgramContext


def run_measured(
    context: ProgramContext, budget: Budget, specialization: Specialization, prepared: Prepared, inputs: list[Any]
) -> Any:
    """Run eagerly, and add to the budget what each call whose own memory is not known has allocated.

    Where addresses are frozen, captures take it from the pool of the graphs, which is measured there.

    Raises:
        MemoryLimitError: there is a limit, and a profiler runs in this thread, so that nothing can be measured.
    """
    plan, names = prepared.plan, list[str]()
    if not freezes_addresses(plan.device):
        sized = budget.sized(plan, prepared.provider.planned_call(inputs, None))
        names += context.planner.unmeasured_calls(sized)
    if names and allocations(lambda: None) is None:
        if budget.nbytes:
            raise _cannot_measure(sorted({operator_name(plan.nodes[name]) for name in names}))
        return prepared.eager(inputs)  # it is measured once there is a limit
    specialization.measured = True
    if not names:
        return prepared.eager(inputs)
    found = dict[str, int]()
    calls = {plan.nodes[name]: _measured(plan.nodes[name], found) for name in names}
    outputs = eager_function(plan, context.name, prepared.give_back, calls).run(inputs)
    budget.note_workspace(sized, found)
    specialization.fits = False  # by what is known now, the next call may have to be planned again
    return outputs


def _cannot_measure(operators: Sequence[str]) -> MemoryLimitError:
    return MemoryLimitError(
        f"memory_limit cannot be held: what {', '.join(operators)} allocates is not known",
        expected="a first call at these sizes in which it can be measured",
        got="a profiler that runs in this thread",
        remedy="make the first call at each size without a profiler",
    )


def _measured(node: Node, found: dict[str, int]) -> Callable[..., Any]:
    """The function of a node, which notes in ``found`` the most bytes that it allocates beyond what it returns."""
    function = node.meta.get("call", node.target)

    def call(*args: Any, **kwargs: Any) -> Any:
        results = list[Any]()
        changes = allocations(lambda: results.append(function(*args, **kwargs)))
        if not results:
            return function(*args, **kwargs)  # an operator before this one has started a profiler
        found[node.name] = most_beyond_result(changes or ())
        return results.pop()

    return call
