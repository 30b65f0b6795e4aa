"""Private functions of torch that running a program needs. Nothing here imports Inductor or Dynamo."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.autograd import forward_ad, profiler
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

# ``(size, stride, dtype)``: the allocation of Inductor's wrapper; torch.empty_strided takes three times as long.
empty_strided_cpu: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)


def use_counter(storages: Sequence[torch.UntypedStorage]) -> Callable[[], list[int]]:
    """A function that returns the number of tensors and storage objects that share each of ``storages``."""
    handles = [storage._cdata for storage in storages]
    count = torch._C._storage_Use_Count
    return lambda: list(map(count, handles))


def pointer_check(pointers: Sequence[Any], positions: Sequence[int]) -> Callable[[list[Any]], bool]:
    """A function that tells whether ``inputs[p]`` is at ``pointers[p]`` for every ``p`` in ``positions``.

    It is torch's C++ function where the build has one; CPU builds have none.
    """
    native: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if native is not None:
        expected, chosen = list(pointers), list(positions)
        return lambda inputs: native(inputs, expected, chosen)
    # It checks up to hundreds of parameters: lookups are made beforehand.
    expected, pointer_of, choose = [pointers[p] for p in positions], torch.Tensor.data_ptr, _chooser(positions)
    return lambda inputs: [*map(pointer_of, choose(inputs))] == expected


def _chooser(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(positions) < 2:  # itemgetter of one item returns no tuple
        return lambda inputs: [inputs[p] for p in positions]
    return operator.itemgetter(*positions)


def layout_check(inputs: Sequence[Any], positions: Sequence[int]) -> Callable[[list[Any]], bool]:
    """A function that tells whether the tensors at ``positions`` have the size, stride, dtype and device of now.

    Dynamo's guard checks all of them in one call; an assert for each takes six times as long. The guard also fails
    where the layout is unchanged (another autograd mode, one tensor twice), so that its caller checks again then.
    """
    choose = _chooser(positions)
    check = _layout_guard(choose(inputs))
    return lambda now: check(*choose(now))


def call_check(inputs: Sequence[Any], positions: Sequence[int]) -> Callable[[list[Any]], bool]:
    """A ``layout_check`` for calls from outside: it also fails for another number of inputs, and in forward AD.

    A layout check does not see tangents.
    """
    count, choose = len(inputs), _chooser(positions)
    check = _layout_guard(choose(inputs))
    if len(positions) == count:
        return lambda now: len(now) == count and forward_ad._current_level < 0 and check(*now)
    return lambda now: len(now) == count and forward_ad._current_level < 0 and check(*choose(now))


def _layout_guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    sizes: Any = [list(tensor.size()) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards.check


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors over one storage share an element; True where torch cannot tell."""
    overlapping: Any = getattr(torch._C._dynamo.guards, "compute_overlapping_tensors", None)
    return overlapping is None or bool(overlapping([first, second], symbolic=False))


def empty_graph() -> GraphModule:
    """A module without nodes. Its Python code is generated at the first use; a restored program uses none."""
    return _LazyGraphModule({}, Graph())


# (tensor, size, stride, offset) -> a new tensor object that shares only the storage with ``tensor``. Some versions
# take sizes only as plain tuples.
lay_out: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009


# (address, device, bytes) -> a storage over memory that it does not own.
storage_at: Any = getattr(torch._C, "_construct_storage_from_data_pointer")  # noqa: B009


def alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage that a weak reference refers to; None if it is freed."""
    storage: Any = torch.UntypedStorage
    return storage._new_with_weak_ptr(reference.cdata)  # type: ignore[no-any-return]


def allocations(run: Callable[[], Any]) -> list[int] | None:
    """Bytes that ``run`` allocates (above 0) and frees (below 0) on the CPU, in order, before its result is freed.

    They come from torch's legacy profiler, because Kineto writes to stderr when it starts.

    Returns:
        None while another profiler runs in this thread, or if torch has no legacy profiler.
    """
    state, enable = torch._C._profiler, getattr(torch._C._autograd, "_enable_profiler_legacy", None)
    if enable is None or torch._C._autograd._profiler_enabled():
        return None
    only_memory = (state.ProfilerState.CPU, False, True, False, False, False, state._ExperimentalConfig())
    enable(state.ProfilerConfig(*only_memory))
    try:
        result = run()
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
    del result
    return [e.cpu_memory_usage() for thread in threads for e in thread if e.kind() == "memory_alloc"]


def most_beyond_result(changes: Sequence[int]) -> int:
    """The most bytes that a call has allocated at one time beyond what it returns, of its ``allocations``."""
    held = list(itertools.accumulate(changes, initial=0))
    return max(held) - held[-1]


def saved_tensors_hooks() -> bool:
    """Whether hooks for saved tensors are set in this thread; a hook may keep the tensors that it packs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def profiling() -> bool:
    """Whether a profiler is on in any thread. An exact check would be slower."""
    return profiler._is_profiler_enabled


