"""ANALYSE: matches the inputs of a backward graph with what its forward graph saves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from ...host_graph.nodes import output_values
from ...host_graph.storages import Origin
from ...plan import ProgramPlan


def saved_tensors(
    forward: ProgramPlan, backward: ProgramPlan, origins: Collection[Origin] = (Origin.ALLOCATION, Origin.EXTERN)
) -> Mapping[int, Sequence[str]]:
    """The inputs of a backward graph that are saved values, by the storage that the forward graph allocates for them.

    Or by storages of other origins: those of its inputs.

    AOTAutograd cuts both graphs out of one, in which a saved value has one name.

    ::

        forward   primals_1, x -> [y, primals_1, addmm]         addmm is allocated there, primals_1 is not
        backward  primals_1, addmm, tangents_1 -> [...]         {storage of addmm: [addmm]}
    """
    received = dict(zip(backward.inputs.names, [node.name for node in backward.placeholders], strict=False))
    values, names = output_values(forward.graph), dict[int, list[str]]()
    for position, name in forward.inputs.saved.items():
        value = values[position]
        if name in received and isinstance(value, Node):
            for index in forward.facts.of(value):
                if forward.facts.storages[index].origin in origins:
                    names.setdefault(index, []).append(received[name])
    return names
