"""Checked mode: a program that also runs some calls eagerly on copies of the inputs, and compares the results.

``pipeline._program`` chooses the class, so that other programs never run this code.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import CheckError
from ...graphs.copies import Copies, Generators, all_bytes, difference, without_gradients
from ...graphs.devices.runtime import DeviceRuntime, runtime_for, using_runtime
from ...graphs.memory.locks import LockOwner
from ...graphs.memory.shared_state import SHARED
from ...graphs.policy.specialization import Record, Specialization
from ...graphs.program import Program
from ...graphs.recorder import NOT_RUN
from ...graphs.replay.recording import Recording, next_use
from ...host_graph.nodes import communicates, only_computes, operator_name, output_values
from ...host_graph.sizes import evaluate_sizes
from ...host_graph.storages import Origin
from ...host_graph.tensors import has_address, tensors_in
from ...torch_private.functions import alive, below_modes
from .memory import WrongStorage, check_memory, first_difference
from .operators import check_operators
from .replays import GATE, alone_with, check_steps, first_user, locate
from .through import through_capture
from .walk import OwnMemory, Walk, fault_at

log = logging.getLogger(__name__)

# With ``checked=True``, every tenth call is checked.
_EVERY = 10
# The number of output storages that are remembered, to see whether a later call overwrites a live one.
_REMEMBERED = 64


class CheckedProgram(Program):
    """Compares its results with eager work, after each recording and at every n-th call.

    A checked call runs operators several times, including their side effects. With the option ``through_capture``
    alone nothing is compared; only the runtime is replaced. After a ``CheckError`` the program runs eagerly.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        checked = self.options.value("checked")
        # A collective cannot be repeated: other processes would not take part.
        local = not any(map(communicates, self.plan.schedule))
        self._every = (_EVERY if checked is True else int(checked)) if local else 0
        if checked and not local:
            self.context.count("events", "not checked: it communicates with other processes")
        self._calls = itertools.count(1)
        self._checking = threading.local()
        self._handed_out = deque[StorageWeakRef](maxlen=_REMEMBERED)
        self._runtimes: dict[DeviceRuntime, DeviceRuntime] = {}

    def run(self, inputs: list[Any]) -> Any:
        with GATE.passed():
            try:
                return self._run_checked(inputs)
            except CheckError as error:
                self._run_eagerly_from_now_on(error)
                raise

    def _run_eagerly_from_now_on(self, error: CheckError) -> None:
        """What was found must not run again: no recording is left, and none is made."""
        self.recorder.never_recorded = found = f"checked mode has found: {error.fault}"
        for specialization in self.specializations.values():
            specialization.drop_recordings(found)
        self.specializations.find_units()

    def _run_checked(self, inputs: list[Any]) -> Any:
        due = self._every and next(self._calls) % self._every == 0
        if not due or self._is_checking() or self._caller_captures():
            outputs = super().run(inputs)
        else:
            with self._in_place():
                check = _Check(self, inputs)
                with self._check_under_way():
                    outputs = super().run(inputs)
                    recorded = self._checking.recorded
                check.compare(outputs, recorded)
        if self._every:
            self._handed_out.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(outputs))
        return outputs

    def _record(
        self, specialization: Specialization, inputs: list[Any], decided: Record, owner: LockOwner
    ) -> tuple[Any, str]:
        def record() -> tuple[Any, str]:
            with self._recording_runtime():
                return Program._record(self, specialization, inputs, decided, owner)

        if not self._every:
            return record()
        generators, copies = Generators(self.plan.device), Copies(inputs)
        symbol_values = evaluate_sizes(self.plan.graph, dict(zip(self.plan.placeholders, inputs, strict=True)))
        try:
            check_operators(self.plan, symbol_values, copies.make(), self._freezes_addresses, below_modes)
        finally:
            generators.set()
        del copies
        if self._is_checking():
            self._checking.recorded = True
            return record()
        check = _Check(self, inputs)
        with self._check_under_way():
            outputs, reason = record()
        if outputs is not NOT_RUN:
            check.compare(outputs, recorded=True)
        return outputs, reason

    @contextlib.contextmanager
    def _recording_runtime(self) -> Iterator[None]:
        if not self.options.value("through_capture"):
            yield
            return
        runtime = runtime_for(self.plan.device)
        if runtime not in self._runtimes:
            self._runtimes[runtime] = through_capture(runtime)
        with using_runtime(self._runtimes[runtime]):
            yield

    def _is_checking(self) -> bool:
        return getattr(self._checking, "active", False)

    @contextlib.contextmanager
    def _check_under_way(self) -> Iterator[None]:
        self._checking.active, self._checking.recorded = True, False
        try:
            yield
        finally:
            self._checking.active = False

    def _in_place(self) -> contextlib.AbstractContextManager[Any]:
        return self._on_device() if self._on_accelerator else contextlib.nullcontext()

    def live_outputs(self, inputs: Sequence[Any]) -> list[tuple[StorageWeakRef, torch.Tensor]]:
        """The live outputs of earlier calls, each with a copy of its bytes, without those among ``inputs``."""
        passed = {tensor.untyped_storage()._cdata for tensor in tensors_in(inputs)}
        groups = [group for arena in SHARED.arenas.alive() for group in arena.watched_outputs]
        watched = {output.storage._cdata: output.storage for group in groups for output in group.outputs}
        live = {output.storage._cdata for group in groups for output in group.live()}
        copies = {}
        for reference in (*self._handed_out, *(StorageWeakRef(watched[handle]) for handle in live)):
            storage = alive(reference)
            # Recordings hold storages of outputs, in arenas and beside them: those that are not live are skipped.
            if storage is not None and storage.nbytes() and reference.cdata not in passed:
                held = reference.cdata in watched or SHARED.arenas.owns(storage.data_ptr())
                if held and reference.cdata not in live:
                    continue
                copies[reference.cdata] = reference, all_bytes(storage).clone()
            del storage
        return list(copies.values())


