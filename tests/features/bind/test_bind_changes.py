"""Whatever the caller changes between calls, a bound function does what its compiled twin does.

Two worlds are made from the same source, each with code, globals and objects of its own. In one, ``torch.compile``'s
wrapper is called, in the other what ``fxwrap.bind`` made of it. A kind of change is a context: it changes both worlds
alike for some calls, and then takes it back.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxwrap

SOURCE = """
import torch
from torch import nn

SCALE = 1.5
TABLE = torch.linspace(-1, 1, 8)

def helper(x):
    return torch.tanh(x)

class Net(nn.Module):
    factor = 0.5

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8))
        self.act = nn.Sigmoid()
        self.extra = None
        self.drop = nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros(8))
        self.gain, self.mode, self.flag, self.count = 1.25, "add", True, 3
        self.terms, self.named = [1.0, 2.0], {"a": 0.5}

    def forward(self, x, other=None, *, bias=0.25):
        self.seen.add_(1)
        y = self.drop(self.act(self.body(x)) * self.gain + sum(self.terms) + self.named["a"])
        y = y + SCALE if self.mode == "add" else y * SCALE
        if self.flag:
            y = helper(y) + TABLE
        if self.extra is not None:
            y = self.extra(y)
        if other is not None:
            y = y + (sum(other) if isinstance(other, (list, tuple)) else other)
        return y * self.factor + bias, self.seen * self.count

class Other(Net):
    def forward(self, x, *args, **kwargs):
        return x - self.gain, self.seen

def other_forward(self, x, *args, **kwargs):
    return x * 3 + self.gain, self.seen

def other_call(self, x, *args, **kwargs):
    return x * 5, self.seen

def instance_forward(x, *args, **kwargs):
    return x * 2, x + 1

def made():
    shift = torch.full((8,), 0.125)

    def function(x, other=None, *more, bias=2.0, **named):
        y = helper(x * shift) * SCALE + bias
        for value in (*more, *named.values()):
            y = y + value
        return y if other is None else y - (sum(other) if isinstance(other, (list, tuple)) else other)

    def another(x, other=None, *more, bias=2.0, **named):
        return x * shift - bias

    def rebind(value):
        nonlocal shift
        before, shift = shift, value
        return before

    return function, another, rebind
