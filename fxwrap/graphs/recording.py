"""A recording: a program captured for one set of concrete shapes. The one place where decisions are applied."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from ..errors import MemoryLimitError
from ..host_graph.nodes import (
    Kind,
    checks_layout,
    checks_on,
    constants,
    effective_users,
    kind_of,
    operator_name,
    output_node,
    reinterpret,
)
from ..plan import MemoryPlan, Origin, Partition, Planned, Verdict
from .arenas import OUT_OF_MEMORY, Arena, has_address, reach, take_memory, tensor_over, tensors_in
from .devices.device_graph import DeviceGraph
from .devices.host_graph import issue
from .devices.runtime import DeviceRuntime, GraphPool
from .flat import FlatBuilder, FlatFunction
from .live_outputs import LivenessGuard, LiveOutputs, OutputStorage
from .locks import LockOwner, TryLock
from .output_views import copy_out, each, relay, views_of
from .placement import MemoryKeptError, PlacedResults
from .regions import Regions
from .static_buffers import StaticBuffers, copy_tensors, unexpanded
from .torch_functions import TorchFunctions


@dataclass(frozen=True)
class RecordingRequest:
    """What one recording is made from.

    Attributes:
        arenas: by device; the call that records has their locks. None where a graph calls again.
        reused_inputs: positions of donated inputs whose memory is used again after their last use.
        static_inputs: positions of the inputs whose address is taken to stay.
        copied: storages of outputs that are copied when handed out.
        policy: is told of outputs that are live when their memory is needed.
    """

    runtime: DeviceRuntime
    functions: TorchFunctions
    planned: Planned
    memory: MemoryPlan
    arenas: Mapping[torch.device, Arena]
    reused_inputs: tuple[int, ...]
    static_inputs: list[int]
    copied: frozenset[int]
    policy: weakref.ref[Policy]


class Policy(Protocol):
    """Who decides what becomes of recordings: ``graphs/specialization``."""

    def found_live(self, outputs: Collection[int]) -> bool: ...


class Recording:
    """Made by recording one call (``Recording.record``), then replayed with ``run``.

    Whoever calls ``run`` has its locks (``acquire``).

    Attributes:
        ended: why it can never run again; empty while it can.
        superseded: why another is to be recorded in its place; empty while it is good.
        without_graphs: why it replays none, although there is work to capture; empty if it does.
        used: when it was used last, as a number that grows.
    """

    def __init__(self, request: RecordingRequest) -> None:
        self.request = request
        self.plan = request.planned.program
        # Who has an arena's lock is alone in everything that was recorded in it.
        self._arenas = tuple(request.arenas.values())
        self._locks = tuple(arena.lock for arena in self._arenas) or (TryLock(),)
        self._placeholders = [n for n in self.plan.graph.graph.nodes if n.op == "placeholder"]
        self._constants = constants(self.plan.graph)
        self.eager_reasons: dict[int, str] = {}
        # Operators and kernels that a capture failed at, and how: the program can be cut anew around them.
        self.refused: dict[str, str] = {}
        self.ended = self.superseded = self.without_graphs = ""
        self.used = next_use()
        self._graphs: list[DeviceGraph] = []
        # Nobody else captures on their streams while the graphs are there.
        self._pools: list[GraphPool | None] = []
        self._steps: list[Callable[[], Any]] = []
        self._memory: dict[Node, torch.Tensor] = {}
        self._kept: list[Any] = []
        # While recording: the tensors that stand for bound and copied inputs.
        self._as_seen: dict[int, torch.Tensor] = {}
        self._check_inputs: Callable[[list[Any]], Any] | None = None
        # By device: places, and the positions of the inputs that are copied to them.
        self._input_buffers: dict[torch.device, tuple[list[torch.Tensor], list[int]]] = {}
        self._mutated: list[tuple[int, torch.Tensor]] = []
        # Values that operators allocated while they were captured: others may be given the same bytes of the pool.
        self._pooled: set[Node] = set()
        self._watched: list[OutputStorage] = []
        self._live_outputs = LiveOutputs()
        self._retire: Callable[[], object] = _nothing
        self._regions = Regions(self.plan, request.memory.regions)
        self._placed = PlacedResults(request.runtime.place_allocations, request.functions)
        # Where planned storages lie, by their handles.
        self._place_of: dict[int, tuple[torch.device, int]] = {}
        self.static_addresses: list[Any] = [None] * len(self._placeholders)
        # Whether every bound input of a call is where it was.
        self.same_addresses: Callable[[list[Any]], bool] = lambda inputs: True
        # Whether nobody can read what a call overwrites.
        self._liveness: LivenessGuard | None = None
        self._inference = torch.is_inference_mode_enabled()
        self._assign_registers()

    # -- making -----------------------------------------------------------------------------------------

    @classmethod
    def record(cls, request: RecordingRequest, inputs: Sequence[Any]) -> tuple[Recording, Any]:
        """Capture a program on ``inputs``; returns the recording and the outputs of this first call.

        On any error nothing is kept. A recording for which memory became short after the first step has ended.

        Raises:
            MemoryLimitError: the device is out of memory, and nothing has run yet.
        """
        recording = cls(request)
        try:
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                with recording._regions.filled():
                    recording._take_memory()
                recording._place_results()
                recording._record(inputs)
                recording._placed.captured()
            if request.static_inputs:
                check = request.functions.pointer_check
                recording.same_addresses = check(recording.static_addresses, request.static_inputs)
            outputs = recording._hand_out(inputs)
            # Only now, with everything temporary gone, does a use count tell who else holds an output.
            recording._as_seen.clear()
            recording._r[:] = recording._blank
            if request.arenas and not recording.ended:
                recording._start_watching(inputs, outputs)
            if recording.eager_reasons and not recording._graphs:
                recording.without_graphs = next(iter(recording.eager_reasons.values()))
            if recording._placed.keeper:
                recording._leave_arenas(f"{recording._placed.keeper} keeps memory that it was offered for a while")
        finally:
            recording._as_seen.clear()
            recording._r[:] = recording._blank
            recording._clean_up()
        return recording, outputs

    def _leave_arenas(self, why: str) -> None:
        """Whatever is recorded there ends; others get other memory."""
        for arena in self.request.arenas.values():
            arena.clear(why)

    def _clean_up(self) -> None:
        """Leave nothing behind that is for the time of a call, be it over or broken off."""
        self._regions.empty()
        self._placed.stop()

    def _assign_registers(self) -> None:
        """Registers hold what changes between calls: first the inputs, then values that leave a partition."""
        self._registers = {node: position for position, node in enumerate(self._placeholders)}
        self._stores: dict[int, list[Node]] = {}
        self._complete: dict[int, list[Node]] = {}  # the same values, where they can be copied
        producer = {node: p.index for p in self.plan.partitions for node in p.nodes}
        captured = [p for p in self.plan.partitions if p.verdict is Verdict.CAPTURED]
        # Storages that have to lie where they always do: graphs read them, or they have a place in the plan.
        self._fixed = self.plan.facts.named_in(node for p in captured for node in p.nodes)
        self._fixed |= self.request.memory.location.keys()
        self._per_call = self._allocated_per_call()
        producer.update({node: index for index, nodes in self._per_call.items() for node in nodes})
        bound = {storage.node for storage in self._planned_storages()}
        views = self._returned_views(producer)
        for partition in self.plan.partitions:
            made_here = {view for view, index in views.items() if index == partition.index}
            for node in (*partition.nodes, *self._per_call.get(partition.index, ())):
                users = effective_users(node, made_here)
                leaves = any(producer.get(user) != partition.index for user in users)
                if leaves and kind_of(node) is not Kind.CHECK and node not in bound:
                    self._registers[node] = len(self._registers)
                    self._stores.setdefault(partition.index, []).append(node)
                    self._complete.setdefault(self._complete_after(node, producer), []).append(node)
        for view, index in views.items():
            self._registers[view] = len(self._registers)
            self._stores.setdefault(index, []).append(view)
        self._last_reader = self._last_readers(producer)
        self._frees_inputs = not self.request.runtime.frozen_addresses
        self._r: list[Any] = [None] * len(self._registers)
        self._inputs_end = len(self._placeholders)
        self._blank = tuple(self._r)

    def _allocated_per_call(self) -> dict[int, list[Node]]:
        """Allocations that are made at every call, by the first partition that names them."""
        found: dict[int, list[Node]] = {}
        seen: set[int] = set()
        for partition in self.plan.partitions:
            named = self.plan.facts.named_in(partition.nodes)
            for index in sorted((named & self.request.memory.per_call) - seen):
                found.setdefault(partition.index, []).append(self.plan.facts.storages[index].node)
            seen |= named
        return found

    def _returned_views(self, producer: Mapping[Node, int]) -> dict[Node, int]:
        """Views that the caller gets of what is allocated for him, where work needs them, too: by partition."""
        found = {}
        allocated = {node for nodes in self._per_call.values() for node in nodes}
        for view in output_node(self.plan.graph).all_input_nodes:
            if view.target is reinterpret and view.args[0] in allocated:
                users = [producer[user] for user in effective_users(view) if user in producer]
                if users and not self.plan.compiled.keys() & users:
                    found[view] = min(users)
        return found

    def _last_readers(self, producer: Mapping[Node, int]) -> dict[Node, int]:
        """For values in registers that nobody reads after the calls: the last partition that does.

        Where addresses are not frozen, the register is emptied there, so that memory is freed as soon as can be.
        """
        if self.request.runtime.frozen_addresses:
            return {}
        found = {}
        facts = self.plan.facts
        returned = facts.behind(output_node(self.plan.graph).all_input_nodes)
        waits = {one: producer[wait] for wait, begun in facts.ends.items() for one in begun}
        for node in self._registers:
            if node.op == "placeholder" and facts.of.get(node, frozenset()) & returned:
                continue  # what the caller gets may be laid over it
            users = effective_users(node)
            # What a communication was given lives until somebody has waited for it.
            readers = [producer.get(user) for user in users] + [waits[user] for user in users if user in waits]
            if readers and None not in readers:  # None: the caller gets it
                found[node] = max(reader for reader in readers if reader is not None)
        return found

    def _complete_after(self, node: Node, producer: Mapping[Node, int]) -> int:
        """The partition after which a value is there: a communication may fill it beyond the end of its own."""
        facts, last = self.plan.facts, producer[node]
        storages = facts.of.get(node, frozenset())
        waits = {wait: begun for wait, begun in facts.ends.items() if facts.writes[wait] & storages}
        while later := [
            producer[wait]
            for wait, begun in waits.items()
            if producer[wait] > last and any(producer[one] <= last for one in begun)
        ]:
            last = max(later)
        return last

    def _planned_storages(self) -> list[Any]:
        memory = self.request.memory
        return [
            s
            for s in self.plan.facts.storages
            if s.origin is Origin.ALLOCATION and s.index in memory.sizes and s.index not in memory.per_call
        ]

    def _take_memory(self) -> None:
        memory = self.request.memory
        for storage in self.plan.facts.storages:
            if storage.origin is not Origin.ALLOCATION or storage.index in memory.per_call:
                continue  # an input's place is laid out when the input is seen
            options: Any = storage.node.kwargs
            if storage.index in self._regions.places:
                region, offset = self._regions.places[storage.index]
                size, stride = self._layout(storage.node)
                self._memory[storage.node] = tensor_over(region, size, stride, options["dtype"], offset)
            elif storage.index in memory.location:
                planned, (size, stride) = self._planned(storage.index), self._layout(storage.node)
                self._memory[storage.node] = tensor_over(planned, size, stride, options["dtype"])
                self._place_of[planned._cdata] = memory.location[storage.index]
            elif storage.index in memory.sizes:
                self._memory[storage.node] = torch.empty_strided(*self._layout(storage.node), **options)

    def _place_results(self) -> None:
        for storage in self.plan.facts.storages:
            if storage.origin is Origin.EXTERN and storage.index in self.request.memory.location:
                planned = self._planned(storage.index)
                self._placed.add(storage, planned)
                self._place_of[planned._cdata] = self.request.memory.location[storage.index]
        for device, plan in self.request.memory.arenas.items():
            arena = self.request.arenas[device]
            for node, spans in plan.workspace.items():
                self._placed.add_workspace(node, [arena.storage(low, high - low) for low, high in spans])

    def _planned(self, index: int) -> torch.UntypedStorage:
        """A storage of its own where the plan wants it."""
        device, offset = self.request.memory.location[index]
        return self.request.arenas[device].storage(offset, self.request.memory.sizes[index])

    def _layout(self, node: Node) -> Any:
        return torch.fx.map_arg(node.args[:2], self.request.planned.numbers.__getitem__)

    def _record(self, inputs: Sequence[Any]) -> None:
        self._r[: self._inputs_end] = inputs
        self._check_inputs = self._input_checks()
        common = {**self._constants, **self.request.planned.numbers, **self._memory}
        common.update(self._take_inputs(inputs))
        known = _Known(inputs, common, {**common, **self._static_inputs(inputs)})
        for partition in self.plan.partitions:
            if partition.verdict is Verdict.CAPTURED and not self.ended:
                self._capture(partition, known)
            else:
                self._add_eager(partition, known)
        self._collect = self._outputs_function(common)

    def _input_checks(self) -> Callable[[list[Any]], Any] | None:
        """Make the asserts on bound inputs now, and return those that every call has to make."""
        bound = {self._placeholders[position] for position in self.request.static_inputs}
        # An assert on a later value may name an input, too (a size): no work has run, so only inputs are there.
        known, registers = self._from_registers()
        registers = {node: i for node, i in registers.items() if node.op == "placeholder"}
        once, layouts, others = (FlatBuilder(dict(known), registers) for _ in range(3))
        looked_at, count = set[int](), 0
        for node in filter(once.available, checks_on(self._placeholders)):
            inputs = [arg for arg in node.all_input_nodes if arg.op == "placeholder"]
            varying = [registers[arg] for arg in inputs if arg in registers]  # not sizes: they are known
            if bound.issuperset(inputs):
                once.check(node)
            elif checks_layout(node) and all(isinstance(self._r[position], torch.Tensor) for position in varying):
                layouts.check(node)
                looked_at.update(varying)
            else:
                others.check(node)
                count += 1
        _, assert_layouts, assert_others = functions = [b.build().function for b in (once, layouts, others)]
        for function in functions:
            function(self._r)
        if not looked_at:
            return assert_others if count else None
        same = self.request.functions.layout_check(self._r, sorted(looked_at))

        def check(r: list[Any]) -> None:
            if not same(r):
                assert_layouts(r)  # says what is wrong, if anything
            if count:
                assert_others(r)

        return check

    def _from_registers(self) -> tuple[dict[Node, Any], dict[Node, int]]:
        """Nothing is bound but numbers and constants: inputs are the caller's own."""
        bound = {**self._constants, **self.request.planned.numbers}
        return bound, {n: i for n, i in self._registers.items() if n not in bound}

    def _take_inputs(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        """Lay out the places that inputs are copied to, and fill them."""
        found: dict[Node, Any] = {}
        written = frozenset().union(*self.plan.facts.writes.values())
        for position, node in enumerate(self._placeholders):
            if node not in self.request.planned.input_buffers:
                continue
            (index,) = self.plan.facts.of[node]
            value = inputs[position]
            place = tensor_over(self._planned(index), tuple(value.size()), value.stride(), value.dtype)
            found[node] = self._as_seen[position] = place
            places, positions = self._input_buffers.setdefault(place.device, ([], []))
            places.append(unexpanded(place))
            positions.append(position)
            if index in written and position not in self.plan.donated:
                self._mutated.append((position, place))
        self._fill_places(inputs)
        return found

    def _static_inputs(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        """Bind inputs whose address stays, without holding them: their owner may free them, and asks who holds them.

        Hardware keeps the address alone; a host graph keeps what its calls are bound to.
        """
        found: dict[Node, Any] = {}
        for position in self.request.static_inputs:
            value = inputs[position]
            self.static_addresses[position] = value.data_ptr()
            if value.device.type == "cpu":
                value = self._without_holding(value)
            found[self._placeholders[position]] = self._as_seen[position] = value
        return found

    def _without_holding(self, value: torch.Tensor) -> torch.Tensor:
        nbytes = reach(value)
        if not nbytes:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
        storage = self.request.functions.storage_at(value.data_ptr(), value.device, nbytes)
        return tensor_over(storage, tuple(value.size()), value.stride(), value.dtype)

    def _capture(self, partition: Partition, known: _Known) -> None:
        runtime = self.request.runtime
        stores = self._stores.get(partition.index, [])
        flat = self._flat(partition, known, True, stores)
        call = _Bound(flat, self._r, self.request.functions.below_autograd)
        call.inputs = self._inputs_end
        call.stores = [self._registers[node] for node in stores]
        capture = functools.partial(self._graph_of, call)
        try:
            if runtime.runs_while_capturing:
                graph = capture()  # what has run cannot be tried again
            else:
                graph = take_memory(runtime.device, capture, functools.partial(self._forget, call))
        except Exception as error:
            graph = None
            self._placed.stop()
            if runtime.runs_while_capturing:
                raise  # the work itself failed, as it would have in Inductor's wrapper
            if isinstance(error, MemoryLimitError):
                if not self._steps:
                    raise  # nothing has run yet
                self._give_up(partition)
            else:
                failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                self.eager_reasons[partition.index] = f"capture failed: {failure}"
                if (node := flat.node_at(error)) is not None:
                    self.refused[operator_name(node)] = failure
        if graph is None:
            # What ran before this partition has run; the rest of this call, and every other, goes on eagerly.
            self._add_eager(partition, known)
            return
        if not runtime.runs_while_capturing:
            graph.replay()
        self._graphs.append(graph)
        self._steps.append(graph.replay)
        if runtime.frozen_addresses:
            # What operators allocated during capture keeps its address: from here on it is known. Held for as
            # long as the recording lives, or a later capture in the same pool could be given its memory.
            stable = self._stable_memory(known.inputs)
            for node in stores:
                value = self._r[self._registers[node]]
                if any(tensor.untyped_storage().data_ptr() not in stable for tensor in tensors_in(value)):
                    self._pooled.add(node)
                self._keep(node, value, known)

    def _graph_of(self, call: _Bound) -> DeviceGraph:
        runtime, pool, put_right = self.request.runtime, self._pool(), self.request.functions.after_failed_capture
        graph = runtime.new_graph(pool.id if pool is not None else None)
        with runtime.capture_stream(pool.stream if pool is not None else None):
            graph.capture_begin()
            try:
                with self._as_replayed():
                    issue(call)
            except BaseException:
                # Wherever it came from: a stream, or this thread, must not be left capturing.
                with contextlib.suppress(Exception):
                    runtime.end_capture(graph, pool, put_right)
                raise
            runtime.end_capture(graph, pool, put_right)
        graph.instantiate()
        self._pools.append(pool)
        return graph

    def _forget(self, call: _Bound) -> None:
        """Let go of what a capture has left."""
        self._placed.stop()
        for register in call.stores:
            self._r[register] = None

    def _give_up(self, partition: Partition) -> None:
        """Memory is short: what graphs and their pools have is for the rest of this call, which runs eagerly."""
        self.ended = self.eager_reasons[partition.index] = OUT_OF_MEMORY
        self._graphs, self._steps, self._pools = [], [], []
        self._leave_arenas(OUT_OF_MEMORY)

    def _pool(self) -> GraphPool | None:
        """The memory pool that captures share. It goes with an arena, so that who may run may work in it."""
        runtime = self.request.runtime
        arena = self.request.arenas.get(runtime.device)
        return arena.pool(runtime) if arena is not None else None

    def _add_eager(self, partition: Partition, known: _Known) -> None:
        stores = self._stores.get(partition.index, [])
        call = _Bound(self._flat(partition, known, False, stores), self._r)
        with self._as_replayed():
            call()
        self._steps.append(call)
        if not self.request.runtime.frozen_addresses or self.ended:
            return
        # Graphs read fixed addresses: what eager work allocates beside the plan is copied to places that stay.
        places, r = StaticBuffers(self._stable_memory(known.inputs)), self._r
        nodes = [node for node in self._complete.get(partition.index, ()) if self._needs_place(node)]
        registers = [self._registers[node] for node in nodes]
        try:
            device = self.request.runtime.device
            placed = take_memory(device, lambda: [places.put(r[register]) for register in registers], _nothing)
        except MemoryLimitError:
            self._give_up(partition)
            return
        refresh = list(zip(registers, placed, strict=True))
        for node, (register, place) in zip(nodes, refresh, strict=True):
            r[register] = place
            self._keep(node, place, known)
        if refresh:

            def copy_over() -> None:
                for register, place in refresh:
                    copy_tensors(r[register], place)
                    r[register] = place

            self._steps.append(copy_over)

    def _as_replayed(self) -> contextlib.AbstractContextManager[Any]:
        """Where a graph calls again, what it makes anew is what it makes at replays: inference tensors, too."""
        if self._inference and not self.request.runtime.frozen_addresses:
            return torch.inference_mode()
        return contextlib.nullcontext()  # inference_mode(False) would switch gradients on

    def _needs_place(self, node: Node) -> bool:
        """Whether a value of eager work has to lie where it always does."""
        value = node.meta.get("val")
        if self.plan.verdicts[node].data_dependent or (isinstance(value, torch.Tensor) and not has_address(value)):
            return False
        indices = self.plan.facts.of.get(node)
        return indices is None or not indices.isdisjoint(self._fixed)

    def _keep(self, node: Node, value: Any, known: _Known) -> None:
        known.captured[node] = known.common[node] = value
        self._kept.append(value)

    def _stable_memory(self, inputs: Sequence[Any]) -> set[int]:
        """Addresses of storages that are the same at every call."""
        known = [*self._memory.values(), *self._kept, *(places for places, _ in self._input_buffers.values())]
        known += [inputs[position] for position in self.request.static_inputs]
        known += list(self._constants.values())
        return {t.untyped_storage().data_ptr() for value in known for t in tensors_in(value)} | self._placed.addresses

    def _flat(self, partition: Partition, known: _Known, captured: bool, stores: Sequence[Node]) -> FlatFunction:
        bound = known.captured if captured else known.common
        last = {node for node, index in self._last_reader.items() if index == partition.index}
        registers = {n: i for n, i in self._registers.items() if n not in bound}
        if self.request.runtime.frozen_addresses:
            others = self._stable_memory(known.inputs)
            before, landings = self._placed.around(partition.nodes, captured, others)
            builder = FlatBuilder(bound, registers, last, before, landings=landings)
        else:
            builder = FlatBuilder(bound, registers, last, self._regions.before, self._regions.after)
        with self._regions.filled():  # views of them are made
            builder.run_partition(self.plan, partition, [node for node in stores if node not in bound])
            return builder.build()

    def _outputs_function(self, common: dict[Node, Any]) -> Callable[[list[Any]], Any]:
        """Build the function that hands out the outputs, and start watching their storages."""
        output = output_node(self.plan.graph)
        frozen = self.request.runtime.frozen_addresses
        lay_out = self.request.functions.lay_out
        builder = FlatBuilder(*self._from_registers())
        lasting = {s.node for s in self.plan.facts.storages if s.index in self.request.memory.outputs}
        for node, users in _made_of(output).items():
            indices = self.plan.facts.of.get(node, frozenset())
            behind = [self.plan.facts.storages[i].node for i in indices]
            memory = [self._memory[n] for n in behind if n in lasting and n in self._memory]
            planned = node in lasting and node in self._memory
            if planned:
                value, owned = builder.constant(self._memory[node]), memory
            elif node.op == "placeholder" or node not in self._registers:
                continue
            elif (position := self._input_behind(node)) is not None:
                # An operator returned an input's memory: what the caller gets is the caller's own.
                value, owned = builder.register(self._placeholders[position]), []
                template = common[node] if frozen and node in common else self._r[self._registers[node]]
                base = self._as_seen[position]
                builder.assign(node, functools.partial(relay, views_of(template, base.data_ptr())), value)
                continue
            elif frozen and node in common:
                # In a place, where it stays like planned outputs; or in the pool.
                value, owned = builder.constant(common[node]), tensors_in(common[node])
            elif memory:
                value, owned = builder.register(node), memory  # an operator returned planned memory
            else:
                continue  # new at every call
            whole = node.meta.get("val")
            sparse = isinstance(whole, torch.Tensor) and not has_address(whole)  # its parts are nobody's outputs
            copy = bool(indices & self.request.copied) or node in self._pooled or sparse
            if copy:
                builder.assign(node, functools.partial(each, copy_out), value)
            elif planned and all(user.meta.get("call") is lay_out for user in users):
                builder.stand_for(node, value)  # what is handed out is laid over it anyway
            elif planned:
                tensor = self._memory[node]
                builder.assign(node, lay_out, value, tuple(tensor.size()), tensor.stride(), 0)
            else:
                builder.assign(node, functools.partial(each, functools.partial(_alias, lay_out)), value)
            if not copy:
                self._watch(owned, indices)
        return builder.build(output.args[0]).function

    def _input_behind(self, node: Node) -> int | None:
        """The input whose bound memory, or place, an operator's result lies in."""
        storages = [self.plan.facts.storages[index] for index in self.plan.facts.of.get(node, ())]
        tensors = tensors_in(self._r[self._registers[node]])
        for storage in storages:
            if storage.node.op != "placeholder" or not tensors:
                continue
            position = self._registers[storage.node]  # the first registers are the inputs
            base = self._as_seen.get(position)
            if base is not None and 0 <= tensors[0].data_ptr() - base.data_ptr() <= reach(base):
                return position
        return None

    def _watch(self, tensors: Sequence[torch.Tensor], indices: frozenset[int]) -> None:
        known = {output.storage.data_ptr() for output in self._watched}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known or not storage.nbytes():
                self.request.functions.share_copies(storage)
                device, low = self._place_of.get(storage._cdata, (None, 0))
                self._watched.append(OutputStorage(storage, indices, device, low, weakref.ref(self)))

    def _start_watching(self, inputs: Sequence[Any], outputs: Any) -> None:
        handed_out = Counter(tensor.untyped_storage()._cdata for tensor in tensors_in(outputs))
        counter, memory, arenas = self.request.functions.use_counter, self.request.memory, self.request.arenas
        self._live_outputs = LiveOutputs(self._watched, counter, handed_out)
        plans = {arena: memory.arenas.get(device) for device, arena in arenas.items()}
        footprints: dict[Arena, Sequence[tuple[int, int]]] = {
            arena: plan.footprint if plan is not None else () for arena, plan in plans.items()
        }
        given = Counter(inputs[position].untyped_storage()._cdata for position in self.request.reused_inputs)
        self._liveness = LivenessGuard(footprints, self._live_outputs, given, counter)
        unplanned = [t for value in (*self._memory.values(), *self._kept) for t in tensors_in(value)]
        self._retire = weakref.finalize(self, _retire, self._live_outputs, self._arenas, unplanned)
        self._retire.atexit = False
        # Last: an interrupt before it leaves nothing in the arenas, and one after it ends the recording.
        for arena, plan in plans.items():
            arena.enter(self, self._live_outputs, plan.placement.size if plan is not None else 0)

    # -- running ----------------------------------------------------------------------------------------

    def acquire(self, owner: LockOwner) -> bool:
        """Lock the recording and its arenas for one call; False when another call uses one, or it has ended."""
        for lock in self._locks:
            if not lock.acquire(owner):
                return False
        return not self.ended

    def release(self, owner: LockOwner) -> None:
        """Release those that ``owner`` has."""
        for lock in self._locks:
            lock.release(owner)

    @property
    def own_bytes(self) -> int:
        """Bytes that it keeps beside arenas: what eager work or an operator allocates and captured work reads."""
        kept = [*self._memory.values(), *(t for value in self._kept for t in tensors_in(value))]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in kept}
        return sum(storage.nbytes() for handle, storage in storages.items() if handle not in self._place_of)

    def is_at(self, position: int, value: Any) -> bool:
        """Whether a static input is where it was."""
        return bool(value.data_ptr() == self.static_addresses[position])

    def may_run(self, inputs: list[Any], owner: LockOwner) -> bool:
        """Whether it suits a call that has its locks: static inputs are where they were, and its memory is free."""
        if self.superseded or not self.same_addresses(inputs):
            return False
        return not self._arenas or (self.is_idle_for(owner) and self.is_free())

    def is_free(self) -> bool:
        """Whether nobody can read what it overwrites."""
        return not self.superseded and (self._liveness is None or self._liveness.all_dead())

    def is_idle_for(self, owner: LockOwner) -> bool:
        """Whether no other stream still works in its arenas."""
        return all(arena.is_idle_for(owner.stream) for arena in self._arenas)

    @property
    def live_outputs(self) -> Sequence[OutputStorage]:
        """What it hands out uncopied."""
        return self._live_outputs.outputs

    def held(self) -> Mapping[OutputStorage, int]:
        """Live outputs: somebody has them."""
        return self._live_outputs.held()

    def tell_who_is_in_the_way(self) -> None:
        """Have those copy their outputs from now on which are live, again, in the memory that it works on."""
        for output in self._liveness.in_the_way() if self._liveness is not None else ():
            owner = output.owner() if output.owner is not None else None
            policy = owner.request.policy() if owner is not None else None
            if policy is not None:
                policy.found_live(output.indices)

    def end(self, why: str) -> None:
        """Never run again, and let go of all memory. Called by who has the lock of one of its arenas, or its own."""
        self.ended = why
        self._retire()
        self._graphs, self._steps, self._pools, self._kept, self._watched = [], [], [], [], []
        self._memory, self._input_buffers, self._mutated = {}, {}, []
        self._placed.end()
        self._collect, self._check_inputs = _ended, None
        self._live_outputs, self._liveness = LiveOutputs(), None

    def run(self, inputs: list[Any], owner: LockOwner) -> Any:
        """Replay on ``inputs`` and hand out the outputs. ``owner`` has its locks; no other stream works there now.

        Where addresses are not frozen the list is emptied, so that inputs live no longer than they are needed.
        """
        r = self._r
        self.used = next_use()
        for arena in self._arenas:
            arena.stream = owner.stream
        try:
            r[: self._inputs_end] = inputs
            if self._frees_inputs:
                inputs.clear()
            if self._check_inputs is not None:
                self._check_inputs(r)
            self._fill_places(inputs)
            for step in self._steps:
                step()
            return self._hand_out(inputs)
        except BaseException as error:
            self._clean_up()
            if isinstance(error, MemoryKeptError):
                self._leave_arenas(error.subject)
            raise
        finally:
            r[:] = self._blank

    def _hand_out(self, inputs: Sequence[Any]) -> Any:
        for position, place in self._mutated:
            inputs[position].copy_(place)
        return self._collect(self._r)

    def _fill_places(self, inputs: Sequence[Any]) -> None:
        for places, positions in self._input_buffers.values():
            torch._foreach_copy_(places, [unexpanded(inputs[position]) for position in positions])


@dataclass(frozen=True)
class _Known:
    """What is known while a recording is made.

    Attributes:
        inputs: of the call that is recorded.
        common: values that are the same at every call.
        captured: what captured partitions may count on: these, and bound inputs.
    """

    inputs: Sequence[Any]
    common: dict[Node, Any]
    captured: dict[Node, Any]


# Numbers that grow, for who was used last.
next_use = itertools.count(1).__next__


def _nothing() -> None:
    """Ends nothing."""


def _ended(registers: list[Any]) -> Any:
    raise AssertionError("a recording that has ended was run")


def _retire(live: LiveOutputs, arenas: Sequence[Arena], unplanned: list[torch.Tensor]) -> None:
    """A recording ends. The device may not have done its work yet, on whichever stream that was issued."""
    live.retire()
    for arena in arenas:
        arena.changed()
        arena.keep_until_done(unplanned)
    unplanned.clear()


def _made_of(output: Node) -> dict[Node, list[Node]]:
    """What outputs, and the views among them, are made of: by value that is no view, the views of it, and
    ``output`` itself where the value is an output."""
    found: dict[Node, list[Node]] = {}
    users = [output]
    for user in users:
        for node in user.all_input_nodes:
            if node not in found and kind_of(node) is Kind.VIEW:
                users.append(node)
            found.setdefault(node, []).append(user)
    return {node: users for node, users in found.items() if kind_of(node) is not Kind.VIEW}


class _Bound:
    """A flat function with its registers: a call without arguments."""

    def __init__(
        self,
        flat: FlatFunction,
        registers: list[Any],
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.function, self.registers, self.source = flat.function, registers, flat.source
        self._context = context
        self.inputs = 0  # so many registers, the first ones, hold inputs
        self.stores: list[int] = []  # the registers it fills

    def __call__(self) -> None:
        with self._context():
            self.function(self.registers)


def _alias(lay_out: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    if not has_address(tensor):
        return tensor
    return lay_out(tensor, tuple(tensor.size()), tensor.stride(), 0)
