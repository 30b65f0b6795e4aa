"""Tensors that are made of others, such as ``DTensor``: a program takes and returns the tensors inside.

::

    weight: DTensor[32, 64], Shard(0) of 2 processes    ->    weight._local_tensor: float32[16, 64]

Operators on such a tensor call others on what is inside, and communicate; that is what a trace holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type

_PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others."""
    return type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)


def any_wraps(types: Iterable[type]) -> bool:
    """Whether there is a type of such tensors."""
    return any(map(is_traceable_wrapper_subclass_type, types))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor is made of: itself, if it is made of no others."""
    return flat(value for _, value in _inner(tensor)[0]) if is_wrapped(tensor) else [tensor]


def storage_of(part: torch.Tensor) -> int:
    """The id of a tensor's storage; 0 of one that has none, such as a sparse one."""
    return int(part.untyped_storage()._cdata) if part.layout is torch.strided else 0


def flat(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of all of them, in order."""
    return list(itertools.chain.from_iterable(map(parts_of, tensors)))


def wrapping_of(tensor: torch.Tensor) -> object:
    """What a program depends on of a tensor beside its parts: its type, and the placements of a ``DTensor``."""
    if not is_wrapped(tensor):
        return type(tensor)
    inner, others, rest = _inner(tensor)
    return type(tensor), rest, tuple(others.items()), tuple(wrapping_of(value) for _, value in inner)


def _inner(tensor: torch.Tensor) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any], Any]:
    """The tensors inside by attribute, other values, such as meshes of devices, and the rest that makes it anew."""
    names, rest = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    values = {name: getattr(tensor, name) for name in names}
    inner = [(name, value) for name, value in values.items() if isinstance(value, torch.Tensor)]
    return inner, {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}, rest


@dataclass(frozen=True, eq=False)
class Wrapping:
    """How a tensor is made of others, to make one like it.

    Attributes:
        inner: by attribute, how a tensor inside is made; none if the tensor is made of no others.
        others: values inside that are no tensors.
    """

    kind: type[torch.Tensor]
    inner: tuple[tuple[str, Wrapping], ...]
    others: Mapping[str, Any] = field(default_factory=dict)
    rest: Any = None
    size: Any = None
    stride: Any = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Wrapping:
        if not is_wrapped(tensor):
            return cls(torch.Tensor, ())
        inner, others, rest = _inner(tensor)
        wrappings = tuple((name, cls.of(value)) for name, value in inner)
        return cls(type(tensor), wrappings, others, rest, tensor.size(), tensor.stride())

    @property
    def count(self) -> int:
        """The number of parts."""
        return sum(wrapping.count for _, wrapping in self.inner) if self.inner else 1

    def around(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        """A tensor that is made of the next parts."""
        if not self.inner:
            return next(parts)
        inner = {name: wrapping.around(parts) for name, wrapping in self.inner}
        made: torch.Tensor = self.kind.__tensor_unflatten__(  # type: ignore[attr-defined]
            {**inner, **self.others}, self.rest, self.size, self.stride
        )
        return made