def share_copies(storage: torch.UntypedStorage) -> None:
    """Make a storage that is a slice of another send a copy of itself to other processes.

    The driver shares whole blocks. For the allocator a slice is an "invalid device pointer", except a slice at the
    start of the block, which would be overwritten while the receiver reads it. Source:
    c10/cuda/CUDACachingAllocator.cpp, shareIpcHandle.
    """
    location = storage.data_ptr(), storage.device, storage.nbytes()  # the storage would refer to itself

    def share() -> Any:
        copy = storage_at(*location).clone()
        # A queue sends from a thread with another stream, for which the next replay does not wait.
        torch.accelerator.current_stream(copy.device).synchronize()
        return copy._share_cuda_()

    setattr(storage, "_share_cuda_", share)  # noqa: B010


def after_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """After a failed capture, end the allocator's recording to its memory pool, and release the pool once.

    Before 2.15 torch does neither. From 2.15 on torch ends the recording and the graph releases the pool: the first
    step here raises then, so that the second, which would release it twice, is not reached.
    """
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    for step in ("endAllocateToPool", "releasePool"):
        function = getattr(torch._C, f"_{device.type}_{step}", None)
        if function is not None:
            function(index, pool)


@functools.cache
def _free_cublas_workspaces() -> Callable[[Any], None] | None:
    """``at::cuda::clearCublasWorkspacesForStream(cudaStream_t)``, which has no Python name; from torch 2.13 on.

    ``PyDLL`` calls it with the interpreter's lock, so that no other Python thread runs meanwhile.
    """
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so")
    try:
        function = ctypes.PyDLL(library)["_ZN2at4cuda30clearCublasWorkspacesForStreamEP11CUstream_st"]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


def frees_workspaces() -> bool:
    """Whether torch can free what cuBLAS retains for one stream."""
    return _free_cublas_workspaces() is not None


def free_workspaces(stream: Any) -> None:
    """Free the workspaces that cuBLAS retains for a stream: 32 MiB for each thread that has called it there (sm_90).

    The next call on the stream allocates one again. Where torch cannot free those of one stream, nothing is done:
    device graphs may have captured those of other streams.
    """
    if isinstance(stream, torch.cuda.Stream) and (free := _free_cublas_workspaces()) is not None:
        free(stream.cuda_stream)


def retains_workspaces(device: torch.device) -> bool:
    """Whether libraries on a device keep a workspace between calls that ``free_workspaces`` frees."""
    return device.type == "cuda" and frees_workspaces()


def make_handles(device: torch.device) -> None:
    """Make what libraries make in the first call of a thread, which no capture can: the handle of cuBLAS.

    With it cuBLAS asks for workspace on the current stream, and retains it.
    """
    if device.type == "cuda":
        torch.cuda.current_blas_handle()


