"""Copies of a call's inputs and of generators' states, and comparison bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from ..host_graph.tensors import has_address, reach, tensor_like, tensor_over

_BYTES = torch.uint8


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from a tensor's first element to its last, in its own memory."""
    storage, low = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
    return tensor_over(storage, (reach(tensor),), (1,), _BYTES, low)


def all_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return tensor_over(storage, (storage.nbytes(),), (1,), _BYTES)


class Copies:
    """The inputs of a call as they were at one time.

    Tensors that share memory share it in the copies, too.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs = list(inputs)  # no tensor more over their memory: a live output is told by their number
        storages = [value.untyped_storage() for value in self._inputs if _lies(value)]
        self._bytes = {storage._cdata: storage.clone() for storage in storages}

    def __len__(self) -> int:
        return len(self._inputs)

    def make(self, changed: Collection[int] = (), but: Collection[int] = ()) -> list[Any]:
        """Inputs with what was in them, at other addresses.

        Args:
            changed: positions of inputs that get other numbers, where they have floating ones.
            but: positions of inputs that are taken as they are.
        """
        storages = {handle: before.clone() for handle, before in self._bytes.items()}
        dtypes = {
            self._inputs[p].untyped_storage()._cdata: self._inputs[p].dtype for p in changed if _lies(self._inputs[p])
        }
        for handle, dtype in dtypes.items():
            change(storages[handle], dtype)
        return [
            value if position in but or not isinstance(value, torch.Tensor) else self._over(value, storages)
            for position, value in enumerate(self._inputs)
        ]

    @staticmethod
    def _over(value: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if not _lies(value):
            return value.clone()
        storage = storages[value.untyped_storage()._cdata]
        low = int(value.storage_offset()) * value.itemsize
        return tensor_like(value, storage, low)

    def restore(self, positions: Collection[int] | None = None) -> None:
        """Have inputs hold again what was in them. Their versions stay."""
        for position, value in enumerate(self._inputs):
            if _lies(value) and (positions is None or position in positions):
                value.untyped_storage().copy_(self._bytes[value.untyped_storage()._cdata])

    def change(self, positions: Collection[int]) -> None:
        """Put other numbers into inputs themselves; ``restore`` takes them back."""
        done = set[int]()
        for position in positions:
            value = self._inputs[position]
            if _lies(value) and value.untyped_storage()._cdata not in done:
                done.add(value.untyped_storage()._cdata)
                change(value.untyped_storage(), value.dtype)


def _lies(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and has_address(value)


def change(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Put other numbers into memory that holds floating ones: in another order, and smaller, so that probabilities
    stay some. Integers stay: as indices they have bounds that nobody tells."""
    real = dtype.to_real() if dtype.is_complex else dtype
    if not real.is_floating_point or storage.nbytes() < real.itemsize or real.itemsize == 1:
        return
    numbers = tensor_over(storage, (storage.nbytes() // real.itemsize,), (1,), real)
    other = numbers.flip(0).mul_(0.75)
    numbers.copy_(other if bool(other.ne(0).any()) else other.fill_(0.5))


class Generators:
    """What random numbers come next, on the CPU and on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = [torch.get_rng_state()]
        if device.type != "cpu":
            with contextlib.suppress(Exception):  # a device may have no generator
                self._states.append(torch.get_device_module(device).get_rng_state(device))

    def set(self) -> None:
        torch.set_rng_state(self._states[0])
        for state in self._states[1:]:
            torch.get_device_module(self._device).set_rng_state(state, self._device)

    def same(self, other: Generators) -> bool:
        pairs = zip(self._states, other._states, strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def difference(got: Any, expected: Any) -> str:
    """What differs between two values, in words; empty if they are the same, bit for bit. NaNs are equal."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if isinstance(expected, (tuple, list)) and isinstance(got, (tuple, list)) and len(got) == len(expected):
            return next(filter(None, map(difference, got, expected)), "")
        same = got is expected or (type(got) is type(expected) and repr(got) == repr(expected))
        return "" if same else f"{got!r}, not {expected!r}"
    if (mine := _looks(got)) != (theirs := _looks(expected)):
        return f"{mine}, not {theirs}"
    if not _lies(got):
        return ""
    a, b = (value.detach().resolve_conj().resolve_neg() for value in (got, expected))
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.itemsize)
    if not a.numel() or bits is None or a.is_quantized:
        return ""
    mine_bits, their_bits = a.contiguous().view(bits), b.contiguous().view(bits)
    if torch.equal(mine_bits, their_bits):
        return ""
    differs = mine_bits.ne(their_bits)
    if a.is_floating_point() and a.itemsize > 1:
        differs &= ~(a.isnan() & b.isnan())
    if not bool(differs.any()):
        return ""
    places = differs.nonzero()
    first = tuple(places[0].tolist())
    there = f" at {first}: {a[first].item()}, not {b[first].item()}" if first else f": {a.item()}, not {b.item()}"
    return f"{len(places)} of {a.numel()} numbers differ, the first{there}"


def _looks(value: torch.Tensor) -> str:
    strides = tuple(value.stride()) if value.layout is torch.strided else value.layout
    return f"{value.dtype} {tuple(value.size())}, strides {strides}, on {value.device}"