class _Check:
    """The check of one call: copies its inputs before the call, compares its results after it."""

    def __init__(self, program: CheckedProgram, inputs: Sequence[Any]) -> None:
        self._program, self._inputs, self._alone = program, list(inputs), GATE.alone_since()
        with without_gradients():
            self._copies, self._live = Copies(inputs), program.live_outputs(inputs)
        self._before, self._clock = Generators(program.plan.device), next_use()

    def compare(self, outputs: Any, recorded: bool) -> None:
        """Compare the call with eager work.

        Args:
            recorded: whether the call made a recording; a new one is checked in more ways.

        Raises:
            CheckError: the results differ, or a check of the recording fails.
        """
        program = self._program
        after = Generators(program.plan.device)
        # Look up by this call's sizes: other threads may have used recordings of other sizes.
        specialization = program.specializations.get(program._sizes.key(self._inputs))
        recordings = specialization.recordings if specialization is not None else ()
        used = [recording for recording in recordings if recording.used > self._clock]
        recording = max(used, key=lambda candidate: candidate.used, default=None)
        try:
            with without_gradients():
                self._outputs_stay()
                if recording is not None and not recording.without_graphs:
                    if recorded:  # these come first, so that faults of the recording or the plan get their own names
                        check_steps(recording)
                        self._check_memory(recording)
                    self._compare_with_eager(recording, outputs, after)
                    if recorded:
                        self._check_addresses(recording)
                    self._compare_changed(recording, recorded)
        finally:
            after.set()

    # -- checks ---------------------------------------------------------------------------------------------

    def _outputs_stay(self) -> None:
        """Check that no live output of an earlier call was overwritten."""
        # Skipped if another thread made a call in between: it may have dropped the output and reused its memory.
        for reference, before in self._live if self._alone() else ():
            storage = alive(reference)
            if storage is not None and not torch.equal(all_bytes(storage), before):
                raise fault_at(
                    None,
                    "live output overwritten",
                    f"{self._program.name}: a call has overwritten a live output of an earlier call",
                    expected="its memory to be left alone while it is live",
                    got=f"{int(all_bytes(storage).ne(before).sum())} of {before.numel()} bytes changed",
                    remedy="this is a bug of fxwrap, unless another thread wrote to it: please report it",
                )
            del storage

    def _compare_with_eager(self, recording: Recording, outputs: Any, after: Generators) -> None:
        prepared = self._program.recorder.prepared
        copies = self._copies.make()
        self._before.set()
        expected = prepared.eager(list(copies))
        same_numbers = Generators(prepared.plan.device).same(after)
        first = self._first_difference(outputs, expected, self._inputs, copies)
        if first is not None:
            self._raise(recording, *first)
        if not same_numbers:
            self._raise(recording, "random numbers", "the next random numbers", "another state", None)

    def _first_difference(self, outputs: Any, expected: Any, inputs: Sequence[Any], copies: Sequence[Any]) -> Any:
        """The first difference from eager work, as (fault, subject, difference, node); None if there is none.

        Args:
            inputs, copies: the inputs of the call and of the eager run, after these.
        """
        plan = self._program.plan
        facts, nodes = plan.facts, output_values(plan.graph)
        written = facts.all_written()
        for position, (a, b) in enumerate(zip(_several(outputs), _several(expected), strict=True)):
            node = nodes[position] if position < len(nodes) else None
            behind = facts.of(node) if isinstance(node, Node) else frozenset[int]()
            empty = [i for i in behind - written if facts.storages[i].origin is Origin.ALLOCATION]
            if not empty and (got := difference(a, b)):
                return "wrong replay", f"output {position}", got, node
            if not empty and (alias := _alias(a, inputs)) != _alias(b, copies):
                got = f"memory of input {alias}" if alias is not None else "memory of its own"
                return "wrong replay", f"whose memory output {position} is", got, node
        for position, (a, b) in enumerate(zip(inputs, copies, strict=True)):
            if position not in plan.inputs.donated and (got := difference(a, b)):
                return "wrong input", f"input {position} after the call", got, self._placeholder(position)
        return None

    def _check_memory(self, recording: Recording) -> None:
        request = recording.request
        self._before.set()
        sized = request.sized
        try:
            check_memory(sized.plan, sized.symbol_values, request.memory, self._copies.make(), self._copies.make())
        except CheckError:
            if not self._differs_from_itself(recording):
                raise

    def _check_addresses(self, recording: Recording) -> None:
        """Check that a call with a moved static input is not replayed."""
        for position in recording.request.static_inputs:
            moved = list(self._inputs)
            moved[position] = self._copies.make()[position]
            elsewhere = moved[position].data_ptr() != recording.static_addresses[position]
            if not elsewhere or not moved[position].numel():
                continue
            unit = recording.unit
            if recording.same_addresses(moved) or (
                unit is not None and unit(list(moved)) is not self._program.specializations.missed
            ):
                node = self._placeholder(position)
                raise fault_at(
                    first_user(self._program.plan, node),
                    "input baked in",
                    f"{self._program.name}: a replay takes input {position} ({node.name}) to lie where it once lay",
                    expected="an input that has moved to be noticed",
                    got="a call with it elsewhere would be replayed on the memory that it had",
                    remedy="this is a bug of fxwrap: please report it",
                )

    def _compare_changed(self, recording: Recording, statics: bool) -> None:
        """Replay with other values, at other addresses, and compare.

        Static inputs stay where they are. They get other values only if ``statics`` is set and no other thread is in
        a call.
        """
        stream, now = self._program._owner().stream, Copies(self._inputs)
        stays = () if statics else recording.request.static_inputs
        everything = [p for p in range(len(self._inputs)) if p not in stays]
        with alone_with(recording, stream, now) as owner, GATE.closed():
            if owner is None:
                return
            first = self._replay_changed(recording, owner, everything)
            if first is None:
                return
            single = [p for p in everything if self._replay_changed(recording, owner, [p]) is not None]
        fault = "input baked in" if single else "wrong replay"
        self._raise(recording, fault, first[1], first[2], first[3], single[:1] or everything)

    def _replay_changed(self, recording: Recording, owner: Any, changed: Collection[int]) -> Any:
        """The first difference with other values in the inputs ``changed``.

        None if there is none, or if the eager run raises.
        """
        static, prepared = recording.request.static_inputs, self._program.recorder.prepared
        self._copies.restore(static)
        if GATE.is_closed():
            self._copies.change([p for p in static if p in changed])
        inputs = self._copies.make(changed, static)
        copies = Copies(inputs).make()
        self._before.set()
        try:
            expected = prepared.eager(list(copies))
        except Exception:
            return None  # the program does not accept these values
        self._before.set()
        try:
            outputs = recording.run(list(inputs), owner)
        except Exception as error:
            return "wrong replay", "what it returns", f"{type(error).__name__}: {error}", None
        return self._first_difference(outputs, expected, inputs, copies)

    # -- errors ---------------------------------------------------------------------------------------------

    def _raise(
        self,
        recording: Recording,
        fault: str,
        subject: str,
        got: str,
        node: Node | None,
        changed: Collection[int] = (),
    ) -> None:
        """Raise a CheckError that names the first wrong operator, if it can be found.

        Returns without an error if eager work itself differs between runs.
        """
        program = self._program
        if self._differs_from_itself(recording):
            return
        located, right_by_steps = None, False
        static = recording.request.static_inputs
        with alone_with(recording, program._owner().stream, Copies(self._inputs)) as owner:
            if owner is not None:
                self._copies.restore(static)
                self._before.set()
                try:
                    located = locate(recording, static, self._copies, changed)
                    right_by_steps = located is None
                except Exception as error:
                    log.info("%s: where a replay goes wrong cannot be found: %s", program.name, error)
        at = _last_writer(program, node)
        how = "recorded step by step it is right" if right_by_steps else "the step cannot be told"
        if located is not None:
            walk, first = located
            at, how = walk.schedule[first.step], _describe(walk, first)
        replay = "a replay" if not changed else f"a replay on other numbers in input(s) {_listed(changed)}"
        raise fault_at(
            at,
            fault,
            f"{program.name}: {replay} differs from eager work in {subject}; {how}",
            expected="the numbers of eager work, bit for bit",
            got=got,
            remedy="options={'through_capture': True} tells whether capturing is at fault; "
            "'eager_ops' keeps the operator out of captures; docs/checked.md says more",
        )

    def _differs_from_itself(self, recording: Recording) -> bool:
        """Whether two eager runs on the same inputs differ, so that nothing can be compared.

        Raises:
            CheckError: the operator that differs is captured, is not torch's own, and the device freezes addresses.
        """
        sized = recording.request.sized
        self._before.set()
        first, second = self._copies.make(), self._copies.make()
        walks = [Walk(sized.plan, sized.symbol_values, inputs, OwnMemory()) for inputs in (first, second)]
        difference = first_difference(*walks)
        if difference is None:
            return False
        node, program = walks[0].schedule[difference.step], self._program
        if node in sized.plan.captured_work and not only_computes(node) and program._freezes_addresses:
            raise fault_at(
                node,
                "not the same twice",
                f"{operator_name(node)} gives other results for the same operands",
                expected="an operator that is captured to do the same at every call",
                got=difference.got,
                remedy=f"options={{'eager_ops': ['{operator_name(node)}']}} has it called every time",
            )
        program.context.count("events", f"not compared: {operator_name(node)} does not compute the same twice")
        return True

    def _placeholder(self, position: int) -> Node:
        return self._program.plan.placeholders[position]


