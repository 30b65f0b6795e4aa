"""The plan of a program: what is captured, in which order work runs, and where every byte lies.

The passes return these dataclasses, and ``graphs/record/recording_builder`` applies them. What is serialised is
immutable data: nodes by name, storages by index, no functions and no tensors. ``ProgramPlan.graph`` is serialised
separately; ``PartitionGraph`` and ``SizedProgram`` are not serialised.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from .host_graph.nodes import by_name, output_values
from .host_graph.storages import Origin, StorageFacts
from .host_graph.user_code import shown_name
from .limit import Repeated
from .packing import Placement, Reserved, joined
from .packing.allocators import BLOCK, rounded
from .packing.lifetimes import Lifetimes

# A field that is not serialised: the reader of a plan passes it to ``from_data`` as a keyword.
_NOT_STORED = {"stored": False}


class Verdict(enum.Enum):
    CAPTURED = "captured"
    EAGER = "eager"


@dataclass(frozen=True)
class NodeVerdict:
    """Whether a node is captured or runs eagerly, and why.

    Attributes:
        data_dependent: whether the value or size of the node depends on data.
        remedy: what would have to change for an eager node to be captured.
        inherited: whether the node is eager only because an operand's value or size depends on data.
    """

    verdict: Verdict
    reason: str
    data_dependent: bool = False
    remedy: str = ""
    inherited: bool = False


@dataclass(frozen=True)
class Partition:
    """Nodes of one verdict that run one after another.

    These are launches and extern calls; an eager partition also has sizes that data decide, allocations and checks
    that need them, and elements of tuples.

    Attributes:
        reason: why the partition is eager; empty for a captured one.
        device: the device whose graph captures the partition; the CPU for an eager partition, even if its kernels run
            elsewhere.
        launches, externs: numbers of its kernel launches and of its extern calls.
        benefit: what a capture is estimated to save; None if the partition cannot be captured. Of partitions
            that the cost model has joined, the first decides.
    """

    index: int
    verdict: Verdict
    nodes: tuple[str, ...]
    reason: str
    device: torch.device
    launches: int
    externs: int = field(metadata={"key": "extern_calls"})
    benefit: CaptureBenefit | None = field(default=None, metadata={"key": "benefit_us"})


@dataclass(frozen=True)
class CaptureBenefit:
    """An estimate of the time that capturing a partition saves the host at every call, in microseconds.

    Attributes:
        saved: the time to issue the partition's launches and extern calls.
        replay: the time of the replay itself.
        copies: the time of copies of inputs and of eager results to captured addresses.
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
        fewest: the least number of captured partitions that the dependencies allow.
        chosen: the number of captured partitions in the chosen order, before the cost model.
        in_program_order: the number of captured partitions without reordering.
        peak: the largest sum of allocated storages, other than outputs, that are alive at one time, in bytes, at the
            sizes that the program was compiled for; 0 if sizes are unknown.
        program_order_peak: the same for program order.
        peak_budget: the largest allowed ratio of ``peak`` to ``program_order_peak``.
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
class PartitionSignature:
    """The inputs and outputs of a partition.

    Attributes:
        inputs: values of the host graph that the partition uses, in order.
        outputs: values that the partition makes and other partitions or the caller use, in order; a value may be a
            tuple of tensors.
        mutated: positions of inputs whose memory the partition writes.
        symbols: positions of inputs that are numbers (sizes).
        temporaries: allocated storages that no other partition uses, and that the program does not return.
        target: the attribute of the host graph that replaces the partition (``compile_partition``); empty if it is
            not replaced. ``target(*inputs)`` returns the outputs in order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutated: tuple[int, ...]
    symbols: tuple[int, ...]
    temporaries: frozenset[int]
    target: str = ""


@dataclass(frozen=True)
class PartitionGraph:
    """A partition as a graph of its own: ``module(*inputs)`` runs it and returns a tuple of its outputs."""

    module: GraphModule
    signature: PartitionSignature
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
    """The home of a storage; if that is a region, its position in ``MemoryPlan.regions``, and the offset in bytes."""

    home: Home
    region: int = -1
    offset: int = 0


@dataclass(frozen=True)
class Region:
    """One allocation that holds several storages, and exists in steps ``[begin, end)`` of each call.

    Attributes:
        size, alignment: bytes.
        arena: whether the region exists all the time and is shared with other recordings.
        lower_bound: the largest sum of storages that are alive at one time, in bytes.
        plain: the bytes that separate allocations without any reuse would take.
        reserved: the intervals of the region that live outputs of other recordings occupy.
        kept: whether the block returns to a process-wide cache when a call frees it, so that the next call of any
            program can get it (CPU only). The region exists in all steps then.
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
    kept: bool = False


