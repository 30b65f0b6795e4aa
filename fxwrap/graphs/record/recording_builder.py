"""Makes recordings. The one place where decisions are applied: memory is laid out, partitions are captured."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...errors import MemoryLimitError
from ...host_graph.nodes import (
    Kind,
    checks_layout,
    checks_on,
    constants,
    effective_users,
    kind_of,
    only_computes,
    operator_name,
    output_node,
)
from ...host_graph.tensors import has_address, reach, tensor_like, tensor_over, tensors_in
from ...plan import Home, Origin, Partition, Verdict
from ..devices.cpu_graph import BoundCall, issue
from ..devices.device_graph import DeviceGraph
from ..devices.runtime import GraphPool
from ..memory.arenas import OUT_OF_MEMORY, take_memory
from ..memory.live_outputs import OutputStorage
from ..memory.output_views import copy_out, each, relay, relay_shared, shares_storage, views_of
from ..memory.regions import Regions
from ..memory.static_buffers import StaticBuffers, copy_tensors, unexpanded
from ..replay.flat_python import Part
from ..replay.operands import Bound, Register
from ..replay.ranges import copies_after, copies_of_inputs, copies_to_inputs, partition_range
from ..replay.recording import Recording, RecordingRequest, RecordingResources, Replay
from ..replay.steps import CallPython, Copy, Fill, ReplayGraph, Resize, Step, Store, View
from .flat import FlatBuilder, FlatFunction, PostProcessing, Steps
from .placed_results import PlacedResults
from .registers import Registers


@dataclass(frozen=True)
class Recorded:
    """The result of recording one call.

    Attributes:
        outputs: outputs of that call.
        refused: operators whose capture failed, with the error: the program can be partitioned again around them.
        not_native: why it replays in Python although it was to replay natively; empty if it does not.
    """

    recording: Recording
    outputs: Any
    refused: Mapping[str, str]
    not_native: str


class RecordingBuilder:
    """Records one call of a program. It is used once; the recording holds all that a replay needs."""

    def __init__(self, request: RecordingRequest) -> None:
        self.request = request
        self.plan = request.planned.program
        self._frozen = request.runtime.frozen_addresses
        self._placeholders = self.plan.placeholders
        self._constants = constants(self.plan.graph)
        self._registers = Registers.of(self.plan, request.memory, self._frozen)
        self._values: list[Any] = [None] * len(self._registers.by_node)
        self._inputs_end = len(self._placeholders)
        # Storages with a fixed address: captured work names them, or the plan puts them in an arena.
        in_arenas = map(request.memory.inside, request.memory.arenas.values())
        self._fixed_storages = self.plan.facts.named_in(self.plan.captured_work).union(*in_arenas)
        self._memory: dict[Node, torch.Tensor] = {}
        self._in_arenas: dict[int, tuple[torch.device, int]] = {}
        self._regions = Regions(self.plan, request.memory)
        self._placed = PlacedResults()
        self._input_buffers: list[torch.Tensor] = []
        self._mutated: list[tuple[int, torch.Tensor]] = []
        self._static_addresses: list[Any] = [None] * len(self._placeholders)
        # By position: the tensor that stands for a static or copied input.
        self._input_tensors: dict[int, torch.Tensor] = {}
        self._parts: list[Part] = []
        self._graphs: list[DeviceGraph] = []
        self._pools: list[GraphPool | None] = []
        self._captured_values: list[Any] = []
        # Nodes whose results lie in the graph pool. Outputs among them are copied: others may get the same bytes.
        self._pooled: set[Node] = set()
        self._output_storages: list[OutputStorage] = []
        self._eager_reasons: dict[int, str] = {}
        self._refused: dict[str, str] = {}
        self._gave_up_because = ""
        self._inference = torch.is_inference_mode_enabled()

    def record(self, inputs: Sequence[Any]) -> Recorded:
        """Capture the program on ``inputs``, and run it once.

        On an error nothing is kept. If memory runs out after the first step, the returned recording has ended.

        Raises:
            MemoryLimitError: the device is out of memory, and nothing has run yet.
        """
        try:
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                with self._regions.filled():
                    self._make_tensors()
                self._place_results()
                common = self._capture_all(inputs)
            *copies_back, collect = last = [*self._copies_back(), self._outputs_part(common)]
            replay = Replay(self._values, self._inputs_end, not self._frozen, (*self._parts, *last))
            recording = self._make_recording(replay)
            for part in copies_back:
                part.run(self._values)
            outputs = collect.run(self._values)
            if self._inference and self._frozen:
                outputs = self._in_inference_mode(outputs, inputs)
            self._forget_inputs()
            if self._gave_up_because:
                recording.end(self._gave_up_because)
            elif self.request.arenas:
                watched = [dataclasses.replace(one, owner=weakref.ref(recording)) for one in self._output_storages]
                recording.watch(watched, inputs, outputs)
        finally:
            self._forget_inputs()
            self._regions.empty()
        return Recorded(recording, outputs, self._refused, "" if self._refused else recording.make_unit())

    def _in_inference_mode(self, outputs: Any, inputs: Sequence[Any]) -> Any:
        """Outputs of this call as inference tensors. Recording runs outside inference mode; replays do not."""
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in(list(inputs))}

        def made(tensor: torch.Tensor) -> torch.Tensor:
            theirs = tensor.is_inference() or not has_address(tensor) or tensor.untyped_storage()._cdata in given
            return tensor if theirs else _alias(self.request.functions.lay_out, tensor)

        return each(made, outputs)

    def _forget_inputs(self) -> None:
        self._input_tensors.clear()
        self._values[:] = [None] * len(self._values)

    def _make_recording(self, replay: Replay) -> Recording:
        kept = [*self._memory.values(), *self._captured_values]
        resources = RecordingResources(
            self._graphs, self._pools, kept, self._in_arenas, self._regions, self._eager_reasons
        )
        return Recording(self.request, replay, resources, self._static_addresses)

    def _clear_arenas(self, why: str) -> None:
        """End all recordings in the arenas, and drop the arenas' memory."""
        for arena in self.request.arenas.values():
            arena.clear(why)

    def _make_tensors(self) -> None:
        """Make tensors over planned and per-recording memory.

        Static input buffers come later (``_fill_input_buffers``).
        """
        for storage, place in zip(self.plan.facts.storages, self.request.memory.places, strict=True):
            if storage.origin is not Origin.ALLOCATION:
                continue
            node = self.plan.nodes[storage.node]
            options: Any = node.kwargs
            match place.home:
                case Home.REGION:
                    space, offset = self._regions.places.get(storage.index) or (self._planned(storage.index), 0)
                    size, stride = self._layout(node)
                    self._memory[node] = tensor_over(space, size, stride, options["dtype"], offset)
                case Home.RECORDING:
                    self._memory[node] = torch.empty_strided(*self._layout(node), **options)

    def _place_results(self) -> None:
        for storage, place in zip(self.plan.facts.storages, self.request.memory.places, strict=True):
            if storage.origin is Origin.EXTERN and place.home is Home.REGION:
                self._placed.add(self.plan.nodes[storage.node], storage.element, self._planned(storage.index))

    def _planned(self, index: int) -> torch.UntypedStorage:
        """A new storage object over a storage's bytes in its arena."""
        place, memory = self.request.memory.places[index], self.request.memory
        device = memory.regions[place.region].device
        storage = self.request.arenas[device].storage(place.offset, memory.sizes[index])
        self._in_arenas[storage._cdata] = device, place.offset
        return storage

    def _layout(self, node: Node) -> Any:
        return torch.fx.map_arg(node.args[:2], self.request.planned.symbol_values.__getitem__)

    def _capture_all(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        """Capture every partition, and run it once. Returns the values that are the same at every call."""
        self._values[: self._inputs_end] = inputs
        self._add_input_checks()
        common = {**self._constants, **self.request.planned.symbol_values, **self._memory}
        common.update(self._fill_input_buffers(inputs))
        bindings = _Bindings(inputs, common, {**common, **self._static_inputs(inputs)})
        for partition in self.plan.partitions:
            if partition.verdict is Verdict.CAPTURED and not self._gave_up_because:
                self._capture(partition, bindings)
            else:
                self._add_eager(partition, bindings)
        return common

    def _copies_back(self) -> Iterator[Part]:
        if self._mutated:
            copies = [Copy(Register(position), Bound(buffer)) for position, buffer in self._mutated]
            yield Part.of(copies, copies_to_inputs(self.request.name))

    def _add_input_checks(self) -> None:
        """Run the asserts on inputs now. Those on static inputs run only now, the others at every call."""
        static = {self._placeholders[position] for position in self.request.static_inputs}
        # An assert may also name values that no work has computed yet. Only inputs exist here.
        known, registers = self._from_registers()
        registers = {node: i for node, i in registers.items() if node.op == "placeholder"}
        once, layouts, others = (FlatBuilder(dict(known), registers) for _ in range(3))
        looked_at = set[int]()
        for node in filter(once.available, checks_on(self._placeholders)):
            inputs = [arg for arg in node.all_input_nodes if arg.op == "placeholder"]
            varying = [registers[arg] for arg in inputs if arg in registers]  # sizes are constants of the recording
            if static.issuperset(inputs):
                once.check(node)
            elif checks_layout(node) and all(
                isinstance(self._values[position], torch.Tensor) for position in varying
            ):
                layouts.check(node)
                looked_at.update(varying)
            else:
                others.check(node)
        check_once, check_layouts, check_others = (builder.build() for builder in (once, layouts, others))
        for flat in (check_once, check_layouts, check_others):
            flat.function(self._values)
        if looked_at:
            same = self.request.functions.layout_check(self._values, sorted(looked_at))
            run = functools.partial(_unless, same, check_layouts.function)  # which raises if a layout is wrong
            self._parts.append(Part(run, check_layouts.lines))
        if check_others.lines:
            self._parts.append(Part(check_others.function, check_others.lines))

    def _from_registers(self) -> tuple[dict[Node, Any], dict[Node, int]]:
        """Bind only numbers and constants. Everything else comes from registers."""
        bound = {**self._constants, **self.request.planned.symbol_values}
        return bound, {n: i for n, i in self._registers.by_node.items() if n not in bound}

    def _fill_input_buffers(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        """Lay out static input buffers, and fill them."""
        found: dict[Node, Any] = {}
        written = self.plan.facts.all_written()
        buffers: dict[torch.device, tuple[list[torch.Tensor], list[int]]] = {}
        steps: dict[torch.device, list[Step]] = {}
        for position, node in enumerate(self._placeholders):
            if node.name not in self.request.planned.input_buffers:
                continue
            (index,) = self.plan.facts.of(node)
            value = inputs[position]
            buffer = tensor_like(value, self._planned(index))
            found[node] = self._input_tensors[position] = buffer
            self._input_buffers.append(buffer)
            if buffer.is_conj() or buffer.is_neg():  # torch refuses to write to such tensors in a list
                copy = CallPython(copy_tensors, (Register(position), Bound(buffer)))
                steps.setdefault(buffer.device, []).append(copy)
            else:
                tensors, positions = buffers.setdefault(buffer.device, ([], []))
                tensors.append(unexpanded(buffer))
                positions.append(position)
            if index in written and position not in self.plan.donated:
                self._mutated.append((position, buffer))
        name = copies_of_inputs(self.request.name)
        for device, (tensors, positions) in buffers.items():
            steps.setdefault(device, []).append(Fill(tuple(tensors), tuple(map(Register, positions))))
        for copies in steps.values():
            self._parts.append(Part.of(copies, name))
            self._parts[-1].run(self._values)
        return found

    def _static_inputs(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        """Static inputs, without a reference to them: the owner may free one, or count references.

        A hardware graph keeps only addresses. The CPU's graph keeps tensors, so these are made over the same memory
        without owning it. There a custom operator may keep its operands, so it gets the caller's own tensor.
        """
        may_keep = self.plan.replaced_work
        found: dict[Node, Any] = {}
        for position in self.request.static_inputs:
            value = inputs[position]
            self._static_addresses[position] = value.data_ptr()
            if value.device.type == "cpu":
                users = effective_users(self._placeholders[position])
                if not self._frozen and any(
                    user in may_keep or not (user.op == "output" or only_computes(user)) for user in users
                ):
                    continue
                value = self._without_holding(value)
            found[self._placeholders[position]] = self._input_tensors[position] = value
        return found

    def _without_holding(self, value: torch.Tensor) -> torch.Tensor:
        nbytes = reach(value)
        if not nbytes:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
        storage = self.request.functions.storage_at(value.data_ptr(), value.device, nbytes)
        return tensor_like(value, storage)

    def _capture(self, partition: Partition, bindings: _Bindings) -> None:
        runtime = self.request.runtime
        stores = self._registers.stores.get(partition.index, [])
        flat = self._flat(partition, bindings, True, stores)
        filled = [self._registers.by_node[node] for node in stores]
        call = BoundCall(
            flat.function, flat.source, self._values, self.request.functions.below_autograd, self._inputs_end, filled
        )
        capture = functools.partial(self._capture_graph, call, partition.index)
        try:
            if runtime.runs_while_capturing:
                graph = capture()  # capture has already run the work; it cannot be retried
            else:
                graph = take_memory(runtime.device, capture, functools.partial(self._forget, call))
        except Exception as error:
            graph = None
            if runtime.runs_while_capturing:
                raise  # the work itself failed, as it would have in Inductor's wrapper
            if isinstance(error, MemoryLimitError):
                if partition is self.plan.partitions[0]:
                    raise  # nothing has run yet
                self._give_up(partition)
            else:
                failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                self._eager_reasons[partition.index] = f"capture failed: {failure}"
                if (node := flat.node_at(error)) is not None:
                    self._refused[operator_name(node)] = failure
        if graph is None:
            # Earlier partitions have run. This one runs eagerly, now and in replays. Later ones are still captured,
            # unless memory ran out.
            self._add_eager(partition, bindings)
            return
        if not runtime.runs_while_capturing:
            graph.replay()
        self._graphs.append(graph)
        # The CPU's graph runs on the same registers.
        part = Part.of([ReplayGraph(graph)], partition_range(self.request.name, partition.index))
        if not self._frozen:
            part = dataclasses.replace(part, steps=flat.lines, below_autograd=True)
        self._parts.append(part)
        if self._frozen:
            # Results that operators allocate during capture keep their addresses, so later work may bind them. The
            # recording holds them: otherwise a later capture could get their memory.
            stable = self._fixed_addresses(bindings.inputs)
            for node in stores:
                value = self._values[self._registers.by_node[node]]
                if any(tensor.untyped_storage().data_ptr() not in stable for tensor in tensors_in(value)):
                    self._pooled.add(node)
                self._bind(node, value, bindings)

    def _capture_graph(self, call: BoundCall, partition: int) -> DeviceGraph:
        runtime, pool = self.request.runtime, self._pool()
        graph = runtime.new_graph(pool.id if pool is not None else None)
        self.request.traces.capturing(graph)

        def work() -> None:
            with self._as_replayed():
                issue(call)

        with self._own_workspaces(pool):
            runtime.capture(graph, work, pool)
        graph.instantiate()
        self.request.traces.captured(graph, partition)
        self._pools.append(pool)
        return graph

    @contextlib.contextmanager
    def _own_workspaces(self, pool: GraphPool | None) -> Iterator[None]:
        """Have libraries take a workspace for one capture only: from the pool, which gets it back.

        A workspace belongs to a thread and a stream, and graphs capture its address. One that stayed would be held
        for each thread that captures; one that was taken before the pool was there would lie outside of it. Later
        captures may reuse a graph's workspace, as they do its other temporaries: graphs of a pool never run at one
        time. Nobody else issues work on the pool's stream.
        """
        free, side = self.request.functions.free_workspaces, pool.stream if pool is not None else None
        free(side)
        try:
            yield
        finally:
            free(side)

    def _forget(self, call: BoundCall) -> None:
        """Drop references that a failed capture left, before the retry."""
        for register in call.stores:
            self._values[register] = None

    def _give_up(self, partition: Partition) -> None:
        """Out of memory: drop graphs and pools, so that the rest of this call can run eagerly."""
        self._gave_up_because = self._eager_reasons[partition.index] = OUT_OF_MEMORY
        self._graphs, self._parts, self._pools = [], [], []
        self._clear_arenas(OUT_OF_MEMORY)

    def _pool(self) -> GraphPool | None:
        """The pool that captures share. It belongs to an arena: whoever holds the arena's lock may use it."""
        runtime = self.request.runtime
        arena = self.request.arenas.get(runtime.device)
        return arena.pool(runtime, self.request.functions.after_failed_capture) if arena is not None else None

    def _add_eager(self, partition: Partition, bindings: _Bindings) -> None:
        stores = self._registers.stores.get(partition.index, [])
        flat = self._flat(partition, bindings, False, stores)
        name = partition_range(self.request.name, partition.index)
        self._parts.append(Part(flat.function, flat.lines, name=name))
        with self._as_replayed():
            flat.function(self._values)
        if not self._frozen or self._gave_up_because:
            return
        # Graphs read fixed addresses. Results of eager work that the plan does not place are copied to static
        # buffers.
        static_buffers, r = StaticBuffers(self._fixed_addresses(bindings.inputs)), self._values
        nodes = [
            node for node in self._registers.complete.get(partition.index, ()) if self._needs_fixed_address(node)
        ]
        registers = [self._registers.by_node[node] for node in nodes]
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
            self._parts.append(Part.of(steps, name))

    def _as_replayed(self) -> contextlib.AbstractContextManager[Any]:
        """The CPU's graph allocates during capture as at replay: in the caller's inference mode."""
        if self._inference and not self._frozen:
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
        """Later work may bind the value: it is at a fixed address."""
        bindings.captured[node] = bindings.common[node] = value
        self._captured_values.append(value)

    def _fixed_addresses(self, inputs: Sequence[Any]) -> set[int]:
        """Addresses of storages that are the same at every call."""
        known = [
            *self._memory.values(),
            *self._captured_values,
            *self._input_buffers,
        ]
        known += [inputs[position] for position in self.request.static_inputs]
        known += list(self._constants.values())
        return {t.untyped_storage().data_ptr() for value in known for t in tensors_in(value)} | self._placed.addresses

    def _flat(
        self, partition: Partition, bindings: _Bindings, captured: bool, stores: Sequence[Node]
    ) -> FlatFunction:
        bound = bindings.captured if captured else bindings.common
        last = {node for node, index in self._registers.last_reader.items() if index == partition.index}
        registers = {n: i for n, i in self._registers.by_node.items() if n not in bound}
        work = self.plan.work_in(partition)
        before, after = (_resizes(memory) for memory in (self._regions.before, self._regions.after))
        processing: PostProcessing = (
            self._placed.result_copies(work, self._fixed_addresses(bindings.inputs)) if self._frozen else {}
        )
        builder = FlatBuilder(bound, registers, last, before, after, processing)
        with self._regions.filled():  # views over regions are made: they need memory
            builder.run_partition(self.plan, partition, [node for node in stores if node not in bound])
            return builder.build()

    def _outputs_part(self, common: dict[Node, Any]) -> Part:
        """What returns the outputs; collect the storages to watch."""
        output = output_node(self.plan.graph)
        lay_out = self.request.functions.lay_out
        builder = FlatBuilder(*self._from_registers())
        for node, users in _made_of(output).items():
            indices = self.plan.facts.of(node)
            makers = map(self.plan.maker, indices & self.request.memory.outputs)
            memory = [self._memory[maker] for maker in makers if maker in self._memory]
            planned = bool(memory) and node in self._memory
            value: Bound | Register
            if planned:
                value, owned = Bound(self._memory[node]), memory
            elif node.op == "placeholder" or node not in self._registers.by_node:
                continue
            elif (position := self._aliased_input(node)) is not None:
                # The result aliases an input: the output is a view of the caller's own tensor.
                given, seen = builder.register(self._placeholders[position]), self._input_tensors[position]
                if self._frozen:
                    views = views_of(self._values[self._registers.by_node[node]], seen.data_ptr())
                    builder.assign(node, CallPython(functools.partial(relay, views), (given,)))
                else:
                    shared = functools.partial(relay_shared, seen)
                    builder.assign(node, CallPython(shared, (builder.register(node), given)))
                continue
            elif self._frozen and node in common:
                # At a fixed address: a static buffer, a placed result, or the pool.
                value, owned = Bound(common[node]), tensors_in(common[node])
            elif memory:
                value, owned = builder.register(node), memory  # an operator returned planned memory
            else:
                continue  # new at every call
            fake = node.meta.get("val")
            # A sparse tensor's components are not outputs themselves.
            has_no_address = isinstance(fake, torch.Tensor) and not has_address(fake)
            copy = bool(indices & self.request.copied) or node in self._pooled or has_no_address
            if copy:
                builder.assign(node, CallPython(functools.partial(each, copy_out), (value,)))
            elif planned and all(user.meta.get("call") is lay_out for user in users):
                builder.stand_for(node, value)  # every user makes a new tensor over it
            elif planned:
                builder.assign(node, self._like(value, self._memory[node]))
            else:
                alias = functools.partial(each, functools.partial(_alias, lay_out))
                builder.assign(node, CallPython(alias, (value,)))
            if not copy:
                self._watch(owned, indices)
                if self._frozen and isinstance(value, Bound):
                    self._lay_out_views(builder, node, value.value, output)
        flat = builder.build(output.args[0])
        return Part(flat.function, flat.lines, flat.result)

    def _like(self, value: Bound | Register, tensor: torch.Tensor) -> View:
        """A new tensor over the memory of ``value``, laid out as ``tensor``."""
        size, stride = Bound(tuple(tensor.size())), Bound(tensor.stride())
        return View(self.request.functions.lay_out, value, size, stride)

    def _lay_out_views(self, builder: FlatBuilder, node: Node, value: Any, output: Node) -> None:
        """Make outputs that are views of ``value`` as new tensors over its memory, which does not move.

        A view operator's result also refers to its base, and would raise the use count by which an output is live.
        """
        known, lay_out = {**builder.bound, node: value}, self.request.functions.lay_out
        for view in _views_in(node, output):
            if not all(arg in known for arg in view.all_input_nodes):
                continue
            args, kwargs = torch.fx.map_arg((view.args, view.kwargs), known.__getitem__)
            call = view.meta.get("call", view.target)
            known[view] = made = call(*args, **kwargs)
            if call is not lay_out and isinstance(made, torch.Tensor) and output in view.users and has_address(made):
                builder.assign(view, self._like(Bound(made), made))

    def _aliased_input(self, node: Node) -> int | None:
        """Position of the input that a result aliases (its memory, or its static buffer), declared or not."""
        value = self._values[self._registers.by_node[node]]
        return next((p for p, seen in self._input_tensors.items() if shares_storage(seen, value)), None)

    def _watch(self, tensors: Sequence[torch.Tensor], indices: frozenset[int]) -> None:
        known = {output.storage.data_ptr() for output in self._output_storages}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known or not storage.nbytes():
                self.request.functions.share_copies(storage)
                device, low = self._in_arenas.get(storage._cdata, (None, 0))
                self._output_storages.append(OutputStorage(storage, indices, device, low))


@dataclass(frozen=True)
class _Bindings:
    """Values that flat functions may bind.

    Attributes:
        inputs: of the call that is recorded.
        common: values that are the same at every call.
        captured: what captured partitions may count on: these, and static inputs.
    """

    inputs: Sequence[Any]
    common: dict[Node, Any]
    captured: dict[Node, Any]


def _made_of(output: Node) -> dict[Node, list[Node]]:
    """For each value behind the outputs that is no view: its users on the way to ``output`` (views of it, or
    ``output``)."""
    found: dict[Node, list[Node]] = {}
    users = [output]
    for user in users:
        for node in user.all_input_nodes:
            if node not in found and kind_of(node) is Kind.VIEW:
                users.append(node)
            found.setdefault(node, []).append(user)
    return {node: users for node, users in found.items() if kind_of(node) is not Kind.VIEW}


def _views_in(node: Node, output: Node) -> list[Node]:
    """The views of a value that outputs need, bases first."""
    found, wanted = [node], {output}
    for one in found:
        found += [user for user in one.users if kind_of(user) is Kind.VIEW and user not in found]
    for one in reversed(found):
        if not wanted.isdisjoint(one.users):
            wanted.add(one)
    return [one for one in found[1:] if one in wanted]


def _unless(holds: Callable[[list[Any]], bool], check: Callable[[list[Any]], Any], r: list[Any]) -> None:
    if not holds(r):
        check(r)


def _resizes(memory: Mapping[Node, Sequence[tuple[torch.UntypedStorage, int]]]) -> Steps:
    return {node: [Resize(storage, nbytes) for storage, nbytes in several] for node, several in memory.items()}


def _alias(lay_out: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    if not has_address(tensor):
        return tensor
    return lay_out(tensor, tuple(tensor.size()), tensor.stride(), 0)
