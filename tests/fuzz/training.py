"""What people do around training steps: programs through ``fxwrap.train_step`` and the ordinary loop, compared.

A program is data: a model with its loss, an optimizer, how the step is made, and what is done before each of its
calls. Both sides run it on objects of their own, with equal values and random state, in float64. After every call
they have the same losses, parameters, states, buffers, settings and random state, and what docs/training.md says of
``p.grad``. Within a limit no call that compiles nothing takes more, and ``MemoryLimitError.least`` fits.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import gc
import io
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config
from conftest import tensors_in
from features.train_step.loops import OrdinaryStep
from own_operators import AROUND, HOST_WORK
from sequences import random_state, set_random_state
from torch import Tensor, nn
from torch.optim import lr_scheduler
from training_grammar import (
    COUNTS_IN_FLOAT32,
    OPTIMIZERS,
    PARTS,
    RATES,
    SMOOTH,
    UNKNOWN_MEMORY,
    WIDTH,
    Optimizer,
    Recipe,
    made_from,
    random_model,
    random_optimizer,
    source_of,
)
from within_limit import DifferenceError, TakesMoreError, measured

import fxwrap
from fxwrap.errors import MemoryLimitError
from fxwrap.graphs.devices.runtime import runtime_for
from fxwrap.host_graph.sizes import hint

# -- what is drawn ---------------------------------------------------------------------------------------------------

SIZES = (5, 12, 7, 24)  # none is a size of a parameter
# By what they touch. Each is done on both sides, but for those of the tool.
OF_SETTINGS = ("rate", "setting", "settings in turn")
OF_GRADIENTS = (
    "ordinary step",
    "backward",
    "zero_grad",
    "zero_grad to zeros",
    "gradients dropped",
    "gradients given",
)
OF_HOOKS = ("optimizer hook", "module hook", "parameter hook")
OF_THE_TOOL = ("record", "dry run", "explain", "report", "release", "limit", "no limit")
OF_STATE = (
    "evaluate", "eval mode", "train mode", "load", "load optimizer", "state by hand", "clear state", "clamp", "data",
    "freeze", "thaw", "add group", "copy", "keep", "seed", "thread", "wrong batch", "collect",
)  # fmt: skip
HABITS = (*OF_SETTINGS, *OF_GRADIENTS, *OF_HOOKS, *OF_THE_TOOL, *OF_STATE)
# Work of the tool that may raise ``MemoryLimitError``, and changes nothing.
STEPS = 9


@dataclass(frozen=True)
class Step:
    """One call, and what is done before it; "" for nothing."""

    size: int
    task: int
    habit: str
    pick: int


@dataclass(frozen=True)
class Training:
    """A program.

    Attributes:
        schedule: of rates: "", or a name of ``lr_scheduler``.
        float64: whether the default dtype is float64, too. If it is not, counts of steps are float32.
        limit: the step's ``memory_limit``; None for none.
    """

    recipe: Recipe
    optimizer: Optimizer
    steps: tuple[Step, ...]
    schedule: str = ""
    accumulate: int = 1
    clip_norm: float | None = None
    dynamic: bool | None = True
    float64: bool = True
    limit: int | str | None = None
    options: tuple[tuple[str, Any], ...] = (("capture", "always"),)

    def __str__(self) -> str:
        names = ("schedule", "accumulate", "clip_norm", "dynamic", "float64", "limit", "options")
        made = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return "\n".join([source_of(self.recipe), f"# {self.optimizer}", f"# {made}", *map(str, self.steps), ""])

    @property
    def tolerance(self) -> float:
        in_float32 = not self.float64 or self.optimizer.foreach == "fused"
        return 1e-3 if in_float32 and self.optimizer.name in COUNTS_IN_FLOAT32 else 1e-9


def random_training(draw: random.Random) -> Training:
    """With a few habits only, each often; half of the programs within limits."""
    optimizer = random_optimizer(draw)
    kinds = tuple(sorted(SMOOTH)) if optimizer.name == "Rprop" else PARTS
    within = draw.random() < 0.5
    habits = draw.sample(HABITS, draw.randint(1, 4)) + (["limit"] if within else [])
    sizes = draw.choice((1, 1, 2, 4))
    steps = tuple(
        Step(
            draw.randrange(sizes),
            draw.randrange(2),
            draw.choice(habits) if draw.random() < 0.6 and n else "",
            draw.randrange(12),
        )
        for n in range(STEPS)
    )
    limit = draw.choice((None, "1GiB", 1)) if within else None  # a step that is made anew has no sums
    options = [("capture", "always")]
    options += draw.choice(([], [], [("warmup", 0)], [("max_recordings", 1)]))  # type: ignore[arg-type]
    return Training(
        random_model(draw, kinds),
        optimizer,
        steps,
        draw.choice(("", "", "", "StepLR", "OneCycleLR", "CyclicLR")) if optimizer.rate == "number" else "",
        1 if limit == 1 else draw.choice((1, 1, 2, 3)),
        draw.choice((None, None, 0.5)),
        draw.choice((True, True, None)),
        draw.random() < 0.7,
        limit,
        tuple(options),
    )


@contextlib.contextmanager
def torch_settings(float64: bool) -> Iterator[None]:
    """Random numbers are torch's own, which the ordinary loop draws, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if float64 else torch.float32)
    try:
        with (
            torch._inductor.config.patch(fallback_random=True),
            torch._dynamo.config.patch(recompile_limit=64, capture_dynamic_output_shape_ops=True),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


# -- one side of a program -------------------------------------------------------------------------------------------


class Side:
    """A model and its optimizer, and everything that is done to them on both sides alike.

    Attributes:
        seen: what the calls have returned, to be compared at once.
        kept: what calls have returned and nobody has dropped, and copies of models.
    """

    def __init__(self, training: Training, device: torch.device) -> None:
        self.training, self.device = training, device
        space = made_from(source_of(training.recipe))
        torch.manual_seed(0)
        self.model: nn.Module = space["Model"]().double().to(device)
        self.loss: Callable[..., Any] = space["loss"]
        self.optimizer = training.optimizer.make(self.model)
        self.schedule = self._schedule()
        self.step = self.make_step()
        self.done = 0  # calls
        self.seen: list[Any] = []
        self.kept: list[Any] = []
        self.saved: list[Any] = []
        self.random = random_state(self.device)
        self.turn = 0

    def _schedule(self) -> Any:
        name, optimizer = self.training.schedule, self.optimizer
        has_momentum = any(one in optimizer.defaults for one in ("momentum", "betas"))
        if name == "StepLR":
            return lr_scheduler.StepLR(optimizer, 2, 0.5)
        if name == "OneCycleLR":
            return lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=4 * STEPS, cycle_momentum=has_momentum)
        if name == "CyclicLR":
            return lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=3, cycle_momentum=has_momentum)
        return None

    def make_step(self) -> Callable[..., Any]:
        training = self.training
        return OrdinaryStep(
            self.model, self.loss, self.optimizer, clip_norm=training.clip_norm, accumulate=training.accumulate
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def batch(self, number: int, step: Step, rows: int = 0) -> tuple[Any, ...]:
        draw = torch.Generator().manual_seed(number)
        rows = rows or SIZES[step.size % len(SIZES)]
        x, y = (torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
        index = torch.randint(WIDTH, (rows,), generator=draw)
        return x.to(self.device), y.to(self.device), index.to(self.device), step.task

    # -- a step

    def run(self, number: int) -> None:
        step, self.seen = self.training.steps[number], []
        set_random_state(self.device, self.random)
        AROUND.kept.clear()
        if step.habit:
            self.habit(number, step)
        self.call(number, step)
        if self.schedule is not None and self.done % self.training.accumulate == 0:
            self.schedule.step()
        self.random = random_state(self.device)
        self.seen.append(list(AROUND.kept))

    def call(self, number: int, step: Step) -> None:
        batch = self.batch(number, step)
        if step.habit == "thread":
            self._in_thread(lambda: self._call(batch))
        else:
            self._call(batch)
        self.done += 1
        if step.habit == "keep":
            self.kept.append(self.seen[-1])

    def _call(self, batch: tuple[Any, ...]) -> None:
        self.seen.append(self.step(*batch))

    @staticmethod
    def _in_thread(run: Callable[[], None]) -> None:
        errors: list[BaseException] = []

        def caught() -> None:
            try:
                run()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(caught,))
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def ordinary(self, number: int, step: Step) -> None:
        """A step of the ordinary loop on this side, too."""
        OrdinaryStep(self.model, self.loss, self.optimizer)(*self.batch(number + 100, step))

    # -- what is done before

    def habit(self, number: int, step: Step) -> None:
        act = getattr(self, "_do_" + step.habit.replace(" ", "_"), None)
        if act is not None:
            act(number, step)

    def _do_rate(self, number: int, step: Step) -> None:
        group = self.optimizer.param_groups[step.pick % len(self.optimizer.param_groups)]
        rate = RATES[step.pick % len(RATES)] * (1 + number / 7)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    def _do_setting(self, number: int, step: Step) -> None:
        names = self.training.optimizer.changeable
        self._set(names[step.pick % len(names)], number + step.pick)

    def _do_settings_in_turn(self, number: int, step: Step) -> None:
        """The same one each time, in all groups, to values that do not come again, as by a schedule."""
        names = self.training.optimizer.changeable
        self._set(names[self.training.steps[0].pick % len(names)], number, 1 - number / 20)

    def _set(self, name: str, pick: int, share: float | None = None) -> None:
        """One of its values; with ``share`` so much of the largest."""
        values = OPTIMIZERS[self.training.optimizer.name][name]
        value = values[pick % len(values)]
        if share is not None and isinstance(value, float):
            value = share * max(values)
        elif share is not None and isinstance(value, tuple):
            value = share * value[0], value[1]
        for group in self.optimizer.param_groups:
            group[name] = value

    def _do_ordinary_step(self, number: int, step: Step) -> None:
        if self.done % self.training.accumulate == 0:
            self.ordinary(number, step)

    def _do_backward(self, number: int, step: Step) -> None:
        """Gradients that no update takes: those of other parameters than the step's, too."""
        if self.done % self.training.accumulate == 0:
            outputs = self.loss(self.model, *self.batch(number + 200, step))
            (outputs[0] if isinstance(outputs, tuple) else outputs).mul(3).backward()

    def _do_zero_grad(self, number: int, step: Step) -> None:
        if self.done % self.training.accumulate == 0:
            self.optimizer.zero_grad()

    def _do_zero_grad_to_zeros(self, number: int, step: Step) -> None:
        if self.done % self.training.accumulate == 0:
            self.optimizer.zero_grad(set_to_none=False)

    def _do_gradients_dropped(self, number: int, step: Step) -> None:
        if self.done % self.training.accumulate == 0:
            for parameter in self.parameters[step.pick % 2 :: 2]:
                parameter.grad = None

    def _do_gradients_given(self, number: int, step: Step) -> None:
        if self.done % self.training.accumulate == 0:
            for parameter in self.parameters:
                parameter.grad = torch.full_like(parameter, 7.0) if parameter.requires_grad else None

    def _do_evaluate(self, number: int, step: Step) -> None:
        before = self.model.training
        self.model.eval()
        with torch.no_grad():
            self.seen.append(self.model(*self.batch(number, step)[0:3:2], step.task))
        self.model.train(before)

    def _do_eval_mode(self, number: int, step: Step) -> None:
        self.model.eval()

    def _do_train_mode(self, number: int, step: Step) -> None:
        self.model.train()

    def _do_load(self, number: int, step: Step) -> None:
        """What was saved the last time, and what is to be loaded the next time."""
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), file)
        self.saved.append(file.getvalue())
        model, optimizer = torch.load(io.BytesIO(self.saved[0]))
        if len(optimizer["param_groups"]) == len(self.optimizer.param_groups):
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
        del self.saved[:-1]

    def _do_load_optimizer(self, number: int, step: Step) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def _do_state_by_hand(self, number: int, step: Step) -> None:
        """Halved, in place or in other tensors. Those that fxwrap has made ahead of a gradient are zeros."""
        for state in list(self.optimizer.state.values()):
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.ndim > 0:
                    state[name] = value.mul_(0.5) if step.pick % 2 else value * 0.5

    def _do_clear_state(self, number: int, step: Step) -> None:
        self.optimizer.state.clear()

    def _do_clamp(self, number: int, step: Step) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.clamp_(-0.3, 0.3)

    def _do_data(self, number: int, step: Step) -> None:
        parameter = self.parameters[step.pick % len(self.parameters)]
        parameter.data = parameter.data * 0.9

    def _do_freeze(self, number: int, step: Step) -> None:
        """Not the first, without which nothing may be left to train, nor while an update is under way."""
        if self.done % self.training.accumulate == 0:
            for parameter in self.parameters[1 + step.pick % 2 :: 2]:
                parameter.requires_grad_(False)

    def _do_thaw(self, number: int, step: Step) -> None:
        if self.done % self.training.accumulate == 0:
            for parameter in self.parameters:
                parameter.requires_grad_(True)

    def _do_add_group(self, number: int, step: Step) -> None:
        known = set(self.parameters)
        others = [p for p in self.model.parameters() if p not in known]
        # A schedule keeps lists of the groups that it was made with.
        if others and self.done % self.training.accumulate == 0 and self.schedule is None:
            self.optimizer.add_param_group({"params": others, "lr": RATES[2]})

    def _do_copy(self, number: int, step: Step) -> None:
        self.kept.append(copy.deepcopy(self.model))

    def _do_seed(self, number: int, step: Step) -> None:
        torch.manual_seed(step.pick)

    def _do_collect(self, number: int, step: Step) -> None:
        self.kept.clear()
        gc.collect()

    # -- hooks that come later, and stay

    def _do_optimizer_hook(self, number: int, step: Step) -> None:
        def shrink(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(0.99)

        register = self.optimizer.register_step_post_hook, self.optimizer.register_step_pre_hook
        register[step.pick % 2](shrink)  # type: ignore[arg-type]

    def _do_module_hook(self, number: int, step: Step) -> None:
        """Of the model, or of one of its modules."""
        modules = list(self.model.modules())
        modules[step.pick % len(modules)].register_full_backward_hook(lambda *_: None)

    def _do_parameter_hook(self, number: int, step: Step) -> None:
        trained = [p for p in self.parameters if p.requires_grad]
        parameter = trained[step.pick % len(trained)]

        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        if step.pick % 2:
            parameter.register_post_accumulate_grad_hook(halve)
        else:
            parameter.register_hook(lambda grad: grad * 0.5)

    # -- what can be seen

    def visible(self) -> Iterator[tuple[str, Any]]:
        """Everything but states and gradients, which the sides make at other times."""
        yield "returned", self.seen
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()
        for number, group in enumerate(self.optimizer.param_groups):
            yield f"settings of group {number}", {k: v for k, v in group.items() if k != "params"}
        for number, kept in enumerate(self.kept):
            yield f"kept {number}", list(kept.state_dict().values()) if isinstance(kept, nn.Module) else kept
        yield "random state", self.random


# -- fxwrap's side ---------------------------------------------------------------------------------------------------


class OurSide(Side):
    """The same with ``fxwrap.train_step``, and what is done to that alone.

    Attributes:
        limit: of bytes, that no call may take more than; 0 for none.
        room: by which the least is multiplied for the next limit.
    """

    limit, room = 0, 1.0

    def make_step(self, limit: int | None = None) -> Any:
        training = self.training
        limit = limit or training.limit
        options = dict(training.options)
        if runtime_for(self.device).frozen_addresses:
            options["eager_ops"] = HOST_WORK
        self.limit = limit if isinstance(limit, int) else 0
        return fxwrap.train_step(
            self.model,
            self.loss,
            self.optimizer,
            clip_norm=training.clip_norm,
            accumulate=training.accumulate,
            memory_limit=limit,
            dynamic=training.dynamic,
            options=options,
        )

    def _call(self, batch: tuple[Any, ...]) -> None:
        written = self._written()
        self.seen.append(self._within_limit(lambda: self.step(*batch)))
        no_program = self._written() != written
        if self.training.accumulate == 1 and not no_program and any(p.grad is not None for p in self.parameters):
            raise DifferenceError("p.grad is left with accumulate=1")

    # -- limits

    def _within_limit(self, run: Callable[[], Any]) -> Any:
        """Run, and if that does not fit, within the least limit that does, or somewhat more."""
        programs = self._programs()
        try:
            result = self._measured(run)
        except MemoryLimitError as error:
            if not self.limit:
                raise
            if error.least <= self.limit:
                raise TakesMoreError(
                    f"within {self.limit} bytes it does not fit, and least is {error.least}"
                ) from error
            self._limit_to(int(error.least * self.room))
            try:
                result = self._measured(run)
            except MemoryLimitError as again:
                raise TakesMoreError(
                    f"least is {error.least}, and within {self.limit} bytes it does not fit"
                ) from again
        if self.limit and self._programs() != programs and self.training.limit != 1:
            self._limit_to(self.limit)  # what is compiled later has the limit of the option
        return result

    def _measured(self, run: Callable[[], Any]) -> Any:
        """Run; a call that compiles nothing takes no more than the limit, beside states and gradients that stay."""
        if not self.limit or runtime_for(self.device).frozen_addresses or self.device.type != "cpu":
            return run()
        compiled, replays, own, written = self._programs(), self._replays(), self._own(), self._written()
        result, peak = measured(run)
        if peak is None or self._programs() != compiled or self._written() != written:
            return result
        if self.training.recipe.kinds & UNKNOWN_MEMORY and self._replays() == replays:
            return result  # it warms up, and what it takes is measured
        more = sum(value.untyped_storage().nbytes() for key, value in self._own().items() if key not in own)
        if peak > self.limit + more:
            raise TakesMoreError(f"within {self.limit} bytes it takes {peak - more}")
        return result

    def _own(self) -> dict[int, Tensor]:
        """States, gradients, and what an operator keeps of a call."""
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return {value.data_ptr(): value for value in [*states, *gradients, *tensors_in(AROUND.kept)]}

    def _programs(self) -> int:
        return self._count("programs")

    def _replays(self) -> int:
        return self._count("replays")

    def _written(self) -> int:
        """Calls that ran as the step is written: no limit holds in these."""
        return sum(self.step.ordinary_calls.values())

    def _count(self, what: str) -> int:
        try:
            return int(fxwrap.stats(self.step)[what])
        except fxwrap.FxwrapError:  # nothing is compiled yet
            return 0

    def _do_limit(self, number: int, step: Step) -> None:
        """None fits into one byte: the call says what the least is."""
        if self.done:
            self.room = (1.0, 1.0, 1.2, 1.5)[step.pick % 4]
            self._limit_to(1)

    def _do_no_limit(self, number: int, step: Step) -> None:
        if self.done:
            self._limit_to(None)

    def _limit_to(self, limit: int | None) -> None:
        """Another limit. A step whose option nothing fits into is made anew."""
        self.limit = limit or 0
        if self.training.limit == 1:
            self.step = self.make_step(self.limit or None)
        else:
            fxwrap.limit_memory(self.step, limit)

    # -- what changes nothing

    def _do_record(self, number: int, step: Step) -> None:
        self._changes_nothing(lambda batch: fxwrap.record(self.step, batch), number, step)

    def _do_dry_run(self, number: int, step: Step) -> None:
        self._changes_nothing(lambda batch: fxwrap.record(self.step, batch, dry_run=True), number, step)

    def _do_explain(self, number: int, step: Step) -> None:
        self._changes_nothing(lambda batch: fxwrap.explain(self.step, *batch), number, step)

    def _changes_nothing(self, act: Callable[[tuple[Any, ...]], Any], number: int, step: Step) -> None:
        """But what an operator notes. Of a size of this program, or of another one."""
        noted, rows = len(AROUND.kept), (0, 9)[step.pick % 2]
        before = self._snapshot()
        with contextlib.suppress(MemoryLimitError):
            act(self.batch(number + 300, step, rows))
        del AROUND.kept[noted:]
        for (name, got), (_, expected) in zip(self._snapshot(), before, strict=True):
            if (why := difference(got, expected, 0.0)) is not None:
                raise DifferenceError(f"{step.habit} has changed {name}: {why}")

    def _snapshot(self) -> list[tuple[str, Any]]:
        found = [(name, copy.deepcopy(value)) for name, value in self.visible() if not name.startswith("kept")]
        found += [(f"gradient {n}", p.grad.clone()) for n, p in enumerate(self.parameters) if p.grad is not None]
        found += [("random state", random_state(self.device))]
        # A state that is made by recording is as if it were new.
        for n, p in enumerate(self.parameters):
            state = self.optimizer.state.get(p, {}) if self.done else {}
            found += [(f"{name} of {n}", copy.deepcopy(value)) for name, value in state.items()]
        return found

    def _do_report(self, number: int, step: Step) -> None:
        if self.done:
            str(fxwrap.report(self.step))
            fxwrap.stats(self.step)

    def _do_release(self, number: int, step: Step) -> None:
        if self.done:
            fxwrap.release(*([self.step] if step.pick % 2 else []))

    def _do_wrong_batch(self, number: int, step: Step) -> None:
        """It raises, and has changed nothing; the other side does nothing."""
        x, *others = self.batch(number, step)
        before = self._snapshot()
        try:
            self.step(x[:, 1:], *others)
        except Exception:
            for (name, got), (_, expected) in zip(self._snapshot(), before, strict=True):
                if (why := difference(got, expected, 0.0)) is not None:
                    raise DifferenceError(f"a wrong batch has changed {name}: {why}") from None
        else:
            raise DifferenceError("a wrong batch is trained on")


# -- both sides ------------------------------------------------------------------------------------------------------


def run(training: Training, device: torch.device, side: type[OurSide] = OurSide) -> int:
    """Run a program on both sides; returns the number of replays.

    Args:
        side: fxwrap's; ``written.py`` has another one.

    Raises:
        DifferenceError: at the first call after which something is not the same.
    """
    torch._dynamo.reset()
    with torch_settings(training.float64), torch.random.fork_rng(devices=[]):
        theirs = Side(training, device)
        ours = side(training, device)
        for number, step in enumerate(training.steps):
            try:
                theirs.run(number)
                ours.run(number)
                compare(ours, theirs, training.tolerance)
            except DifferenceError as error:
                raise DifferenceError(f"call {number}, {step}: {error}") from error.__cause__
        counters = fxwrap.stats(ours.step)
        if counters["fallbacks"]:
            raise DifferenceError(f"Inductor's wrapper runs it: {counters['fallbacks']}")
        check_static_inputs(ours)
        return int(counters["replays"])


def compare(ours: OurSide, theirs: Side, tolerance: float) -> None:
    mine, others = list(ours.visible()), list(theirs.visible())
    if [name for name, _ in mine] != [name for name, _ in others]:
        raise DifferenceError(
            f"{[name for name, _ in mine]} is there, and in the loop {[name for name, _ in others]}"
        )
    for (name, got), (_, expected) in zip(mine, others, strict=True):
        if (why := difference(got, expected, tolerance)) is not None:
            raise DifferenceError(f"{name}: {why}")
    under_way = ours.done % ours.training.accumulate > 0
    for number, (p, other) in enumerate(zip(ours.parameters, theirs.parameters, strict=True)):
        state, expected = ours.optimizer.state.get(p, {}), theirs.optimizer.state.get(other, {})
        for name, value in expected.items():
            # What the loop counts on the host lies beside the parameter, or a device graph could not write it.
            if (why := difference(state.get(name), value, tolerance, check_device=False)) is not None:
                raise DifferenceError(f"{name} of parameter {number}: {why}")
        if under_way and (other.grad is not None or (p.grad is not None and p.grad.any())):
            got = torch.zeros_like(p) if p.grad is None else p.grad
            if (
                why := difference(got, other.grad if other.grad is not None else torch.zeros_like(p), tolerance)
            ) is not None:
                raise DifferenceError(f"gradient of parameter {number}: {why}")


def difference(got: Any, expected: Any, tolerance: float, check_device: bool = True) -> str | None:
    """What two values differ in; None for nothing. Where one has no tensors, the other has none."""
    mine, others = tensors_in([got]), tensors_in([expected])
    if len(mine) != len(others):
        return f"{got}, and there {expected}"
    for a, b in zip(mine, others, strict=True):
        try:
            # Counts of steps are float32 here and there, and the same.
            torch.testing.assert_close(
                a.detach().double(),
                b.detach().double(),
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                check_device=check_device,
            )
        except AssertionError as error:
            lines = [line for line in str(error).splitlines() if line]
            return " ".join([f"{_short(a)}, and there {_short(b)};", *lines[1:3]])
    plain = [_plain(got), _plain(expected)]
    return None if plain[0] == plain[1] else f"{plain[0]}, and there {plain[1]}"


def _short(value: Tensor) -> str:
    return f"{tuple(value.shape)} of {value.detach().flatten()[:3].tolist()}"


def _plain(value: Any) -> Any:
    """The structure, with dtypes for tensors."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Tensor):
        return value.dtype if value.ndim else None
    return round(value, 9) if isinstance(value, float) else value


def check_static_inputs(ours: OurSide) -> None:
    """What moves from call to call is the batch, and nothing else."""
    for graph in fxwrap.report(ours.step).graphs:
        plan = graph.program.plan
        for position, node in enumerate(plan.placeholders):
            value = node.meta["val"]
            if not isinstance(value, Tensor) or not value.ndim:  # a number may be given as a tensor, too
                continue
            rows = value.shape[0]
            of_batch = value.dtype is torch.int64 or isinstance(rows, torch.SymInt) or hint(rows) in SIZES
            if of_batch == (position in plan.inputs.static):
                kind = "static" if position in plan.inputs.static else "not static"
                raise DifferenceError(f"{node.name} of {tuple(value.shape)} counts as {kind}: input {position}")


# -- what fails is made small ----------------------------------------------------------------------------------------


def differs(training: Training, device: torch.device, side: type[OurSide] = OurSide) -> bool:
    """Whatever is raised."""
    try:
        run(training, device, side)
    except Exception:
        return True
    return False


def shrunk(
    training: Training, device: torch.device, fails: Callable[[Training, torch.device], bool] | None = None
) -> Training:
    """A program that fails, without what it does not need: calls, habits, parts, settings."""

    fails = fails or differs

    def smaller(**change: Any) -> bool:
        nonlocal training
        one = dataclasses.replace(training, **change)
        if one == training or not fails(one, device):
            return False
        training = one
        return True

    if not fails(training, device):
        return training
    steps = training.steps
    while len(steps) > 1 and smaller(steps=steps[:-1]):
        steps = training.steps
    for index in reversed(range(len(training.steps) - 1)):
        smaller(steps=training.steps[:index] + training.steps[index + 1 :])
    for index in range(len(training.steps)):
        for change in ({"habit": ""}, {"size": 0}, {"task": 0}, {"pick": 0}):
            steps = training.steps
            smaller(steps=(*steps[:index], dataclasses.replace(steps[index], **change), *steps[index + 1 :]))  # type: ignore[arg-type]
    for change in (
        {"schedule": ""},
        {"accumulate": 1},
        {"clip_norm": None},
        {"dynamic": True},
        {"limit": None},
        {"options": ()},
    ):
        smaller(**change)
    for index in reversed(range(len(training.recipe.parts))):
        parts = training.recipe.parts
        if len(parts) > 1:
            smaller(recipe=dataclasses.replace(training.recipe, parts=parts[:index] + parts[index + 1 :]))
    smaller(recipe=dataclasses.replace(training.recipe, loss="squares"))
    for name in dict(training.optimizer.settings):
        fewer = tuple(one for one in training.optimizer.settings if one[0] != name)
        smaller(optimizer=dataclasses.replace(training.optimizer, settings=fewer))
    for plainer in ({"groups": "one"}, {"foreach": None}, {"rate": "number"}):
        smaller(optimizer=dataclasses.replace(training.optimizer, **plainer))  # type: ignore[arg-type]
    smaller(optimizer=Optimizer("SGD", ()))
    return training
