"""Fake values of host-graph nodes: what a node returns as far as it is known when the graph is emitted.

A fake value has size, stride, type and device, and no data. Its sizes may be symbolic. Python's ``max(s0, 6)``
compares with the size of the example, and is ``s0`` or 6 from then on; ``torch.sym_max(s0, 6)`` is the larger one at
each call.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.codegen.wrapper_fxir import FxConverter
from torch._inductor.virtualized import V
from torch.fx import Node

from ...host_graph.arithmetic import select
from ...host_graph.control_flow import switch, while_loop
from ...host_graph.nodes import Kind, launch, reinterpret
from ...host_graph.user_code import is_of_user, last_frame
from .. import torch_versions as versions
from .statements import StatementReader


class NodeEmitter(FxConverter):
    """Gives each new node of the host graph its fake value, and the line of user code that it comes from.

    It is the base of the classes that read one kind of wrapper line each.

    Attributes:
        wrapper: Inductor's wrapper, whose lines are read.
        module: the loaded module with all kernels and imports of the program.
        reader: reads Python text of the lines.
    """

    wrapper: PythonWrapperCodegen
    module: types.ModuleType
    reader: StatementReader
    _line: Any = None  # the wrapper line that is being read
    _predicted: Any = None  # the fake value of a node that is about to be copied
    _constants: dict[str, Node]  # nodes that hold kernels, subgraphs and constants, by attribute

    def _constant(self, name: str, value: Any) -> Node:
        """The node that holds ``value``, an attribute of the graph module."""
        if name not in self._constants:
            setattr(self.gm, name, value)
            self._constants[name] = self.gm.graph.create_node("get_attr", name)
        return self._constants[name]

    def _by_value(self, arg: Any) -> Any:
        """Give a number that is read out of a tensor a data-dependent value; return ``arg``.

        ``item`` has no fake value. Without one the number would count as constant, and a device graph would keep the
        first.
        """
        if isinstance(arg, Node) and arg.target is torch.ops.aten.item.default and "val" not in arg.meta:
            env = V.graph.sizevars.shape_env
            source = arg.all_input_nodes[0].meta["val"]
            with env.ignore_fresh_unbacked_symbols():
                if source.dtype is torch.bool:
                    arg.meta["val"] = env.create_unbacked_symbool()
                else:
                    fraction = source.is_floating_point()
                    arg.meta["val"] = env.create_unbacked_symfloat() if fraction else env.create_unbacked_symint()
        return arg

    def _trace(self) -> str:
        """The stack trace of the present line; of several, one with a line of the user's."""
        traces = versions.stack_traces(self._line)
        return next((trace for trace in traces if is_of_user(last_frame(trace))), traces[0] if traces else "")

    def _note(self, node: Node) -> Node:
        """Note on a node which user code the present line comes from."""
        if trace := self._trace():
            node.meta["stack_trace"] = trace
        if names := versions.origins(self._line):
            node.meta["origins"] = names
        if module := versions.module_path_of(self._line):
            node.meta["module"] = module
        return node

    def _infer_value(self, node: Node) -> None:
        """Give a new node a fake value: run it on its operands' fake values.

        Fake values serve display, symbolic arithmetic and the verifier's view of aliasing. Nothing that executes
        depends on them: an operator that has no fake form has no value.
        """
        if node.op != "call_function" or "val" in node.meta or node.meta.get("kind") is Kind.CHECK:
            return
        without_value = (launch, switch, while_loop, print, triton_kernel_wrapper_mutation)
        if node.target in without_value or is_assert(node.target):
            return
        if node.target is reinterpret and "val" not in node.args[0].meta:  # type: ignore[union-attr]
            return
        missing = [arg for arg in node.all_input_nodes if "val" not in arg.meta]
        overload = node.target
        if missing or decided_by_data(overload, self._line) or not callable(overload):
            self._value_from_layout(node)
            return
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        if overload is reinterpret and isinstance(args[-1], int) and args[-1] < 0:
            overload = _window_before
        try:
            # The program does not rely on what an operator asks of sizes here: no guards, and no sizes of its own.
            env = V.graph.sizevars.shape_env
            with V.fake_mode, torch.no_grad(), env.suppress_guards(), env.ignore_fresh_unbacked_symbols():
                node.meta["val"] = symbolic_form(overload)(*args, **kwargs)
        except Exception:
            self._value_from_layout(node)

    def _value_from_layout(self, node: Node) -> None:
        """Give a node the value that Inductor's layout predicts: data-dependent sizes have names there."""
        if self._predicted is not None:
            node.meta["val"] = in_own_storages(self._predicted)
            return
        owner = getattr(self._line, "node", None)
        symbol = getattr(owner, "sym", None)
        if symbol is not None:
            node.meta["val"] = versions.symbolic_value(symbol)
            return
        if (origin := versions.origin(self._line, node.target)) is not None and "val" in origin.meta:
            node.meta["val"] = origin.meta["val"]
            return
        if node.target is torch.ops.aten.item.default:
            self._by_value(node)
        elif (value := example(owner)) is not None:
            node.meta["val"] = value

    def _name_value(self, name: str, node: Node) -> None:
        """Give the node of a data-dependent size the symbol that Inductor's program names it by."""
        symbol = self._unbacked().get(name)
        if symbol is not None:
            node.meta["val"] = versions.symbolic_value(symbol)

    def _unbacked(self) -> dict[str, Any]:
        env = V.graph.sizevars.shape_env
        return {str(symbol): symbol for symbol in env.var_to_range if env.is_unbacked_symint(symbol)}


