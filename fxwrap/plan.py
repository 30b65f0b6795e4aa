"""Decisions: what the passes return and what runs.

Frozen data: nodes by name, storages by number, no closures and no tensors. They are applied in one place,
``graphs/record/recording_builder``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .host_graph.nodes import by_name
from .packing import Placement, Reserved, joined

_NONE: frozenset[int] = frozenset()
# What is no data: whoever reads a stored plan puts it back.
_NOT_STORED = {"stored": False}


class Verdict(enum.Enum):
    CAPTURED = "captured"
    EAGER = "eager"


@dataclass(frozen=True)
class NodeVerdict:
    """Where a node runs, and why.

    Attributes:
        data_dependent: its value or size depends on data.
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
        node: the node that makes it.
        element: which result of the node, for operators with several.
    """

    index: int
    origin: Origin
    node: str
    element: int | None = None

    @property
    def name(self) -> str:
        return self.node if self.element is None else f"{self.node}[{self.element}]"

    def value(self, maker: Node) -> Any:
        """What was in it when the graph was traced; None where nothing tells: a loop has storages for what its body
        hands over, besides those of its results.

        Args:
            maker: the node that makes it.
        """
        value = maker.meta.get("val")
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
        values: by node, the storages that its value lives in.
        read, written: by node, storages.
        awaited: by node that waits, the communications that are over then.
        in_flight: storages that a communication works on before the graph begins, or after it ends.
    """

    storages: tuple[Storage, ...]
    values: Mapping[str, frozenset[int]]
    read: Mapping[str, frozenset[int]]
    written: Mapping[str, frozenset[int]]
    awaited: Mapping[str, frozenset[str]] = field(default_factory=dict)
    in_flight: frozenset[int] = frozenset()

    def of(self, node: Node) -> frozenset[int]:
        """Storages that a value lives in."""
        return self.values.get(node.name, _NONE)

    def reads(self, node: Node) -> frozenset[int]:
        return self.read.get(node.name, _NONE)

    def writes(self, node: Node) -> frozenset[int]:
        return self.written.get(node.name, _NONE)

    def all_written(self) -> frozenset[int]:
        """Storages that some node writes."""
        return _NONE.union(*self.written.values())

    def behind(self, nodes: Iterable[Node]) -> frozenset[int]:
        """Storages that any of these values lives in."""
        return _NONE.union(*map(self.of, nodes))

    def behind_named(self, names: Iterable[str]) -> frozenset[int]:
        """Storages that the values of any of these nodes live in."""
        return _NONE.union(*(self.values.get(name, _NONE) for name in names))

    def touched(self, node: Node) -> frozenset[int]:
        return self.reads(node) | self.writes(node)

    def named_in(self, nodes: Iterable[Node]) -> frozenset[int]:
        """Storages that have to be there for nodes to run: a view of one touches no byte of it."""
        return _NONE.union(*(self.touched(node) | self.of(node) for node in nodes))


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
    nodes: tuple[str, ...]
    reason: str
    device: torch.device
    launches: int
    externs: int
    benefit: CaptureBenefit | None = None

    def to_dict(self) -> dict[str, Any]:
        """As reports and traces have it, for JSON."""
        return {
            "index": self.index,
            "verdict": self.verdict.value,
            "launches": self.launches,
            "extern_calls": self.externs,
            "device": str(self.device),
            "reason": self.reason,
            "benefit_us": None if self.benefit is None else dataclasses.asdict(self.benefit),
            "nodes": list(self.nodes),
        }


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
    """The partitions of a program, and the alternatives that were considered.

    Attributes:
        fewest: captured partitions that the dependencies demand; no order has fewer.
        chosen: captured partitions of the order that was chosen, before the cost model.
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


@dataclass(frozen=True)
class Signature:
    """What goes into a partition and comes out of it.

    Attributes:
        inputs: values of the host graph that the partition uses, in order.
        outputs: values it makes that others use, in order; a value may be a tuple of tensors.
        mutated: positions of inputs whose memory it writes.
        symbols: positions of inputs that are numbers (sizes).
        temporaries: storages that live and die inside.
        target: the attribute of the host graph that runs in the partition's place; empty where the partition runs
            itself. ``target(*inputs)`` returns the outputs in order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutated: tuple[int, ...]
    symbols: tuple[int, ...]
    temporaries: frozenset[int]
    target: str = ""


