"""Copies of a call's inputs and of random number generators, and comparison of tensors bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from ..host_graph.tensors import has_address, reach, tensor_like, tensor_over, unexpanded

_BYTES = torch.uint8


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from a tensor's first element to its last, in its own memory."""
    storage, low = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
    return tensor_over(storage, (reach(tensor),), (1,), _BYTES, low)


def all_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a tensor over it."""
    return tensor_over(storage, (storage.nbytes(),), (1,), _BYTES)


class Copies:
    """A snapshot of the inputs of a call. Tensors that share memory share it in the copies as well."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs = list(inputs)  # makes no new tensors: use counts of storages tell whether outputs are live
        storages = [value.untyped_storage() for value in self._inputs if _lies(value)]
        self._bytes = {storage._cdata: storage.clone() for storage in storages}

    def __len__(self) -> int:
        return len(self._inputs)

    def make(self, changed: Collection[int] = (), exclude: Collection[int] = ()) -> list[Any]:
        """New inputs with the values of the snapshot, at other addresses.

        Args:
            changed: positions of inputs that get other values, if they hold floating-point numbers.
            exclude: positions of inputs that are not copied.
        """
        storages = {handle: before.clone() for handle, before in self._bytes.items()}
        dtypes = {
            self._inputs[p].untyped_storage()._cdata: self._inputs[p].dtype for p in changed if _lies(self._inputs[p])
        }
        for handle, dtype in dtypes.items():
            change(storages[handle], dtype)
        return [
            value if position in exclude or not isinstance(value, torch.Tensor) else self._over(value, storages)
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
        """Write the values of the snapshot back to the inputs. Their version counters do not change."""
        for position, value in enumerate(self._inputs):
            if _lies(value) and (positions is None or position in positions):
                value.untyped_storage().copy_(self._bytes[value.untyped_storage()._cdata])

    def change(self, positions: Collection[int]) -> None:
        """Write other values to the inputs themselves; ``restore`` takes that back."""
        done = set[int]()
        for position in positions:
            value = self._inputs[position]
            if _lies(value) and value.untyped_storage()._cdata not in done:
                done.add(value.untyped_storage()._cdata)
                change(value.untyped_storage(), value.dtype)


def _lies(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and has_address(value)


def change(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Replace floating-point numbers in memory by others: in reverse order, and smaller, so that probabilities remain
    valid. Integers do not change: they may be indices, whose bounds are unknown."""
    real = dtype.to_real() if dtype.is_complex else dtype
    if not real.is_floating_point or storage.nbytes() < real.itemsize or real.itemsize == 1:
        return
    numbers = tensor_over(storage, (storage.nbytes() // real.itemsize,), (1,), real)
    other = numbers.flip(0).mul_(0.75)
    numbers.copy_(other if bool(other.ne(0).any()) else other.fill_(0.5))


class Generators:
    """The states of the random number generators of the CPU and of a device."""

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
        return all(torch.equal(own_state, other_state) for own_state, other_state in pairs)


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def difference(got: Any, expected: Any) -> str:
    """How two values differ, in words; empty if they are the same bit for bit. NaNs are equal."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if isinstance(expected, (tuple, list)) and isinstance(got, (tuple, list)) and len(got) == len(expected):
            return next(filter(None, map(difference, got, expected)), "")
        same = got is expected or (type(got) is type(expected) and repr(got) == repr(expected))
        return "" if same else f"{got!r}, not {expected!r}"
    if (layout := _looks(got)) != (expected_layout := _looks(expected)):
        return f"{layout}, not {expected_layout}"
    if not _lies(got):
        return ""
    # Each element once, before anything copies them: an expanded tensor may have more than there is memory.
    a, b = (unexpanded(value.detach()).resolve_conj().resolve_neg() for value in (got, expected))
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.itemsize)
    if not a.numel() or bits is None or a.is_quantized:
        return ""
    got_bits, expected_bits = a.contiguous().view(bits), b.contiguous().view(bits)
    if torch.equal(got_bits, expected_bits):
        return ""
    differs = got_bits.ne(expected_bits)
    if a.is_floating_point() and a.itemsize > 1:
        differs &= ~(a.isnan() & b.isnan())
    if not bool(differs.any()):
        return ""
    places = differs.nonzero()
    first = tuple(places[0].tolist())
    where = f" at {first}: {a[first].item()}, not {b[first].item()}" if first else f": {a.item()}, not {b.item()}"
    return f"{len(places)} of {a.numel()} numbers differ, the first{where}"


def _looks(value: torch.Tensor) -> str:
    strides = tuple(value.stride()) if value.layout is torch.strided else value.layout
    return f"{value.dtype} {tuple(value.size())}, strides {strides}, on {value.device}"
