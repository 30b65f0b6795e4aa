"""Whether rows of a batch see each other: the condition for padding them to a bucket.

The traced graph, at the level of ATen operators, is walked once. Sizes in it are symbolic, so the bucketed dimension
of every value is known by its symbol. Each operator that has it must have a rule (``row_rules.py``) by which row *i* of
its results depends on row *i* of its operands only. Then rows of padding change nothing but the rows of padding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.nodes import user_line
from .row_calls import Call, RowDimension, RowsMixed, tensors_in
from .row_rules import POINTWISE, RULES, Rule

# Random operators that Inductor makes of torch's, without torch's tag.
_RANDOM = {"prims::inductor_random", "prims::inductor_randint", "prims::rand_eager_offset"}


@dataclass(frozen=True)
class RowMixer:
    """An operator in which a row can see others.

    Attributes:
        operator: its name, as the user's code or a decomposition of torch calls it.
        reason: what it does with rows.
        line: the line of the user's code; empty if it is unknown.
    """

    operator: str
    reason: str
    line: str

    def __str__(self) -> str:
        return f"{self.operator} {self.reason}" + (f" ({self.line})" if self.line else "")


def row_mixers(gm: GraphModule, rows: RowDimension) -> list[RowMixer]:
    """All operators of a traced graph in which a row may see others, in order; empty if there are none.

    Args:
        gm: the graph of an inference program, with fake values in ``meta["val"]``.
        rows: the bucketed dimension.
    """
    mixers = []
    for node in gm.graph.nodes:
        try:
            _check(node, rows)
        except RowsMixed as mixed:
            mixers.append(RowMixer(_name(node), str(mixed), user_line(node)))
    return mixers


def _check(node: Node, rows: RowDimension) -> None:
    if node.op == "placeholder":
        for tensor in tensors_in(node.meta.get("val")):
            rows.of(tensor)
    # An item of a result has the dimensions that were checked with the result.
    if node.op != "call_function" or node.target is operator.getitem:
        return
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and not any(tensors_in(_operands(node))):
        return  # arithmetic of sizes, which is checked where it is used
    if str(node.target).startswith("aten.sym_"):
        return  # likewise: reads a size
    call = Call(node, rows)
    if not any(_has_rows(operand, rows) for operand in (*call.args.values(), value)):
        return
    rule = _rule(node)
    for name, argument in call.args.items():
        if name not in rule.sizes and any(map(rows.in_size, _numbers(argument))):
            raise RowsMixed(f"uses the number of rows as a number (argument '{name}')")
    place = rule.place(call)
    for position, result in enumerate(call.results):
        dim = rows.of(result)
        if dim != place and not (position and dim is None and rule.others):
            raise RowsMixed("loses this dimension" if dim is None else "moves rows to another dimension")


def _operands(node: Node) -> list[Any]:
    return [operand.meta.get("val") for operand in node.all_input_nodes]


def _rule(node: Node) -> Rule:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise RowsMixed("is not known to keep rows apart")
    name, tags = target._schema.name, target.tags
    if torch.Tag.nondeterministic_seeded in tags or name in _RANDOM:
        raise RowsMixed("draws random numbers for rows")
    if name in RULES:
        return RULES[name]
    if torch.Tag.pointwise in tags:
        return POINTWISE
    raise RowsMixed("is not known to keep rows apart")


def _has_rows(value: Any, rows: RowDimension) -> bool:
    sizes = (size for tensor in tensors_in(value) for size in tensor.size())
    return any(map(rows.in_size, (*sizes, *_numbers(value))))


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield value


def _name(node: Node) -> str:
    """The operator's name, with that of the operator that torch decomposed into it."""
    name, original = str(node.target), str(node.meta.get("original_aten") or "")
    return f"{original}, as {name}," if original and original != name else name
