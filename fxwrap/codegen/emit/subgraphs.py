"""Wrapper lines that call subgraphs: branches and loops, and subgraphs that are copied into the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, WrapperLine
from torch.fx import Node

from ...host_graph.control_flow import switch, while_loop
from ...host_graph.nodes import Kernel, output_node
from .values import NodeEmitter, results_by_index


@dataclass
class WhileLoopLine(WrapperLine):
    """A loop over subgraphs. Inductor's Python wrapper writes it as several plain strings."""

    wrapper: PythonWrapperCodegen
    node: Any
    stacked: bool


@dataclass
class InvokeSubgraphLine(WrapperLine):
    """A call of a subgraph. Inductor's Python wrapper writes it as several plain strings."""

    wrapper: PythonWrapperCodegen
    node: Any


@dataclass
class ChosenSubgraphLine(WrapperLine):
    """A call of the subgraph that autotuning chose for an operator, such as a matrix product whose sums are split.

    Attributes:
        graph: name of the subgraph.
        inputs: the arguments, as the wrapper's Python.
        outputs: names of the results.
    """

    wrapper: PythonWrapperCodegen
    graph: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class SubgraphEmitter(NodeEmitter):
    """Emits calls of subgraphs."""

    def _line_ConditionalLine(self, line: Any) -> None:
        node = line.node
        branches = node.false_subgraph, node.true_subgraph
        self._control_flow(switch, node.predicate, node.operands, *branches, by_truth=True)

    def _line_SwitchLine(self, line: Any) -> None:
        node = line.node
        self._control_flow(switch, node.selector, node.operands, *node.branches)

    def _line_WhileLoopLine(self, line: Any) -> None:
        node = line.node
        operands = node.carried_inputs, node.additional_inputs
        stacked = (True,) if line.stacked else ()
        self._control_flow(while_loop, node.cond_subgraph, node.body_subgraph, *operands, *stacked)

    def _control_flow(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Emit a call of subgraphs."""
        owner = self._line.node
        node = self.gm.graph.create_node("call_function", function, tuple(map(self._operand, args)), kwargs)
        node.meta["val"] = results_by_index(owner)
        node.meta["outside_plan"] = "its subgraphs allocate what it returns"
        self._note(node)
        self.reader.assign(owner.get_name(), node)

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, (tuple, list)):
            return tuple(map(self._operand, arg))
        if isinstance(arg, ir.Subgraph):
            return self._subgraph(arg)
        return self.reader.value(arg.codegen_reference()) if isinstance(arg, ir.IRNode) else arg

    def _subgraph(self, subgraph: Any) -> Node:
        """The node that holds a subgraph, which is a host graph of its own."""
        name = subgraph.graph.name
        return self._constant(name, self.subgms[name])

    def _line_InvokeSubgraphLine(self, line: Any) -> None:
        name, inputs = line.node.get_name(), map(self._operand, line.node.inputs)
        self.reader.assign(name, self._copied(line.node.subgraph.graph.name, inputs, name, line.node.subgraph.name))

    def _line_ChosenSubgraphLine(self, line: Any) -> None:
        results = self._copied(line.graph, map(self.reader.value, line.inputs), line.outputs[0], line.graph)
        for name, result in zip(line.outputs, results, strict=True):
            self.reader.assign(name, result)

    def _copied(self, graph: str, inputs: Iterable[Any], prefix: str, constants: str) -> Any:
        """Copy a subgraph's nodes into this graph, where they are planned and captured like others.

        Args:
            graph: name of the subgraph.
            prefix: begins the names of the copied nodes.
            constants: begins the names of the copied constants.

        Returns:
            The results of the copy.
        """
        subgraph = self.subgms[graph]
        placeholders = [node for node in subgraph.graph.nodes if node.op == "placeholder"]
        values: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))
        for node in subgraph.graph.nodes:
            if node.op == "get_attr":
                value = getattr(subgraph, str(node.target))
                # A kernel's name is unique in the program, a constant's in its graph alone.
                name = value.name if isinstance(value, Kernel) else f"{constants}_{node.target}"
                values[node] = self._constant(name, value)
                values[node].meta.update(node.meta)
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                self._predicted = node.meta.get("val")
                values[node] = copy = self.gm.graph.create_node(
                    "call_function", node.target, args, kwargs, name=f"{prefix}_{node.name}"
                )
                self._predicted = None
                copy.meta = {**node.meta, **copy.meta}
        (results,) = output_node(subgraph).args
        return torch.fx.map_arg(results, values.__getitem__)
