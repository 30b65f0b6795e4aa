"""What fxwrap knows about a type of device: its kernels, its operators that must run eagerly, its cost of capture.

``fxwrap.register_device`` (codegen/devices/registration.py) adds a record for a device. A device without a record
follows the general rules; CUDA and XPU need none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .eager_rules import EagerRule


@dataclass(frozen=True)
class KernelCall:
    """One launch of a compiled kernel that is not Triton's, as Inductor's scheduling wrote it.

    Attributes:
        name: the kernel's name.
        source: the code that Inductor generated.
        device: where the kernel runs.
        definition: the object that the kernel's definition evaluates to: for C++ a function of CPU tensors and
            numbers.
        arg_types: the C type of each argument, or what the scheduling gave instead; None if it gave none.
    """

    name: str
    source: str
    device: torch.device
    definition: Any
    arg_types: Sequence[Any] | None


def written_pointers(call: KernelCall) -> tuple[int, ...]:
    """Positions of the arguments that a C++ kernel writes: pointers without ``const``; all if types are unknown."""
    types = call.arg_types or ["*"] * 256
    return tuple(
        position for position, ctype in enumerate(types) if "*" in str(ctype) and not str(ctype).startswith("const ")
    )


@dataclass(frozen=True)
class KernelKind:
    """One kind of compiled kernels on a device: how a launch enters a host graph, and how it runs.

    Attributes:
        name: shown in reports: "cpp", or a vendor's own.
        load: makes the callable that launches a kernel, from the kernel's first call. The callable gets the launch's
            arguments (tensors on the device, numbers), and issues the work to the device's current stream.
        accepts: whether a call is of this kind; kinds are tried in the order in which they were registered.
        writes: positions of the arguments that the kernel writes.
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


# The CPU has no streams: the kernel's definition is called directly.
HOST_KERNELS = KernelKind("cpp", lambda call: call.definition)


@dataclass(frozen=True)
class CaptureCost:
    """What it costs the host to issue work to a device, in microseconds. The cost model compares these numbers.

    The defaults are round numbers for a GPU behind a driver. A capture saves the time that the host takes to issue
    the work, not the work itself.

    Attributes:
        launch: one kernel launch from a host graph.
        extern: one library call from a host graph.
        replay: one replay of a device graph of any size.
        copy: one copy of an input to its static input buffer, or of an eager result to a captured address.
        bytes: bandwidth of such a copy, in bytes per microsecond.
    """

    launch: float = 5.0
    extern: float = 10.0
    replay: float = 10.0
    copy: float = 4.0
    bytes: float = 500_000.0


# The CPU's graph makes the same calls with bound arguments, and copies nothing.
_HOST_COST = CaptureCost(launch=1.0, extern=2.0, replay=0.0, copy=0.0, bytes=float("inf"))


# ``after_failed_capture(device, pool)``: stop the allocator from recording to the pool, and release the pool once.
RecoverFromFailedCapture = Callable[[torch.device, Any], None]


@dataclass(frozen=True)
class ConditionalNodes:
    """The nodes of a device's graphs that decide at a replay what runs.

    Both functions are called while a graph is captured, with a boolean tensor of no dimensions. They make an iterator
    for a ``for`` statement, whose body issues the work of the node. A capture goes through the body once. A graph
    that replays by calling again goes through it as often as the work is to run.

    Attributes:
        branch: ``for _ in branch(predicate): ...`` issues work that runs if the predicate is true.
        loop: ``for decide in loop(predicate): ...; decide(predicate)`` issues work that runs while the predicate is
            true; ``decide`` is given the predicate of the next iteration, as the last call of the body.
        need_a_run: whether kernels and libraries have to run once before a capture. What is in a body may not have
            run with the program; it is run on zeros then.
    """

    branch: Callable[[torch.Tensor], Iterator[object]]
    loop: Callable[[torch.Tensor], Iterator[Callable[[torch.Tensor], object]]]
    need_a_run: bool = True


