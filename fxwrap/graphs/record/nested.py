"""The step of a branch or a loop: in a replay steps in Python or C++, in a capture nodes of the device graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ...devices import ConditionalNodes
from ...host_graph.control_flow import ControlFlow, switch
from ...host_graph.sizes import layout_at
from ..memory.static_buffers import copy_at_once
from ..replay.operands import Bound, Call, Local, Operand, Register, Text, operands_in
from ..replay.steps import Allocate, Block, Branch, CallPython, Drop, Loop, Nested, Step

if TYPE_CHECKING:
    from .flat import FlatBuilder


@dataclass(frozen=True)
class InGraph:
    """How a capture makes nodes of branches and loops.

    Attributes:
        nodes: of the device's graphs.
        symbols: the values of symbolic sizes.
    """

    nodes: ConditionalNodes
    symbols: Mapping[Any, int]


def nested_step(builder: FlatBuilder, node: Node, flow: ControlFlow) -> Nested:
    """The step of a branch or a loop. It appends allocations, if it will be a node of a device graph."""
    operands = tuple(map(builder.operand, flow.operands))
    step, used = (_branch if node.target is switch else _loop)(builder, node, flow, operands)
    builder.use_next(node, used)
    return step


def _branch(
    builder: FlatBuilder, node: Node, flow: ControlFlow, operands: Sequence[Operand]
) -> tuple[Nested, Sequence[Operand]]:
    selector = builder.operand(node.args[0])
    blocks = tuple(builder.block(branch, operands) for branch in flow.subgraphs)
    branch = Branch(selector, blocks, bool(node.kwargs.get("by_truth")))
    if builder.in_graph is None:
        return branch, ()
    merged = list[Operand]()
    for like, values in zip(node.meta["val"], zip(*(block.values for block in blocks), strict=True), strict=True):
        same = all(_is_same(values[0], value) for value in values)
        merged.append(values[0] if same else _place(builder, builder.in_graph, node, like))
    chosen = tuple(builder.new_local() for _ in blocks)
    return BranchNodes(builder.in_graph.nodes, branch, chosen, tuple(merged)), merged


def _loop(
    builder: FlatBuilder, node: Node, flow: ControlFlow, operands: Sequence[Operand]
) -> tuple[Nested, Sequence[Operand]]:
    condition, body = flow.subgraphs
    count, in_graph = len(node.meta["val"]), builder.in_graph
    if in_graph is None:
        carried = tuple(builder.new_local() for _ in range(count))
    else:
        inputs = body.graph.find_nodes(op="placeholder")[:count]
        carried = tuple(_place(builder, in_graph, node, given.meta["val"]) for given in inputs)
    given = (*carried, *operands[count:])
    loop = Loop(
        initial=tuple(operands[:count]),
        carried=carried,
        passes=builder.new_local(),
        condition=builder.block(condition, given),
        body=builder.block(body, given, ends=carried if in_graph is None else ()),
        stacks=bool(node.args[4:]),
    )
    return (loop, ()) if in_graph is None else (LoopNode(in_graph.nodes, loop), carried)


def _is_same(value: Operand, other: Operand) -> bool:
    if isinstance(value, Bound) and isinstance(other, Bound):
        return value.value is other.value
    return value == other


def _place(builder: FlatBuilder, in_graph: InGraph, node: Node, like: Any) -> Local:
    """Append the allocation of a place for what branches return, or what a loop carries."""
    layout = layout_at(like, in_graph.symbols)
    if layout is None:
        raise TypeError(f"{node.name} carries or returns {like!r}, which cannot lie at a fixed address")
    return builder.allocate(Allocate(*layout, like.dtype, like.device), node)


def predicates(selector: torch.Tensor, branches: int, by_truth: bool) -> list[torch.Tensor]:
    """Whether each branch is chosen (``position_of``), as tensors on the device."""
    selector = selector.reshape(())
    if by_truth:
        truth = selector.to(torch.bool)
        return [truth.logical_not(), truth]
    selector = selector.to(torch.int64)  # as ``int`` does: a fraction counts as what is below it
    *chosen, _ = [selector == position for position in range(branches)]
    return [*chosen, (selector < 0).logical_or_(selector >= branches - 1)]


@dataclass(frozen=True, eq=False)
class BranchNodes(Nested):
    """An IF node for each branch. All predicates are computed first: a branch may write what they are read from.

    Attributes:
        chosen: the predicates.
        merged: the results: places to which each branch copies its own, or what all branches return.
    """

    nodes: ConditionalNodes
    branch: Branch
    chosen: tuple[Local, ...]
    merged: tuple[Operand, ...]

    def reads(self) -> Iterator[Local | Register | Bound]:
        yield from self.branch.reads()
        yield from operands_in(self.merged)

    def lines(self, text: Text) -> Iterator[str | Sequence[Step]]:
        branches = self.branch.branches
        chosen = Call(predicates, (self.branch.selector, len(branches), self.branch.by_truth))
        yield f"{text.of(self.chosen)} = {text.of(chosen)}"
        for predicate, branch in zip(self.chosen, branches, strict=True):
            yield f"for _ in {text.of(Call(self.nodes.branch, (predicate,)))}:"
            copied = [p for p, value in enumerate(branch.values) if not _is_same(value, self.merged[p])]
            yield [*branch.steps, *_copies(branch, self.merged, copied)]
        yield f"del {', '.join(map(text.of, self.chosen))}"
        yield text.assigned(self.results, self.unpacks, text.of(self.merged))


@dataclass(frozen=True, eq=False)
class LoopNode(Nested):
    """A WHILE node. What is carried stays at the addresses of ``loop.carried``, to which each iteration copies."""

    nodes: ConditionalNodes
    loop: Loop

    def reads(self) -> Iterator[Local | Register | Bound]:
        yield from self.loop.reads()

    def lines(self, text: Text) -> Iterator[str | Sequence[Step]]:
        loop, decide = self.loop, text.of(self.loop.passes)
        yield [CallPython(copy_at_once, (loop.initial, loop.carried))]
        yield loop.condition.steps
        yield f"for {decide} in {text.of(Call(self.nodes.loop, (loop.going,)))}:"
        changed = [p for p, value in enumerate(loop.body.values) if value != loop.carried[p]]
        yield [*loop.body.steps, *_copies(loop.body, loop.carried, changed), *loop.condition.steps]
        yield f"    {decide}({text.of(loop.going)})"
        yield [Drop(loop.condition.ended)] if loop.condition.ended else []
        yield text.assigned(self.results, self.unpacks, text.of(loop.carried))


def _copies(block: Block, places: Sequence[Operand], positions: Sequence[int]) -> Iterator[Step]:
    """Copies of what a block returns to places; then nobody reads its own results."""
    values = tuple(block.values[position] for position in positions)
    yield CallPython(copy_at_once, (values, tuple(places[position] for position in positions)))
    if block.ended:
        yield Drop(block.ended)
