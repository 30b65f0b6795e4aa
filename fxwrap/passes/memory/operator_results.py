"""Results that operators allocate themselves, where addresses are frozen: which the plan can have a place for.

What is allocated while a graph is captured comes from the pool of the graphs, where a later capture is given whatever
an earlier one has freed. One recording works there on bytes that may be the result of another: it may not be live
after the call. So what a captured program hands out is copied to memory of the plan, which is watched, and shared
like any other (``graphs/placed_results.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.nodes import by_name, communicates, output_node
from ...host_graph.sizes import number_at, symbols_at
from ...plan import Origin, StorageFacts


def placeable_results(
    facts: StorageFacts,
    gm: GraphModule,
    device: torch.device,
    symbol_values: Mapping[Node, Any] = MappingProxyType({}),
) -> dict[int, int]:
    """Bytes of what operators return that the plan can have a place for, by storage.

    What is data-dependent is missing, and so is what may alias another value.

    Args:
        symbol_values: concrete sizes, for what depends on symbols.
    """
    handed_out = facts.behind(output_node(gm).all_input_nodes)
    # What a communication fills is there before and after its call.
    nodes = by_name(gm)
    begun = frozenset[str]().union(*facts.awaited.values(), facts.awaited)
    in_communication = facts.named_in(map(nodes.__getitem__, begun))
    symbols, found = symbols_at(symbol_values), dict[int, int]()
    for storage in facts.storages:
        node = nodes[storage.node]
        if storage.origin is not Origin.EXTERN or storage.index in in_communication:
            continue
        values = list(_values(node, storage.element))
        if any(facts.of(value) != {storage.index} for value in values):
            continue  # it may alias another value
        # Of what a communication fills there is nothing to copy until somebody has waited.
        if storage.index in handed_out and (communicates(node) or not _is_one_plain_tensor(values)):
            continue
        value = storage.value(node)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device != device:
            continue
        if nbytes := number_at(value.untyped_storage().nbytes(), symbols):
            found[storage.index] = nbytes
    return found


def _is_one_plain_tensor(values: Sequence[Node]) -> bool:
    fake = values[0].meta.get("val") if len(values) == 1 else None
    return isinstance(fake, torch.Tensor) and fake.layout is torch.strided and not (fake.is_conj() or fake.is_neg())


def _values(node: Node, element: int | None) -> Iterator[Node]:
    """The nodes whose value is a result: the call itself, or what takes it out of a tuple."""
    if element is None:
        yield node
    else:
        yield from (user for user in node.users if user.target is operator.getitem and user.args[1] == element)
