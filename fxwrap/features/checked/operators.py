"""Watches custom operators while they run: undeclared writes and aliases, reads on the host, kept memory."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ...graphs.copies import all_bytes, without_gradients
from ...host_graph.control_flow import control_flow_of
from ...host_graph.nodes import Kind, kind_of, only_computes, operator_name, schema_of
from ...host_graph.storages import Origin
from ...host_graph.tensors import tensors_in
from ...plan import ProgramPlan
from .walk import OwnMemory, Walk, fault_at


def check_operators(
    plan: ProgramPlan, symbol_values: Mapping[Node, Any], inputs: list[Any], frozen: bool, call: Callable[..., Any]
) -> None:
    """Run a program eagerly, with every storage in memory of its own, and watch its custom operators.

    Args:
        inputs: copies; the list is emptied.
        frozen: whether device graphs freeze what operators do on the host.
        call: ``call(operator, *args, **kwargs)`` calls an operator so that a dispatch mode sees what it calls.

    Raises:
        CheckError: an operator does something that makes replays wrong.
    """
    foreign = set(filter(_is_foreign, plan.schedule))
    hosts: dict[Node, _Host] = {}

    def watched(node: Node, *args: Any, **kwargs: Any) -> Any:
        with hosts.setdefault(node, _Host(plan.device)):
            return call(node.target, *args, **kwargs)

    captured = plan.captured_work & foreign if frozen else frozenset[Node]()
    calls = {n: functools.partial(watched, n) for n in captured if isinstance(n.target, torch._ops.OpOverload)}
    with without_gradients():
        walk = Walk(plan, symbol_values, inputs, OwnMemory(), calls)
        for step, node in enumerate(walk.schedule):
            walk.begin(step)
            if node in foreign:
                _watch(walk, step, hosts)
            else:
                walk.run(step)
            walk.end(step)
        live_storages = walk.finish()
    for index in live_storages:
        _check_retained(walk, index, frozen)


def _is_foreign(node: Node) -> bool:
    """Whether a node is an operator whose implementation is unknown: only its schema is."""
    return (
        kind_of(node) is Kind.EXTERN
        and not only_computes(node)
        and schema_of(node) is not None
        and control_flow_of(node) is None
    )


def _watch(walk: Walk, step: int, hosts: Mapping[Node, _Host]) -> None:
    """Run a step and watch it. If the run adds it to ``hosts``, its work on the host is looked at as well."""
    node, facts = walk.schedule[step], walk.facts
    writes = facts.writes(node)
    before = {
        index: [(tensor, tensor.untyped_storage().clone()) for tensor in walk.tensors(index)]
        for index in facts.reads(node) - writes
    }
    walk.run(step)
    if node in hosts:
        _read_on_host(walk, node, hosts[node])
    for index, pairs in before.items():
        for tensor, old_bytes in pairs:
            if not torch.equal(all_bytes(tensor.untyped_storage()), all_bytes(old_bytes)):
                raise fault_at(
                    node,
                    "undeclared write",
                    f"{operator_name(node)} writes {facts.storages[index].name}, which its schema says that it reads",
                    expected="a schema that names it: Tensor(a!), or mutates_args of torch.library.custom_op",
                    got=str(_schema(node)),
                    remedy="declare it, or write to a copy: what is reordered or reused in between is wrong",
                )
    _aliases(walk, node)


def _aliases(walk: Walk, node: Node) -> None:
    """Check that results share memory only with operands that the schema names."""
    new = {i: s for i, s in enumerate(walk.facts.storages) if s.node == node.name and s.origin is Origin.EXTERN}
    for index in new:
        results = {t.untyped_storage().data_ptr() for t in walk.tensors(index)}
        declared = walk.facts.of(node) - new.keys()
        for other in walk.facts.reads(node) - declared:
            if any(t.untyped_storage().data_ptr() in results for t in walk.tensors(other)):
                raise fault_at(
                    node,
                    "undeclared alias",
                    f"{operator_name(node)} returns memory of {walk.facts.storages[other].name}",
                    expected="a new tensor, or a schema that says whose memory it is: Tensor(a) ... -> Tensor(a)",
                    got=str(_schema(node)),
                    remedy="return a copy, or declare it: who writes to one of both changes the other",
                )


def _schema(node: Node) -> Any:
    overload = schema_of(node)
    return overload._schema if overload is not None else ""


def _read_on_host(walk: Walk, node: Node, host: _Host) -> None:
    name = operator_name(node)
    if host.waits:
        raise fault_at(
            node,
            "host synchronisation",
            f"{name} waits for the device while it is captured",
            expected="work that is issued without waiting",
            got=host.waits[0],
            remedy=f"options={{'eager_ops': ['{name}']}} keeps it out of captures, or do without the wait",
        )
    if host.reads:
        raise fault_at(
            node,
            "host value",
            f"{name} reads a value on the host while it is captured, and every replay would go by it",
            expected="values to be read on the device",
            got=host.reads[0],
            remedy=f"options={{'eager_ops': ['{name}']}} keeps it out of captures, or hand the number in as an int",
        )
    alive = [reference for reference in host.allocated if not reference.expired()]
    in_graph = {t.untyped_storage()._cdata for i in range(len(walk.facts.storages)) for t in walk.tensors(i)}
    if any(reference.cdata not in in_graph for reference in alive):
        raise fault_at(
            node,
            "keeps what it allocates",
            f"{name} allocates memory while it is captured, and keeps it after its call",
            expected="memory of a capture to be let go of in it: a graph's pool gives it to others",
            got="a storage that is alive after the call, and is none of its results",
            remedy=f"allocate it once, at the first call, or options={{'eager_ops': ['{name}']}}",
        )


def _check_retained(walk: Walk, index: int, frozen: bool) -> None:
    """Check a storage that is live after the walk: an operator retains it.

    Raises:
        CheckError: a later operator, or the next replay, writes to it.
    """
    storage = walk.facts.storages[index]
    if storage.origin is Origin.CONSTANT:
        return
    given = (n for work in walk.work for n in work if index in walk.facts.touched(n) | walk.facts.of(n))
    keepers = [node for node in given if not only_computes(node)]
    position = {node: step for step, node in enumerate(walk.schedule)}
    for node in keepers:
        later = [other for other in walk.schedule[position.get(node, 0) + 1 :] if index in walk.facts.writes(other)]
        if not frozen and not later:
            continue
        result = storage.node == node.name
        write = (
            f"{operator_name(later[0])} writes to it in the same call" if later else "the next replay writes to it"
        )
        raise fault_at(
            node,
            "keeps a result" if result else "keeps an operand",
            f"{operator_name(node)} keeps {storage.name} beyond its call, and {write}",
            expected="what it returns to be the caller's alone" if result else "an operand to be let go of",
            got="its storage is live after the call",
            remedy="keep a copy (clone)",
        )


class _Host(TorchDispatchMode):
    """A dispatch mode that notes reads on the host, waits for the device, and allocations of an operator.

    Attributes:
        reads, waits: descriptions of the calls.
        allocated: storages of the results of all operators that were called, without those of 0 bytes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._thread = device, threading.get_ident()
        self.reads: list[str] = []
        self.waits: list[str] = []
        self.allocated: list[StorageWeakRef] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Any:
        for name in ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"):
            self._patch(torch.Tensor, name, lambda name, args: self._note(f"Tensor.{name}", args[0]))
        modules = [torch.accelerator]
        if self._device.type != "cpu":
            modules.append(torch.get_device_module(self._device))
        for module in modules:
            if hasattr(module, "synchronize"):
                self._patch(module, "synchronize", lambda name, _: self.waits.append(f"{name}()"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _patch(self, owner: Any, name: str, note: Callable[[str, tuple[Any, ...]], Any]) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                note(name, args)
            return function(*args, **kwargs)

        self._patches.enter_context(mock.patch.object(owner, name, noting))

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        notes = self.reads if tensor.device.type == "cpu" else self.waits
        notes.append(f"{name} of a tensor on {tensor.device}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name if hasattr(func, "_schema") else str(func)
        operands = tensors_in(list(args))
        if operands and _reads_on_host(func, name, args, kwargs or {}):
            self._note(name, operands[0])
        elif name in _COPIES:
            types_of_device = {tensor.device.type for tensor in (*operands, *tensors_in(result))}
            if len(types_of_device) > 1 and tensors_in(result)[0].device.type == "cpu":
                self.waits.append(f"{name} to the CPU")
        storages = (tensor.untyped_storage() for tensor in tensors_in(result))
        self.allocated += (StorageWeakRef(storage) for storage in storages if storage.nbytes())
        return result


_COPIES = ("aten::_to_copy", "aten::copy_")
_READS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_INDEXING = "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"
_READS_NOTHING = "aten::linalg_lstsq", "aten::_ctc_loss"  # their sizes depend on host numbers only


def _reads_on_host(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator reads values of its operands on the host, for a decision or for the size of a result."""
    if name in _INDEXING:
        return any(mask.dtype in (torch.bool, torch.uint8) for mask in tensors_in(list(args[1])))
    if func.name() in _READS_NOTHING or kwargs.get("output_size") is not None:
        return False
    return any(tag in getattr(func, "tags", ()) for tag in _READS)
