"""The arguments of a call: their leaves, and what a program is made for of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..codegen.wrapped_tensors import is_wrapped, parts_of, storage_of, wrapping_of
from .found import PLAIN

_LEAVES = frozenset([torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)])


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """The leaves of arguments, and their structure: their number, where each is a leaf, as torch's trees are slow."""
    if not kwargs and all(type(value) in _LEAVES for value in args):
        return args, len(args)
    return tree_flatten((args, kwargs))


def arguments_of(leaves: Sequence[Any], structure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with other leaves."""
    if type(structure) is int:
        return tuple(leaves), {}
    args, kwargs = tree_unflatten(list(leaves), structure)
    return args, kwargs


def memory_of(parts: Sequence[torch.Tensor], known: Mapping[int, int]) -> tuple[Any, ...]:
    """How tensors of a call lie in memory that is not theirs alone: the place of each in it; empty if none does.

    Args:
        parts: of arguments. One tensor that is given twice has its memory for itself.
        known: the storages of tensors that the step reaches otherwise, with their positions.
    """
    distinct = {id(part): part for part in parts if part.layout is torch.strided}
    storages = list(map(storage_of, distinct.values()))
    if len(set(storages)) == len(storages) and known.keys().isdisjoint(storages):
        return ()
    number = {storage: place for place, storage in enumerate(dict.fromkeys(storages))}
    return tuple(
        (number[storage], known.get(storage), part.storage_offset())
        for storage, part in zip(storages, distinct.values(), strict=True)
    )


class Same:
    """An object, compared by identity, and kept: no other gets its id."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        return f"another {type(self._value).__name__}"


@dataclass(frozen=True)
class Kind:
    """What a program is made for of its arguments and of torch's modes.

    Attributes:
        leaves: of a tensor, what does not vary; of another leaf its type and value.
        sizes: of tensors, their sizes and strides.
    """

    leaves: tuple[Any, ...]
    sizes: tuple[tuple[torch.Size, tuple[int, ...]], ...]
    structure: Any
    modes: Any

    @classmethod
    def of(cls, leaves: Sequence[Any], structure: Any, modes: Any, known: Mapping[int, int]) -> Kind:
        """What these are.

        Args:
            known: by ids, the tensors that the step reaches otherwise, with their positions.
        """
        kinds, sizes, seen = list[Any](), [], dict[int, int]()
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if is_wrapped(leaf):
                    kinds.append((wrapping_of(leaf), leaf.requires_grad))
                # One tensor that is given twice is one in the program, too.
                for part in parts_of(leaf):
                    same = seen.setdefault(id(part), len(kinds)), known.get(id(part))
                    kinds.append((part.dtype, part.device, part.requires_grad, part.dim(), same))
                    sizes.append((part.shape, part.stride()))
            else:
                kinds.append((type(leaf), leaf if isinstance(leaf, PLAIN) else Same(leaf)))
        return cls(tuple(kinds), tuple(sizes), structure, modes)

    def difference(self, other: Kind) -> str:
        """The first leaf that is no tensor and another one, as ``argument 2 is 0.5, was 1.0``; empty if none is."""
        for place, (now, was) in enumerate(zip(self.leaves, other.leaves, strict=False)):
            if now != was and isinstance(now[0], type) and issubclass(now[0], PLAIN) and now[0] is was[0]:
                return f"argument {place} is {now[1]!r}, was {was[1]!r}"
        return ""

    def alike_but_for_sizes(self, other: Kind) -> bool:
        """Whether nothing but sizes is another."""
        return (self.leaves, self.structure, self.modes) == (other.leaves, other.structure, other.modes)

    def varying(self, others: Sequence[Kind], dynamic: bool | None) -> list[Collection[int]]:
        """For each tensor the dimensions that a program for several sizes is made for; none of size 0 or 1.

        Args:
            others: of earlier programs that differ in sizes.
            dynamic: as for ``torch.compile``: None for those that have varied.
        """
        varying: list[Collection[int]] = []
        for place, (shape, _) in enumerate(self.sizes):
            dims = [dim for dim, size in enumerate(shape) if size > 1]
            if dynamic is None:
                dims = [dim for dim in dims if any(other.sizes[place][0][dim] != shape[dim] for other in others)]
            varying.append(dims if dynamic is not False else ())
        return varying

    def fits(self, made_for: Kind, varying: Sequence[Collection[int]]) -> bool:
        """Whether sizes that do not vary are those that a program was made for."""
        for (shape, stride), (other, other_stride), dims in zip(self.sizes, made_for.sizes, varying, strict=True):
            if not dims and (shape, stride) != (other, other_stride):
                return False
            if any(size != other[dim] for dim, size in enumerate(shape) if dim not in dims):
                return False
        return True
