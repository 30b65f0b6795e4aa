"""Storages: the memory behind the values of a host graph, and the nodes that read and write it."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

_NONE: frozenset[int] = frozenset()


class Origin(enum.Enum):
    """Where a storage of the host graph comes from."""

    INPUT = "input"
    CONSTANT = "constant"
    ALLOCATION = "allocation"  # an allocation node: can be planned
    EXTERN = "extern"  # an operator allocates it; a copy of it can be planned


@dataclass(frozen=True)
class Storage:
    """The memory behind one or more values of a host graph.

    Attributes:
        index: position in ``StorageFacts.storages``.
        node: the node that makes the storage.
        element: the position among the node's results, for operators with several.
    """

    index: int
    origin: Origin
    node: str
    element: int | None = None

    @property
    def name(self) -> str:
        return self.node if self.element is None else f"{self.node}[{self.element}]"

    def value(self, maker: Node) -> torch.Tensor | None:
        """The fake tensor that the node returned in this storage when the graph was traced.

        None if there is none: a loop also has storages for values between iterations, which it does not return.

        Args:
            maker: the node that makes the storage.
        """
        return self.result_in(maker.meta.get("val"))  # type: ignore[return-value]

    def result_in(self, value: object) -> object:
        """The part of ``value``, which the node returned, that lies in this storage; None if there is none."""
        if self.element is None or not isinstance(value, (tuple, list)):
            return value
        return value[self.element] if self.element < len(value) else None


@dataclass(frozen=True)
class StorageFacts:
    """Alias analysis: the storages of each node's value, and the storages that each node reads and writes.

    Only work nodes (launches, extern calls) read and write; a view reads nothing. A communication uses its storages
    until it is waited for: the node that waits reads what the communication reads, and writes what it fills.

    Attributes:
        values: the storages of a node's value, by node.
        read, written: the storages that a node reads and writes, by node.
        awaited: the communications that end at a wait, by the node that waits.
        in_flight: storages that a communication uses before the graph begins, or after it ends.
        handed_out: storages that the caller gets, or gets back.
    """

    storages: tuple[Storage, ...]
    values: Mapping[str, frozenset[int]]
    read: Mapping[str, frozenset[int]]
    written: Mapping[str, frozenset[int]]
    awaited: Mapping[str, frozenset[str]] = field(default_factory=dict)
    in_flight: frozenset[int] = frozenset()
    handed_out: frozenset[int] = frozenset()

    def of(self, node: Node) -> frozenset[int]:
        """Storages of a node's value."""
        return self.values.get(node.name, _NONE)

    def reads(self, node: Node) -> frozenset[int]:
        return self.read.get(node.name, _NONE)

    def writes(self, node: Node) -> frozenset[int]:
        return self.written.get(node.name, _NONE)

    def made(self) -> frozenset[int]:
        """Storages that the program or an operator allocates."""
        return self._made

    @functools.cached_property
    def _made(self) -> frozenset[int]:
        return frozenset(s.index for s in self.storages if s.origin in (Origin.ALLOCATION, Origin.EXTERN))

    def inner(self) -> frozenset[int]:
        """Storages that the program or an operator allocates, and that the caller does not get."""
        return self.made() - self.handed_out

    def all_written(self) -> frozenset[int]:
        """Storages that some node writes."""
        return _NONE.union(*self.written.values())

    def behind(self, nodes: Iterable[Node]) -> frozenset[int]:
        """Storages of the values of any of these nodes."""
        return _NONE.union(*map(self.of, nodes))

    def behind_named(self, names: Iterable[str]) -> frozenset[int]:
        """As ``behind``, for nodes that are given by name."""
        return _NONE.union(*(self.values.get(name, _NONE) for name in names))

    def touched(self, node: Node) -> frozenset[int]:
        return self.reads(node) | self.writes(node)

    def named_in(self, nodes: Iterable[Node]) -> frozenset[int]:
        """Storages that must exist for these nodes to run. They include bases of views that no node reads."""
        return _NONE.union(*(self.touched(node) | self.of(node) for node in nodes))


def results_in(node: Node, element: int | None) -> list[Node]:
    """The nodes whose value is one result of a call: the call itself, or each ``getitem`` of that element."""
    if element is None:
        return [node]
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == element]
