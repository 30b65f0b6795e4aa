"""What operators allocate while they are captured, known to this process from rehearsals (``record/rehearsal.py``).

An operator without an ``out=`` form allocates its results, many allocate temporaries, libraries ask for workspace.
Where a device can place such allocations (``devices.Placements``), all of them have a place in the plan.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...host_graph.control_flow import control_flow_of
from ...host_graph.nodes import Kind, communicates, draws_numbers, kind_of, schema_of
from ...host_graph.sizes import layout_at, number_at
from ...host_graph.storages import Origin, Storage, StorageFacts, results_in
from ...plan import OperatorMemory, ProgramPlan
from ...torch_private.functions import library_settings
from ..devices.runtime import runtime_for

_known: dict[Hashable, OperatorMemory | str] = {}
_lock = threading.Lock()


def known_memory(plan: ProgramPlan, symbols: Mapping[Any, int]) -> dict[str, OperatorMemory]:
    """What the captured calls of a program allocate at these sizes, by node, of those that were rehearsed."""
    of_operators = (storage for storage in plan.facts.storages if storage.origin is Origin.EXTERN)
    made = {(storage.node, storage.element or 0) for storage in of_operators}
    found = dict[str, OperatorMemory]()
    for node, kind in kinds_of_calls(plan, symbols):
        if isinstance(memory := _known.get(kind), OperatorMemory) and memory.allocations:
            results = {block: at for block, at in memory.results.items() if (node.name, at) in made}
            found[node.name] = dataclasses.replace(memory, results=results)
    return found


def unknown_calls(plan: ProgramPlan, symbols: Mapping[Any, int]) -> dict[Hashable, Node]:
    """The kinds of captured calls that were not rehearsed, each with one of the calls."""
    return {kind: node for node, kind in kinds_of_calls(plan, symbols) if kind not in _known}


def note_memory(kind: Hashable, memory: OperatorMemory | str) -> None:
    """Remember what calls of a kind allocate, or why that cannot be planned."""
    with _lock:
        _known[kind] = memory


def refuse(plan: ProgramPlan, symbols: Mapping[Any, int], calls: Mapping[Node, str]) -> None:
    """Remember that calls allocate otherwise than in their rehearsal, and how: the next plan has no place for it."""
    for node, kind in kinds_of_calls(plan, symbols) if calls else ():
        if node in calls:
            note_memory(kind, calls[node])


def kinds_of_calls(plan: ProgramPlan, symbols: Mapping[Any, int]) -> Iterator[tuple[Node, Hashable]]:
    """The captured calls whose allocations can be placed, each with a key that is equal for the same allocations.

    These are torch's own operators. What a custom operator does at a call is not known: it might not bear one more.
    """
    if runtime_for(plan.device).placements is None:
        return
    sizes, settings = frozenset(symbols.items()), library_settings(plan.device)
    newest, calls = _newest_calls.get(plan, (None, ()))
    if newest != sizes:
        calls = tuple((node.name, described) for node, described in _calls_that_can_be_placed(plan, symbols))
        _newest_calls[plan] = sizes, calls
    yield from ((plan.nodes[name], (*described, settings)) for name, described in calls)


# Several questions are asked about one recording: the calls of each plan at the sizes that were asked about last. By
# name: a node leads to its graph, and that to whatever has the plan.
_newest_calls = weakref.WeakKeyDictionary[ProgramPlan, tuple[Any, tuple[tuple[str, tuple[str, str]], ...]]]()


def _calls_that_can_be_placed(
    plan: ProgramPlan, symbols: Mapping[Any, int]
) -> Iterator[tuple[Node, tuple[str, str]]]:
    """Each with its operator, and its operands as text."""
    made = defaultdict[str, list[Storage]](list)
    for storage in plan.facts.storages:
        if storage.origin is Origin.EXTERN:
            made[storage.node].append(storage)
    for node in plan.schedule:
        captured = node in plan.captured_work and node not in plan.replaced_work
        if captured and _can_be_placed(node, plan.device) and _is_new(plan.facts, node, made[node.name]):
            try:
                described = torch.fx.map_arg((node.args, node.kwargs), lambda operand: _description(operand, symbols))
            except _UnknownError:
                continue
            yield node, (str(node.target), repr(described))


class _UnknownError(Exception):
    """An operand has no size that is known before the call."""


def _can_be_placed(node: Node, device: torch.device) -> bool:
    overload = schema_of(node)
    if kind_of(node) is not Kind.EXTERN or overload is None or overload.namespace != "aten":
        return False
    if communicates(node) or "effect" in node.meta or control_flow_of(node) is not None:
        return False
    if draws_numbers(node):  # at the first, a generator allocates what the graph keeps: its seed and offset
        return False
    values = (arg.meta.get("val") for arg in node.all_input_nodes)
    result = node.meta.get("val")
    if isinstance(result, (tuple, list)) and any(isinstance(value, (tuple, list)) for value in result):
        return False
    return all(_is_plain(value, device) for value in (*values, result))


def _is_plain(value: Any, device: torch.device) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item, device) for item in value)
    if not isinstance(value, torch.Tensor):
        return True
    return value.layout is torch.strided and value.device == device and not (value.is_conj() or value.is_neg())


def _is_new(facts: StorageFacts, node: Node, made: Sequence[Storage]) -> bool:
    """Whether each result is an operand that the call writes, or shares memory with nothing else.

    Args:
        made: the storages that the call makes.
    """
    if not facts.of(node) <= facts.writes(node).union(storage.index for storage in made):
        return False
    return all(facts.of(value) == {one.index} for one in made for value in results_in(node, one.element))


def _description(node: Node, symbols: Mapping[Any, int]) -> Any:
    """Sizes, strides, offset and type of a tensor; the value of a number."""
    if "val" not in node.meta:
        raise _UnknownError
    value: Any = node.meta["val"]
    if isinstance(value, (tuple, list)):
        return tuple(_described(item, symbols) for item in value)
    return _described(value, symbols)


def _described(value: Any, symbols: Mapping[Any, int]) -> Any:
    if isinstance(value, torch.Tensor):
        layout, offset = layout_at(value, symbols), number_at(value.storage_offset(), symbols)
        if layout is not None and offset is not None:
            return *layout, offset, value.dtype
    elif isinstance(value, (int, torch.SymInt)):
        if (number := number_at(value, symbols)) is not None:
            return number
    elif isinstance(value, (float, bool, str, type(None))):
        return value
    raise _UnknownError
