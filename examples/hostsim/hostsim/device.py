"""The module that torch registers under the device's name: what `torch.cuda` is for CUDA."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from .build import load
from .name import NAME

_C = load()
if _C.NAME != NAME:
    raise RuntimeError(f"the device is called {NAME!r} in name.py and {_C.NAME!r} in csrc/name.h; name both alike")

Device: TypeAlias = torch.device | str | int | None

Stream = torch.Stream
Event = torch.Event

default_generators: tuple[torch.Generator, ...] = tuple(_C.default_generator(i) for i in range(_C.device_count()))


def _index(device: Device) -> int:
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _C.current_device()
    device = torch.device(device)
    if device.type != NAME:
        raise ValueError(f"expected a device of type '{NAME}', got '{device}'")
    return _C.current_device() if device.index is None else device.index


# Devices ------------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return _C.device_count() > 0


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing to do: the device is there as soon as its library is loaded."""


_lazy_init = init

_forked = False


def _is_in_bad_fork() -> bool:
    """In a forked process: the threads that serve the streams stayed behind."""
    return _forked


def _note_fork() -> None:
    global _forked  # noqa: PLW0603
    _forked = True


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: Device) -> None:
    _C.set_device(_index(device))


class device:
    """Makes a device current inside of a `with` block; None changes nothing."""

    def __init__(self, device: Device) -> None:
        self.index = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self.before = _C.current_device()
        _C.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        _C.set_device(self.before)


class device_of(device):
    """Makes the device of a tensor current; a tensor of another device changes nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == NAME else None)


def _exchange_device(index: int) -> int:
    before = _C.current_device()
    _C.set_device(index)
    return before


def _maybe_exchange_device(index: int) -> int:
    return _C.current_device() if index < 0 else _exchange_device(index)


class DeviceProperties:
    def __init__(self, index: int) -> None:
        self.name = f"{NAME}:{index}"
        self.type = NAME
        self.index = index
        self.total_memory = torch.accelerator.get_memory_info(index)[1]
        self.multi_processor_count = 1
        self.major, self.minor = 1, 0

    def __repr__(self) -> str:
        return f"DeviceProperties(name={self.name!r}, total_memory={self.total_memory})"


def get_device_properties(device: Device = None) -> DeviceProperties:
    return DeviceProperties(_index(device))


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> tuple[int, int]:
    properties = get_device_properties(device)
    return properties.major, properties.minor


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


# Streams ------------------------------------------------------------------------------------------------------------


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    return _C.default_stream(_index(device))


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Makes a stream and its device current inside of a `with` block; None changes nothing."""
    if stream is None:
        yield
        return
    with stream:
        yield


def set_asynchronous(value: bool) -> None:
    """Whether every stream runs its work in a thread of its own; otherwise whoever issues work runs it."""
    _C.set_asynchronous(value)


def is_asynchronous() -> bool:
    return _C.asynchronous()


def delay(stream: torch.Stream, seconds: float) -> None:
    """Let a stream do nothing for a while: what should have waited for it shows."""
    _C.delay(stream.device_index, stream.stream_id, seconds)


# Memory -------------------------------------------------------------------------------------------------------------


def memory_stats(device: Device = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Device = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Device = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """So much of a device's memory this process may have; what needs more raises ``torch.OutOfMemoryError``."""
    _C.set_memory_fraction(fraction, _index(device))


def get_per_process_memory_fraction(device: Device = None) -> float:
    return _C.memory_fraction(_index(device))


def fail_allocations(at: int = -1, all_after: bool = False) -> None:
    """The allocation ``at``, counted from now and from 0, raises ``torch.OutOfMemoryError``; none if negative.

    With ``all_after`` those that follow it do, too.
    """
    _C.fail_allocations(at, all_after)


def allocations_wanted() -> int:
    """How many there were since ``fail_allocations`` was called."""
    return _C.allocations_wanted()


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def pool_stats(pool: tuple[int, int]) -> dict[str, int]:
    """Bytes and blocks of one memory pool: {0, 0} is the ordinary one, `Graph.pool()` names that of a graph."""
    return _C.pool_stats(pool)


def set_poison(value: bool) -> None:
    """Whether memory allocated outside of captures, too, is filled with bytes that read as NaN."""
    _C.set_poison(value)


def is_poisoned() -> bool:
    return _C.poison()


# Random numbers -----------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    default_generators[_C.current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> None:
    default_generators[_C.current_device()].seed()


def seed_all() -> None:
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    return default_generators[_C.current_device()].initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    default_generators[_index(device)].set_state(state)


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


# Graphs -------------------------------------------------------------------------------------------------------------


def graph_pool_handle() -> tuple[int, int]:
    return _C.graph_pool_handle()


def is_current_stream_capturing() -> bool:
    return _C.is_capturing(_C.current_device())


def graph_counters() -> dict[str, int]:
    return _C.graph_counters()


def reset_graph_counters() -> None:
    _C.reset_graph_counters()


@contextlib.contextmanager
def branch(predicate: torch.Tensor) -> Iterator[None]:
    """While the current stream is captured: work issued inside of the `with` block is the body of a node, which runs
    in replays that find the predicate true, a boolean of no dimensions."""
    _C.begin_branch(predicate)
    with _ended_body():
        yield


@contextlib.contextmanager
def loop(predicate: torch.Tensor) -> Iterator[Callable[[torch.Tensor], None]]:
    """The same of a body that runs as long as the predicate is true, which the body says anew by what is yielded."""
    _C.begin_loop(predicate)
    with _ended_body():
        yield _C.set_condition


@contextlib.contextmanager
def _ended_body() -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # What went wrong in the body is the error to be told.
            _C.end_body()
        raise
    _C.end_body()


def launch(function: Callable[..., Any], *arguments: Any) -> None:
    """Run a compiled kernel on the current stream of its tensors' device, or record it if that is being captured.

    The function gets CPU tensors over the same memory in the place of device tensors, and everything else as it is.
    Tensors that stand for shapes only (fake or meta ones) launch nothing.
    """
    _C.launch(function, *arguments)


def recover(device: Device, pool: tuple[int, int]) -> None:
    """After a capture has failed: its pool records no more, and may be used again, and generators draw again."""
    _C.end_allocate_to_pool(pool)
    _C.release_pool(pool)


# Rules --------------------------------------------------------------------------------------------------------------


def rules() -> dict[str, tuple[str, str]]:
    """What torch does on CUDA and this device does, too: by name, what that is, and where it stands in torch."""
    return _C.known_rules()


def relax(name: str) -> None:
    """Be kinder than CUDA from now on: for a device that need not be like it, and for tests."""
    _C.relax(name)


def relaxed_rules() -> list[str]:
    return _C.relaxed_rules()


def enforce_all_rules() -> None:
    _C.enforce_all_rules()


# Faults -------------------------------------------------------------------------------------------------------------


def faults() -> dict[str, str]:
    """What can be planted, and what it does."""
    return _C.known_faults()


def plant_fault(name: str) -> None:
    """Make the device misbehave: for tests that have to prove that they notice."""
    _C.plant_fault(name)


def planted_faults() -> list[str]:
    return _C.planted_faults()


def clear_faults() -> None:
    _C.clear_faults()