"""


_worlds = itertools.count()


class World:
    """Everything that a change may reach: a module, a function, their source's globals, and how they are called."""

    def __init__(self, how: Callable[..., Any]) -> None:
        # A module, for torch 2.11 imports those whose names are in guards.
        module = types.ModuleType(f"world{next(_worlds)}")
        sys.modules[module.__name__] = module
        self.scope = vars(module)
        exec(compile(SOURCE, "<world>", "exec"), self.scope)
        torch.manual_seed(0)
        self.net = self.scope["Net"]()
        self.function, self.another, self.rebind = self.scope["made"]()
        self.optimized = torch.compile(self.net, backend="fxwrap")
        x = torch.zeros(4, 8)
        self.calls = {
            "net": how(self.optimized, x),
            "function": how(torch.compile(self.function, backend="fxwrap"), x),
        }
        self.log: list[str] = []

    def outcome(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Results, gradients, and state after the call; or the error."""
        args, kwargs = copy.deepcopy((args, kwargs))
        torch.manual_seed(1)
        self.net.zero_grad()
        try:
            results = self.calls[target](*args, **kwargs)
        except Exception as error:
            return type(error)
        tensors = [t for t in (results if isinstance(results, tuple) else (results,)) if isinstance(t, torch.Tensor)]
        if (loss := tensors[0]).requires_grad:
            loss.float().sum().backward()
        gradients = [p.grad for p in self.net.parameters()] + [getattr(a, "grad", None) for a in args]
        return [*tensors, *gradients, self.net.seen.clone(), *map(str, self.log), *map(type, tensors)]


KINDS: dict[str, Callable[..., Any]] = {}
Worlds = list[World]
Change = Iterator[Any]


def kind(change: Callable[[Worlds, random.Random], Change]) -> Callable[..., Any]:
    KINDS[change.__name__] = contextlib.contextmanager(change)
    return change


def attribute(name: str, owner: Callable[[World], Any], attribute: str, value: Callable[[World], Any]) -> None:
    """A kind of change that gives an attribute another value, and the old one back."""

    def change(worlds: Worlds, rng: random.Random) -> Change:
        before = [getattr(owner(world), attribute) for world in worlds]
        for world in worlds:
            setattr(owner(world), attribute, value(world))
        yield
        for world, old in zip(worlds, before, strict=True):
            setattr(owner(world), attribute, old)

    change.__name__ = name
    kind(change)


def item(name: str, owner: Callable[[World], Any], key: str, value: Callable[[World], Any]) -> None:
    """A kind of change that gives an item of a dictionary another value, and the old one back."""

    def change(worlds: Worlds, rng: random.Random) -> Change:
        before = [owner(world)[key] for world in worlds]
        for world in worlds:
            owner(world)[key] = value(world)
        yield
        for world, old in zip(worlds, before, strict=True):
            owner(world)[key] = old

    change.__name__ = name
    kind(change)


def mode(name: str, context: Callable[[], Any]) -> None:
    """A kind of change that lasts as long as a context."""

    def change(worlds: Worlds, rng: random.Random) -> Change:
        with context():
            yield

    change.__name__ = name
    kind(change)


def arguments(name: str, make: Callable[[random.Random], tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """A kind of change that is other arguments."""

    def change(worlds: Worlds, rng: random.Random) -> Change:
        yield make(rng)

    change.__name__ = name
    kind(change)


class _Plain(torch.Tensor):
    """A subclass without behaviour of its own."""

    def __deepcopy__(self, memo: Any) -> _Plain:
        return self.clone()


class _Counting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def noise(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(7))


first = lambda world: world.net.body[0]
net = lambda world: world.net
scope = lambda world: world.scope

# -- parameters and buffers ----------------------------------------------------------------------------------------
attribute("parameter_replaced", first, "weight", lambda world: torch.nn.Parameter(noise(8, 8)))
attribute("parameter_frozen_by_replacement", first, "bias", lambda world: torch.nn.Parameter(noise(8), False))
attribute("buffer_replaced", net, "seen", lambda world: noise(8))


@kind
def parameter_in_place(worlds: Worlds, rng: random.Random) -> Change:
    with torch.no_grad():
        for world in worlds:
            first(world).weight.add_(0.125)
    yield


@kind
def parameter_data(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        first(world).weight.data = noise(8, 8) / 2
    yield


@kind
def parameter_requires_no_grad(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        first(world).weight.requires_grad_(False)
    yield
    for world in worlds:
        first(world).weight.requires_grad_(True)


@kind
def parameters_loaded(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.net.load_state_dict({k: v + 0.25 for k, v in world.net.state_dict().items()})
    yield


@kind
def parameters_assigned(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.net.load_state_dict({k: v.clone() for k, v in world.net.state_dict().items()}, assign=True)
    yield


@kind
def buffer_in_place(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.net.seen.fill_(3)
    yield


@kind
def parameter_removed(worlds: Worlds, rng: random.Random) -> Change:
    before = [first(world).bias for world in worlds]
    for world in worlds:
        first(world).bias = None
    yield
    for world, bias in zip(worlds, before, strict=True):
        first(world).bias = bias


# -- attributes of the module, its class, its parts ----------------------------------------------------------------
attribute("float", net, "gain", lambda world: 0.75)
attribute("int", net, "count", lambda world: 5)
attribute("text", net, "mode", lambda world: "times")
attribute("flag", net, "flag", lambda world: False)
attribute("list_replaced", net, "terms", lambda world: [0.5])
item("item_of_a_dictionary", lambda world: world.net.named, "a", lambda world: 0.25)
attribute("class_attribute", lambda world: world.scope["Net"], "factor", lambda world: 0.25)
attribute("part_replaced", net, "act", lambda world: torch.nn.Tanh())
attribute("part_added", net, "extra", lambda world: torch.nn.Softplus())
attribute("attribute_of_a_part", lambda world: world.net.body[2], "eps", lambda world: 0.5)
attribute("set_through_the_compiled_module", lambda world: world.optimized, "gain", lambda world: 2.5)


@kind
def list_appended(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.net.terms.append(4.0)
    yield
    for world in worlds:
        world.net.terms.pop()


@kind
def part_appended(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.net.body.append(torch.nn.ELU())
    yield
    for world in worlds:
        del world.net.body[3]


@kind
def training(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.net.eval()
    yield
    for world in worlds:
        world.net.train()


@kind
def forward_on_the_instance(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.net.forward = world.scope["instance_forward"]
    yield
    for world in worlds:
        del world.net.forward


attribute("forward_on_the_class", lambda world: world.scope["Net"], "forward", lambda w: w.scope["other_forward"])
attribute("another_class", net, "__class__", lambda world: world.scope["Other"])


@kind
def call_of_the_class(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.scope["Net"].__call__ = world.scope["other_call"]
    yield
    for world in worlds:
        del world.scope["Net"].__call__


# -- globals, closures, defaults, code -----------------------------------------------------------------------------
item("global_float", scope, "SCALE", lambda world: 0.5)
item("global_tensor", scope, "TABLE", lambda world: noise(8))
item("global_function", scope, "helper", lambda world: torch.sin)
attribute("defaults", lambda world: world.function, "__defaults__", lambda world: (1.5,))
attribute("no_defaults", lambda world: world.function, "__defaults__", lambda world: None)
item("default_by_name", lambda world: world.function.__kwdefaults__, "bias", lambda world: 0.75)
item("default_of_forward", lambda world: world.scope["Net"].forward.__kwdefaults__, "bias", lambda world: 0.75)


@kind
def global_tensor_in_place(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.scope["TABLE"].mul_(-1)
    yield


@kind
def default_missing(worlds: Worlds, rng: random.Random) -> Change:
    before = [world.function.__kwdefaults__.pop("bias") for world in worlds]
    yield
    for world, bias in zip(worlds, before, strict=True):
        world.function.__kwdefaults__["bias"] = bias


@kind
def closure(worlds: Worlds, rng: random.Random) -> Change:
    before = [world.rebind(noise(8)) for world in worlds]
    yield
    for world, shift in zip(worlds, before, strict=True):
        world.rebind(shift)


@kind
def closure_of_another_type(worlds: Worlds, rng: random.Random) -> Change:
    before = [world.rebind(0.25) for world in worlds]
    yield
    for world, shift in zip(worlds, before, strict=True):
        world.rebind(shift)


@kind
def code(worlds: Worlds, rng: random.Random) -> Change:
    before = [world.function.__code__ for world in worlds]
    for world in worlds:
        world.function.__code__ = world.another.__code__
    yield
    for world, old in zip(worlds, before, strict=True):
        world.function.__code__ = old


# -- hooks ---------------------------------------------------------------------------------------------------------
def hook(name: str, register: Callable[[World], Any]) -> None:
    def change(worlds: Worlds, rng: random.Random) -> Change:
        handles = [register(world) for world in worlds]
        yield
        for handle in handles:
            handle.remove()

    change.__name__ = name
    kind(change)


hook("forward_hook", lambda world: world.net.register_forward_hook(lambda m, args, out: (out[0] + 1, out[1])))
hook("forward_pre_hook", lambda world: world.net.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:])))
hook(
    "backward_hook", lambda world: world.net.register_full_backward_hook(lambda m, a, b: world.log.append("backward"))
)
hook(
    "hook_of_the_compiled_module",
    lambda world: world.optimized.register_forward_hook(lambda m, args, out: (out[0] - 1, out[1])),
)


@kind
def global_hook(worlds: Worlds, rng: random.Random) -> Change:
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda m, args: None)
    yield
    handle.remove()


# -- modes ---------------------------------------------------------------------------------------------------------
mode("no_grad", torch.no_grad)
mode("inference_mode", torch.inference_mode)
mode("autocast", lambda: torch.autocast("cpu", torch.bfloat16))
COUNTING = _Counting()
mode("function_mode", lambda: COUNTING)
mode("profiler", lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
mode("stance_eager", lambda: torch.compiler.set_stance("force_eager"))
mode("stance_eager_on_recompile", lambda: torch.compiler.set_stance("eager_on_recompile"))
mode(
    "deterministic",
    lambda: _set(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), True),
)
mode("default_dtype", lambda: _set(torch.set_default_dtype, torch.get_default_dtype(), torch.float64))
mode("default_device", lambda: torch.device("cpu"))


@contextlib.contextmanager
def _set(setter: Callable[[Any], Any], before: Any, value: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


# -- arguments -----------------------------------------------------------------------------------------------------
arguments("other_batch", lambda rng: ((noise(rng.choice([2, 6, 9]), 8),), {}))
arguments("one_row", lambda rng: ((noise(1, 8),), {}))
arguments("no_rows", lambda rng: ((noise(0, 8),), {}))
arguments("three_dimensions", lambda rng: ((noise(2, 3, 8),), {}))
arguments("transposed", lambda rng: ((noise(8, 4).t(),), {}))
arguments("with_an_offset", lambda rng: ((noise(5, 8)[1:],), {}))
arguments("not_aligned", lambda rng: ((noise(33)[1:].view(4, 8),), {}))
arguments("expanded", lambda rng: ((noise(8).expand(4, 8),), {}))
arguments("double", lambda rng: ((noise(4, 8).double(),), {}))
arguments("input_requires_grad", lambda rng: ((noise(4, 8).requires_grad_(),), {}))
arguments("parameter_as_input", lambda rng: ((torch.nn.Parameter(noise(4, 8)),), {}))
arguments("subclass", lambda rng: ((noise(4, 8).as_subclass(_Plain),), {}))
arguments("other", lambda rng: ((noise(4, 8), noise(8)), {}))
arguments("other_by_name", lambda rng: ((noise(4, 8),), {"other": noise(8)}))
arguments("all_by_name", lambda rng: ((), {"x": noise(4, 8), "bias": noise(8)}))
arguments("other_is_a_number", lambda rng: ((noise(4, 8), rng.choice([1, 2, 3])), {}))
arguments("other_is_a_list", lambda rng: ((noise(4, 8), [noise(8)] * rng.choice([1, 2])), {}))
arguments("twice_the_same", lambda rng: ((noise(4, 8),) * 2, {}))
arguments("more_arguments", lambda rng: ((noise(4, 8), noise(8), noise(8)), {"extra": 2.0}))
arguments("no_arguments", lambda rng: ((), {}))
arguments("wrong_name", lambda rng: ((noise(4, 8),), {"nothing": 1, "x": 2}))
arguments("wrong_size", lambda rng: ((noise(4, 7),), {}))
arguments("no_tensor", lambda rng: ((2.0,), {}))


@kind
def marked_dynamic(worlds: Worlds, rng: random.Random) -> Change:
    x = noise(5, 8)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    yield (x,), {}


# -- what ends compiled code ---------------------------------------------------------------------------------------
@kind
def garbage(worlds: Worlds, rng: random.Random) -> Change:
    for world in worlds:
        world.net.act = torch.nn.Sigmoid()
    gc.collect()
    yield


RARE = {"reset", "dispatch_mode"}  # everything is compiled anew afterwards


@kind
def dispatch_mode(worlds: Worlds, rng: random.Random) -> Change:
    """Dynamo gives up code that is called in such a mode, for good. A bound function goes on with the code it has."""
    with _Watching():
        yield
    torch._dynamo.reset()


@kind
def reset(worlds: Worlds, rng: random.Random) -> Change:
    torch._dynamo.reset()
    yield


USUAL = ((noise(4, 8),), {})


def same(ours: Any, twins: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(twins, torch.Tensor):
        return type(ours) is type(twins) and ours.dtype == twins.dtype and torch.equal(ours, twins)
    if isinstance(ours, list) and isinstance(twins, list):
        return len(ours) == len(twins) and all(map(same, ours, twins))
    return bool(ours == twins)


def called(compiled: Any, *example: Any) -> Any:
    """The function itself, which has been called once, as ``bind`` calls it."""
    compiled(*example)
    return compiled


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 10000}
    with torch._dynamo.config.patch(limits):
        made = [World(fxwrap.bind), World(called)]
        yield made
    for world in made:
        del sys.modules[world.scope["__name__"]]


def test_there_are_at_least_forty_kinds_of_change() -> None:
    assert len(KINDS) >= 40


def compare(worlds: Worlds, change: str, target: str, given: Any) -> None:
    outcomes = [world.outcome(target, *given) for world in worlds]
    assert same(*outcomes), (change, target, outcomes)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("most", [0, pytest.param(3_000, marks=pytest.mark.sweep)])
def test_changes(worlds: Worlds, most: int) -> None:
    """Each kind of change once, for the module or for the function; in a sweep for both, then kinds at random."""
    rng = random.Random(0)
    names = [name for name in KINDS for _ in range(1 if name in RARE else 20)]
    drawn = [(name, target) for name in KINDS for target in ("net", "function")]
    if not most:  # in turn
        drawn = [pair for n, pair in enumerate(drawn) if n % 4 in {0, 3}]
    calls = 0
    while drawn or calls < most:
        name, target = drawn.pop(0) if drawn else (rng.choice(names), rng.choice(["net", "function"]))
        with KINDS[name](worlds, rng) as given:
            for _ in range(3):
                compare(worlds, name, target, given or USUAL)
        for target in ("net", "function"):
            compare(worlds, f"after {name}", target, USUAL)
        calls += 5
    ordinary = sum((call.ordinary_calls for call in worlds[0].calls.values()), Counter())
    print(f"{calls} calls, {len(KINDS)} kinds; through the wrapper: {dict(ordinary)}")
    assert ordinary.total() < calls / 3  # most calls are bound ones


def test_in_threads(worlds: Worlds) -> None:
    """Four threads call with sizes of their own while parameters change in place."""
    expected = {rows: worlds[1].outcome("function", (noise(rows, 8),), {}) for rows in (2, 3, 4, 5)}
    wrong: list[Any] = []

    def calling(rows: int) -> None:
        for _ in range(100):
            with torch.no_grad():
                ours = worlds[0].calls["function"](noise(rows, 8))
            if not torch.equal(ours, expected[rows][0]):
                wrong.append(rows)

    threads = [threading.Thread(target=calling, args=(rows,)) for rows in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