@dataclass(frozen=True)
class OperatorMemory:
    """What a captured call asks its device's allocator for.

    ::

        allocations      (0, 512) (1, 2048) free 1 (1, 1024) (2, 4096)
        blocks           0: 512 bytes, 1: 2048 bytes, 2: 4096 bytes
        results          {0: 0, 2: 1}      blocks 0 and 2 are the call's two results; block 1 is workspace

    Attributes:
        allocations: the block and the bytes of each allocation, in order. A block that was freed may be used again.
        results: the position of the result that lies in a block, by block; other blocks are workspace.
    """

    allocations: tuple[tuple[int, int], ...]
    results: Mapping[int, int] = field(default_factory=dict)

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """The most bytes that are asked for in each block."""
        sizes = dict[int, int]()
        for block, nbytes in self.allocations:
            sizes[block] = max(nbytes, sizes.get(block, 0))
        return tuple(sizes.values())

    @functools.cached_property
    def workspace(self) -> Mapping[int, int]:
        """The offset of each block of the workspace, in bytes. They keep their order of addresses."""
        offsets, end = dict[int, int](), 0
        for block, nbytes in enumerate(self.blocks):
            if block not in self.results:
                offsets[block], end = end, end + rounded(nbytes, BLOCK)
        return offsets

    @property
    def workspace_bytes(self) -> int:
        return max((offset + self.blocks[block] for block, offset in self.workspace.items()), default=0)

    def bytes_of(self, element: int | None) -> int:
        """The bytes of the block in which a result lies; 0 if the call has not allocated it."""
        return next((self.blocks[block] for block, position in self.results.items() if position == (element or 0)), 0)


@dataclass(frozen=True)
class Workspace:
    """Bytes of a region in which a call's workspace lies, while it runs."""

    region: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Lanes:
    """Work that may run at the same time: consecutive nodes of a schedule, each in a lane.

    ::

        schedule   a  b  c  d  e  f

        lane 0     a     c  d     f        d waits for b
        lane 1        b        e           f waits for e

    In a lane one node runs after the other, in the order of the schedule. What comes before all of them has ended
    when they begin, and they have ended before the rest begins. This holds over one memory plan, where storages that
    share bytes are in use one after the other, too.

    Attributes:
        lane_of: the lane of each node, by name; in the order of the schedule.
        waits_for: nodes of other lanes that have to have ended before a node runs, by name, where there are any.
            Nodes for which it waits already by these, or by what comes before it in its lane, are left out.
        serial, beside: the estimated time of all nodes one after the other, and in lanes, in microseconds.
    """

    lane_of: Mapping[str, int]
    waits_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    serial: float = 0.0
    beside: float = 0.0

    @property
    def count(self) -> int:
        return max(self.lane_of.values(), default=-1) + 1


