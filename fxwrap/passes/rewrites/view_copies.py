"""Rewrite: a call of a ``*_copy`` operator becomes the view, where no node can tell the copy from a view."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...host_graph.nodes import (
    Kind,
    checks_on,
    counts_from_storage,
    kind_of,
    launch,
    reinterpret,
    schema_of,
)
from ...host_graph.storages import Origin, StorageFacts
from ...packing.lifetimes import Lifetimes
from ..analysis.aliasing import analyse_storages, overlap_groups

# Bytes: the alignment that kernels for accelerators assume of buffers.
_ALIGNMENT = 16
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class NeedlessCopy:
    """A copy that can be a view.

    Attributes:
        copy: the call that copies.
        view: the operator that takes the same arguments and returns a view.
        value: the view's fake value.
    """

    copy: Node
    view: OpOverload
    value: Any


def view_needless_copies(gm: GraphModule) -> GraphModule:
    """Replace needless copies by views, in place.

    ::

        buf1 = aten.slice_copy(buf0, 0, 1, 3)           buf1 = aten.slice(buf0, 0, 1, 3)
        launch cpp_fused_add_0(buf1, buf2)        ->    launch cpp_fused_add_0(buf1, buf2)
    """
    decisions = needless_copies(gm)
    for decision in decisions:
        node = decision.copy
        node.target = decision.view
        node.meta = {key: value for key, value in node.meta.items() if key not in ("call", "outside_plan")}
        node.meta |= {"op_overload": decision.view, "kind": Kind.VIEW, "val": decision.value}
    if decisions:
        gm.recompile()
    return gm


def needless_copies(gm: GraphModule) -> tuple[NeedlessCopy, ...]:
    """Copies that can be views.

    A copy may share its operand's memory if all of this holds:

    * nothing writes to the copy, nor to the operand between the copy and its last use: such a write would make the
      two differ. (A write to an input may be a write to any other input.)
    * the copy is not returned: the caller may write to it, and keep it;
    * the view has the copy's layout, for which the kernels that read it were compiled: sizes, strides, type, no
      pending conjugation or negation, and alignment where a reader depends on it;
    * no user depends on the position in its storage: a view of another type must begin at a whole element, offsets of
      ``as_strided`` count from the storage's start, and a custom operator may depend on anything.
    """
    copies = [(node, view) for node in gm.graph.nodes if (view := view_of_copy(node)) is not None]
    if not copies:
        return ()
    facts = analyse_storages(gm)
    uses = _Uses.of(gm, facts)
    fixed = facts.behind(arg for node in gm.graph.nodes for arg in _operands_with_fixed_offset(node))
    # The storages of the views that replace copies, by storage of the copy.
    moved: dict[int, frozenset[int]] = {}
    needless: list[NeedlessCopy] = []
    for node, view in copies:
        storages = facts.of(node)
        base = _NONE.union(*(moved.get(i, {i}) for i in facts.of(node.all_input_nodes[0])))
        value = _value_as_view(node, view)
        if value is None or not base or storages & (facts.handed_out | fixed):
            continue
        if _aligned(node, value, base, facts) and not uses.distinguish(node, storages, base):
            moved.update((index, base) for index in storages)
            needless.append(NeedlessCopy(node, view, value))
    return tuple(needless)


@dataclass(frozen=True)
class _Uses:
    """Where storages are written and last read, by position in the graph; groups of inputs count as storages, too."""

    position: dict[Node, int]
    writes: dict[int, list[int]]
    reads: Lifetimes
    groups: Mapping[int, int]

    @classmethod
    def of(cls, gm: GraphModule, facts: StorageFacts) -> _Uses:
        position = {node: index for index, node in enumerate(gm.graph.nodes)}
        writes: dict[int, list[int]] = defaultdict(list)
        groups = overlap_groups(gm, facts)
        for node, index in position.items():
            for storage in facts.writes(node):
                writes[storage].append(index)
                if storage in groups:
                    writes[groups[storage]].append(index)
        return cls(position, writes, Lifetimes.of(map(facts.reads, position)), groups)

    def distinguish(self, copy: Node, storages: frozenset[int], base: frozenset[int]) -> bool:
        """Whether a write makes the copy and a view differ.

        Args:
            storages: those of the copy.
            base: storages of its operand.
        """
        begin = self.position[copy]
        end = max((self.reads[index][-1] for index in storages if index in self.reads), default=begin)
        sources = {*base, *(self.groups[index] for index in base if index in self.groups)}
        between = any(begin < write <= end for index in sources for write in self.writes.get(index, ()))
        return between or any(self.writes.get(index) for index in storages)


def view_of_copy(node: Node) -> OpOverload | None:
    """The view operator whose copying form a call is (``aten::slice`` for ``aten::slice_copy``); None for others."""
    overload = node.target
    if not isinstance(overload, OpOverload) or overload.namespace != "aten" or counts_from_storage(node):
        return None
    name = overload._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_copy"), None) if name.endswith("_copy") else None
    view = getattr(packet, overload._overloadname, None)
    if not isinstance(view, OpOverload) or not view.is_view:
        return None

    def arguments(schema: Any) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in schema.arguments]

    return view if arguments(view._schema) == arguments(overload._schema) else None


def _operands_with_fixed_offset(node: Node) -> list[Node]:
    """Operands whose position in their storage a node may depend on."""
    overload = schema_of(node) if node.op == "call_function" else None
    if overload is None:
        independent = (
            node.op == "output"
            or node.target in (launch, operator.getitem, reinterpret)
            or kind_of(node) is Kind.CHECK
        )
        return [] if independent else node.all_input_nodes
    of_another_type = overload in (torch.ops.aten.view.dtype, torch.ops.aten.view_as_complex.default)
    depends = of_another_type or counts_from_storage(node) or overload.namespace != "aten"
    return node.all_input_nodes if depends else []


def _value_as_view(node: Node, view: OpOverload) -> Any:
    """The fake value of the view; None if its layout is not the copy's."""
    if "val" not in node.meta or any("val" not in arg.meta for arg in node.all_input_nodes):
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    with torch.no_grad():
        value = view(*args, **kwargs)
    copies, views = _tensors(node.meta["val"]), _tensors(value)
    same = len(copies) == len(views) and all(map(_same_layout, copies, views))
    return value if same else None


def _same_layout(copy: torch.Tensor, view: torch.Tensor) -> bool:
    plain = not any(tensor.is_conj() or tensor.is_neg() for tensor in (copy, view))
    numbers = zip((*copy.size(), *copy.stride()), (*view.size(), *view.stride()), strict=True)
    return (
        plain
        and copy.dtype == view.dtype
        and copy.dim() == view.dim()
        and all(statically_known_true(mine == theirs) for mine, theirs in numbers)
    )


def _aligned(node: Node, value: Any, base: frozenset[int], facts: StorageFacts) -> bool:
    """Whether the view is aligned as a new buffer would be, where a reader depends on that."""
    views = _tensors(value)
    asserted = any("align" in getattr(check.target, "__name__", "") for check in checks_on([node]))
    if not asserted and all(view.device.type == "cpu" for view in views):
        return True
    planned = all(facts.storages[index].origin is Origin.ALLOCATION for index in base)
    return planned and all(
        statically_known_true(view.storage_offset() * view.element_size() % _ALIGNMENT == 0) for view in views
    )


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, (tuple, list)) else (value,)
