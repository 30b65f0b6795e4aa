"""Decisions: what the passes return and what runs. Frozen; applied in one place, ``graphs/recording``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .packing import Buffer, Placement

# Runs a function and tells how many bytes it allocated (above 0) and freed (below) on the CPU, in order, before its
# result was freed; None if that cannot be told at the moment.
Allocations = Callable[[Callable[[], Any]], Sequence[int] | None]


class Verdict(enum.Enum):
    CAPTURED = "captured"
    EAGER = "eager"


@dataclass(frozen=True)
class NodeVerdict:
    """Where a node runs, and why.

    Attributes:
        data_dependent: its value or size is known only once data is.
        remedy: what would have to change for an eager one to be captured.
        inherited: it is eager because of what it works on, and would be captured if that were.
    """

    verdict: Verdict
    reason: str
    data_dependent: bool = False
    remedy: str = ""
    inherited: bool = False


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

    @property
    def value(self) -> Any:
        """What was in it when the graph was traced; None where nothing tells: a loop has storages for what its body
        hands over, besides those of its results."""
        value = self.node.meta.get("val")
        if self.element is None or not isinstance(value, (tuple, list)):
            return value
        return value[self.element] if self.element < len(value) else None


@dataclass(frozen=True)
class StorageFacts:
    """Which storages each node's value lives in, and which storages each node reads and writes.

    Only nodes that do work (launches, extern calls) read and write; a view reads nothing. A communication works on
    its storages until it is waited for: the node that waits reads what the communication reads, and writes what it
    fills.

    Attributes:
        ends: for nodes that wait, the communications that are over then.
        in_flight: storages that a communication works on before the graph begins, or after it ends.
    """

    storages: tuple[Storage, ...]
    of: Mapping[Node, frozenset[int]]
    reads: Mapping[Node, frozenset[int]]
    writes: Mapping[Node, frozenset[int]]
    ends: Mapping[Node, frozenset[Node]] = field(default_factory=dict)
    in_flight: frozenset[int] = frozenset()

    def behind(self, nodes: Iterable[Node]) -> frozenset[int]:
        """Storages that any of these values lives in."""
        return frozenset[int]().union(*(self.of.get(node, frozenset()) for node in nodes))

    def touched(self, node: Node) -> frozenset[int]:
        return self.reads.get(node, frozenset()) | self.writes.get(node, frozenset())

    def named_in(self, nodes: Iterable[Node]) -> frozenset[int]:
        """Storages that have to be there for nodes to run: a view of one touches no byte of it."""
        return frozenset[int]().union(*(self.touched(node) | self.of.get(node, frozenset()) for node in nodes))


@dataclass(frozen=True)
class Partition:
    """A run of work nodes with one verdict, in the order in which they run.

    Attributes:
        reason: why it is eager; empty for a captured one.
        device: where a captured partition runs.
        benefit: what capturing it is estimated to save; None for one that cannot be captured.
    """

    index: int
    verdict: Verdict
    nodes: tuple[Node, ...]
    reason: str
    device: torch.device
    launches: int
    externs: int
    benefit: CaptureBenefit | None = None


@dataclass(frozen=True)
class CaptureBenefit:
    """An estimate of what capturing a partition saves the host at every call, in microseconds.

    Attributes:
        saved: the ways to its launches and library calls.
        replay: the replay itself.
        copies: copies of inputs, and of what eager work hands over, to the addresses that were captured.
    """

    saved: float
    replay: float
    copies: float

    @property
    def pays(self) -> bool:
        return self.saved > self.replay + self.copies

    def __str__(self) -> str:
        costs = f"{self.replay:.0f} us of replay and {self.copies:.0f} us of copies"
        return f"saves {self.saved:.0f} us of calls for {costs}"


@dataclass(frozen=True)
class Cut:
    """The partitions of a program, and what was weighed.

    Attributes:
        fewest: captured partitions that the dependencies demand; no order has fewer.
        chosen: captured partitions of the order that was chosen, before any was found not to be worth it.
        in_program_order: captured partitions if nothing were reordered.
        peak: bytes of planned storages that are alive at most, at the sizes the program was compiled for; 0 if
            they are not known.
        program_order_peak: the same, in program order.
        peak_budget: how many times that was allowed.
    """

    partitions: tuple[Partition, ...]
    fewest: int
    chosen: int
    in_program_order: int
    peak: int = 0
    program_order_peak: int = 0
    peak_budget: float = 1.1

    @property
    def captured(self) -> int:
        return sum(partition.verdict is Verdict.CAPTURED for partition in self.partitions)

    @property
    def partitions_cost_memory(self) -> bool:
        """Whether there would be fewer captured partitions if memory were no matter."""
        return self.chosen > self.fewest


@dataclass(frozen=True)
class Signature:
    """What goes into a partition and comes out of it.

    Attributes:
        inputs: values of the host graph that the partition uses, in order.
        outputs: values it makes that others use, in order; a value may be a tuple of tensors.
        mutated: positions of inputs whose memory it writes.
        symbols: positions of inputs that are numbers (sizes).
        temporaries: storages that live and die inside.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    mutated: tuple[int, ...]
    symbols: tuple[int, ...]
    temporaries: frozenset[int]


@dataclass(frozen=True)
class PartitionGraph:
    """A partition as a graph of its own: ``module(*inputs)`` does its work and returns a tuple of its outputs."""

    module: GraphModule
    signature: Signature
    partition: Partition

    def __str__(self) -> str:
        return str(self.module.graph)


@dataclass(frozen=True)
class CompiledPartition:
    """A partition that somebody else compiled: ``call(*inputs)`` returns its outputs in order."""

    call: Callable[..., Sequence[Any]]
    signature: Signature


