"""What differs between torch versions, tried by feature. Nothing else in fxwrap asks which torch it runs on."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import config, ir, sizevars
from torch._inductor.codegen import cpp_utils
from torch._inductor.codegen.common import IndentedBuffer
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, pexpr
from torch._inductor.select_algorithm import extern_kernels as _extern_kernels
from torch.multiprocessing.reductions import StorageWeakRef

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


# ``(size, stride, dtype)``: what Inductor's wrapper allocates with; torch.empty_strided takes three times as long.
empty_strided_cpu: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)


def scheduled_nodes(device: torch.device) -> list[Any]:
    """Inductor's IR nodes in the kernel whose call is being written."""
    from torch._inductor.virtualized import V

    scheduler = V.graph.scheduler
    # C++ kernels are written when a group of loops is complete, after the scheduler has moved on.
    group = getattr(scheduler.get_backend(device), "kernel_group", None)
    scheduled = getattr(group, "scheduled_nodes", None) or [scheduler.current_node]
    return [part.node for node in scheduled if node is not None for part in node.get_nodes() if part.node is not None]


def _ir_nodes(line: Any) -> list[Any]:
    """The IR nodes behind a wrapper line."""
    node = getattr(line, "node", None)
    return [node] if node is not None else list(getattr(line, "scheduled", ()))


def stack_traces(line: Any) -> list[str]:
    """The user's stack traces behind a wrapper line, newest frame last; empty where torch keeps none."""
    found: dict[str, None] = {}
    for node in _ir_nodes(line):
        getter = getattr(node, "get_stack_traces", None)
        with contextlib.suppress(Exception):
            found.update(dict.fromkeys(getter() if getter is not None else ()))
    return [trace for trace in found if trace]


def _fx_nodes(line: Any) -> list[torch.fx.Node]:
    found = (origin for node in _ir_nodes(line) for origin in getattr(node, "origins", None) or ())
    return list(dict.fromkeys(found))


def origins(line: Any) -> list[str]:
    """Names of the nodes of Inductor's input graph that a wrapper line comes from."""
    return [node.name for node in _fx_nodes(line)]


def operators(line: Any) -> list[str]:
    """The operators behind a wrapper line, as torch names them."""
    overloads = [getattr(node, "op_overload", None) for node in _ir_nodes(line)]
    targets = [overload for overload in overloads if overload is not None] or [
        node.target for node in _fx_nodes(line) if node.op == "call_function"
    ]
    return list(dict.fromkeys(map(str, targets)))


def prefix_asserts(wrapper: PythonWrapperCodegen) -> list[str]:
    """Asserts on inputs that are written before the first line: NaN asserts, in some versions those on sizes, too."""
    lines = map(str.strip, wrapper.prefix.getvalue().splitlines())
    return [line for line in lines if line.startswith(("assert_size_stride(", "assert "))]


def scalar_asserts() -> list[tuple[set[str], str, str]]:
    """Asserts on data-dependent sizes: the names each needs, its condition as Python, its message.

    Inductor drops them where it emits graphs.
    """
    from torch._inductor.virtualized import V

    if not config.scalar_asserts:
        return []
    is_range_bound: Any = getattr(sizevars, "is_range_bound", None)
    skips_ranges = is_range_bound is not None and getattr(config, "unsafe_skip_scalar_range_asserts", False)
    found = []
    for operation in V.graph.operations:
        if not isinstance(operation, ir.AssertScalar) or (skips_ranges and is_range_bound(operation.scalar)):
            continue
        # Not simplified: Inductor takes what is asserted for granted, and would find it to be true.
        text = V.graph.wrapper_code.codegen_python_sizevar(operation.scalar, simplify=False)
        names = {str(symbol) for symbol in operation.get_free_symbol_uses(unbacked_only=False)}
        found.append((names, text, operation.msg))
    return found


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


def registered_operators() -> list[str]:
    """What operators of C++ and Python are called, with their overloads."""
    return torch._C._dispatch_get_all_op_names()


def extern_kernels() -> frozenset[Any]:
    """The Python functions Inductor's wrapper calls for library kernels (``torch.addmm``, ...)."""
    return _extern_functions(len(vars(_extern_kernels)))


def wrapper_functions() -> dict[str, Callable[..., Any]]:
    """The private functions that Inductor's Python wrapper calls, by a name that stays."""
    guards = vars(torch._C._dynamo.guards)
    found = {f"guards.{n}": f for n, f in guards.items() if callable(f) and not isinstance(f, type)}
    return {**found, **{f"extern_kernels.{n}": f for n, f in vars(_extern_kernels).items() if callable(f)}}


def size_functions() -> dict[str, type]:
    """Torch's own classes of size expressions (``FloorDiv``, ``ModularIndexing``), by name."""
    from torch.utils._sympy import functions

    return {n: f for n, f in vars(functions).items() if isinstance(f, type) and issubclass(f, sympy.Basic)}


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


