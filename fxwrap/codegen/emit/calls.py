"""Calls in wrapper lines: allocations, views, library calls and operators, which get memory that the plan owns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.effects import has_effects
from torch._inductor import ir
from torch.fx import Node
from torch.fx.node import has_side_effect

from ...errors import EmissionError
from ...host_graph.nodes import Kind, aligned, reinterpret
from ...torch_private.functions import empty_strided_cpu
from .. import torch_versions as versions
from .out_forms import OutForm, out_form
from .statements import UndefinedName
from .triton_kernels import is_descriptor
from .values import NodeEmitter, decided_by_data, is_assert, predicted_results, same_layouts


def _is_written(owner: Any) -> bool:
    """Whether Inductor writes what it allocates for ``owner``: not the result of ``aten.empty``, nor a workspace."""
    if not isinstance(owner, ir.Buffer):
        return False
    return isinstance(owner, ir.ConcatKernel) or not (isinstance(owner, ir.Operation) and owner.is_no_op())


class CallEmitter(NodeEmitter):
    """Emits the calls that wrapper lines make, and describes them for analysis and execution."""

    def _rewrites(self) -> dict[Any, Callable[..., Any]]:
        """Functions of the wrapper's module, and the methods that emit the host graph's form of a call."""
        module = self.module
        rewrites: dict[Any, Callable[..., Any]] = {module.reinterpret_tensor: self._reinterpret}
        rewrites[torch.empty_strided] = self._allocate
        if (copy := getattr(module, "copy_if_misaligned", None)) is not None:
            rewrites[copy] = self._align
        if (grouped := getattr(module, "assert_size_stride_grouped", None)) is not None:
            rewrites[grouped] = self._assert_each
        for name in vars(module):
            if name.startswith("empty_strided_"):
                rewrites[getattr(module, name)] = self._allocate_pinned if "pinned" in name else self._allocate
        return rewrites

    def _reinterpret(self, base: Node, size: Any, stride: Any, offset: Any = 0) -> Node:
        node = self.gm.graph.call_function(reinterpret, (base, size, stride, offset))
        node.meta["call"] = self.module.reinterpret_tensor
        return node

    def _assert_each(self, tensors: Any, sizes: Any, strides: Any, *name: str) -> None:
        """One assert for each tensor: the helper library has that, and it runs as soon as the tensor exists."""
        function = self.module.assert_size_stride
        for layout in zip(tensors, sizes, strides, strict=True):
            self._describe_call(self.gm.graph.call_function(function, (*layout, *name)), function)

    def _align(self, tensor: Node) -> Node:
        node = self.gm.graph.call_function(aligned, (tensor,))
        node.meta["call"] = self.module.copy_if_misaligned
        return node

    def _allocate(self, size: Any, stride: Any, dtype: torch.dtype, device: Any = None, **kwargs: Any) -> Node:
        # The text has the device's type, or nothing; the line has the device.
        owner = getattr(self._line, "node", None)
        device = (owner.get_device() if owner is not None else None) or torch.device(device or "cpu")
        node = self._new_buffer(size, stride, {"dtype": dtype, "device": device, **kwargs})
        if not _is_written(owner):
            node.meta["uninitialised"] = True
        return node

    def _new_buffer(self, size: Any, stride: Any, kwargs: dict[str, Any]) -> Node:
        node = self._note(self.gm.graph.call_function(torch.empty_strided, (size, stride), kwargs))
        if kwargs["device"].type == "cpu" and "pin_memory" not in kwargs and empty_strided_cpu is not None:
            node.meta["call"] = empty_strided_cpu
        return node

    def _allocate_pinned(self, size: Any, stride: Any, dtype: torch.dtype) -> Node:
        return self._allocate(size, stride, dtype, pin_memory=True)

    def _finish_call(self, node: Node, function: Any) -> Any:
        """Describe a call. Returns its result: the node, or the buffers that the call now writes into.

        Raises:
            EmissionError: a tensor gets the storage of another one, and keeps it when the program has ended. The plan
                would give that memory to others.
        """
        if getattr(function, "overloadpacket", function) in versions.SETS_STORAGE:
            raise EmissionError(
                "the storage of a tensor is replaced inside the compiled region (tensor.data = ..., set_)",
                expected="a graph that copies to it",
            )
        self._describe_call(node, function)
        result = self._into_buffers(node)
        self._check_written_results(node)
        return result

    def _check_written_results(self, node: Node) -> None:
        """Assert the layout of the buffers that a custom operator's ``out=`` form has written.

        A custom operator may resize them, where its fake kernel is wrong; torch's own operators agree with their fake
        kernels. The assert reads the call's results: one that reads the buffers could run before the call.
        """
        overload = node.target
        if not isinstance(overload, torch._ops.OpOverload) or overload.namespace == "aten":
            return
        if getattr(torch.Tag, "out", None) not in overload.tags or "val" not in node.meta:
            return
        results, several = node.meta["val"], isinstance(node.meta["val"], (tuple, list))
        for position, result in enumerate(results if several else (results,)):
            if isinstance(result, torch.Tensor):
                value = self.gm.graph.call_function(operator.getitem, (node, position)) if several else node
                layout = self._sizes(result.size()), self._sizes(result.stride())
                check = self.gm.graph.call_function(self.module.assert_size_stride, (value, *layout, str(overload)))
                check.meta["kind"] = Kind.CHECK

    def _into_buffers(self, node: Node) -> Any:
        """Make a functional operator write into new buffers, so that its results are planned.

        ::

            buf3 = aten.topk(x, 2)              values, indices = allocate ..., allocate ...
            buf4 = buf3[0]                 ->   aten.topk.values(x, 2, values=values, indices=indices)
            buf5 = buf3[1]

        Where that is impossible, ``node.meta["outside_plan"]`` says why.
        """
        overload, value = node.target, node.meta.get("val")
        if not isinstance(overload, torch._ops.OpOverload) or value is None:
            return node
        values = value if isinstance(value, (tuple, list)) else (value,)
        if not all(isinstance(result, torch.Tensor) for result in values):
            return node
        form = out_form(overload, values[0].device.type)
        if isinstance(form, OutForm) and decided_by_data(overload, self._line):
            # Even where the program promises a size: what the operator returns is checked before anything uses it.
            form = "its result's size is data-dependent"
        elif isinstance(form, OutForm) and not same_layouts(values, predicted_results(self._line)):
            form = "Inductor predicts no results like these"
        buffers = self._with_buffers(node, form, values) if isinstance(form, OutForm) else form
        if isinstance(buffers, str):
            node.meta["outside_plan"] = buffers
            return node
        return buffers if isinstance(value, (tuple, list)) else buffers[0]

    def _with_buffers(self, node: Node, form: OutForm, values: Sequence[torch.Tensor]) -> tuple[Node, ...] | str:
        """Make ``node`` the call of its out= form. Returns the buffers, or why there can be none."""
        if any(v.layout is not torch.strided or v.is_conj() or v.is_neg() for v in values):
            return "its results have no plain memory"
        try:
            layouts = [(self._sizes(value.size()), self._sizes(value.stride())) for value in values]
        except UndefinedName:
            return "its result's size is data-dependent"
        buffers = []
        for layout, value in zip(layouts, values, strict=True):
            kwargs: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            buffers.append(self._new_buffer(*layout, kwargs))
        buffers[-1].append(node)
        node.target = form.overload
        node.kwargs = {**node.kwargs, **dict(zip(form.results, buffers, strict=True))}
        node.meta["op_overload"] = form.overload
        node.meta.pop("call", None)
        results = tuple(buffer.meta["val"] for buffer in buffers)
        node.meta["val"] = results if len(results) > 1 else results[0]
        return tuple(buffers)

    def _sizes(self, sizes: Sequence[int | torch.SymInt]) -> tuple[Any, ...]:
        return tuple(
            size if isinstance(size, int) else self.reader.value(versions.python_expression(size.node.expr))
            for size in sizes
        )

    def _describe_call(self, node: Node, function: Any) -> None:
        """Note on a call what analysis and execution need beyond its target."""
        self._note(node)
        if function is print:
            has_side_effect(print)  # otherwise dead code elimination drops it
            return
        if is_assert(function):
            node.meta["kind"] = Kind.CHECK
            has_side_effect(function)
            return
        if is_descriptor(function):
            node.meta["kind"] = Kind.VIEW
            return
        overload = getattr(getattr(self._line, "node", None), "op_overload", None)
        is_operator = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        if isinstance(overload, torch._ops.OpOverload) and node.meta.get("kind") is None:
            if isinstance(function, torch._ops.OpOverloadPacket):
                node.meta["op_overload"] = overload
            elif not is_operator and callable(function) and versions.is_extern_kernel(function):
                # Inductor's wrapper calls a Python binding (torch.addmm); the graph shows the operator.
                node.meta["call"] = function
                node.target = overload
        if isinstance(function, torch._ops.OpOverload):
            node.meta["op_overload"] = function
            if versions.is_plain_view(function) or _is_view_here(node):
                node.meta["kind"] = Kind.VIEW
        if has_effects(node.meta.get("op_overload", node.target)):
            node.meta["effect"] = True  # the schema does not show it
        if decided_by_data(node.target, self._line):
            node.meta["of_data"] = True  # a promised size hides it, and custom operators have no tag


def _is_view_here(node: Node) -> bool:
    """Whether a call is a ``reshape`` that returns a view of its operand. The operand's layout decides."""
    if node.target is not torch.ops.aten.reshape.default:
        return False
    result, operand = node.meta.get("val"), node.args[0].meta.get("val")  # type: ignore[union-attr]
    if not isinstance(result, torch.Tensor) or not isinstance(operand, torch.Tensor):
        return False
    return result.untyped_storage()._cdata == operand.untyped_storage()._cdata
