"""What differs between torch versions, tried by feature. Nothing else in fxwrap asks which torch it runs on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._inductor.codegen import cpp_utils
from torch._inductor.codegen.common import IndentedBuffer
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, pexpr
from torch._inductor.select_algorithm import extern_kernels as _extern_kernels

# What devices are called in C++; where torch has no such table, a device's op overrides say it.
CPP_DEVICE_NAMES: dict[str, str] = getattr(cpp_utils, "DEVICE_TO_ATEN", {})


@contextlib.contextmanager
def redirect_writeline(wrapper: PythonWrapperCodegen, code: IndentedBuffer) -> Iterator[None]:
    """Send what a wrapper line prints into ``code``."""
    context = wrapper.set_writeline(code, code.writeline) if _takes_buffer() else None
    if context is None:
        context = wrapper.set_writeline(code.writeline)  # type: ignore[call-arg,arg-type]
    with context:
        yield


@functools.cache
def _takes_buffer() -> bool:
    import inspect

    return len(inspect.signature(PythonWrapperCodegen.set_writeline).parameters) >= 3


def python_expression(expression: Any) -> str:
    """The Python text of a kernel argument: an expression of sizes, a number, a named value."""
    inner = getattr(expression, "inner", None)  # SymbolicCallArg
    if inner is not None:
        return str(inner)
    if isinstance(expression, sympy.Basic):
        return pexpr(expression)
    return repr(expression)


def stack_traces(line: Any) -> list[str]:
    """The user's stack traces behind a wrapper line, newest frame last; empty where torch keeps none."""
    node = getattr(line, "node", None)
    getter = getattr(node, "get_stack_traces", None)
    if getter is not None:
        try:
            return [trace for trace in getter() if trace]
        except Exception:
            return []
    return []


def prefix_asserts(wrapper: PythonWrapperCodegen) -> list[str]:
    """Asserts on inputs that some versions write before the first line instead of among the lines."""
    lines = wrapper.prefix.getvalue().splitlines()
    return [line.strip() for line in lines if line.strip().startswith("assert_size_stride(")]


def wrap_for_graph(tuner: Any) -> Any:
    """Enter a Triton kernel into torch's table of kernels for graphs."""
    from torch._library.triton import wrap_triton

    # A kernel that was compiled in another process came back without its Python function.
    if hasattr(tuner, "_ensure_kernel_loaded"):
        tuner._ensure_kernel_loaded()
    elif tuner.fn.fn is None:
        tuner.fn = tuner._reload_kernel().fn
    return wrap_triton(tuner.fn)


@functools.cache
def is_plain_view(overload: torch._ops.OpOverload) -> bool:
    """Whether an operator always returns a view of its first argument, and does nothing else.

    Operators that torch composes of others (``reshape``, ``contiguous``) may return a copy under the same schema.
    """
    schema = overload._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    composed = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return overload.namespace == "aten" and overload.is_view and len(schema.returns) == 1 and not composed


@functools.cache
def _extern_functions(count: int) -> frozenset[Any]:
    return frozenset(value for value in vars(_extern_kernels).values() if callable(value))


def extern_kernels() -> frozenset[Any]:
    """The Python functions Inductor's wrapper calls for library kernels (``torch.addmm``, ...)."""
    return _extern_functions(len(vars(_extern_kernels)))


def symbolic_value(symbol: sympy.Expr) -> Any:
    """A torch.SymInt (or SymFloat, SymBool) that stands for ``symbol``."""
    from torch._inductor.virtualized import V

    env = V.graph.sizevars.shape_env
    if getattr(symbol, "is_integer", False):
        return env.create_symintnode(symbol, hint=None)
    return env.create_symfloatnode(symbol, hint=None)


def use_counter(storages: Sequence[torch.UntypedStorage]) -> Callable[[], list[int]]:
    """A function that tells how many tensors and storage objects share each of ``storages``."""
    handles = [storage._cdata for storage in storages]
    count = torch._C._storage_Use_Count
    return lambda: list(map(count, handles))


def _same_data_pointers(inputs: Sequence[Any], pointers: Sequence[Any], positions: Sequence[int]) -> bool:
    addresses = list(map(torch.Tensor.data_ptr, [inputs[position] for position in positions]))
    return addresses == [pointers[position] for position in positions]


# (inputs, pointers, positions) -> whether inputs[p] is at pointers[p] for every p in positions. In C++ where the
# build has it: CPU builds do not.
same_data_pointers = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _same_data_pointers)


# (tensor, size, stride, offset) -> a new tensor object, related to ``tensor`` by nothing but its storage. Sizes are
# plain tuples: some versions take nothing else.
lay_out: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009


# (address, device, bytes) -> a storage over memory that somebody else owns and keeps.
storage_at: Any = getattr(torch._C, "_construct_storage_from_data_pointer")  # noqa: B009


def below_autograd() -> Any:
    """A context in which operators skip autograd's layer of the dispatcher.

    Compiled programs record no gradients, and the layer costs a third of a small operator's call.
    """
    return torch._C._AutoDispatchBelowAutograd()
