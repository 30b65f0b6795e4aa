"""The dimension of rows in a traced graph, and calls of operators on values that have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...host_graph.sizes import expression


class RowsMixed(Exception):
    """A row of a result can depend on other rows; the message says how, as the end of a sentence."""


@dataclass(frozen=True)
class RowDimension:
    """Finds the bucketed dimension of tensors.

    Attributes:
        symbol: the bucketed size.
        name: the bucket's name, for messages.
    """

    symbol: sympy.Symbol
    name: str

    def in_size(self, size: Any) -> bool:
        """Whether a number depends on the bucketed size."""
        found = expression(size)
        return isinstance(found, sympy.Basic) and self.symbol in found.free_symbols

    def of(self, tensor: torch.Tensor) -> int | None:
        """The bucketed dimension of a tensor, whose size is a multiple of the symbol; None if it has none.

        Raises:
            RowsMixed: several dimensions have it, or the size is another function of it.
        """
        dims = [dim for dim, size in enumerate(tensor.size()) if self.in_size(size)]
        if not dims:
            return None
        if len(dims) > 1:
            raise RowsMixed(f"combines rows with rows: {len(dims)} dimensions of {shape_text(tensor)} have this size")
        size = expression(tensor.size(dims[0]))
        if self.symbol in sympy.cancel(size / self.symbol).free_symbols:
            raise RowsMixed(f"makes a dimension of size {size}, which is no multiple of {self.symbol}")
        return dims[0]


def shape_text(tensor: torch.Tensor) -> str:
    """The sizes of a tensor, with symbols."""
    return "(" + ", ".join(str(expression(size)) for size in tensor.size()) + ")"


class OperatorCall:
    """One call of an operator.

    Attributes:
        node: the call.
        args: values of the arguments by the schema's names, defaults included; fake tensors stand for tensors.
        nodes: the same with graph nodes.
        results: the fake tensors that it returns.
        before: the factor before the rows in the bucketed dimension, which is ``(before, rows, after)`` merged: 1
            where rows are the outermost factor. None if all rows of the operands are the same, or no operand has
            rows. A rule changes it for the results.
        numbered: nodes whose rows depend on their own number, counted from the first one. A rule adds its call.

    Raises:
        RowsMixed: rows of two operands lie in different orders.
    """

    def __init__(self, node: Node, rows: RowDimension, before: Mapping[Node, Any], numbered: set[Node]) -> None:
        self.node, self.rows, self.numbered = node, rows, numbered
        orders = {order for operand in node.all_input_nodes if (order := before.get(operand)) is not None}
        if len(orders) > 1:
            raise RowsMixed("combines rows that lie in different orders")
        self.before: Any = orders.pop() if orders else None
        self.nodes = arguments_of(node)
        self.args: dict[Any, Any] = {
            name: torch.fx.map_arg(value, lambda arg: arg.meta.get("val")) for name, value in self.nodes.items()
        }
        self.results = list(tensors_in(node.meta.get("val")))

    def has(self, name: str) -> bool:
        return isinstance(self.args.get(name), torch.Tensor)

    def dim(self, name: str) -> int | None:
        """The bucketed dimension of an operand; None if it has none, or is no tensor."""
        return self.rows.of(self.args[name]) if self.has(name) else None

    def own_dim(self, name: str) -> int:
        """The bucketed dimension of an operand that must have it."""
        dim = self.dim(name)
        if dim is None:
            raise RowsMixed(f"takes rows by the argument '{name}', which has none")
        return dim

    def without(self, *names: str) -> None:
        """Check that operands do not have the bucketed dimension."""
        for name in names:
            if any(self.rows.of(tensor) is not None for tensor in tensors_in(self.args.get(name))):
                raise RowsMixed(f"has rows in its argument '{name}', which every row of the result may read")

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from tensors_in(list(self.args.values()))


def arguments_of(node: Node) -> dict[Any, Any]:
    """The arguments of a call by the schema's names, defaults included; by their positions without a schema."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = dict(zip(names, node.args, strict=False)) if names else dict(enumerate(node.args))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()} if schema else {}
    return {**defaults, **given, **node.kwargs}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value and in sequences of it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def operator_of(node: Any) -> str:
    """The name of the operator that a node calls ("aten::add"); empty if it calls none."""
    return str(getattr(getattr(node.target, "_schema", None), "name", "")) if isinstance(node, Node) else ""