def pointer_check(pointers: Sequence[Any], positions: Sequence[int]) -> Callable[[list[Any]], bool]:
    """Makes a function that tells whether ``inputs[p]`` is at ``pointers[p]`` for every ``p`` in ``positions``.

    In C++ where the build has it: CPU builds do not.
    """
    native: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if native is not None:
        expected, chosen = list(pointers), list(positions)
        return lambda inputs: native(inputs, expected, chosen)
    # Asked of a hundred parameters: what can be is looked up beforehand.
    expected, pointer_of, choose = [pointers[p] for p in positions], torch.Tensor.data_ptr, _chooser(positions)
    return lambda inputs: [*map(pointer_of, choose(inputs))] == expected


def _chooser(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(positions) < 2:  # a getter of one item returns no tuple
        return lambda inputs: [inputs[p] for p in positions]
    return operator.itemgetter(*positions)


def layout_check(inputs: Sequence[Any], positions: Sequence[int]) -> Callable[[list[Any]], bool]:
    """A function that tells whether the tensors at ``positions`` look as they do now: size, stride, dtype, device.

    Dynamo's guard looks at all of them in one call, where an assert for each takes six times as long. It also says
    no where it does not matter (another autograd mode, one tensor twice): who asks looks closer then.
    """
    choose = _chooser(positions)
    tensors: Sequence[Any] = choose(inputs)
    sizes: Any = [list(tensor.size()) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return lambda now: guards.check(*choose(now))


# (tensor, size, stride, offset) -> a new tensor object, related to ``tensor`` by nothing but its storage. Sizes are
# plain tuples: some versions take nothing else.
lay_out: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009


# (address, device, bytes) -> a storage over memory that somebody else owns and keeps.
storage_at: Any = getattr(torch._C, "_construct_storage_from_data_pointer")  # noqa: B009


def alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """What a weak reference refers to; None if that is gone."""
    storage: Any = torch.UntypedStorage
    return storage._new_with_weak_ptr(reference.cdata)  # type: ignore[no-any-return]


def allocations(run: Callable[[], Any]) -> list[int] | None:
    """Bytes that ``run`` allocates (above 0) and frees (below) on the CPU, in order, before its result is freed.

    The profiler that torch had before Kineto tells that; the newer one writes to stderr when it starts. None while
    another profiler is running in this thread, or if torch has no such profiler.
    """
    state, enable = torch._C._profiler, getattr(torch._C._autograd, "_enable_profiler_legacy", None)
    if enable is None or torch._C._autograd._profiler_enabled():
        return None
    what = (state.ProfilerState.CPU, False, True, False, False, False, state._ExperimentalConfig())
    enable(state.ProfilerConfig(*what))  # of these only memory
    try:
        result = run()
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
    del result
    return [e.cpu_memory_usage() for thread in threads for e in thread if e.kind() == "memory_alloc"]


def saved_tensors_hooks() -> bool:
    """Whether hooks pack what autograd saves, in this thread: their owner may keep it."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def donated_inputs() -> frozenset[int]:
    """Positions of the inputs that the backward graph being compiled may overwrite, by AOTAutograd's word."""
    from torch._inductor.utils import get_donated_idxs

    return frozenset(get_donated_idxs() or ())


def saved_outputs(gm: torch.fx.GraphModule) -> dict[int, str]:
    """The outputs of a forward graph that the caller does not get: their names in AOTAutograd's joint graph, by
    position; none if nobody tells."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    visible = output.meta.get("user_visible_output_idxs")
    values = enumerate(output.args[0]) if visible else ()
    return {position: str(value) for position, value in values if position not in visible}


def share_copies(storage: torch.UntypedStorage) -> None:
    """Have a storage that is a slice of another send a copy of itself to other processes.

    The driver shares whole blocks. A slice is "invalid device pointer" to the allocator, but for the one at the start
    of the block, which would be overwritten while the receiver has it. Source: c10/cuda/CUDACachingAllocator.cpp,
    shareIpcHandle.
    """
    where = storage.data_ptr(), storage.device, storage.nbytes()  # not the storage: it would hold itself

    def share() -> Any:
        copy = storage_at(*where).clone()
        # A queue sends from a thread with a stream of its own, for which the next replay would not wait.
        torch.get_device_module(copy.device).current_stream(copy.device).synchronize()
        return copy._share_cuda_()

    setattr(storage, "_share_cuda_", share)  # noqa: B010


def after_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """End recording to a memory pool that a capture failed in, and let go of it once.

    Torch has done neither. From 2.15 on it has ended the recording, and the graph lets go of the pool: then the first
    step raises, and the second, which would be one too many, is not made.
    """
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    for step in ("endAllocateToPool", "releasePool"):
        function = getattr(torch._C, f"_{device.type}_{step}", None)
        if function is not None:
            function(index, pool)


def below_autograd() -> Any:
    """A context in which operators skip autograd's layer of the dispatcher.

    Compiled programs record no gradients, and the layer costs a third of a small operator's call.
    """
    return torch._C._AutoDispatchBelowAutograd()
