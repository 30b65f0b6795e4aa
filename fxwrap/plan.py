"""Decisions: what the passes return and what runs. Frozen; applied in one place, ``graphs/recording``."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node


class Verdict(enum.Enum):
    CAPTURED = "captured"
    EAGER = "eager"


@dataclass(frozen=True)
class NodeVerdict:
    """Where a node runs, and why. ``data_dependent``: its value or size is known only once data is."""

    verdict: Verdict
    reason: str
    data_dependent: bool = False


class Origin(enum.Enum):
    """Who owns a storage's memory."""

    INPUT = "input"
    CONSTANT = "constant"
    ALLOCATION = "allocation"  # an allocation node: can be planned
    EXTERN = "extern"  # an operator allocates it: outside the plan


@dataclass(frozen=True)
class Storage:
    """Memory behind one or more values of a host graph.

    Attributes:
        index: position in ``StorageFacts.storages``.
        node: the node that brings it into being.
        element: which result of the node, for operators with several.
    """

    index: int
    origin: Origin
    node: Node
    element: int | None = None

    @property
    def name(self) -> str:
        return self.node.name if self.element is None else f"{self.node.name}[{self.element}]"


@dataclass(frozen=True)
class StorageFacts:
    """Which storages each node's value lives in, and which storages each node reads and writes.

    Only nodes that do work (launches, extern calls) read and write; a view reads nothing.
    """

    storages: tuple[Storage, ...]
    of: Mapping[Node, frozenset[int]]
    reads: Mapping[Node, frozenset[int]]
    writes: Mapping[Node, frozenset[int]]

    def touched(self, node: Node) -> frozenset[int]:
        return self.reads.get(node, frozenset()) | self.writes.get(node, frozenset())


@dataclass(frozen=True)
class Partition:
    """A run of work nodes with one verdict, in the order in which they run.

    Attributes:
        reason: why it is eager; empty for a captured one.
        device: where a captured partition runs.
    """

    index: int
    verdict: Verdict
    nodes: tuple[Node, ...]
    reason: str
    device: torch.device
    launches: int
    externs: int


@dataclass(frozen=True)
class Buffer:
    """Something to place: ``size`` bytes, live in steps ``[begin, end)``: begin inclusive, end exclusive."""

    name: str
    size: int
    begin: int
    end: int


@dataclass(frozen=True)
class Placement:
    """Offsets in bytes into one arena of ``size`` bytes.

    ``lower_bound`` is the largest number of (aligned) bytes live in any one step: no arena can be smaller.
    """

    offsets: Mapping[str, int]
    size: int
    lower_bound: int


@dataclass(frozen=True)
class ArenaPlan:
    """The plan for one device.

    Attributes:
        buffers: what was placed, by storage name.
        alignment: bytes.
        plain: bytes that separate allocations without any reuse would take.
    """

    device: torch.device
    buffers: Mapping[str, Buffer]
    placement: Placement
    alignment: int
    plain: int


@dataclass(frozen=True)
class MemoryPlan:
    """Where every planned storage of a recording lies.

    Attributes:
        arenas: one per device.
        location: storage index -> its device and its offset in that device's arena, in bytes.
        apart: storages that outputs live in; each has memory of its own.
        sizes: concrete sizes in bytes of every storage with an allocation node.
    """

    arenas: Mapping[torch.device, ArenaPlan]
    location: Mapping[int, tuple[torch.device, int]]
    apart: frozenset[int]
    sizes: Mapping[int, int]

    @property
    def size(self) -> int:
        return sum(arena.placement.size for arena in self.arenas.values())

    @property
    def lower_bound(self) -> int:
        return sum(arena.placement.lower_bound for arena in self.arenas.values())

    @property
    def plain(self) -> int:
        return sum(arena.plain for arena in self.arenas.values())


@dataclass(frozen=True)
class ProgramPlan:
    """Everything decided about a host graph before shapes are known."""

    graph: GraphModule
    facts: StorageFacts
    verdicts: Mapping[Node, NodeVerdict]
    partitions: tuple[Partition, ...]
    device: torch.device
    static_inputs: frozenset[int]
    phase: str

    @property
    def schedule(self) -> tuple[Node, ...]:
        """Every work node, in the order in which it runs."""
        return tuple(node for partition in self.partitions for node in partition.nodes)
