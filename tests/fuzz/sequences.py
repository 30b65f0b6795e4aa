"""What callers do: sequences of calls, through fxwrap and through Inductor's own wrapper, compared after every step.

A sequence is data: two programs of a pool, and steps. A step is one call of one of them, and what its caller does
before and after it. Both sides run the same code on tensors of their own, with equal values and equal random state.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import gc
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from conftest import tensors_in
from grammar import Recipe, Text, random_recipe, shrunk_recipe, text_of
from own_operators import AROUND, HOST_WORK
from torch import Tensor
from within_limit import DifferenceError, Limit, TakesMoreError

import fxwrap
from fxwrap.backend import fxwrap as backend
from fxwrap.devices import registered_devices
from fxwrap.graphs.compilation import Compilation
from fxwrap.graphs.devices.runtime import runtime_for
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.shared_state import SHARED

# -- what is drawn --------------------------------------------------------------------------------------------------

SIZES = (3, 5, 2, 8, 6)
# How x and y are given. Each is guarded by Dynamo, and may compile a program of its own.
LAYOUTS = ("transposed", "strided", "offset", "misaligned", "one tensor", "of one base", "overlapping", "a buffer")
BEFORE = (
    "data", "data in turn", "assign", "new parameter", "in place", "new buffer",
    "release", "release all", "record", "raise", "seed", "flag", "number", "collect", "limit", "no limit",
)  # fmt: skip
AFTER = (
    "keep", "keep a view", "keep one", "keep detached", "update", "resize", "drop oldest", "drop all",
    "hold in autograd",
)  # fmt: skip
BACKWARD = ("micro-batches", "later", "oldest", "newest", "twice", "never", "gradients dropped", "descend")
INPUTS = ("again", "fed back", "fed back as a view", "kept by the caller")
HOW = ("thread", "two threads", "other mode")
HABITS = tuple(
    [("before", one) for one in BEFORE]
    + [("after", one) for one in AFTER]
    + [("backward", one) for one in BACKWARD]
    + [("inputs", one) for one in INPUTS]
    + [("how", one) for one in HOW]
)


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        program: which of the sequence's.
        habit: what the caller does besides calling: (where, what); ("", "") for nothing.
    """

    program: int
    size: int
    layout: int
    habit: tuple[str, str]
    pick: int


@dataclass(frozen=True)
class Sequence_:
    """Steps on programs of a pool, by their numbers there."""

    programs: tuple[int, ...]
    steps: tuple[Step, ...]


STEPS = 12


def random_sequence(draw: random.Random, pool: int) -> Sequence_:
    """A sequence has a few habits only, each of them often: so that calls are replayed in between."""
    programs = tuple(draw.randrange(pool) for _ in range(2))
    habits = [("", ""), *draw.sample(HABITS, draw.randint(1, 4))]
    sizes, layouts = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 1, 2, 3))
    which = draw.choice(((0,), (0, 0, 1), (0, 1)))
    steps = [
        Step(
            draw.choice(which),
            draw.randrange(sizes),
            draw.randrange(layouts),
            draw.choice(habits) if draw.random() < 0.7 else ("", ""),
            draw.randrange(8),
        )
        for _ in range(STEPS)
    ]
    return Sequence_(programs, tuple(steps))


@dataclass(frozen=True)
class Variant:
    """A program of the pool, and how it is compiled.

    Attributes:
        layouts: of its inputs; the first is the usual one.
        other_mode: inference_mode instead of no_grad, or no_grad instead of training.
    """

    recipe: Recipe
    options: tuple[tuple[str, Any], ...]
    dynamic: bool | None
    sizes: tuple[int, ...]
    layouts: tuple[str, ...]


OPTIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("warmup", (0, 2)),
    ("copy_outputs", (True,)),
    ("max_recordings", (1, 2)),
    ("max_memory", (512, 2048)),
    ("capture", ("auto", "never")),
    ("eager_ops", (("aten::mm",), ("aten::addmm",), ("fxwrap_fuzz::both_",), ("fxwrap_fuzz::scale_",))),
    ("peak_budget", (4.0,)),
    ("min_launches", (2,)),
    ("lanes", (1, 3)),
)


