"""Which results that operators allocate themselves can be copied to planned memory, where addresses are frozen.

What a capture allocates comes from the pool of the device graphs, and a later capture reuses what an earlier one has
freed. Another recording may overwrite such a result after the call. So a result that a captured program returns is
copied to planned memory, where live outputs are tracked (``graphs/record/placed_results.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.nodes import by_name, communicates
from ...host_graph.sizes import number_at, symbols_at
from ...host_graph.storages import Origin, StorageFacts, results_in


def placeable_results(
    facts: StorageFacts,
    gm: GraphModule,
    device: torch.device,
    symbol_values: Mapping[Node, Any] = MappingProxyType({}),
) -> dict[int, int]:
    """Bytes of the operators' results that the plan can place, by storage.

    Results of data-dependent size are missing, and so are those that may alias another value.

    Args:
        symbol_values: concrete sizes, for what depends on symbols.
    """
    # A communication fills its result after its call, until it is awaited.
    nodes = by_name(gm)
    begun = frozenset[str]().union(*facts.awaited.values(), facts.awaited)
    in_communication = facts.named_in(map(nodes.__getitem__, begun))
    symbols, sizes = symbols_at(symbol_values), dict[int, int]()
    for storage in facts.storages:
        node = nodes[storage.node]
        if storage.origin is not Origin.EXTERN or storage.index in in_communication:
            continue
        values = results_in(node, storage.element)
        if any(facts.of(value) != {storage.index} for value in values):
            continue  # it may alias another value
        # What a communication fills can be copied only after a wait.
        if storage.index in facts.handed_out and (communicates(node) or not _is_one_plain_tensor(values)):
            continue
        value = storage.value(node)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device != device:
            continue
        if nbytes := number_at(value.untyped_storage().nbytes(), symbols):
            sizes[storage.index] = nbytes
    return sizes


def _is_one_plain_tensor(values: Sequence[Node]) -> bool:
    fake = values[0].meta.get("val") if len(values) == 1 else None
    return isinstance(fake, torch.Tensor) and fake.layout is torch.strided and not (fake.is_conj() or fake.is_neg())