@dataclass(frozen=True)
class MemoryPlan:
    """The place of every storage of a recording.

    Where device graphs freeze addresses, planned storages lie in arenas. On the CPU, whose graph repeats its calls,
    temporaries lie in regions that exist during a call, and storages that may be live after it are allocated per
    call.

    Attributes:
        places: by storage index.
        sizes: bytes of every storage that has an allocation node or lies in a region, by storage index.
        outputs: storages of outputs; an arena reuses their bytes only when the outputs are not live.
        copied_back: inputs whose static buffer is copied to the caller's tensor after the last partition: those that
            the program writes, unless nobody sees it (a donated input that the caller does not get back).
        peak: the peak of the program's own memory, in bytes, with regions at their full size.
        lower_bound: the peak if every storage existed from its first use to its last only, in bytes; with arenas,
            the sum of their lower bounds.
        plain: the bytes that separate allocations without any reuse take.
        workspaces: where calls' workspace lies, by node, as far as it is planned.
        lanes: work that may run at the same time over this memory, in the order of the schedule.
    """

    places: tuple[Place, ...]
    regions: tuple[Region, ...]
    sizes: Mapping[int, int]
    outputs: frozenset[int]
    copied_back: frozenset[str] = frozenset()
    peak: int = 0
    lower_bound: int = 0
    plain: int = 0
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    lanes: tuple[Lanes, ...] = ()

    @functools.cached_property
    def arenas(self) -> Mapping[torch.device, Region]:
        """The regions that lie in arenas, by device. (``RecordingMemory.arenas`` has the arenas themselves.)"""
        return {region.device: region for region in self.regions if region.arena}

    @functools.cached_property
    def per_call(self) -> frozenset[int]:
        """Storages of known size that each call allocates separately, in no region."""
        return frozenset(i for i, place in enumerate(self.places) if place.home is Home.CALL and i in self.sizes)

    @property
    def size(self) -> int:
        """The bytes that this plan needs in arenas."""
        return sum(region.size for region in self.arenas.values())

    @property
    def kept(self) -> int:
        """The bytes of regions whose memory is kept for later calls."""
        return sum(region.size for region in self.regions if region.kept)

    def keeping(self, most: int) -> MemoryPlan:
        """The same plan; no memory is kept if that would be more than ``most`` bytes."""
        if self.kept <= most:
            return self
        return dataclasses.replace(self, regions=tuple(dataclasses.replace(r, kept=False) for r in self.regions))

    def inside(self, region: Region) -> dict[int, int]:
        """The offsets of the storages in a region, by storage."""
        number = next(n for n, candidate in enumerate(self.regions) if candidate is region)
        places = enumerate(self.places)
        return {i: place.offset for i, place in places if place.home is Home.REGION and place.region == number}

    def footprint(self, region: Region) -> list[tuple[int, int]]:
        """The bytes of a region that the program uses, as spans ``[low, high)`` in order, adjacent ones joined."""
        spans = [(low, low + self.sizes[index]) for index, low in self.inside(region).items()]
        inside = (one for one in self.workspaces.values() if self.regions[one.region] is region)
        return joined([*spans, *((one.offset, one.offset + one.nbytes) for one in inside)])


