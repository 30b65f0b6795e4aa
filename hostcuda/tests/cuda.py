"""CUDA's runtime by ctypes: a test sees which error each single call answers, without torch between."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hostcuda

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # cudaStreamCaptureMode
BLOCKING, NON_BLOCKING = 0, 1  # flags of a stream
NO_TIMING = 2  # cudaEventDisableTiming
EXTERNAL = 1  # cudaEventRecordExternal, cudaEventWaitExternal
LEGACY = ctypes.c_void_p(None)
NONE, ACTIVE, INVALIDATED = "none", "active", "invalidated"  # cudaStreamCaptureStatus
DEFAULT_KIND = 4  # cudaMemcpyDefault
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def answer(function: str, *args: Any) -> str:
    """The name of what a call returns, without cudaError: Success, StreamCaptureUnsupported, ..."""
    library = hostcuda.runtime()
    code = getattr(library, function)(*args)
    library.cudaGetErrorName.restype = ctypes.c_char_p
    name: str = library.cudaGetErrorName(code).decode()
    return name.removeprefix("cudaError").removeprefix("cuda")


def do(function: str, *args: Any) -> None:
    got = answer(function, *args)
    assert got == "Success", f"{function}: {got}"


def stream(flags: int = NON_BLOCKING) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    do("cudaStreamCreateWithFlags", ctypes.byref(made), flags)
    return made


def event(flags: int = 0) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    do("cudaEventCreateWithFlags", ctypes.byref(made), flags)
    return made


def memory(size: int = 4096) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    do("cudaMalloc", ctypes.byref(made), ctypes.c_size_t(size))
    return made


def pinned(size: int = 4096) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    do("cudaHostAlloc", ctypes.byref(made), ctypes.c_size_t(size), 0)
    return made


def malloc() -> str:
    """The answer to the documentation's example of a call that is unsafe while something captures."""
    made = ctypes.c_void_p()
    got = answer("cudaMalloc", ctypes.byref(made), ctypes.c_size_t(512))
    if made:
        answer("cudaFree", made)
    return got


def fill(pointer: Any, value: int, on: Any, size: int = 1) -> str:
    """Work on a stream: size bytes become value."""
    return answer("cudaMemsetAsync", pointer, value, ctypes.c_size_t(size), on)


def copy(to: Any, source: Any, on: Any, size: int = 1) -> str:
    return answer("cudaMemcpyAsync", to, source, ctypes.c_size_t(size), DEFAULT_KIND, on)


def byte(pointer: Any, wait: Any = None) -> int:
    """What lies there now; after a stream's work, if one is given."""
    if wait is not None:
        do("cudaStreamSynchronize", wait)
    address = pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer
    return ctypes.c_ubyte.from_address(address).value


def record(what: Any, on: Any, flags: int = 0) -> str:
    return answer("cudaEventRecordWithFlags", what, on, flags)


def wait(on: Any, what: Any, flags: int = 0) -> str:
    return answer("cudaStreamWaitEvent", on, what, flags)


_begun: list[Any] = []  # streams that captures began on, in this test


def begin(on: Any, mode: int = GLOBAL) -> str:
    _begun.append(on)
    return answer("cudaStreamBeginCapture", on, mode)


def begin_to(on: Any, graph: Any, after: Any = (), mode: int = GLOBAL) -> str:
    """A capture into a graph that is there, behind some of its nodes."""
    _begun.append(on)
    nodes = (ctypes.c_void_p * len(after))(*after)
    return answer("cudaStreamBeginCaptureToGraph", on, graph, nodes, None, ctypes.c_size_t(len(after)), mode)


def end(on: Any) -> tuple[str, ctypes.c_void_p]:
    """The answer, and the graph."""
    graph = ctypes.c_void_p()
    return answer("cudaStreamEndCapture", on, ctypes.byref(graph)), graph


def end_all() -> None:
    """Ends what a test that has failed has left, or the tests after it would fail, too."""
    while _begun:
        end(_begun.pop())


def status(of: Any) -> str:
    got = ctypes.c_int()
    name = answer("cudaStreamIsCapturing", of, ctypes.byref(got))
    return [NONE, ACTIVE, INVALIDATED][got.value] if name == "Success" else name


def executable(graph: ctypes.c_void_p) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    do("cudaGraphInstantiate", ctypes.byref(made), graph, ctypes.c_ulonglong(0))
    return made


def captured(on: Any, work: Callable[[], Any], mode: int = GLOBAL) -> ctypes.c_void_p:
    """A graph of work, ready to be launched."""
    assert begin(on, mode) == "Success"
    work()
    got, graph = end(on)
    assert got == "Success", got
    return executable(graph)


def launch(graph: Any, on: Any) -> str:
    return answer("cudaGraphLaunch", graph, on)


def exchange_mode(mode: int) -> int:
    """Sets this thread's mode, and returns the one before."""
    value = ctypes.c_int(mode)
    do("cudaThreadExchangeStreamCaptureMode", ctypes.byref(value))
    return value.value


def in_thread(work: Callable[[], Any]) -> Any:
    """What work returns in a thread of its own."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    assert result, "the thread has failed"
    return result[0]


@contextlib.contextmanager
def another_thread_captures(mode: int = GLOBAL, ends: str = "Success") -> Iterator[ctypes.c_void_p]:
    """While the block runs, another thread captures on the stream that this yields; what ending it must answer."""
    one, begun, finish = stream(), threading.Event(), threading.Event()
    answers = []

    def work() -> None:
        answers.append(begin(one, mode))
        begun.set()
        finish.wait(30)
        answers.append(end(one)[0])

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(30)
    try:
        yield one
    finally:
        finish.set()
        thread.join()
    assert answers == ["Success", ends]


def free_memory() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    do("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value
