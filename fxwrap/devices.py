"""What the pipeline knows about devices: one record for each, looked up where a device makes a difference.

``fxwrap.register_device`` (codegen/devices/registration.py) enters records. A device without one follows the general
rules: CUDA and XPU need none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .eager_rules import EagerRule


@dataclass(frozen=True)
class KernelCall:
    """One launch of a compiled kernel that is not Triton's, as Inductor's scheduling wrote it.

    Attributes:
        name: the kernel's name.
        source: the code Inductor generated.
        device: where it runs.
        definition: what the kernel's definition evaluates to: for C++ a function of CPU tensors and numbers.
        arg_types: the C type of each argument, or what the scheduling gave instead; None where it gave none.
    """

    name: str
    source: str
    device: torch.device
    definition: Any
    arg_types: Sequence[Any] | None


def written_pointers(call: KernelCall) -> tuple[int, ...]:
    """Positions of the arguments that a C++ kernel writes: pointers without ``const``; all if nothing is known."""
    types = call.arg_types or ["*"] * 256
    return tuple(
        position for position, ctype in enumerate(types) if "*" in str(ctype) and not str(ctype).startswith("const ")
    )


@dataclass(frozen=True)
class KernelKind:
    """One kind of compiled kernels on a device: how a launch gets into a host graph, and what runs it.

    Attributes:
        name: shown in reports: "cpp", "triton", a vendor's own.
        load: makes, from the first call of a kernel, the callable that launches it: it gets the launch's
            arguments (tensors on the device, numbers), and issues the work to the device's current stream.
        accepts: whether a call is of this kind; kinds are asked in the order in which they were registered.
        writes: positions among the arguments that the kernel writes.
    """

    name: str
    load: Callable[[KernelCall], Callable[..., Any]]
    accepts: Callable[[KernelCall], bool] = lambda call: True
    writes: Callable[[KernelCall], Sequence[int]] = written_pointers


def cpp_kernels(launch: Callable[..., Any]) -> KernelKind:
    """Inductor's C++ kernels on a device that reaches host memory.

    Args:
        launch: ``launch(function, *args)`` runs ``function(*args)`` on the device's current stream, or records it
            while that stream captures; ``function`` takes CPU tensors over the memory of ``args``.
    """
    return KernelKind("cpp", lambda call: functools.partial(launch, call.definition))


# Without a stream, running a kernel is calling it.
HOST_KERNELS = KernelKind("cpp", lambda call: call.definition)


@dataclass(frozen=True)
class CaptureCost:
    """What issuing work costs the host on a device, in microseconds: the cost model's numbers.

    The defaults are round numbers for a GPU behind a driver, with which Python is compared: what is saved is the
    way to the launch, not the work.

    Attributes:
        launch: a kernel's launch out of a host graph.
        extern: a library call out of a host graph.
        replay: the replay of a device graph, whatever is in it.
        copy: one copy of an input to its static buffer, or of what eager work hands over.
        bytes: how many bytes such a copy moves in a microsecond.
    """

    launch: float = 5.0
    extern: float = 10.0
    replay: float = 10.0
    copy: float = 4.0
    bytes: float = 500_000.0


# A graph of the CPU calls what it would call otherwise, with everything bound, and copies nothing.
_HOST_COST = CaptureCost(launch=1.0, extern=2.0, replay=0.0, copy=0.0, bytes=float("inf"))


# ``after_failed_capture(device, pool)``: have the allocator record to the pool no more, and let go of it once.
PutRight = Callable[[torch.device, Any], None]


@dataclass(frozen=True, eq=False)
class DeviceSupport:
    """What is known about one type of device.

    Attributes:
        kernels: kinds of compiled kernels besides Triton's, which every device may have.
        eager_ops: operators that must not be captured, and rules.
        new_graph: makes a device graph in a memory pool (None: a pool of its own); by default the unified one.
        codegen: emits and compiles unless the ``codegen`` option says otherwise.
        config: Inductor's settings while a graph with this device in it is compiled.
        cost: what issuing work costs; None for the usual.
        after_failed_capture: puts the device's allocator right.
    """

    device_type: str
    kernels: tuple[KernelKind, ...] = ()
    eager_ops: tuple[str | EagerRule, ...] = ()
    new_graph: Callable[[Any], Any] | None = None
    codegen: type | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    cost: CaptureCost | None = None
    after_failed_capture: PutRight | None = None


_registered: dict[str, DeviceSupport] = {}


def device_support(device_type: str) -> DeviceSupport:
    """The record of a device; an empty one where nothing was registered."""
    return _registered.get(device_type) or _unregistered(device_type)


# One for each: what is made for a device is found again by its record.
_unregistered = functools.cache(DeviceSupport)


def device_function(device_type: str, name: str) -> Any:
    """A function of ``torch.<device_type>``; where its module leaves it out, what torch has for every accelerator."""
    module = torch.get_device_module(device_type)
    return getattr(module, name) if hasattr(module, name) else OF_ANY_ACCELERATOR[name]


# Streams belong to the guard, in C++: a module has these for its users' sake.
OF_ANY_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "current_stream": torch.accelerator.current_stream,
    "set_stream": torch.accelerator.set_stream,
    "synchronize": torch.accelerator.synchronize,
    "Stream": torch.Stream,
    "stream": lambda stream: stream,  # a context, which makes it current
}


def capture_cost(device_type: str) -> CaptureCost:
    """What issuing work costs on a device."""
    return device_support(device_type).cost or (_HOST_COST if device_type == "cpu" else CaptureCost())


def registered_devices() -> dict[str, DeviceSupport]:
    """The records entered by ``register_device``; the dictionary itself, for it to edit."""
    return _registered


def kernel_kind(call: KernelCall) -> KernelKind | None:
    """The first kind of the call's device that accepts it."""
    kinds = device_support(call.device.type).kernels
    if call.device.type == "cpu":
        kinds += (HOST_KERNELS,)
    return next((kind for kind in kinds if kind.accepts(call)), None)


def launch_kernel(device: str, name: str, kernel: Any, *args: Any) -> None:
    """Launch a kernel as a host graph would: for wrapper code that Inductor runs itself."""
    call = KernelCall(name, "", torch.device(device), kernel, None)
    kind = kernel_kind(call)
    (kind.load(call) if kind is not None else kernel)(*args)
