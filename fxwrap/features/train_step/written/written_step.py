"""A training step as it is written: a function with any losses, optimizers and updates, as one program."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from ....backend import parsed
from ....errors import CheckError, FxwrapError, TrainStepError, limit_among
from ....graphs.compilation import Compilation
from ....host_graph.user_code import described
from ..codegen.as_it_stands import TRACING, compiled, is_tracing
from ..codegen.tracing_state import autocast_is_on, modes, without_autocast
from ..codegen.wrapped_tensors import flat, is_wrapped, parts_of, storage_of
from ..group import begin_alike, check_group
from ..optimizers import make_states, move_to_parameters
from ..refusals import of_modules
from .arguments import Kind, leaves_of, memory_of
from .averaged import averaged_gradients
from .checked_calls import Checks, checked
from .found import Found, found_in
from .gradients import Before, grad_of
from .messages import note_first_call, note_trace, refused, warn_only_read, warn_too_many
from .put_back import put_back
from .settings import Settings
from .side_effects import Drawn, SideEffects
from .step_program import StepProgram
from .traced_call import NotTraceable, TracedCall
from .watched import Facts, Watched, difference, facts_of, shared_memory

log = logging.getLogger(__name__)
_Step = TypeVar("_Step", bound="WrittenStep")
# Parameters for which an optimizer's state was made.
_Made = list[tuple[Optimizer, torch.Tensor]]

# Why a call runs as it is written.
FIRST = "first call"
NEW_STATE = "makes state of an optimizer"
TOO_MANY = "more programs than torch.compiler.config.recompile_limit"


def _with_state(updated: Mapping[Optimizer, Sequence[torch.Tensor]]) -> _Made:
    """Make the states that an update of these parameters makes, where that is known how."""
    return [(optimizer, p) for optimizer in updated for p in make_states(optimizer, updated[optimizer])]


class WrittenStep:
    """A training step; ``step(*batch)`` makes it. See ``fxwrap.train_step``.

    ``fxwrap.report``, ``stats`` and others take it as a compiled function.

    Attributes:
        ordinary_calls: calls that ran as the step is written, by reason.
        traced: the reason of each trace.

    Args:
        searched: where modules, optimizers and tensors are found: the step itself, or what it calls.
        given: modules and optimizers that are not found there, by the names that reports have for them.
    """

    _first_call_is_written = True
    _accumulate = 1

    def __init__(
        self,
        step: Callable[..., Any],
        searched: Callable[..., Any],
        given: Mapping[str, torch.nn.Module | Optimizer],
        group: dist.ProcessGroup | None,
        dynamic: bool | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        own_options, _ = parsed(options)  # wrong options are known now, and not at the first call
        self._checks = Checks(own_options.value("checked"))
        self._step, self._searches, self._given = step, searched, given
        self._group, self._dynamic, self._options = group, dynamic, options
        self._found = Found()
        if group is not None:
            check_group(group)
            self._found = self._searched()
            begin_alike(self._found.modules, list(self._found.optimizers.values()), self._accumulate, group)
        self.ordinary_calls: Counter[str] = Counter()
        self.traced: Counter[str] = Counter()
        self._programs: list[StepProgram] = []
        self._settings: Settings | None = None
        self._watched: Watched | None = None
        self._facts: Facts = ()
        self._tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}  # of these tensors, by id
        self._storages: dict[int, int] = {}  # of their storages, by id
        self._serving: dict[Kind, list[StepProgram]] = {}
        self._rehearses = False
        self._dropped: Sequence[torch.Tensor] = ()
        self._only_as_written = ""
        # A trace has other values in optimizers and p.grad. Calls of one step write the same tensors, anyway.
        self._one_at_a_time = threading.RLock()
        self.__name__ = getattr(step, "__name__", type(step).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_at_a_time:
            if is_tracing():
                raise self._refused("it is called in another step: call the function that it was made of there")
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._only_as_written:
            return self._as_written(self._only_as_written, args, kwargs)
        if self._watched is None and self._first_call_is_written:
            result = self._as_written(FIRST, args, kwargs)
            note_first_call(self.__name__, getattr(self._step, "__code__", None))
            return self._once_more(args, kwargs) if self._rehearses else result
        if not self._has_all_as_it_was():
            self._look()
        leaves, structure = leaves_of(args, kwargs)
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(map(is_wrapped, given)):
            given = flat(given)
        kind = Kind.of(leaves, structure, self._modes(), self._places)
        if (programs := self._serving.get(kind)) is None:
            programs = [one for one in self._present() if self._serves(one, kind, given)]
            if programs:
                self._serving[kind] = programs
        program = next((one for one in programs if one.gradients.fit() and self._lies_alike(one, given)), None)
        if program is None:
            traced = TOO_MANY if self._has_too_many(kind) else self._trace(leaves, kind)
            if isinstance(traced, list) and traced:
                return self._with_states(traced, args, kwargs)
            if not isinstance(traced, StepProgram):
                reason = traced if isinstance(traced, str) else NEW_STATE
                result = self._as_written(reason, args, kwargs)
                return self._once_more(args, kwargs) if self._rehearses else result
            program = traced
        if self._checks.due(program):
            return self._checked(program, given, args, kwargs)
        return self._run(program, given)

    def _once_more(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return WrittenStep._call(self, args, kwargs)

    def _with_states(self, made: _Made, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call for which states were made. It changes nothing if it fails, so that they go."""
        try:
            return self._once_more(args, kwargs)
        except BaseException:
            for optimizer, parameter in made:
                optimizer.state.pop(parameter, None)
            raise

    def _checked(
        self, program: StepProgram, given: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        dropped = self._dropped

        def as_program() -> Any:
            self._dropped = dropped
            return self._run(program, given)

        try:
            return checked(
                lambda: self._called(*args, **kwargs),
                as_program,
                self._searched,
                given,
                program.gradients.dropped,
                program.rounding,
                self.__name__,
            )
        except CheckError as error:
            self._only_as_written = f"checked mode has found: {error.fault}"
            raise

    def _run(self, program: StepProgram, given: list[torch.Tensor]) -> Any:
        gradients = program.gradients
        if gradients.read(self._dropped):
            raise self._refused(
                "it reads p.grad that the call before has left: a call that clears gradients before it reads them, "
                "and steps with them, keeps none. Call zero_grad() in the step wherever gradients begin anew"
            )
        gradients.give_up()
        having = flat(map(grad_of, program.having)) if program.having else ()
        inputs = [*self._tensors, *having, *program.inputs_of(given)]
        try:
            if program.autocast:
                with without_autocast():
                    returned = program.run(*inputs)
            else:
                returned = program.run(*inputs)
        except Exception as error:
            if (limit := limit_among(error)) is not None:
                raise limit from limit.__cause__
            raise
        for attributes, training in program.modes:
            attributes["training"] = training
        self._dropped = gradients.dropped
        made = gradients.parts_made
        gradients.apply(returned[len(returned) - made :])
        return program.outputs.of(returned[: len(returned) - made] if made else returned)

    def _as_written(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._called(*args, **kwargs)
        self.ordinary_calls[reason] += 1
        self._dropped = ()
        self._look()
        leaves, structure = tree_flatten(result)
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree_unflatten(leaves, structure)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """The step as it is written, with gradients that are averages over the group."""
        if self._group is None:
            return self._step(*args, **kwargs)
        with averaged_gradients(self._found.leaves(), self._group):
            return self._step(*args, **kwargs)

    def _has_all_as_it_was(self) -> bool:
        """Whether what the step's code reaches is what it was at the last look."""
        seen, settings = self._watched, self._settings
        return seen is not None and settings is not None and seen.holds() and settings.hold()

    def _searched(self) -> Found:
        return found_in(self._searches, self._given)

    def _modes(self) -> object:
        """What else than arguments and facts a program is made for."""
        return modes()

    def _look(self) -> None:
        """Find what the step's code reaches now, and the programs that are for it."""
        found = self._searched()
        if any([move_to_parameters(optimizer) for optimizer in found.optimizers.values()]):
            found = self._searched()
        if self._settings is None or self._settings.optimizers != found.optimizers:
            self._settings = Settings(found.optimizers)
        self._settings.look()
        facts = [*facts_of(found), *self._settings.facts()]
        self._found, self._facts, self._watched = found, facts, Watched(found)
        self._tensors = list(self._named_tensors())
        self._places = {id(tensor): place for place, tensor in enumerate(self._tensors)}
        self._storages = {storage_of(tensor): place for place, tensor in enumerate(self._tensors)}
        self._serving = {}

    def _named_tensors(self) -> dict[torch.Tensor, str]:
        """The tensors that are inputs of every program, by their names; those that are made of others by parts."""
        assert self._settings is not None
        named = {**self._found.tensors, **self._settings.tensors()}
        return {part: name for tensor, name in named.items() for part in parts_of(tensor)}

    def _present(self) -> list[StepProgram]:
        """The programs for what the step's code reaches now. Those that ask least of p.grad come first."""
        present = (program for program in self._programs if program.facts == self._facts)
        return sorted(present, key=lambda one: len(one.gradients.there))

    @staticmethod
    def _serves(program: StepProgram, kind: Kind, given: Sequence[torch.Tensor]) -> bool:
        alike = kind.alike_but_for_sizes(program.kind) and kind.fits(program.kind, program.varying)
        return alike and program.sizes_hold(program.inputs_of(given))

    def _lies_alike(self, program: StepProgram, given: Sequence[torch.Tensor]) -> bool:
        return program.memory is None or program.memory == memory_of(given, self._storages)

    # -- tracing ---------------------------------------------------------------------------------------------------

    def _trace(self, leaves: Sequence[Any], kind: Kind) -> StepProgram | _Made:
        """Trace and compile the step for a call. No program is made where the call makes state of an optimizer: what
        was made of that state by now is returned, for another trace with it.
        """
        reason = self._reason(kind)
        others = [one.kind for one in self._present() if kind.alike_but_for_sizes(one.kind)]
        varying = kind.varying(others, self._dynamic)
        try:
            program = self._program(leaves, kind, varying)
        except (FxwrapError, MemoryError):
            raise
        except Exception as error:
            if not any(varying):
                raise
            log.info("sizes of %s cannot vary: %s", self.__name__, described(error))
            reason = f"{reason}, which cannot vary"
            program = self._program(leaves, kind, [()] * len(varying))
        self.traced[reason] += isinstance(program, StepProgram)
        note_trace(getattr(self._step, "__code__", None))
        return program

    def _program(self, leaves: Sequence[Any], kind: Kind, varying: Sequence[Collection[int]]) -> StepProgram | _Made:
        if reasons := of_modules(self._found.modules):
            raise self._refused(*reasons)
        before = Before.of(self._found.leaves())
        with TRACING:
            call = TracedCall(self._called, self._found, leaves, kind.structure, before.with_any())
            made_state = self._traced(call, varying)
            if call.needs_absent:
                call = TracedCall(self._called, self._found, leaves, kind.structure, before)
                made_state = self._traced(call, varying)
            made = _with_state(call.updated if made_state else self._updated_later())
            return made if made or made_state else self._compiled(call, kind, varying)

    def _updated_later(self) -> Mapping[Optimizer, Sequence[torch.Tensor]]:
        """What a later call updates with the gradients of the last trace."""
        return {}

    def _traced(self, call: TracedCall, varying: Sequence[Collection[int]]) -> bool:
        """Trace a call. Returns whether optimizers have made state."""
        assert self._settings is not None
        effects, drawn = SideEffects(self._found), Drawn()
        with call.before.in_place():
            try:
                with self._settings.standing_in():
                    call.trace(self._tensors, effects, varying)
            except NotTraceable as error:
                raise self._refused(str(error)) from error.__cause__
            finally:
                made_state, faults = effects.undo()
        faults += [
            f"it draws from {name}, which a program cannot: use torch's, or give it a tensor"
            for name in drawn.put_back()
        ]
        faults += [
            f"it changes the setting {key} of an optimizer: do so between steps" for key in self._settings.changed
        ]
        call.modes = effects.modes
        if not (faults or made_state) and (left := call.traced.left_behind()):
            faults.append(
                f"it leaves a tensor that it computes in {left[0]}, where a replay puts none: return it, or write it "
                "to a tensor that is there before"
            )
        if faults and not made_state:
            raise self._refused(*faults)
        return made_state

    def _compiled(self, call: TracedCall, kind: Kind, varying: Sequence[Collection[int]]) -> StepProgram:
        assert self._settings is not None
        names, trace = self._named_tensors(), call.traced
        having, shown, unused, place = [], list(names.values()), list[int](), len(names)
        for parameter, grad in call.before.with_grad():
            places = range(place, place + len(parts_of(grad)))
            place = places.stop
            if any(map(trace.is_used, places)):
                having.append(parameter)
                shown += [f"{self._found.tensors[parameter]}.grad"] * len(places)
            else:  # as an input, it would have to be there at each call
                unused += places
        trace = trace.without(unused)
        compilation = Compilation()
        # Checked calls draw the numbers that the step draws as it is written.
        checks = {"fallback_random": True} if self._checks.every else {}
        memory = memory_of(call.parts, self._storages) if trace.writes_given else None
        apart = not (shared_memory(self._found) or memory)
        options = {"inputs_apart": apart, **checks, **(self._options or {})}
        program = StepProgram(
            compiled(trace, shown, options, compilation),
            self._facts,
            kind,
            varying,
            trace.sizes_hold(),
            call.gradients,
            having,
            None if len(call.taken) == len(call.parts) else call.taken,
            memory,
            call.outputs,
            compilation,
            autocast_is_on(),
            call.modes,
            trace.rounding() if self._checks.every else 0.0,
        )
        self._programs.append(program)
        self._serving = {}
        warn_only_read(self.__name__, call.traced.only_read)
        return program

    def _has_too_many(self, kind: Kind) -> bool:
        """Whether there are as many programs as a compiled function may have. Warns once. A rehearsal makes more."""
        if self._rehearses or len(self._programs) < torch.compiler.config.recompile_limit:
            return False
        if not self.ordinary_calls[TOO_MANY]:
            warn_too_many(self.__name__, len(self._programs), self.traced, self._reason(kind))
        return True

    def _reason(self, kind: Kind) -> str:
        if not self._programs:
            return "first trace"
        same = [program for program in self._programs if program.kind == kind]
        if not same:
            if any(kind.alike_but_for_sizes(program.kind) for program in self._present()):
                return "other sizes"
            return kind.difference(self._programs[-1].kind) or "other arguments"
        if differing := difference(same[-1].facts, self._facts):
            return differing
        # Of equal facts, and gradients as they are: only memory is left.
        alike = any(one.facts == self._facts and one.gradients.fit() for one in same)
        return "arguments that lie otherwise in the memory of others" if alike else "other gradients"

    def _refused(self, *reasons: str) -> TrainStepError:
        return refused(self.__name__, reasons)

    # -- beside calls ----------------------------------------------------------------------------------------------

    _fxwrap_without = "a step that was called less than twice: the first call runs as it is written"

    def _fxwrap_compilations(self) -> list[Compilation]:
        return [program.compilation for program in self._programs]

    def _fxwrap_afresh(self, options: Mapping[str, Any] | None) -> WrittenStep:
        options = {**(self._options or {}), **(options or {})}
        return self._as_rehearsed(WrittenStep(self._step, self._searches, self._given, None, self._dynamic, options))

    def _as_rehearsed(self, afresh: _Step) -> _Step:
        """A step that is called in a rehearsal of this one; processes have begun alike."""
        afresh._group, afresh._rehearses = self._group, True
        return afresh

    @contextlib.contextmanager
    def _fxwrap_rehearsal(self) -> Iterator[None]:
        """Inside the context, calls change no parameter, state, buffer, gradient or random number for longer.

        A call that would run as it is written makes a program, too.
        """
        self._rehearses = True
        try:
            with put_back(self._searched()):
                yield
        finally:
            self._rehearses = False

    def __repr__(self) -> str:
        return f"<fxwrap.WrittenStep of {self.__name__}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """What ``copy.copy``, ``copy.deepcopy``, ``pickle`` and ``torch.save`` ask for."""
        raise TrainStepError(
            f"a copy of {self!r}",
            expected="copies of its modules and its optimizers",
            got="the step itself, whose programs write their tensors",
            remedy="copy modules and optimizers together, and make a step of the copies with fxwrap.train_step",
        )
