"""Stand-ins for the tensors and sizes of a stored host graph: they have a layout and no data.

Fake tensors would serve as well, but making one imports Dynamo and Inductor, which a stored program runs without.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from .graph_json import TensorLayout

_NOTHING = torch.empty(0)


class StandIn(torch.Tensor):
    """A tensor with a layout and without data. Operators refuse it."""

    _layout: TensorLayout
    _storage: StorageStandIn

    @classmethod
    def of(cls, layout: TensorLayout, storage: StorageStandIn) -> StandIn:
        tensor: StandIn = _NOTHING.as_subclass(cls)
        tensor._layout, tensor._storage = layout, storage
        return tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__get__":
            return super().__torch_function__(function, types, args, kwargs or {})
        raise TypeError(f"{function} of a value that stands for a tensor: there is no data")

    dtype = property(lambda self: self._layout.dtype)  # type: ignore[assignment]
    device = property(lambda self: self._layout.device)  # type: ignore[assignment]
    shape = property(lambda self: self._layout.size)  # type: ignore[assignment]

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self._layout.size if dim is None else self._layout.size[dim]

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self._layout.stride if dim is None else self._layout.stride[dim]

    def dim(self) -> int:
        return len(self._layout.size)

    def storage_offset(self) -> Any:
        return self._layout.offset

    def is_conj(self) -> bool:
        return self._layout.conjugation

    def is_neg(self) -> bool:
        return self._layout.negation

    def new_empty_strided(self, size: Any, stride: Any) -> StandIn:  # type: ignore[override]
        """A value of the same type in a storage of its own, for another result with these elements."""
        layout = dataclasses.replace(self._layout, size=size, stride=stride, offset=0)
        return StandIn.of(layout, self._storage).in_storage(None)

    def in_storage(self, storage: StorageStandIn | None) -> StandIn:
        """A value with the same layout in another storage; None for a new one."""
        return StandIn.of(self._layout, storage or StorageStandIn(next(_numbers), self._storage.nbytes()))

    def untyped_storage(self) -> Any:
        return self._storage

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StandIn({self.dtype}, {tuple(self.shape)}, {self.device})"


@dataclass(frozen=True)
class StorageStandIn:
    """A storage that is only a number: tensors with the same number share memory."""

    _cdata: int
    _nbytes: Any

    def nbytes(self) -> Any:
        return self._nbytes


@dataclass(frozen=True)
class SizeNode:
    """The node behind a ``torch.SymInt``, ``SymFloat`` or ``SymBool`` of a stored graph: its expression and hint."""

    expr: sympy.Expr
    hint: Any

    def is_symbolic(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self.expr)

    _graph_repr = __str__


_KINDS: dict[str, Any] = {"SymInt": torch.SymInt, "SymFloat": torch.SymFloat, "SymBool": torch.SymBool}
_numbers = itertools.count(1)


class StandIns:
    """Makes the stand-ins of one graph. It implements ``graph_json.Values``."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageStandIn] = {}

    def number(self, expression: sympy.Expr, kind: str, hint: Any) -> Any:
        return _KINDS[kind](SizeNode(expression, hint))

    def tensor(self, layout: TensorLayout) -> Any:
        storage = self._storages.get(layout.storage)
        if storage is None:
            storage = self._storages[layout.storage] = StorageStandIn(next(_numbers), layout.storage_bytes)
        return StandIn.of(layout, storage)
