"""Whether rows of a batch see each other: the condition for padding them to a bucket.

The traced graph, at the level of ATen operators, is walked once. Sizes in it are symbolic, so the bucketed dimension
of every value is known by its symbol. Each operator that has it must have a rule (``row_rules.py``) by which row *i*
of its results depends on row *i* of its operands only. Then rows of padding change nothing but the rows of padding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ...host_graph.user_code import user_line
from .row_calls import OperatorCall, RowDimension, RowsMixed, tensors_in
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
    walk, mixers = _Walk(rows), dict[Any, RowMixer]()
    for node in gm.graph.nodes:
        try:
            walk.visit(node)
        except RowsMixed as mixed:
            line, original = user_line(node), node.meta.get("original_aten")
            # Of one operator that torch has decomposed, the first part is enough.
            mixers.setdefault((original or node.target, line), RowMixer(_name(node), str(mixed), line))
    return list(mixers.values())


class _Walk:
    """One walk along a graph, in order.

    Attributes:
        before: the factor before the rows in the bucketed dimension of each value (``OperatorCall.before``), if it is
            known.
        numbered: nodes whose rows depend on their own number.
    """

    def __init__(self, rows: RowDimension) -> None:
        self.rows = rows
        self.before: dict[Node, Any] = {}
        self.numbered: set[Node] = set()

    def visit(self, node: Node) -> None:
        """Check one node. Raises RowsMixed."""
        if not self.numbered.isdisjoint(node.all_input_nodes):
            self.numbered.add(node)
        if node.op == "placeholder":
            if any(self.rows.of(tensor) is not None for tensor in tensors_in(node.meta.get("val"))):
                self.before[node] = sympy.Integer(1)
        elif node.op == "output":
            if any(self.before.get(operand, 1) not in (None, 1) for operand in node.all_input_nodes):
                raise RowsMixed("returns a dimension of which the rows are not the outermost factor")
        elif node.target is operator.getitem:
            self.before[node] = self.before.get(node.args[0])  # type: ignore[arg-type]
        elif node.op == "call_function":
            self._visit_call(node)

    def _visit_call(self, node: Node) -> None:
        value, rows = node.meta.get("val"), self.rows
        of_sizes = str(node.target).startswith("aten.sym_") or not any(map(_is_tensor, node.all_input_nodes))
        if of_sizes and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return  # checked where it is used
        call = OperatorCall(node, rows, self.before, self.numbered)
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
        self.before[node] = call.before


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _rule(node: Node) -> Rule:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise RowsMixed("is not known to keep rows apart")
    name, tags = target._schema.name, target.tags
    if name in RULES:
        return RULES[name]
    if torch.Tag.nondeterministic_seeded in tags or name in _RANDOM:
        raise RowsMixed("draws random numbers for rows")
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
    if node.op == "output":
        return "the graph"
    name, original = str(node.target), str(node.meta.get("original_aten") or "")
    return f"{original}, as {name}," if original and original != name else name
