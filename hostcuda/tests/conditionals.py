"""Conditional nodes by CUDA's runtime: handles, nodes, captures into bodies, and the kernel that sets a handle."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from cuda import answer, begin, begin_to, do, end, memory, stream

import hostcuda

IF, WHILE, SWITCH = 0, 1, 2  # cudaGraphConditionalNodeType
GRAPH, EMPTY, CONDITIONAL = 4, 5, 13  # cudaGraphNodeType
ASSIGN_DEFAULT = 1  # cudaGraphCondAssignDefault
# at::cuda's kernel in torch's library, without the part that names the translation unit
SET_KERNEL = b"_ZN2at4cuda12_GLOBAL__N_129set_conditional_handle_kernelEyPKb"


class Params(ctypes.Structure):
    """cudaGraphNodeParams of a conditional node, or (in the place of its handle) of a child graph."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved0", ctypes.c_int * 3),
        ("handle", ctypes.c_ulonglong),
        ("kind", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("graphs", ctypes.POINTER(ctypes.c_void_p)),
        ("padding", ctypes.c_longlong * 26),
        ("reserved2", ctypes.c_longlong),
    )


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def graph() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    do("cudaGraphCreate", ctypes.byref(made), 0)
    return made


def make_handle(of: Any, default: int | None = None) -> int:
    made = ctypes.c_ulonglong()
    flags = 0 if default is None else ASSIGN_DEFAULT
    do("cudaGraphConditionalHandleCreate", ctypes.byref(made), of, default or 0, flags)
    return made.value


def add(to: Any, params: Params, after: Any = (), node: ctypes.c_void_p | None = None) -> str:
    node = ctypes.c_void_p() if node is None else node
    nodes = (ctypes.c_void_p * len(after))(*after)
    count = ctypes.c_size_t(len(after))
    return answer("cudaGraphAddNode", ctypes.byref(node), to, nodes, None, count, ctypes.byref(params))


def conditional(to: Any, handle: int, kind: int = IF, size: int = 1, after: Any = ()) -> tuple[Any, list[Any]]:
    """A node, and its bodies."""
    params, node = Params(type=CONDITIONAL, handle=handle, kind=kind, size=size), ctypes.c_void_p()
    got = add(to, params, after, node)
    assert got == "Success", got
    return node, [ctypes.c_void_p(params.graphs[i]) for i in range(size)]


def capturing(on: Any) -> tuple[ctypes.c_void_p, list[int]]:
    """The graph that a stream captures into, and what its next node depends on."""
    status, into, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    nodes = ctypes.POINTER(ctypes.c_void_p)()
    out = (ctypes.byref(one) for one in (status, into, nodes, count))
    do("cudaStreamGetCaptureInfo", on, next(out), None, next(out), next(out), None, next(out))
    return into, [nodes[i] for i in range(count.value)]


def branch(on: Any, kind: int = IF, size: int = 1, value: Any = None, default: int | None = None) -> list[Any]:
    """Captures a conditional node as torch does: the kernel that sets its handle, if a place of its value is given,
    then the node. Returns its bodies."""
    into, _ = capturing(on)
    handle = make_handle(into, default)
    if value is not None:
        assert set_handle(handle, value, on) == "Success"
    node, bodies = conditional(into, handle, kind, size, capturing(on)[1])
    do("cudaStreamUpdateCaptureDependencies", on, ctypes.byref(node), None, ctypes.c_size_t(1), 1)
    for body in bodies:
        body.handle = handle
    return bodies


@contextlib.contextmanager
def into(body: Any, ends: str = "Success") -> Iterator[ctypes.c_void_p]:
    """A stream that captures into a graph while the block runs; what the end answers."""
    one = stream()
    assert begin_to(one, body) == "Success"
    yield one
    assert answer("cudaStreamEndCapture", one, None) == ends


@contextlib.contextmanager
def captured_graph(on: Any) -> Iterator[ctypes.c_void_p]:
    """The graph of a capture, which ends with the block; then the handle is there."""
    assert begin(on) == "Success"
    handle = ctypes.c_void_p()
    yield handle
    got, made = end(on)
    assert got == "Success", got
    handle.value = made.value


def set_handle(handle: int, value: Any, on: Any) -> str:
    """Launches torch's kernel: the handle becomes the byte that lies there, a bool."""
    values = ctypes.c_ulonglong(handle), ctypes.c_void_p(value.value)
    args = (ctypes.c_void_p * 2)(*(ctypes.addressof(one) for one in values))
    one = Dim3(1, 1, 1)
    return answer("cudaLaunchKernel", _kernel(), one, one, args, ctypes.c_size_t(0), on)


@functools.cache
def _kernel() -> ctypes.c_void_p:
    """A kernel of torch's name, registered as nvcc's code does."""
    host = ctypes.c_void_p(ctypes.addressof(_HOST))
    getattr(hostcuda.runtime(), "__cudaRegisterFunction")(None, host, None, SET_KERNEL, -1, *[None] * 5)
    return host


_HOST = ctypes.create_string_buffer(1)  # its address stands for the kernel


def instantiate(of: Any) -> tuple[str, ctypes.c_void_p]:
    made = ctypes.c_void_p()
    return answer("cudaGraphInstantiate", ctypes.byref(made), of, ctypes.c_ulonglong(0)), made


def why_not(of: Any) -> str:
    """What the list of refusals says of an instantiation that has to be refused."""
    before = hostcuda.refusals()
    assert instantiate(of)[0] == "InvalidValue"
    (line,) = [name for name, count in hostcuda.refusals().items() if count > before.get(name, 0)]
    return line.removeprefix("cudaGraphInstantiate (").removesuffix(") -> cudaErrorInvalidValue")


def bytes_of(values: list[int]) -> ctypes.c_void_p:
    """Device memory with these bytes."""
    place = memory()
    write(place, values)
    return place


def write(place: Any, values: list[int]) -> None:
    data = (ctypes.c_ubyte * len(values))(*values)
    do("cudaMemcpy", place, data, ctypes.c_size_t(len(values)), 4)


def at(pointer: Any, offset: int) -> ctypes.c_void_p:
    return ctypes.c_void_p((pointer.value or 0) + offset)