@dataclass(frozen=True)
class InputFacts:
    """What is known of a program's inputs and outputs before its graph is analysed. Both are given by position.

    Attributes:
        phase: "inference", "forward" or "backward".
        static: inputs that AOTAutograd marks as static: their addresses stay the same.
        donated: inputs that AOTAutograd marks as donated: not needed after their last use.
        write_only: inputs whose values are never read, because they are written first.
        used_outside: by position, the operator (``as_strided``) whose kernel may access the input's storage outside
            of the tensor.
        saved: AOTAutograd's names of the outputs that only backward gets.
        names: AOTAutograd's names of the inputs.
        apart: whether written inputs on the program's device share no memory with other inputs (``inputs_apart``).
    """

    phase: str = "inference"
    static: frozenset[int] = frozenset()
    donated: frozenset[int] = frozenset()
    write_only: frozenset[int] = frozenset()
    used_outside: Mapping[int, str] = field(default_factory=dict)
    saved: Mapping[int, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    apart: bool = False


@dataclass(frozen=True, eq=False)
class ProgramPlan:
    """The decisions about a host graph that need no concrete sizes. A plan is equal to itself alone: it is a key.

    With ``memory_limit``, what is recomputed was chosen at one set of sizes. The plan is correct at any size. It is
    known to keep the limit at these sizes only; ``Recorder.fit`` plans again for others.

    Attributes:
        repeated: the copies of nodes that recompute dropped values, in order.
        workspace: measured workspace of extern calls in bytes, by node; it holds at the sizes that the program was
            compiled for.
        compiled: the signatures of partitions that ``compile_partition`` replaced, by the partition's index.
    """

    graph: GraphModule = field(metadata=_NOT_STORED)
    facts: StorageFacts
    verdicts: Mapping[str, NodeVerdict]
    cut: Cut
    device: torch.device
    inputs: InputFacts
    workspace: Mapping[str, int] = field(default_factory=dict)
    compiled: Mapping[int, PartitionSignature] = field(default_factory=dict)
    repeated: tuple[Repeated, ...] = ()

    @property
    def phase(self) -> str:
        return self.inputs.phase

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return self.cut.partitions

    @functools.cached_property
    def nodes(self) -> Mapping[str, Node]:
        """The nodes of the graph, by name."""
        return by_name(self.graph)

    def work_in(self, partition: Partition) -> tuple[Node, ...]:
        """The nodes of a partition, in the order in which they run."""
        return tuple(map(self.nodes.__getitem__, partition.nodes))

    @functools.cached_property
    def schedule(self) -> tuple[Node, ...]:
        """The nodes of all partitions, in the order in which they run."""
        return tuple(node for partition in self.partitions for node in self.work_in(partition))

    @functools.cached_property
    def awaited(self) -> Mapping[Node, tuple[Node, ...]]:
        """The communications that end at a wait, by the node that waits."""
        return {self.nodes[n]: tuple(map(self.nodes.__getitem__, over)) for n, over in self.facts.awaited.items()}

    @functools.cached_property
    def placeholders(self) -> tuple[Node, ...]:
        """The inputs, in order."""
        return tuple(node for node in self.graph.graph.nodes if node.op == "placeholder")

    @functools.cached_property
    def numbers_returned(self) -> frozenset[int]:
        """Storages of one element that the caller gets, such as a loss. Where addresses are frozen, each has a block
        of its own, of the device's allocator.

        Callers keep numbers for longer than a call. In an arena, one that is kept would keep the whole arena, and the
        next recording would be planned around it. An allocator's smallest block is as large as its place there.
        """
        saved = (value for position, value in enumerate(output_values(self.graph)) if position in self.inputs.saved)
        for_backward = self.facts.behind(value for value in saved if isinstance(value, Node))
        allocations = (
            (index, self.maker(index))
            for index in self.facts.handed_out - for_backward
            if self.facts.storages[index].origin is Origin.ALLOCATION
        )
        return frozenset(
            index
            for index, node in allocations
            if node.kwargs["device"] == self.device and all(extent == 1 for extent in node.args[0])  # type: ignore
        )

    @functools.cached_property
    def lifetimes(self) -> Lifetimes:
        """When storages have to exist, in steps of the schedule.

        A partition that ``compile_partition`` replaced may work in any order: it uses its storages in all its steps.
        """
        steps: list[frozenset[int]] = []
        for partition in self.partitions:
            nodes = self.work_in(partition)
            if partition.index in self.compiled:
                steps += [self.facts.named_in(nodes)] * len(nodes)
            else:
                steps += (self.facts.named_in([node]) for node in nodes)
        return Lifetimes.of(steps)

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

    def shown_name(self, index: int) -> str:
        """The name of a storage in reports."""
        storage = self.facts.storages[index]
        return shown_name(self.maker(index)) if storage.element is None else storage.name


@dataclass(frozen=True, eq=False)
class SizedProgram:
    """A program at concrete sizes.

    Attributes:
        symbol_values: the values of symbolic nodes (``evaluate_sizes``).
        input_buffers: device and bytes of the static input buffer of each input that is copied, by input.
        frozen: whether device graphs freeze addresses; otherwise memory is allocated and freed within each call.
        donated: storages of inputs that are freed after their last use: the bytes of each, and the inputs that share
            it.
        workspace: bytes of workspace that calls have at these sizes, by node, where the plan does not know them.
        operators: what captured calls allocate at these sizes, by node, as far as the plan has a place for it.
        lanes: how much of a call may run at the same time.
    """

    plan: ProgramPlan
    symbol_values: Mapping[Node, int | float]
    input_buffers: Mapping[str, tuple[torch.device, int]]
    frozen: bool = True
    donated: tuple[tuple[int, tuple[str, ...]], ...] = ()
    workspace: Mapping[str, int] = field(default_factory=dict)
    operators: Mapping[str, OperatorMemory] = field(default_factory=dict)
    lanes: int = 1


# The intervals of each device's arena that live outputs of other recordings occupy.
Reservations = Mapping[torch.device, Sequence[Reserved]]

# What a joint plan of a forward and its backward says of one of the two: offsets of buffers by name, for the arena of
# each device. Size and lower bound are those of the joint plan.
PlacementHint = Mapping[torch.device, Placement]
