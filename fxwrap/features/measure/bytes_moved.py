"""The bytes that launches and library calls move."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from ...host_graph.nodes import kernel_of, schema_of
from ...host_graph.sizes import hinted_layout, layout_at, storage_bytes
from ...host_graph.storages import Origin
from ...passes.memory.requirements import expected_sizes
from ...plan import ProgramPlan


class BytesMoved:
    """Counts the bytes that the work of a program moves, at concrete sizes.

    A kernel may read a part of an operand only (rows of a table), and read one twice: this counts each operand once.
    """

    def __init__(self, plan: ProgramPlan, symbols: Mapping[Any, int]) -> None:
        """``symbols`` are the sizes, by symbol."""
        self._plan, self._symbols = plan, symbols
        self._sizes = expected_sizes(plan.graph, plan.facts, symbols)
        made = (storage for storage in plan.facts.storages if storage.origin is Origin.EXTERN)
        self._made: dict[str, set[int]] = {}
        for storage in made:
            self._made.setdefault(storage.node, set()).add(storage.index)

    def by(self, node: Node) -> int:
        """Bytes of what a node reads, and of what it writes; an operand that it updates counts twice."""
        facts, seen = self._plan.facts, dict[int, int]()
        for operand in node.all_input_nodes:
            for index in facts.of(operand):
                seen[index] = max(seen.get(index, 0), self._bytes_of(operand, index))
        results = results_of(node)
        others = facts.behind(operand for operand in node.all_input_nodes if operand not in results)
        read = facts.reads(node) - (facts.behind(results) - others)
        written = facts.writes(node) | self._made.get(node.name, set())
        return sum(seen.get(index, self._sizes.get(index, 0)) for part in (read, written) for index in part)

    def _bytes_of(self, operand: Node, index: int) -> int:
        """The bytes of a storage that a tensor spans."""
        value: Any = operand.meta.get("val")
        layout = layout_at(value, self._symbols) if self._symbols else hinted_layout(value)
        return storage_bytes(*layout, value.dtype) if layout is not None else self._sizes.get(index, 0)


def results_of(node: Node) -> set[Node]:
    """The operands that a node writes without reading them: ``out=`` of an operator, ``out_ptr0`` of a kernel."""
    if (kernel := kernel_of(node)) is not None:
        signature = _SIGNATURE.search(kernel.source)
        names = [part.split()[-1] for part in signature[1].split(",") if part.split()] if signature else []
        given = zip(names, node.args[1:], strict=False)
        return {arg for name, arg in given if name.startswith("out_ptr") and isinstance(arg, Node)}
    declared = overload._schema.arguments if (overload := schema_of(node)) is not None else ()
    given_out = (node.kwargs.get(argument.name) for argument in declared if argument.is_out)
    return {value for value in given_out if isinstance(value, Node)}


# The parameters of Inductor's C++ and Triton kernels.
_SIGNATURE = re.compile(r"(?:\bkernel|\bdef \w+)\(([^)]*)\)")