@dataclass(frozen=True)
class PartitionGraph:
    """A partition as a graph of its own: ``module(*inputs)`` does its work and returns a tuple of its outputs."""

    module: GraphModule
    signature: Signature
    partition: Partition

    def __str__(self) -> str:
        return str(self.module.graph)


class Home(enum.Enum):
    """Where a storage's memory comes from."""

    INPUT = "input"  # the caller's
    CONSTANT = "constant"
    REGION = "region"  # planned
    CALL = "call"  # allocated per call
    RECORDING = "recording"  # allocated once for a recording: pinned memory, the meta device
    OPERATOR = "operator"  # the operator that returns it allocates it


@dataclass(frozen=True)
class Place:
    """The home of a storage; in a region, its number there and the offset in bytes."""

    home: Home
    region: int = -1
    offset: int = 0


@dataclass(frozen=True)
class Region:
    """Memory of several storages that is there in steps ``[begin, end)`` of each call.

    Attributes:
        size, alignment: bytes.
        arena: it is there all the time, and other recordings use it, too.
        lower_bound: bytes of storages that are alive at one time at most.
        plain: bytes that separate allocations without any reuse would take.
        reserved: the intervals of it that live outputs of other recordings occupy.
    """

    device: torch.device
    begin: int
    end: int
    size: int
    alignment: int
    arena: bool = False
    lower_bound: int = 0
    plain: int = 0
    reserved: tuple[Reserved, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """Where every storage of a recording lies.

    Where a graph freezes addresses, planned ones lie in arenas. Where it calls again (CPU), temporaries lie in
    per-call regions, and what may be live after the call is allocated per call.

    Attributes:
        places: by storage index.
        sizes: concrete sizes in bytes of every storage that has an allocation node or lies in a region.
        outputs: storages that outputs live in: nothing else in an arena gets their bytes while they are live.
        peak: bytes that the program's own storages take at one time, at most, with regions as large as they are.
        lower_bound: bytes that they take at one time, at most, if every storage is there from its first use to its
            last; where there are arenas, the sum of theirs.
        plain: bytes that separate allocations without any reuse take.
    """

    places: tuple[Place, ...]
    regions: tuple[Region, ...]
    sizes: Mapping[int, int]
    outputs: frozenset[int]
    peak: int = 0
    lower_bound: int = 0
    plain: int = 0

    @functools.cached_property
    def arenas(self) -> Mapping[torch.device, Region]:
        return {region.device: region for region in self.regions if region.arena}

    @functools.cached_property
    def per_call(self) -> frozenset[int]:
        """Storages of known size that are allocated per call."""
        return frozenset(i for i, place in enumerate(self.places) if place.home is Home.CALL and i in self.sizes)

    @property
    def size(self) -> int:
        """Bytes of the arenas."""
        return sum(region.size for region in self.arenas.values())

    def inside(self, region: Region) -> dict[int, int]:
        """Offsets of what lies in a region, by storage."""
        number = next(n for n, one in enumerate(self.regions) if one is region)
        places = enumerate(self.places)
        return {i: place.offset for i, place in places if place.home is Home.REGION and place.region == number}

    def footprint(self, region: Region) -> list[tuple[int, int]]:
        """The bytes of a region that the program works on, as spans ``[low, high)`` that do not touch, in order."""
        return joined((low, low + self.sizes[index]) for index, low in self.inside(region).items())


@dataclass(frozen=True)
class Prediction:
    """What a call, or a forward and its backward, will take on one device beyond its inputs, in bytes.

    Not in it: workspace of operators where it was not measured, and what a driver keeps for a graph.

    Attributes:
        arena: there all the time.
        operators: results that operators allocate, and their workspace if that is known, at one time.
        outside: all that is not in the arena, at one time: regions, what is allocated per call, ``operators``.
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
        static_inputs: positions of inputs that AOTAutograd marks as static: their addresses stay the same.
        donated: positions of inputs that AOTAutograd marks as donated: not needed after their last use.
        saved: AOTAutograd's names of the outputs that only backward gets, by output position.
        inputs: AOTAutograd's names of the inputs.
        workspace: measured bytes of library calls' workspace, by node.
        compiled: the partitions, by index, that ``compile_partition`` replaced.
    """

    graph: GraphModule = field(metadata=_NOT_STORED)
    facts: StorageFacts
    verdicts: Mapping[str, NodeVerdict]
    cut: Cut
    device: torch.device
    static_inputs: frozenset[int]
    phase: str
    donated: frozenset[int] = frozenset()
    saved: Mapping[int, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    workspace: Mapping[str, int] = field(default_factory=dict)
    compiled: Mapping[int, Signature] = field(default_factory=dict)

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return self.cut.partitions

    @functools.cached_property
    def nodes(self) -> Mapping[str, Node]:
        """The nodes of the graph by name."""
        return by_name(self.graph)

    def work_in(self, partition: Partition) -> tuple[Node, ...]:
        """The work nodes of a partition, in the order in which they run."""
        return tuple(map(self.nodes.__getitem__, partition.nodes))

    @functools.cached_property
    def schedule(self) -> tuple[Node, ...]:
        """Every work node, in the order in which it runs."""
        return tuple(node for partition in self.partitions for node in self.work_in(partition))

    @functools.cached_property
    def awaited(self) -> Mapping[Node, tuple[Node, ...]]:
        """For nodes that wait, the communications that are over then."""
        return {self.nodes[n]: tuple(map(self.nodes.__getitem__, over)) for n, over in self.facts.awaited.items()}

    @functools.cached_property
    def placeholders(self) -> tuple[Node, ...]:
        """The inputs, in order."""
        return tuple(node for node in self.graph.graph.nodes if node.op == "placeholder")

    @functools.cached_property
    def captured_work(self) -> frozenset[Node]:
        """The work nodes of captured partitions."""
        return self._work_of(partition for partition in self.partitions if partition.verdict is Verdict.CAPTURED)

    @functools.cached_property
    def replaced_work(self) -> frozenset[Node]:
        """The work nodes of partitions that ``compile_partition`` replaced."""
        return self._work_of(partition for partition in self.partitions if partition.index in self.compiled)

    def _work_of(self, partitions: Iterable[Partition]) -> frozenset[Node]:
        return frozenset(node for partition in partitions for node in self.work_in(partition))

    def maker(self, index: int) -> Node:
        """The node that makes a storage."""
        return self.nodes[self.facts.storages[index].node]


@dataclass(frozen=True, eq=False)
class Planned:
    """A program at concrete sizes.

    Attributes:
        symbol_values: concrete sizes (``evaluate_sizes``).
        input_buffers: inputs that are copied to a static buffer in an arena: device and bytes.
        frozen: whether a graph freezes addresses; else memory comes and goes with each call.
        donated: inputs that are freed after their last use: bytes of a storage, and the inputs that share it.
    """

    program: ProgramPlan
    symbol_values: Mapping[Node, Any]
    input_buffers: Mapping[str, tuple[torch.device, int]]
    frozen: bool = True
    donated: tuple[tuple[int, tuple[str, ...]], ...] = ()


# By device: intervals of its arena that live outputs of other recordings occupy.
Reservations = Mapping[torch.device, Sequence[Reserved]]

# Offsets by name in the arena of each device, for one of two programs: size and lower bound are those of both.
PlacementHint = Mapping[torch.device, Placement]