def _describe(walk: Walk, first: WrongStorage) -> str:
    node = walk.schedule[first.step]
    if first.index < 0:
        return f"{operator_name(node)} raises {first.got}"
    name = walk.facts.storages[first.index].name
    if first.before:
        return f"{name} is already wrong when {operator_name(node)} reads it: {first.got}"
    return f"{operator_name(node)} is the first that leaves something else, in {name}: {first.got}"


def _listed(positions: Collection[int]) -> str:
    few = [str(position) for position in itertools.islice(positions, 8)]
    return ", ".join(few) + (", ..." if len(positions) > 8 else "")


def _last_writer(program: Program, node: Node | None) -> Node | None:
    """The last node that writes or makes a storage of the value."""
    if node is None:
        return None
    facts = program.plan.facts
    storages = facts.of(node)
    work = reversed(program.plan.schedule)
    return next((other for other in work if (facts.writes(other) | facts.of(other)) & storages), None)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]


def _alias(value: Any, inputs: Sequence[Any]) -> int | None:
    """The position of the first input that shares the value's storage; None if none does."""
    if not isinstance(value, torch.Tensor) or not has_address(value) or not value.numel():
        return None
    handle = value.untyped_storage()._cdata
    tensors = (p for p, other in enumerate(inputs) if isinstance(other, torch.Tensor) and has_address(other))
    return next((p for p in tensors if inputs[p].untyped_storage()._cdata == handle), None)