def random_variant(draw: random.Random) -> Variant:
    recipe = random_recipe(draw)
    options: dict[str, Any] = {"capture": "always"}
    for name, values in draw.sample(OPTIONS, draw.choice((0, 0, 1, 2))):
        options[name] = draw.choice(values)
    dynamic = draw.choice((True, True, None, False))
    sizes = (3, 5) if dynamic is False else (*SIZES, 1) if draw.random() < 0.2 else SIZES
    return Variant(recipe, tuple(options.items()), dynamic, sizes, ("plain", *draw.sample(LAYOUTS, 2)))


# -- a program on two sides -----------------------------------------------------------------------------------------


class Compiled:
    """A program compiled on one side, and the state that its module begins a sequence with."""

    def __init__(self, variant: Variant, text: Text, device: torch.device, ours: bool) -> None:
        self.variant, self.text, self.device = variant, text, device
        self.module = text.make(0, device)
        self.compilation = Compilation() if ours else None
        settings = {key: value for one in registered_devices().values() for key, value in one.config.items()}
        options, how = settings, "inductor"
        if ours:
            options, how = dict(variant.options), functools.partial(backend, compilation=self.compilation)
            if runtime_for(device).frozen_addresses:
                options["eager_ops"] = (*options.get("eager_ops", ()), *HOST_WORK)
        self.call = torch.compile(self.module, backend=how, options=options or None, dynamic=variant.dynamic)
        self._state = {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def begin(self) -> None:
        """Be as new, but for what is compiled."""
        for program in self.compilation.programs if self.compilation is not None else ():
            program.release()
            program.specializations.clear()
            program._thread = threading.local()
            if program.recorder.memory_limit:
                program.set_memory_limit(0)
        for name in self.module._parameters:
            self.module._parameters[name] = torch.nn.Parameter(self._state[name].clone())
        for name in self.module._buffers:
            self.module._buffers[name] = self._state[name].clone()

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.module.named_parameters(), *self.module.named_buffers()]


Pair = tuple[Compiled, Compiled]


class Pool:
    """Pairs of compiled programs by number, made when they are asked for.

    Args:
        variants: the programs, by number; None to draw them from the seed.
    """

    def __init__(self, device: torch.device, seed: int = 0, variants: Mapping[int, Variant] | None = None) -> None:
        self.device, self.seed, self._variants = device, seed, variants
        self._known: dict[int, Pair] = {}

    def __len__(self) -> int:
        return len(self._known)

    def variant(self, number: int) -> Variant:
        if self._variants is not None:
            return self._variants[number]
        return random_variant(random.Random(f"{self.seed} {number}"))

    def get(self, number: int) -> Pair:
        if number not in self._known:
            variant = self.variant(number)
            text = text_of(variant.recipe)
            self._known[number] = (
                Compiled(variant, text, self.device, True),
                Compiled(variant, text, self.device, False),
            )
        return self._known[number]

    def programs(self) -> list[Any]:
        """All that fxwrap has made."""
        compilations = [ours.compilation for ours, _ in self._known.values()]
        return [program for one in compilations if one is not None for program in one.programs]


@contextlib.contextmanager
def torch_settings() -> Iterator[None]:
    """Every program is compiled, as often as its calls ask for.

    AOTAutograd's cache does not tell inputs that overlap from those that do not: what it finds may not fit the call.
    """
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(
            recompile_limit=64, accumulated_recompile_limit=1 << 14, capture_scalar_outputs=True
        ),
    ):
        yield


# -- one side of a sequence -----------------------------------------------------------------------------------------


@dataclass
class Pending:
    """A loss whose backward has not run."""

    loss: Tensor
    again: bool = False