@dataclass(frozen=True)
class Taken:
    """Bytes ``[low, high)`` of an arena in which an output of another recording lives while a program runs.

    Attributes:
        nodes: the inputs as which the program gets it, if nobody else has it: free after their last use.
    """

    low: int
    high: int
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class ArenaPlan:
    """The plan for one device.

    Attributes:
        buffers: what was placed, by storage name.
        alignment: bytes.
        plain: bytes that separate allocations without any reuse would take.
        taken: what was in the arena already.
        workspace: bytes ``[low, high)`` that an operator may have while it runs, by operator.
    """

    device: torch.device
    buffers: Mapping[str, Buffer]
    placement: Placement
    alignment: int
    plain: int
    taken: tuple[Taken, ...] = ()
    workspace: Mapping[Node, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @property
    def footprint(self) -> list[tuple[int, int]]:
        """The bytes that a program works on, as spans ``[low, high)`` that do not touch, in order."""
        spans: list[tuple[int, int]] = []
        offsets = self.placement.offsets
        for low, size in sorted((offsets[name], buffer.size) for name, buffer in self.buffers.items()):
            if spans and low <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], low + size)
            elif size:
                spans.append((low, low + size))
        return spans


@dataclass(frozen=True)
class Region:
    """Memory of several storages that is there in steps ``[begin, end)`` of each call only.

    Attributes:
        size: bytes.
        offsets: by storage index, in bytes.
    """

    begin: int
    end: int
    size: int
    offsets: Mapping[int, int]


@dataclass(frozen=True)
class MemoryPlan:
    """Where every planned storage of a recording lies.

    Where a graph freezes addresses, in an arena. Where it calls again (CPU), temporaries lie in regions, and what
    somebody can have after the call is allocated at the call.

    Attributes:
        arenas: one per device.
        location: storage index -> its device and its offset in that device's arena, in bytes: of allocations, inputs
            that are copied, and what operators return where the device's allocator can be told.
        outputs: storages that outputs live in: nothing else in an arena gets their bytes until nobody has them.
        sizes: concrete sizes in bytes of every storage with an allocation node, or a location.
        regions: memory that comes and goes with each call: its storages are named while it is there.
        per_call: storages that are allocated at every call.
        peak: bytes that the program's own storages take at one time, at most, with regions as large as they are.
        lower_bound: bytes that they take at one time, at most, if every storage is there from its first use to its
            last; where there are arenas, the sum of theirs.
        plain: bytes that separate allocations without any reuse take.
    """

    arenas: Mapping[torch.device, ArenaPlan]
    location: Mapping[int, tuple[torch.device, int]]
    outputs: frozenset[int]
    sizes: Mapping[int, int]
    regions: tuple[Region, ...] = ()
    per_call: frozenset[int] = frozenset()
    peak: int = 0
    lower_bound: int = 0
    plain: int = 0

    @property
    def size(self) -> int:
        """Bytes of the arenas."""
        return sum(arena.placement.size for arena in self.arenas.values())


@dataclass(frozen=True)
class Prediction:
    """What a call, or a forward and its backward, will take on one device beyond its inputs, in bytes.

    Not in it: workspace of operators where it was not measured, and what a driver keeps for a graph.

    Attributes:
        arena: there all the time.
        operators: results that operators allocate, and their workspace if that is known, at one time.
        outside: all that is not in the arena, at one time: regions, what is allocated at every call, ``operators``.
        outputs: of all this, what the caller has in the end.
    """

    device: torch.device
    arena: int
    operators: int
    outside: int
    outputs: int

    @property
    def total(self) -> int:
        return self.arena + self.outside


@dataclass(frozen=True)
class ProgramPlan:
    """Everything decided about a host graph before shapes are known.

    Attributes:
        static_inputs: positions of inputs whose address AOTAutograd expects to stay.
        donated: positions of inputs that AOTAutograd marks as donated: nobody needs them after their last use.
        saved: positions of outputs that are for backward alone: the caller does not get them.
        compiled: the partitions, by index, that somebody else compiled.
    """

    graph: GraphModule
    facts: StorageFacts
    verdicts: Mapping[Node, NodeVerdict]
    cut: Cut
    device: torch.device
    static_inputs: frozenset[int]
    phase: str
    donated: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    compiled: Mapping[int, CompiledPartition] = field(default_factory=dict)

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return self.cut.partitions

    @property
    def schedule(self) -> tuple[Node, ...]:
        """Every work node, in the order in which it runs."""
        return tuple(node for partition in self.partitions for node in partition.nodes)


@dataclass(frozen=True)
class Planned:
    """A program at concrete sizes.

    Attributes:
        numbers: concrete sizes (``evaluate_sizes``).
        input_buffers: inputs that are copied to a place in an arena: device and bytes.
        frozen: whether a graph freezes addresses; else memory comes and goes with each call.
        workspace: bytes that calls allocate beyond what they return, as far as is known.
        places_results: whether the device's allocator is told where what operators return shall lie.
        donated: inputs that are freed after their last use: bytes of a storage, and the inputs that share it.
    """

    program: ProgramPlan
    numbers: Mapping[Node, Any]
    input_buffers: Mapping[Node, tuple[torch.device, int]]
    frozen: bool = True
    workspace: Mapping[Node, int] = field(default_factory=dict)
    places_results: bool = False
    donated: tuple[tuple[int, tuple[Node, ...]], ...] = ()


# Offsets by name in the arena of each device, for one of two programs: size and lower bound are those of both.
PlacementHint = Mapping[torch.device, Placement]