class SuspendableMemory(Protocol):
    """Memory of one arena whose bytes go back to the device while its addresses stay (``fxwrap.suspend``).

    It is called by one thread at a time, and its bytes need not survive ``suspend``.
    """

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Memory for the arena. Its bytes return to the device at the first ``reclaim`` after it was freed.

        Raises:
            torch.OutOfMemoryError: there is none.
        """

    def new_pool(self) -> Any:
        """A memory pool for device graphs, which lives as long as the object; its ``id`` is what graphs are given."""

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """Entered by a thread while it captures work that allocates in a pool."""

    def allocate_in(self, pool: Any, nbytes: int) -> torch.UntypedStorage:
        """Memory of a pool, allocated outside of captures. Raises torch.OutOfMemoryError."""

    def note_stream(self, stream: Any) -> None:
        """Note that a stream works in the memory from now on."""

    def suspend(self, block: torch.UntypedStorage | None) -> int:
        """Give the bytes of the arena's ``block`` and of all pools back to the device; returns how many.

        No work uses them, and none will before ``resume``.
        """

    def resume(self) -> int:
        """Take bytes for all of it again, at the same addresses; returns how many. What they hold is undefined.

        Raises:
            torch.OutOfMemoryError: there are too few; then nothing was taken.
        """

    def reclaim(self) -> int:
        """Return freed memory of the device to it, when the streams that worked in it are done; returns the bytes."""


class Placements(Protocol):
    """Decides during one capture where calls on this thread allocate.

    There is a context for each call, one after another. All that is allocated in one is freed before the capture
    ends. If a context raises, the capture fails, and the call is captured once more without one.
    """

    def at(self, addresses: Sequence[int]) -> contextlib.AbstractContextManager[object]:
        """A context in which these addresses are given out, in order.

        One that was freed in it may be given out again. It raises if more or fewer are asked for.
        """

    def without_memory(self) -> contextlib.AbstractContextManager[object]:
        """A context in which addresses are given out for a capture that never runs. They need no memory."""

    def stand_in(self, nbytes: int) -> torch.UntypedStorage:
        """Such an address for an operand."""

    def made(self) -> Sequence[Sequence[tuple[int, int]] | None]:
        """After the capture, for each context: the address and the bytes of each allocation, in order.

        None for a context of which something is allocated still.
        """


@dataclass(frozen=True, eq=False)
class DeviceSupport:
    """What is known about one type of device.

    Attributes:
        kernels: kinds of compiled kernels besides Triton's, which every device may have.
        eager_ops: operators that must not be captured, and rules.
        new_graph: makes a device graph in a memory pool (None: a pool of its own); by default
            ``torch.accelerator.Graph``.
        codegen: the class that emits and compiles, unless the ``codegen`` option names another.
        config: Inductor's settings while a graph with this device in it is compiled.
        cost: what issuing work costs; None for the default.
        after_failed_capture: restores the device's allocator after a failed capture.
        suspendable_memory: makes the suspendable memory of an arena; None if the device has none.
        conditional_nodes: of its graphs; None if they have none, so that the host decides.
        placements: a context around one capture, which decides where operators allocate; None if the device's
            allocator takes no addresses.
    """

    device_type: str
    kernels: tuple[KernelKind, ...] = ()
    eager_ops: tuple[str | EagerRule, ...] = ()
    new_graph: Callable[[Any], Any] | None = None
    codegen: type | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    cost: CaptureCost | None = None
    after_failed_capture: RecoverFromFailedCapture | None = None
    suspendable_memory: Callable[[torch.device], SuspendableMemory] | None = None
    conditional_nodes: ConditionalNodes | None = None
    placements: Callable[[torch.device], contextlib.AbstractContextManager[Placements]] | None = None


_registered: dict[str, DeviceSupport] = {}


def device_support(device_type: str) -> DeviceSupport:
    """The record of a device; an empty one if none was registered."""
    return _registered.get(device_type) or _unregistered(device_type)


# One empty record for each device: other caches are keyed by it.
_unregistered = functools.cache(DeviceSupport)


def device_function(device_type: str, name: str) -> Any:
    """A function of ``torch.<device_type>``; if that module lacks it, the one in ``torch.accelerator``."""
    module = torch.get_device_module(device_type)
    return getattr(module, name) if hasattr(module, name) else OF_ANY_ACCELERATOR[name]


# A device's module need not have these: torch implements streams in C++ by the device's guard.
OF_ANY_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "current_stream": torch.accelerator.current_stream,
    "set_stream": torch.accelerator.set_stream,
    "synchronize": torch.accelerator.synchronize,
    "Stream": torch.Stream,
    "stream": lambda stream: stream,  # a context, which makes it current
}


def capture_cost(device_type: str) -> CaptureCost:
    """What it costs the host to issue work to a device."""
    return device_support(device_type).cost or (_HOST_COST if device_type == "cpu" else CaptureCost())


def registered_devices() -> dict[str, DeviceSupport]:
    """The records that ``register_device`` has added, by type; this is the dictionary that it edits."""
    return _registered


def kernel_kind(call: KernelCall) -> KernelKind | None:
    """The first kind of the call's device that accepts it."""
    kinds = device_support(call.device.type).kernels
    if call.device.type == "cpu":
        kinds += (HOST_KERNELS,)
    return next((kind for kind in kinds if kind.accepts(call)), None)


def launch_kernel(device: str, name: str, kernel: Any, *args: Any) -> None:
    """Launch a kernel as a host graph does: for code that Inductor's own wrapper runs."""
    call = KernelCall(name, "", torch.device(device), kernel, None)
    kind = kernel_kind(call)
    (kind.load(call) if kind is not None else kernel)(*args)