def library_settings(device: torch.device) -> tuple[Any, ...]:
    """The settings by which an operator on a device chooses its kernel, and with it what it allocates."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    try:
        precision: Any = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # it was set by ``fp32_precision``, which these do not know
        precision = cudnn.conv.fp32_precision, cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    choices = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()
    return device, *choices, *attention, cuda.cudnn_sdp_enabled(), precision


def release_conditional_nodes(device: torch.device, pool: Any, count: int) -> None:
    """Give back what conditional nodes take of their graph's memory pool, and do not give back with the graph.

    Without it the pool's memory never returns to the device. Source: ATen/cuda/CUDAGraph.cpp (torch 2.14.1),
    begin_capture_to_conditional_node: the pool counts a user at the begin of a body, and another one after it.
    """
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        for _ in range(count * _uses_of_conditional_node(index)):
            torch._C._cuda_releasePool(index, pool)  # type: ignore[attr-defined]


@functools.cache
def _uses_of_conditional_node(index: int) -> int:
    """How many users of its pool a conditional node leaves behind, found out with a graph."""
    pool, graph = torch.cuda.MemPool(), torch.cuda.CUDAGraph()
    predicate = torch.zeros((), dtype=torch.bool, device=f"cuda:{index}")
    with torch.cuda.stream(torch.cuda.Stream(index)):  # type: ignore[no-untyped-call]
        before = pool.use_count()
        graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")  # type: ignore[arg-type]
        graph.begin_capture_to_if_node(predicate)
        predicate.zero_()
        graph.end_capture_to_conditional_node()
        graph.capture_end()
    graph.reset()
    left = pool.use_count() - before
    for _ in range(left):
        torch._C._cuda_releasePool(index, pool.id)  # type: ignore[attr-defined]
    return left


# Files with code in which a thread waits for a lock, a queue, a pipe or another process, and launches nothing.
_WAITS = ("threading.py", "queue.py", "selectors.py", "subprocess.py", "socket.py", "concurrent/", "multiprocessing/")
_WAITING = (
    *(os.path.join(os.path.dirname(os.__file__), name) for name in (*_WAITS, "asyncio/")),
    os.path.join(os.path.dirname(torch.__file__), "_inductor", "compile_worker", ""),
)


def other_threads_wait() -> bool:
    """Whether every other Python thread waits in the standard library.

    The frame of a thread in one of torch's functions is that of its Python caller. A thread that waits for backward
    has a frame in torch, so that it counts as running.
    """
    this_thread = threading.get_ident()
    # No variable refers to the frames: this frame is among them, and the cycle would keep its values alive.
    files = [frame.f_code.co_filename for thread, frame in sys._current_frames().items() if thread != this_thread]
    return all(file.startswith(_WAITING) for file in files)


def below_autograd() -> Any:
    """A context in which operators skip autograd's layer of the dispatcher.

    Compiled programs record no gradients, and the layer costs a third of a small operator's call.
    """
    return torch._C._AutoDispatchBelowAutograd()


def below_modes(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator's implementation below dispatch modes: a mode sees the calls in it, not the operator."""
    tensor = next((t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), None)
    if tensor is None:
        return overload(*args, **kwargs)
    keys = torch._C._dispatch_keys(tensor) & torch._C._after_ADInplaceOrView_keyset  # type: ignore[attr-defined]
    return overload.redispatch(keys, *args, **kwargs)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a kernel may read a tensor's memory: the tensor is dense, and wraps no other.

    Wrappers are subclasses with a ``__torch_dispatch__``, and functorch's tensors (vmap, functionalize). The zero
    tensors of forward-mode derivatives have no memory.
    """
    wraps: Any = getattr(torch._C._functorch, "is_functorch_wrapped_tensor")  # noqa: B009
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return plain and dense and not wraps(tensor) and not tensor._is_zerotensor()


def primals(inputs: list[Any]) -> list[Any]:
    """Inputs without the tangents of forward-mode derivatives, which compiled programs do not compute."""
    if not forward_ad._current_level >= 0:
        return inputs
    unpacked = ((x, *forward_ad.unpack_dual(x)) if isinstance(x, torch.Tensor) else (x, x, None) for x in inputs)
    return [x if tangent is None else primal for x, primal, tangent in unpacked]


# Whether autocast is on for any device; and a context that switches it off.
autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
without_autocast: Any = getattr(torch._C, "_DisableAutocast")  # noqa: B009


def device_guard(device_type: str) -> Callable[[int], Any] | None:
    """The context manager that makes a device the current one, on which Triton launches; operators do so themselves.

    Returns:
        None where there is no more than one device of the type.
    """
    if device_type == "cpu":
        return None
    module = torch.get_device_module(device_type)
    # A minimal device module of a vendor has neither.
    several = hasattr(module, "device") and hasattr(module, "device_count") and module.device_count() > 1
    return module.device if several else None


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A context without dispatch modes, functionalization, function transforms and the meta device's kernels.

    For finalizers: one may run while an operator is traced, or within a kernel of the meta device for a fake tensor.
    """
    with _disable_current_modes(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(False)
        for key in _LAYERS:
            torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        yield


# Of the dispatcher: functionalization, and what ``torch.func`` puts around operators.
_LAYERS = [
    torch._C.DispatchKey.Functionalize,
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode,
]


def wrapper_functions() -> dict[str, Callable[..., Any]]:
    """The private functions that Inductor's wrapper calls, by names that are the same in every torch version."""
    guards = vars(torch._C._dynamo.guards)
    functions = {f"guards.{name}": f for name, f in guards.items() if callable(f) and not isinstance(f, type)}
    # From torch 2.15 on Inductor has this function; it replaces ours where Inductor is imported.
    inductor = sys.modules.get("torch._inductor.runtime.runtime_utils")
    functions["assert_tensor_metadata"] = getattr(inductor, "assert_tensor_metadata", assert_tensor_metadata)
    return functions


def assert_tensor_metadata(
    tensor: torch.Tensor | None, size: Any, stride: Any, dtype: torch.dtype, operator: str | None = None
) -> None:
    """Check that an operator has returned what its fake kernel predicts; None is accepted.

    Raises:
        RuntimeError, AssertionError: the dtype, size or stride differs.
    """
    if tensor is None:
        return
    if tensor.dtype != dtype:
        remedy = "its fake kernel is wrong: torch.library.opcheck tells more"
        raise RuntimeError(f"{operator}: expected dtype {dtype}, got {tensor.dtype}; {remedy}")
    torch._C._dynamo.guards.assert_size_stride(tensor, size, stride, operator)  # type: ignore[attr-defined]


def library_functions() -> dict[str, Callable[..., Any]]:
    """Torch's own functions that Inductor's wrapper calls for library kernels, by name."""
    return {f"extern_kernels.{name}": f for name, f in vars(torch).items() if callable(f)}


def size_functions() -> dict[str, type]:
    """Torch's own classes of size expressions (``FloorDiv``, ``ModularIndexing``), by name."""
    from torch.utils._sympy import functions

    return {n: f for n, f in vars(functions).items() if isinstance(f, type) and issubclass(f, sympy.Basic)}
