"""The step of a branch or a loop: in a replay steps in Python or C++, in a capture nodes of the device graph."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ...devices import ConditionalNodes
from ...host_graph.control_flow import ControlFlow, counts_on_the_host, switch, unchanged
from ...host_graph.nodes import by_name, output_values
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
        nodes: makes IF and WHILE nodes on this device.
        symbols: the values of symbolic sizes.
    """

    device: torch.device
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
    results = {position: builder.operand(place[0]) for position, place in _places(flow).items()}
    blocks = tuple(_blocks(builder, flow, operands, results))
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
    _, body = flow.subgraphs
    count, in_graph = len(node.meta["val"]), builder.in_graph
    initial = tuple(operands[:count])
    if in_graph is not None and not counts_on_the_host(flow, in_graph.device):
        inputs, same = body.graph.find_nodes(op="placeholder"), unchanged(flow)
        places = tuple(
            operands[p] if p in same else _place(builder, in_graph, node, inputs[p].meta["val"]) for p in range(count)
        )
        blocks = _blocks(builder, flow, (*places, *operands[count:]))
        return LoopNode(in_graph.nodes, initial, places, builder.new_local(), *blocks), places
    # Where a value alternates between two places, an iteration gets both: it writes to the first, and swaps them.
    turns = {position: tuple(map(builder.operand, two)) for position, two in _places(flow).items()}
    carried = tuple(builder.new_local() for _ in range(count + 2 * len(turns)))
    firsts, seconds = carried[count::2], carried[count + 1 :: 2]
    given, results = (*carried[:count], *operands[count:]), dict(zip(turns, firsts, strict=True))
    asked, made = _blocks(builder, flow, given, results, ends=carried)
    swapped = itertools.chain(*zip(seconds, firsts, strict=True))
    loop = (Loop if in_graph is None else UnrolledLoop)(
        initial=(*initial, *itertools.chain(*turns.values())),
        carried=carried,
        passes=builder.new_local(),
        condition=asked,
        body=dataclasses.replace(made, values=(*made.values, *swapped)),
        stacks=bool(node.args[4:]),
    )
    return loop, ()


def _places(flow: ControlFlow) -> dict[int, Any]:
    """By position, where a branch writes its result, or a loop what it carries, in turn."""
    return {position: several for position, several in enumerate(flow.results) if several}


def _blocks(
    builder: FlatBuilder,
    flow: ControlFlow,
    operands: Sequence[Operand],
    results: Mapping[int, Operand] = MappingProxyType({}),
    ends: Sequence[Operand] = (),
) -> Iterator[Block]:
    """The steps of each subgraph, whose allocations lie where the branch or the loop says.

    Args:
        results: where what is returned lies, by position.
        ends: operands that may be dropped after their last use in a subgraph that returns them anew.
    """
    for gm, views in zip(flow.subgraphs, flow.temporaries, strict=True):
        nodes, returned, returns = by_name(gm), output_values(gm), gm in flow.returning
        given = dict(zip(gm.graph.find_nodes(op="placeholder"), operands, strict=True))
        given |= {nodes[name]: builder.operand(view) for name, view in views.items()}
        given |= {returned[position]: place for position, place in results.items() if returns}
        yield builder.block(gm, given, ends if returns else ())


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
    """A WHILE node.

    Attributes:
        initial: what the first iteration gets.
        carried: where what is carried stays: each iteration copies there what it returns. What no iteration changes
            is an operand of the loop.
        decide: is given the predicate of the next iteration.
    """

    nodes: ConditionalNodes
    initial: tuple[Operand, ...]
    carried: tuple[Operand, ...]
    decide: Local
    condition: Block
    body: Block

    def reads(self) -> Iterator[Local | Register | Bound]:
        yield from operands_in((self.initial, self.carried))
        yield from self.condition.reads()
        yield from self.body.reads()

    def lines(self, text: Text) -> Iterator[str | Sequence[Step]]:
        changed = [p for p, value in enumerate(self.body.values) if not _is_same(value, self.carried[p])]
        initial, places = (tuple(values[p] for p in changed) for values in (self.initial, self.carried))
        (going,), decide = self.condition.values, text.of(self.decide)
        yield [CallPython(copy_at_once, (initial, places)), *self.condition.steps]
        yield f"for {decide} in {text.of(Call(self.nodes.loop, (going,)))}:"
        yield [*self.body.steps, *_copies(self.body, self.carried, changed), *self.condition.steps]
        yield f"    {decide}({text.of(going)})"
        yield [Drop(self.condition.ended)] if self.condition.ended else []
        yield text.assigned(self.results, self.unpacks, text.of(self.carried))


@dataclass(frozen=True, eq=False)
class UnrolledLoop(Loop):
    """A loop that counts on the host, in a capture: the graph gets the work of all iterations."""

    HEAD = "for _ in range(10000):"
    TAIL = "else: raise RuntimeError('a loop that counts on the host has more than 10000 iterations')"


def _copies(block: Block, places: Sequence[Operand], positions: Sequence[int]) -> Iterator[Step]:
    """Copies of what a block returns to places; then nobody reads its own results."""
    values = tuple(block.values[position] for position in positions)
    yield CallPython(copy_at_once, (values, tuple(places[position] for position in positions)))
    if block.ended:
        yield Drop(block.ended)
