"""Finds out what operators allocate in a capture: each is captured once, in a graph that never runs.

::

    convolution(x, w)        asks for   24,576 bytes   its result
                                        65,536 bytes   workspace
                                        12,288 bytes   workspace, after the first was freed

The graph never runs: operands and results have addresses without memory of their own, and nothing is computed. Each
kind of call (operator, sizes, strides, settings of libraries) is rehearsed once in a process.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...devices import Placements
from ...host_graph.nodes import operator_name
from ...host_graph.sizes import layout_at, number_at, storage_bytes
from ...host_graph.tensors import tensors_in
from ...plan import OperatorMemory, ProgramPlan
from ...torch_private.functions import below_autograd, free_workspaces, make_handles
from ..devices.runtime import DeviceRuntime, current_stream, own_runtime
from ..memory.operator_memory import note_memory, unknown_calls

log = logging.getLogger(__name__)


def rehearse(plan: ProgramPlan, symbols: Mapping[Any, int], has_run: bool = True) -> bool:
    """Find out what the captured calls of a program allocate at these sizes; whether anything new was found.

    The caller holds the lock of captures. A call that cannot be rehearsed allocates outside of the plan.

    Args:
        has_run: whether the program has run at these sizes. What fails before may succeed then, and is tried again.
    """
    unknown = unknown_calls(plan, symbols)
    found = bool(unknown)
    if unknown and not has_run:
        _make_handles(own_runtime(plan.device))
    while unknown:
        # In a graph of the device: one that runs its work at once would use what is not there.
        unknown = _rehearse_some(own_runtime(plan.device), unknown, symbols, has_run)
    return found


def _rehearse_some(
    runtime: DeviceRuntime, calls: Mapping[Hashable, Node], symbols: Mapping[Any, int], has_run: bool
) -> dict[Hashable, Node]:
    """Rehearse calls in one capture; returns those that are left, because one has failed."""
    assert runtime.placements is not None
    results = dict[Hashable, dict[int, int]]()
    tried = list[Hashable]()
    with runtime.placements(runtime.device) as placements:

        def work() -> None:
            with below_autograd():
                for kind, node in calls.items():
                    tried.append(kind)
                    results[kind] = _captured(node, symbols, placements, runtime.device)

        try:
            with torch.inference_mode(False), torch.no_grad(), runtime.keeping_stream():
                graph = runtime.rehearse(work)
        except Exception as error:
            if has_run and not isinstance(error, torch.OutOfMemoryError):  # then the next recording rehearses it
                _note(tried[-1], calls[tried[-1]], f"{type(error).__name__}: {error}")
            return {kind: node for kind, node in calls.items() if kind != tried[-1]}
        made = placements.made()
        del graph  # which may keep what a call has allocated: ``made`` is to see it
    for (kind, addresses), allocations in zip(results.items(), made, strict=True):
        if allocations is None:
            _note(kind, calls[kind], "it keeps what it has allocated")
            continue
        _note(kind, calls[kind], _memory(addresses, allocations))
    return {}


def _make_handles(runtime: DeviceRuntime) -> None:
    """Make the handles of libraries. The workspace that they ask for lies nowhere, and is freed at once."""
    assert runtime.placements is not None
    with runtime.placements(runtime.device) as placements, placements.without_memory():
        make_handles(runtime.device)
        free_workspaces(current_stream(runtime.device))


def _memory(addresses: Mapping[int, int], allocations: Sequence[tuple[int, int]]) -> OperatorMemory | str:
    """What a call allocates, or why that cannot be planned.

    Args:
        addresses: of the memory of its results, by position.
        allocations: the address and the bytes of each allocation, in order.
    """
    in_order = dict.fromkeys(address for address, _ in allocations)
    blocks = {address: block for block, address in enumerate(in_order)}
    lie_in = {blocks.get(address, -1): position for position, address in addresses.items()}
    if -1 in lie_in:
        return "it returns memory that it has not allocated"
    if len(lie_in) < len(addresses):
        return "two of its results share memory"
    return OperatorMemory(tuple((blocks[address], nbytes) for address, nbytes in allocations), lie_in)


def _note(kind: Hashable, node: Node, memory: OperatorMemory | str) -> None:
    if isinstance(memory, str):
        log.info("%s allocates outside of the plan: %s", operator_name(node), memory.splitlines()[0])
    note_memory(kind, memory)


def _captured(node: Node, symbols: Mapping[Any, int], placements: Placements, device: torch.device) -> dict[int, int]:
    """Capture a call; returns the addresses of the memory of its results, by position."""
    function = node.meta.get("call", node.target)
    operands = {arg: _stand_in(arg.meta["val"], symbols, placements) for arg in node.all_input_nodes}
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operands.__getitem__)
    given = {tensor.untyped_storage().data_ptr() for value in operands.values() for tensor in tensors_in(value)}
    stream = current_stream(device)
    free_workspaces(stream)
    with placements.without_memory():
        result = function(*args, **kwargs)
        values = result if isinstance(result, (tuple, list)) else (result,)
        tensors = {position: value for position, value in enumerate(values) if isinstance(value, torch.Tensor)}
        addresses = {position: value.untyped_storage().data_ptr() for position, value in tensors.items()}
        del result, values, tensors
        free_workspaces(stream)
    return {position: address for position, address in addresses.items() if address and address not in given}


def _stand_in(value: Any, symbols: Mapping[Any, int], placements: Placements) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_stand_in(item, symbols, placements) for item in value)
    if not isinstance(value, torch.Tensor):
        return number_at(value, symbols) if isinstance(value, torch.SymInt) else value
    layout, offset = layout_at(value, symbols), number_at(value.storage_offset(), symbols)
    assert layout is not None and offset is not None
    storage = placements.stand_in(offset * value.itemsize + storage_bytes(*layout, value.dtype))
    empty = torch.empty(0, dtype=value.dtype, device=storage.device)
    return empty.set_(storage, offset, *layout)  # type: ignore[call-overload]