class Side:
    """Everything that the caller of one side has.

    Attributes:
        raised: the types of exceptions in the present step, in order, None for what raised nothing.
        lost: whether the call of this step raised.
        written: of what could be seen before the call, what the call has written.
    """

    def __init__(self, programs: Sequence[Compiled], ours: bool, device: torch.device) -> None:
        self.programs, self.ours, self.device = programs, ours, device
        self.random = random_state(device)
        self.outputs: list[Any] = []
        self.inputs: list[Tensor] = []
        self.kept: list[Any] = []
        self.callers: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.pending: list[Pending] = []
        self.old_data: dict[int, Tensor] = {}
        self.kept_by_operator: list[Tensor] = []
        self.raised: list[str | None] = []
        self.lost, self.written = False, list[bool]()
        self.flag, self.number = True, 2
        self.limits: dict[int, Limit] = {}

    # -- a step

    def run(self, step: Step, number: int) -> None:
        """Take one step; what it draws depends on its number alone."""
        self.raised, self.lost = [], False
        AROUND.kept = self.kept_by_operator
        program = self.programs[step.program % len(self.programs)]
        where, what = step.habit
        draw = torch.Generator().manual_seed(number)
        before = random_state(self.device)
        set_random_state(self.device, self.random)
        try:
            if where == "before":
                self._before(program, what, step, draw)
            self.outputs = []
            self._call(program, step, draw)
            if not self.lost:
                if where == "after":
                    self._after(program, what, step.pick)
                if (where, what) == ("backward", "micro-batches"):
                    self._micro_batches(program, step, draw)
                self._backward(program, what if where == "backward" else "", step.pick)
        finally:
            AROUND.raising = False
            self.random = random_state(self.device)
            set_random_state(self.device, before)

    def attempt(self, act: Callable[[], Any]) -> Any:
        """Note what it raises, by type: messages name what an implementation is made of."""
        try:
            result = act()
        except TakesMoreError:
            raise
        except Exception as error:
            self.raised.append(type(error).__name__)
            error.__traceback__ = None
            return None
        self.raised.append(None)
        return result

    def normal(self, draw: torch.Generator, *size: int) -> Tensor:
        return torch.randn(*size, generator=draw).to(self.device)

    # -- before a call

    def _before(self, program: Compiled, what: str, step: Step, draw: torch.Generator) -> None:
        module = program.module
        if what == "data":
            module.weight.data = self.normal(draw, 4, 4)
        elif what == "data in turn":
            other = self.old_data.get(id(module), None)
            self.old_data[id(module)] = module.weight.data
            module.weight.data = self.normal(draw, 4, 4) if other is None else other
        elif what == "assign":
            self.attempt(
                lambda: module.load_state_dict({"weight": self.normal(draw, 4, 4)}, strict=False, assign=True)
            )
        elif what == "new parameter":
            module.weight = torch.nn.Parameter(self.normal(draw, 4, 4))
        elif what == "in place":
            with torch.no_grad():
                module.bias.copy_(self.normal(draw, 4))
        elif what == "new buffer":
            module.cache = module.cache.clone()
        elif what in ("release", "release all") and self.ours:
            with contextlib.suppress(fxwrap.FxwrapError):  # nothing was compiled yet
                fxwrap.release(*([program.call] if what == "release" else []))
        elif what == "record" and not program.text.windows:  # an example's copy is no part of anything
            self._record(program, step, draw)
        elif what == "raise":
            AROUND.raising = True
        elif what == "seed":
            torch.manual_seed(step.pick)
        elif what == "flag":
            self.flag = not self.flag
        elif what == "number":
            self.number = 2 + step.pick % 3
        elif what == "collect":
            gc.collect()
        elif what in ("limit", "no limit") and self.ours and program.text.one_graph:
            limit = self._limit(program)
            limit.set(1 if what == "limit" and not program.variant.recipe.training else 0)
            limit.room = (1.0, 1.0, 1.2, 1.5)[step.pick % 4]

    def _record(self, program: Compiled, step: Step, draw: torch.Generator) -> None:
        """The other side makes the same calls, so that Dynamo has seen the same; what is written is put back."""
        x, y = self._given(program, dataclasses.replace(step, habit=("", "")), draw)
        before = {name: value.detach().clone() for name, value in program.module.named_buffers()}
        state, kept = random_state(self.device), len(self.kept_by_operator)

        def train(x: Tensor, y: Tensor) -> None:
            with torch.set_grad_enabled(program.variant.recipe.training):
                losses = _losses(program.call(x, y, self.flag, self.number))
                if losses:
                    torch.autograd.grad(losses, [program.module.weight], allow_unused=True)

        def record(x: Tensor, y: Tensor) -> None:
            try:
                self._limit(program).run(lambda: fxwrap.record(train, (x, y)), measures=False)
            except fxwrap.FxwrapError as error:
                if "called no program" not in str(error):  # where it only returns inputs, nothing is compiled
                    raise

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.attempt(lambda: record(x, y) if self.ours else train(x.clone(), y.clone()))
        if self.ours and not torch.equal(state, random_state(self.device)):
            self.raised.append("recording has changed the random state")
        set_random_state(self.device, state)
        with torch.no_grad():
            for name, value in program.module.named_buffers():
                value.copy_(before[name])
        del self.kept_by_operator[kept:]

    # -- the call

    def _given(self, program: Compiled, step: Step, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """x and y."""
        x, y = self._laid_out(program, step, draw)
        if program.text.windows:
            extent = 1 + sum((n - 1) * stride for n, stride in zip(x.size(), x.stride(), strict=True))
            x = self.normal(draw, extent + 16).as_strided(x.size(), x.stride(), 8).copy_(x)
        return x, y

    def _laid_out(self, program: Compiled, step: Step, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        variant = program.variant
        n = variant.sizes[step.size % len(variant.sizes)]
        layout = variant.layouts[step.layout % len(variant.layouts)]
        where, what = step.habit
        wide = [value for value in tensors_in(self.kept) if self._suits(value, n)]
        x, y = self.normal(draw, n, 4), self.normal(draw, n, 4)
        if where == "inputs":
            if what == "again" and self.inputs and self._suits(self.inputs[0], n) and self._suits(self.inputs[1], n):
                with torch.no_grad():
                    self.inputs[0].copy_(x)
                return self.inputs[0].detach(), self.inputs[1].detach()
            if what == "fed back" and wide:
                return wide[step.pick % len(wide)].detach(), y
            if what == "fed back as a view" and wide:
                return x, wide[step.pick % len(wide)].detach()[:]
            if what == "kept by the caller":
                self.callers.append(x)
        if layout == "transposed":
            x = self.normal(draw, 4, n).t()
        elif layout == "strided":
            x = self.normal(draw, n, 8)[:, ::2]
        elif layout == "offset":
            x = self.normal(draw, n + 3, 4)[2 : n + 2]
        elif layout == "misaligned" and not runtime_for(self.device).frozen_addresses:
            # Recordings with static buffers copy it to an aligned one, and a library's sums depend on alignment.
            y = self.normal(draw, 4 * n + 1)[1:].view(n, 4)
        elif layout == "one tensor":
            y = x
        elif layout == "of one base":
            base = self.normal(draw, n, 8)
            x, y = base[:, :4], base[:, 4:]
        elif layout == "overlapping":
            base = self.normal(draw, n + 1, 4)
            x, y = base[:n], base[1:]
        elif layout == "a buffer":
            x = program.module.cache[:n]
        return x, y

    @staticmethod
    def _suits(value: Tensor, n: int) -> bool:
        """Whether it can be given as a plain input."""
        like = value.shape == (n, 4) and value.stride() == (4, 1) and value.dtype is torch.float32
        return like and value.is_inference() == torch.is_inference_mode_enabled()

    def _call(self, program: Compiled, step: Step, draw: torch.Generator) -> None:
        training, (where, what) = program.variant.recipe.training, step.habit
        other = (where, what) == ("how", "other mode")

        def mode() -> contextlib.AbstractContextManager[Any]:
            if not training and other:
                return torch.inference_mode()
            return torch.set_grad_enabled(training and not other)

        def prepared() -> tuple[Tensor, Tensor]:
            x, y = self._given(program, step, draw)
            if training and not program.text.writes_inputs and x is not y and x.is_leaf:
                x.requires_grad_()
            return x, y

        def call(given: tuple[Tensor, Tensor], into: list[Any]) -> None:
            with mode():
                into.append(self.attempt(lambda: within(lambda: program.call(*given, self.flag, self.number))))

        within = self._limit(program).run if self.ours else lambda run: run()
        with mode():
            self.inputs = list(prepared())
        given, results = (self.inputs[0], self.inputs[1]), list[Any]()
        said = len(self.raised)
        known = [value for _, value in self.visible() if not value.is_inference()]
        versions = [(value, value._version) for value in known]
        if (where, what) == ("how", "thread"):
            _in_threads([lambda: call(given, results)])
        elif (where, what) == ("how", "two threads") and program.text.pure:
            with mode():
                others = prepared()
            second = list[Any]()
            work: list[Callable[[], None]] = [lambda: call(given, results), lambda: call(others, second)]
            if self.ours:
                _in_threads(work)
            else:
                for one in work:
                    one()
            self.raised.sort(key=str)
            results += second
        else:
            call(given, results)
        self.lost = any(self.raised[said:])
        self.outputs = results
        # How often a tensor was written depends on the operators that did it; autograd asks whether it was.
        self.written = [value._version > version for value, version in versions]

    def _limit(self, program: Compiled) -> Limit:
        if id(program) not in self.limits:
            assert program.compilation is not None
            self.limits[id(program)] = Limit(program.compilation, program.text.unknown_memory, self.device)
        return self.limits[id(program)]

    # -- after a call

    def _after(self, program: Compiled, what: str, pick: int) -> None:
        outputs = tensors_in(self.outputs)
        one = outputs[pick % len(outputs)] if outputs else None
        if what == "drop oldest":
            del self.kept[:1]
        elif what == "drop all":
            self.kept.clear()
            self.callers.clear()
        elif one is None:
            return
        elif what == "keep":
            self.kept.append(self.outputs)
        elif what == "keep a view":
            self.kept.append(one[:1])
            self.outputs = []
        elif what == "keep one":
            self.kept.append(one)
            self.outputs = []
        elif what == "keep detached":
            self.kept.append([output.detach() for output in outputs])
            self.outputs = []
        elif what == "update":
            with torch.no_grad():
                self.attempt(lambda: one.add_(1))
            self.kept.append(self.outputs)
        elif what == "resize":
            # The storage of an output in an arena cannot be resized (docs/limits.md).
            if not runtime_for(self.device).frozen_addresses:
                self.attempt(lambda: one.detach().resize_(64).fill_(3))
                self.kept.append(one)
        elif what == "hold in autograd" and one.is_floating_point() and not one.is_inference():
            leaf = torch.ones(one.shape, device=self.device, requires_grad=True)
            with torch.enable_grad():
                product = one.detach() * leaf
            self.leaves.append(leaf)
            self.pending.append(Pending(product.sum()))
            self.outputs = []

    def _micro_batches(self, program: Compiled, step: Step, draw: torch.Generator) -> None:
        """More forwards before the first backward; each backward then runs."""
        for _ in range(1 + step.pick % 2):
            if losses := _losses(self.outputs):
                self.pending.append(Pending(_scaled(losses, step.pick)))
            self._call(program, step, draw)
            if self.lost:
                return
        for pending in list(self.pending):
            self._run(pending)

    def _backward(self, program: Compiled, what: str, pick: int) -> None:
        losses = _losses(self.outputs)
        if losses:
            self.pending.append(Pending(_scaled(losses, pick)))
            if what not in ("later", "never", "oldest", "newest"):
                self._run(self.pending[-1], again=what == "twice")
        if what == "never":
            self.pending.clear()
        elif what in ("oldest", "newest", "twice") and self.pending:
            self._run(self.pending[0 if what == "oldest" else -1])
        elif what == "gradients dropped":
            for _, value in program.tensors():
                value.grad = None
        elif what == "descend":
            with torch.no_grad():
                for _, value in program.tensors():
                    if value.grad is not None:
                        value.sub_(value.grad, alpha=0.1)

    def _run(self, pending: Pending, again: bool = False) -> None:
        with torch.enable_grad():
            self.attempt(lambda: pending.loss.backward(retain_graph=again))
        if not again:
            self.pending.remove(pending)

    # -- what can be seen

    def visible(self) -> list[tuple[str, Tensor]]:
        """Everything that the caller can look at."""
        found = [("output", value) for value in tensors_in(self.outputs)]
        found += [("kept output", value) for value in tensors_in(self.kept)]
        found += [("input", value) for value in self.inputs]
        found += [("earlier input", value) for value in self.callers]
        found += [("leaf", value) for value in self.leaves]
        found += [("loss", one.loss) for one in self.pending]
        for program in self.programs:
            found += program.tensors()
        found += [(f"gradient of {name}", v.grad) for name, v in list(found) if v.is_leaf and v.grad is not None]
        found += [("kept by an operator", value) for value in self.kept_by_operator]
        return found


def _losses(outputs: Any) -> list[Tensor]:
    return [out.square().sum() for out in tensors_in(outputs) if out.requires_grad and out.is_floating_point()]


def _scaled(losses: Sequence[Tensor], pick: int) -> Tensor:
    with torch.enable_grad():
        return torch.stack(list(losses)).sum() * (1 + pick % 3)


def _in_threads(work: Sequence[Callable[[], None]]) -> None:
    """At one time, on the device of the sequence."""
    threads = [threading.Thread(target=contextvars.copy_context().run, args=(one,)) for one in work]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


def random_state(device: torch.device) -> Tensor:
    """Of the CPU and of the device."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


def set_random_state(device: torch.device, state: Tensor) -> None:
    of_cpu = torch.get_rng_state().numel()
    torch.set_rng_state(state[:of_cpu].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[of_cpu:].clone(), device)


# -- both sides ---------------------------------------------------------------------------------------------------


def run(sequence: Sequence_, pool: Pool, device: torch.device) -> int:
    """Run a sequence on both sides; returns the number of calls that were compared.

    Raises:
        DifferenceError: at the first step after which something that can be seen is not the same.
    """
    pairs = [pool.get(number) for number in dict.fromkeys(sequence.programs)]
    with alone(pairs), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ours, theirs = (Side([pair[side] for pair in pairs], not side, device) for side in (0, 1))
        for number, step in enumerate(sequence.steps):
            try:
                for side in (ours, theirs):
                    side.run(step, number)
                compare(ours, theirs)
            except DifferenceError as error:
                raise DifferenceError(f"step {number}, {step}: {error}") from None
            if theirs.lost:
                _even_out(ours, theirs)
    for mine, _ in pairs:
        if mine.compilation is not None and mine.compilation.fallbacks:
            raise DifferenceError(f"Inductor's wrapper runs a program: {mine.compilation.fallbacks}")
    return len(sequence.steps)


@contextlib.contextmanager
def alone(pairs: Sequence[tuple[Compiled, Compiled]]) -> Iterator[None]:
    """Nothing is left of the sequence before, nor of this one in the end."""
    arenas, SHARED.arenas = SHARED.arenas, ArenaPool()
    try:
        for pair in pairs:
            for one in pair:
                one.begin()
        yield
    finally:
        for pair in pairs:
            for one in pair:
                one.begin()
        AROUND.kept = []
        SHARED.arenas = arenas


def compare(ours: Side, theirs: Side) -> None:
    if ours.raised != theirs.raised:
        raise DifferenceError(f"raised {ours.raised}, and Inductor's wrapper {theirs.raised}")
    if theirs.lost:
        return  # what was written before a call raised depends on the order in which it runs
    if ours.written != theirs.written:
        raise DifferenceError(f"has written {ours.written}, and Inductor's wrapper {theirs.written}")
    if not torch.equal(ours.random, theirs.random):
        raise DifferenceError("the state of the random number generator")
    mine, others = ours.visible(), theirs.visible()
    if [name for name, _ in mine] != [name for name, _ in others]:
        raise DifferenceError(f"{[name for name, _ in mine]} can be seen, and there {[name for name, _ in others]}")
    for (name, got), (_, expected) in zip(mine, others, strict=True):
        if (why := difference(got, expected)) is not None:
            raise DifferenceError(f"{name}: {why}")
    if _aliases(mine) != _aliases(others):
        names = [name for name, _ in mine]
        raise DifferenceError(f"who shares memory among {names}: {_aliases(mine)}, and there {_aliases(others)}")
    kinds = [_plain(ours.outputs), _plain(theirs.outputs)]
    if kinds[0] != kinds[1]:
        raise DifferenceError(f"returned {kinds[0]}, and there {kinds[1]}")


def difference(got: Tensor, expected: Tensor) -> str | None:
    """What two tensors differ in; None for nothing."""
    for what in ("dtype", "shape", "device", "requires_grad", "is_leaf"):
        if getattr(got, what) != getattr(expected, what):
            return f"{what} is {getattr(got, what)}, and there {getattr(expected, what)}"
    for ask in ("stride", "storage_offset", "is_inference"):
        if getattr(got, ask)() != getattr(expected, ask)():
            return f"{ask} is {getattr(got, ask)()}, and there {getattr(expected, ask)()}"
    mine, other = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (got, expected))
    if not torch.equal(mine, other):
        return f"{got}, and there {expected}"
    return None


def _aliases(visible: Sequence[tuple[str, Tensor]]) -> list[int]:
    """For each tensor the first one with its storage."""
    first: dict[int, int] = {}
    return [first.setdefault(value.untyped_storage()._cdata, index) for index, (_, value) in enumerate(visible)]


def _plain(outputs: Any) -> Any:
    """The structure, with types for tensors."""
    if isinstance(outputs, (tuple, list)):
        return [_plain(one) for one in outputs]
    return type(outputs).__name__ if isinstance(outputs, Tensor) else outputs


def _even_out(ours: Side, theirs: Side) -> None:
    """After a call that raised: what it has written until then is as the implementation orders it."""
    ours.random = theirs.random.clone()
    ours.kept_by_operator.clear()
    theirs.kept_by_operator.clear()
    for side in (ours, theirs):
        side.inputs, side.outputs, side.callers, side.kept = [], [], [], []
    with torch.no_grad():
        for mine, other in zip(ours.programs, theirs.programs, strict=True):
            for (_, value), (_, expected) in zip(mine.tensors(), other.tensors(), strict=True):
                written = torch.zeros_like(expected)
                value.copy_(written)
                expected.copy_(written)


# -- what fails is made small ----------------------------------------------------------------------------------------


def differs(sequence: Sequence_, pool: Pool, device: torch.device) -> bool:
    try:
        run(sequence, pool, device)
    except DifferenceError:
        return True
    return False


def shrunk(sequence: Sequence_, pool: Pool, device: torch.device) -> tuple[Sequence_, list[Variant]]:
    """A sequence that differs, and its programs, without what it does not need: steps, habits, options, statements.

    Programs are compiled anew for it. One that depends on what was compiled before comes back as it is.
    """
    numbers = list(dict.fromkeys(sequence.programs))
    variants = {number: pool.variant(number) for number in numbers}

    def fails(sequence: Sequence_, variants: Mapping[int, Variant]) -> bool:
        torch._dynamo.reset()
        return differs(sequence, Pool(device, variants=variants), device)

    if not fails(sequence, variants):
        return sequence, list(variants.values())
    sequence = _shrunk_steps(sequence, lambda one: fails(one, variants))
    for number in numbers:

        def with_(fails_with: Variant, number: int = number) -> dict[int, Variant]:
            return {**variants, number: fails_with}

        for option in variants[number].options:
            fewer = tuple(one for one in variants[number].options if one != option)
            plainer = dataclasses.replace(variants[number], options=fewer)
            if fails(sequence, with_(plainer)):
                variants[number] = plainer
        recipe = shrunk_recipe(
            variants[number].recipe,
            lambda recipe: fails(sequence, with_(dataclasses.replace(variants[number], recipe=recipe))),  # noqa: B023
        )
        variants[number] = dataclasses.replace(variants[number], recipe=recipe)
    return sequence, list(variants.values())


def _shrunk_steps(sequence: Sequence_, fails: Callable[[Sequence_], bool]) -> Sequence_:
    for index in reversed(range(len(sequence.steps))):
        shorter = dataclasses.replace(sequence, steps=sequence.steps[:index] + sequence.steps[index + 1 :])
        if fails(shorter):
            sequence = shorter
    for index in range(len(sequence.steps)):
        for change in ({"habit": ("", "")}, {"layout": 0}, {"size": 0}, {"program": 0}):
            step = sequence.steps[index]
            plainer = dataclasses.replace(step, **change)  # type: ignore[arg-type]
            steps = (*sequence.steps[:index], plainer, *sequence.steps[index + 1 :])
            if plainer != step and fails(changed := dataclasses.replace(sequence, steps=steps)):
                sequence = changed
    return sequence


def program_alone(variant: Variant) -> str:
    """To read: the program and how it is compiled."""
    how = f"dynamic={variant.dynamic}, options={dict(variant.options)}, training={variant.recipe.training}"
    return f"{text_of(variant.recipe).source}\n# {how}, sizes={variant.sizes}, layouts={variant.layouts}\n"