def _window_before(base: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    """The fake value of a view that begins before an input: fake memory has nothing there."""
    return torch.empty_strided(size, stride, dtype=base.dtype, device=base.device)


def decided_by_data(function: Any, line: Any) -> bool:
    """Whether an operator returns a size or a number that data decide, whatever the program promises of it.

    Custom operators seldom have the tag. Inductor keeps the symbols that their fake kernels make.
    """
    if not isinstance(function, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return False
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    symbols = getattr(getattr(line, "node", None), "unbacked_bindings", None)
    return bool(symbols) or not tags.isdisjoint(getattr(function, "tags", ()))


def is_assert(function: Any) -> bool:
    """Whether a function is one of the wrapper's asserts, which return nothing."""
    # A custom operator may have such a name, too, and returns something.
    is_operator = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return not is_operator and getattr(function, "__name__", "").startswith("assert_")


def example(owner: Any) -> Any:
    """The fake value that a node of Inductor's IR predicts; None where it has no layout."""
    try:
        return owner.get_example()
    except Exception:
        return None


def predicted_results(line: Any) -> list[Any]:
    """The fake values of a call's results in Inductor's IR, for which its kernels are laid out."""
    owner = getattr(line, "node", None)
    outputs = getattr(owner, "outputs", None) or [owner]
    return [example(output) for output in outputs]


def same_layouts(values: Sequence[torch.Tensor], others: Sequence[Any]) -> bool:
    """Whether tensors are known to have the same sizes, strides, types and devices; symbolic sizes are compared."""
    same = V.graph.sizevars.statically_known_list_equals

    def layout(tensor: torch.Tensor) -> list[Any]:
        return [n if isinstance(n, int) else n.node.expr for n in (*tensor.size(), *tensor.stride())]

    return len(values) == len(others) and all(
        isinstance(other, torch.Tensor)
        and (value.dtype, value.device, value.dim()) == (other.dtype, other.device, other.dim())
        and same(layout(value), layout(other))
        for value, other in zip(values, others, strict=True)
    )


def results_by_index(owner: Any) -> list[Any]:
    """The fake values of a control-flow node's results, at the indices of ``getitem``; None where there is no value.

    An output's position in ``owner.outputs`` is not its index: the list has no carried values that the loop writes in
    place, because the program reads their buffers.
    """
    results = {output.indices[0][1]: example(output) for output in owner.outputs}
    return [results.get(index) for index in range(max(results, default=-1) + 1)]


def in_own_storages(value: Any) -> Any:
    """Copies of fake values, each tensor in a storage of its own."""
    with V.fake_mode:
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device), value
        )


# -- arithmetic on symbolic sizes ------------------------------------------------------------------


def symbolic_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's function that computes the same from symbolic numbers; ``function`` itself where torch has none."""
    return _SYMBOLIC.get(id(function), function)


def _of_many(of_two: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *numbers: functools.reduce(of_two, numbers)


def _select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """``torch.sym_ite`` for symbolic and plain numbers, which it refuses to mix."""
    symbolic = next((number for number in (if_true, if_false) if isinstance(number, torch.SymInt)), None)
    if symbolic is not None:
        if_true, if_false = (
            torch.SymInt(symbolic.node.wrap_int(number)) if type(number) is int else number
            for number in (if_true, if_false)
        )
    return torch.sym_ite(condition, if_true, if_false)


_SYMBOLIC: dict[int, Callable[..., Any]] = {
    id(max): _of_many(torch.sym_max),
    id(min): _of_many(torch.sym_min),
    id(int): torch.sym_int,
    id(float): torch.sym_float,
    id(select): _select,
    **{id(f): getattr(torch, f"_sym_{name}") for name, f in vars(math).items() if hasattr(torch, f"_sym_{name}")},
}
