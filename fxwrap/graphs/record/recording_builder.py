"""Makes a recording of one call: lays memory out, captures or runs each partition, collects the parts of a replay.

The plan decides, and this module applies it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...errors import MemoryLimitError
from ...host_graph.nodes import Kind, checks_layout, checks_on, constants, is_work, kind_of, operator_name
from ...host_graph.sizes import symbols_at
from ...host_graph.tensors import has_address, tensors_in
from ...plan import Partition, ProgramPlan, Verdict
from ...torch_private.functions import after_failed_capture, below_autograd, layout_check, release_conditional_nodes
from ..devices.cpu_graph import BoundCall
from ..devices.device_graph import DeviceGraph
from ..devices.runtime import GraphPool
from ..memory.arenas import OUT_OF_MEMORY
from ..memory.static_buffers import StaticBuffers, copy_tensors
from ..memory.take_memory import take_memory
from ..replay.flat_python import Part
from ..replay.operands import Bound, Register
from ..replay.ranges import copies_after, copies_to_inputs, partition_range
from ..replay.recording import Recording, RecordingRequest, RecordingResources, Replay
from ..replay.steps import CallOperator, CallPython, ReplayGraph, Resize, Step, Store
from .capture import capture_graph, nodes_with_workspaces
from .flat import FlatBuilder, PostProcessing, Resizes
from .lanes import in_lanes
from .layout import Layout
from .nested import InGraph
from .outputs import Outputs
from .placed_calls import CallsDifferError, PlacedCalls
from .registers import Registers


@dataclass(frozen=True)
class Recorded:
    """The result of recording one call.

    Attributes:
        outputs: outputs of that call.
        capture_errors: operators whose capture failed, with the error: a new partition keeps them out of captures.
        not_native: why the native unit could not be made; empty if it was made, or none was to be made.
        not_placed: calls that have not allocated as it was planned, and how.
    """

    recording: Recording
    outputs: Any
    capture_errors: Mapping[str, str]
    not_native: str
    not_placed: Mapping[Node, str]


class RecordingBuilder:
    """Records one call of a program. It is used once; the recording holds all that a replay needs.

    Attributes:
        layout: the recording's memory.
        registers: the registers of values that change from call to call.
        fixed_values: values at fixed addresses: results of captured partitions, static buffers of eager results.
    """

    def __init__(self, request: RecordingRequest) -> None:
        self.request = request
        self.plan = request.sized.plan
        self._freezes_addresses = request.runtime.frozen_addresses
        self._constants = constants(self.plan.graph)
        self.registers = Registers.of(self.plan, request.memory, self._freezes_addresses)
        self._values: list[Any] = [None] * len(self.registers.by_node)
        # Storages with a fixed address: captured work uses them, or the plan puts them in an arena.
        in_arenas = map(request.memory.inside, request.memory.arenas.values())
        self._fixed_storages = self.plan.facts.named_in(self.plan.captured_work).union(*in_arenas)
        self.layout = Layout(request)
        self._parts: list[Part] = []
        self._graphs: list[DeviceGraph] = []
        self._pools: list[GraphPool | None] = []
        self.fixed_values: dict[Node, Any] = {}
        self._pooled: set[Node] = set()  # nodes whose results lie in the graph pool
        self._eager_reasons: dict[int, str] = {}
        self._refused: dict[str, str] = {}
        self._gave_up_because = ""
        self._inference = torch.is_inference_mode_enabled()
        self._captured = Counter[str]()
        operators = request.sized.operators.items()
        self._placed = PlacedCalls(request.runtime, {self.plan.nodes[name]: own for name, own in operators})

    def record(self, inputs: Sequence[Any]) -> Recorded:
        """Capture the program on ``inputs``, and run it once.

        On an error nothing is kept. If memory runs out after the first partition has run, the rest of the call runs
        eagerly, and the returned recording has already ended.

        Raises:
            MemoryLimitError: the device is out of memory, and nothing has run yet.
        """
        try:
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self.layout.make_tensors()
                self.layout.place_results()
                self._placed.lay_out(self.layout)
                common = self._capture_all(inputs)
            made = Outputs(self.request, self.layout, self.registers.by_node, self._values, frozenset(self._pooled))
            copies_back = list(self._copies_back())
            collect = made.part(FlatBuilder(*self._from_registers()), common)
            parts = (*self._parts, *copies_back, collect)
            replay = Replay(self._values, len(inputs), not self._freezes_addresses, parts)
            recording = self._make_recording(replay)
            for part in copies_back:
                part.run(self._values)
            outputs = collect.run(self._values)
            if self._inference and self._freezes_addresses:
                outputs = made.in_inference_mode(outputs, inputs)
            self._forget_inputs()  # what is live is counted below, from here on
            if self._gave_up_because:
                recording.end(self._gave_up_because)
            elif self.request.arenas:
                watched = [dataclasses.replace(output, owner=weakref.ref(recording)) for output in made.storages]
                recording.watch(watched, inputs, outputs)
        finally:
            self._forget_inputs()
            self.layout.regions.empty()
        not_native = "" if self._refused else recording.make_unit()
        return Recorded(recording, outputs, self._refused, not_native, self._placed.refused)

    def _forget_inputs(self) -> None:
        self.layout.input_tensors.clear()
        self._values[:] = [None] * len(self._values)

    def _make_recording(self, replay: Replay) -> Recording:
        kept = {**self.layout.tensors, **self.layout.input_buffers, **self.fixed_values}
        resources = RecordingResources(
            self._graphs, self._pools, kept, self.layout.in_arenas, self.layout.regions, self._eager_reasons
        )
        return Recording(self.request, replay, resources, self.layout.static_addresses)

    def _capture_all(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        """Run every partition once, captured or eagerly. Returns the values that are the same at every call."""
        self._values[: len(inputs)] = inputs
        self._add_input_checks()
        for part in self.layout.fill_input_buffers(inputs):
            self._parts.append(part)
            part.run(self._values)
        known = {**self._constants, **self.request.sized.symbol_values}
        common = {**known, **self.layout.tensors, **self.layout.input_buffers}
        bindings = _Bindings(inputs, common, {**common, **self.layout.static_inputs(inputs)})
        for partition in self.plan.partitions:
            if partition.verdict is Verdict.CAPTURED and not self._gave_up_because:
                self._capture(partition, bindings)
            else:
                self._add_eager(partition, bindings)
        return common

    def _copies_back(self) -> Iterator[Part]:
        if self.layout.copies_back:
            copy = torch.ops.aten.copy_.default
            copies = [
                CallOperator(copy, (Register(position), Bound(buffer)), overload=copy)
                for position, buffer in self.layout.copies_back
            ]
            yield Part.of(copies, name=copies_to_inputs(self.request.name))

    def _add_input_checks(self) -> None:
        """Run the asserts on inputs now. Those on static inputs run only now, the others at every call.

        Of inputs that overlap, one of which is written, AOTAutograd makes one, whose layout nothing guards (torch
        2.14.1 passes it with other dimensions). So a static input that is written is checked at every call.
        """
        facts, written = self.plan.facts, self.plan.facts.all_written()
        placeholders = (self.plan.placeholders[position] for position in self.request.static_inputs)
        static = {node for node in placeholders if written.isdisjoint(facts.of(node))}
        # Only inputs exist here: asserts that need results come later.
        known, registers = self._from_registers()
        registers = {node: i for node, i in registers.items() if node.op == "placeholder"}
        once, layouts, others = (FlatBuilder(dict(known), registers) for _ in range(3))
        checked = set[int]()
        for node in filter(once.available, checks_on(self.plan.placeholders)):
            inputs = [arg for arg in node.all_input_nodes if arg.op == "placeholder"]
            varying = [registers[arg] for arg in inputs if arg in registers]  # sizes are constants of the recording
            if static.issuperset(inputs):
                once.check(node)
            elif checks_layout(node) and all(
                isinstance(self._values[position], torch.Tensor) for position in varying
            ):
                layouts.check(node)
                checked.update(varying)
            else:
                others.check(node)
        check_once, check_layouts, check_others = (builder.build() for builder in (once, layouts, others))
        for flat in (check_once, check_layouts, check_others):
            flat.run(self._values)
        if checked:
            same = layout_check(self._values, sorted(checked))
            run = functools.partial(_unless, same, check_layouts.run)  # one check after another, which raise
            self._parts.append(dataclasses.replace(check_layouts, run=run))
        if check_others.steps:
            self._parts.append(check_others)

    def _from_registers(self) -> tuple[dict[Node, Any], dict[Node, int]]:
        """What a flat function binds, and what it reads from registers, if it binds only numbers and constants."""
        bound = {**self._constants, **self.request.sized.symbol_values}
        return bound, {n: i for n, i in self.registers.by_node.items() if n not in bound}

    def _capture(self, partition: Partition, bindings: _Bindings) -> None:
        runtime = self.request.runtime
        stores = self.registers.stores.get(partition.index, [])
        filled = [self.registers.by_node[node] for node in stores]
        refused = -1
        while refused < len(self._placed.refused):  # once more, without the calls that have allocated otherwise
            refused = len(self._placed.refused)
            flat = self._flat(partition, bindings, True, stores)
            call = BoundCall(flat.run, flat.source, self._values, below_autograd, len(bindings.inputs), filled)
            with runtime.keeping_stream():
                graph = self._try_to_capture(partition, flat, call)
        if graph is None:
            # Earlier partitions have run. This one runs eagerly, now and in replays. Later ones are still captured,
            # unless memory ran out.
            self._add_eager(partition, bindings)
            return
        if not runtime.runs_while_capturing:
            graph.replay()
        self._graphs.append(graph)
        part = Part.of([ReplayGraph(graph, node=_only_work(self.plan, partition))], name=flat.name)
        if not self._freezes_addresses:
            # The CPU's graph calls the flat function on the same registers, so that ``run`` and the steps, which a
            # native unit runs, do the same.
            lanes = in_lanes(flat.steps, self.request.memory.lanes)
            part = dataclasses.replace(flat, run=part.run, below_autograd=True, lanes=lanes)
        self._parts.append(part)
        if self._freezes_addresses:
            # Results that operators allocate during capture keep their addresses, so later work may bind them. The
            # recording holds them: otherwise a later capture could get their memory.
            stable = self._fixed_addresses(bindings.inputs)
            for node in stores:
                value = self._values[self.registers.by_node[node]]
                if any(tensor.untyped_storage().data_ptr() not in stable for tensor in tensors_in(value)):
                    self._pooled.add(node)
                self._bind(node, value, bindings)

    def _try_to_capture(self, partition: Partition, flat: Part, call: BoundCall) -> DeviceGraph | None:
        """Capture a partition; None, with the reason noted, if that fails."""
        runtime, capture = self.request.runtime, functools.partial(self._capture_graph, call, partition)
        if runtime.runs_while_capturing:
            # Capture runs the work. It cannot be retried, and its errors are those of Inductor's wrapper.
            return capture()
        try:
            return take_memory(runtime.device, capture, functools.partial(self._forget, call))
        except CallsDifferError:
            self._forget(call)
        except MemoryLimitError:
            if partition is self.plan.partitions[0]:
                raise  # nothing has run yet
            self._give_up(partition)
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._eager_reasons[partition.index] = f"capture failed: {failure}"
            node = flat.node_at(error)
            if node is not None and is_work(node) and partition.index not in self.plan.compiled:
                self._refused[operator_name(node)] = failure
        return None

    def _capture_graph(self, call: BoundCall, partition: Partition) -> DeviceGraph:
        pool = self._pool()  # a new pool after a failed capture
        self._captured.clear()
        with self._placed.capturing():
            graph = capture_graph(self.request, call, partition, pool, self._as_replayed())
        if pool is not None and (nodes := self._captured["nodes"]):
            release_conditional_nodes(self.request.runtime.device, pool.id, nodes)
        self._pools.append(pool)
        return graph

    def _forget(self, call: BoundCall) -> None:
        """Drop references that a failed capture left, before the retry."""
        for register in call.stores:
            self._values[register] = None

    def _give_up(self, partition: Partition) -> None:
        """Out of memory: drop graphs and pools, and clear the arenas; the rest of this call can then run eagerly."""
        self._gave_up_because = self._eager_reasons[partition.index] = OUT_OF_MEMORY
        self._graphs, self._parts, self._pools = [], [], []
        self._clear_arenas()

    def _clear_arenas(self) -> None:
        for arena in self.request.arenas.values():
            arena.clear(OUT_OF_MEMORY)

    def _pool(self) -> GraphPool | None:
        """The pool that captures share. It belongs to an arena, and is used under the arena's lock."""
        runtime = self.request.runtime
        arena = self.request.arenas.get(runtime.device)
        return arena.pool(runtime, after_failed_capture) if arena is not None else None

    def _allocate_buffer(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Memory for a static buffer; from the pool of an arena that can be suspended, so that both are suspended."""
        arena = self.request.arenas.get(device)
        if arena is None or arena.memory is None or (pool := self._pool()) is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._pools.append(pool)
        return pool.allocate(nbytes, device)

    def _add_eager(self, partition: Partition, bindings: _Bindings) -> None:
        stores = self.registers.stores.get(partition.index, [])
        flat = self._flat(partition, bindings, False, stores)
        self._parts.append(flat)
        with self._as_replayed():
            flat.run(self._values)
        if not self._freezes_addresses or self._gave_up_because:
            return
        # Graphs read fixed addresses. Results of eager work that the plan does not place are copied to static
        # buffers.
        stable, r = self._fixed_addresses(bindings.inputs), self._values
        static_buffers = StaticBuffers(stable, self._allocate_buffer)
        nodes = [node for node in self.registers.complete.get(partition.index, ()) if self._needs_fixed_address(node)]
        registers = [self.registers.by_node[node] for node in nodes]
        try:
            device = self.request.runtime.device
            buffers = take_memory(device, lambda: [static_buffers.buffer_of(r[n]) for n in registers], lambda: None)
        except MemoryLimitError:
            self._give_up(partition)
            return
        refresh = list(zip(registers, buffers, strict=True))
        for node, (register, buffer) in zip(nodes, refresh, strict=True):
            r[register] = buffer
            self._bind(node, buffer, bindings)
        if refresh:
            steps = list[Step]()
            for register, buffer in refresh:
                steps.append(CallPython(copy_tensors, (Register(register), Bound(buffer))))
                steps.append(Store(Register(register), Bound(buffer)))
            name = copies_after(self.request.name, partition.index)
            self._parts.append(Part.of(steps, name=name))

    def _as_replayed(self) -> contextlib.AbstractContextManager[Any]:
        """The mode for a capture or a first run: the caller's inference mode if replays make new tensors."""
        if self._inference and not self._freezes_addresses:
            return torch.inference_mode()
        return contextlib.nullcontext()  # inference_mode(False) would switch gradients on

    def _needs_fixed_address(self, node: Node) -> bool:
        """Whether a result of eager work needs a fixed address."""
        value = node.meta.get("val")
        if self.plan.verdicts[node.name].data_dependent or (
            isinstance(value, torch.Tensor) and not has_address(value)
        ):
            return False
        indices = self.plan.facts.values.get(node.name)
        return indices is None or not indices.isdisjoint(self._fixed_storages)

    def _bind(self, node: Node, value: Any, bindings: _Bindings) -> None:
        """Let later work bind a value, which is at a fixed address."""
        bindings.captured[node] = bindings.common[node] = self.fixed_values[node] = value

    def _fixed_addresses(self, inputs: Sequence[Any]) -> set[int]:
        """Addresses of storages that are the same at every call."""
        known = [
            *self.layout.tensors.values(),
            *self.fixed_values.values(),
            *self.layout.input_buffers.values(),
        ]
        known += [inputs[position] for position in self.request.static_inputs]
        known += list(self._constants.values())
        tensors = (tensor for value in known for tensor in tensors_in(value))
        return self.layout.placed.addresses.union(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def _flat(self, partition: Partition, bindings: _Bindings, captured: bool, stores: Sequence[Node]) -> Part:
        # On the CPU eager partitions bind static inputs as well, so that views of them are made once.
        bound = bindings.captured if captured or not self._freezes_addresses else bindings.common
        last = {node for node, index in self.registers.last_reader.items() if index == partition.index}
        registers = {n: i for n, i in self.registers.by_node.items() if n not in bound}
        work = self.plan.work_in(partition)
        before, after = (_resizes(memory) for memory in (self.layout.regions.before, self.layout.regions.after))
        processing: PostProcessing = {}
        calls = self._placed.of(work) if captured else {}
        if self._freezes_addresses:
            copied = [node for node in work if node not in calls]
            processing = self.layout.placed.result_copies(copied, self._fixed_addresses(bindings.inputs))
        in_graph = None
        runtime = self.request.runtime
        if captured and runtime.conditional_nodes is not None:
            symbols = symbols_at(self.request.sized.symbol_values)
            in_graph = InGraph(runtime.device, nodes_with_workspaces(self.request, self._captured), symbols)
        builder = FlatBuilder(bound, registers, last, before, after, processing, in_graph=in_graph, calls=calls)
        builder.append_partition(self.plan, partition, [node for node in stores if node not in bound])
        return builder.build(name=partition_range(self.request.name, partition.index))


@dataclass(frozen=True)
class _Bindings:
    """Values that flat functions may bind.

    Attributes:
        inputs: the inputs of the recorded call.
        common: values that are the same at every call.
        captured: ``common``, and static inputs: for captured partitions, and for all where addresses are not frozen.
    """

    inputs: Sequence[Any]
    common: dict[Node, Any]
    captured: dict[Node, Any]


def _only_work(plan: ProgramPlan, partition: Partition) -> Node | None:
    """The node that a partition runs, if it is but one; of a partition that is compiled elsewhere, the last."""
    work = [node for node in plan.work_in(partition) if kind_of(node) is not Kind.CHECK]
    return work[-1] if len(work) == 1 or partition.index in plan.compiled else None


def _unless(holds: Callable[[list[Any]], bool], check: Callable[[list[Any]], Any], r: list[Any]) -> None:
    if not holds(r):
        check(r)


def _resizes(memory: Mapping[Node, Sequence[tuple[torch.UntypedStorage, int]]]) -> Resizes:
    return {node: [Resize(storage, nbytes) for storage, nbytes in several] for node, several in memory.items()}
