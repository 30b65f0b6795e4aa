"""Which programs belong to a function: those that its calls run, whoever they were compiled for."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lazy_group
import pytest
import torch
import torch.distributed as dist

import fxwrap
from fxwrap.codegen.torch_versions import own_caches
from fxwrap.errors import FxwrapError
from fxwrap.graphs.compilation import live_compilations

X = torch.randn(4, 4)


def fast(fn: Any, **options: Any) -> Any:
    """Compiled by a backend that compares equal: what Dynamo compiled for one may serve another."""
    return torch.compile(fn, backend="fxwrap", options={"capture": "always", **options})


def ran(call: Callable[[], Any]) -> set[Any]:
    """The programs that a call runs."""

    def counts() -> dict[Any, int]:
        programs = [program for one in live_compilations() for program in one.programs]
        counters = {program: program.counters for program in programs}
        return {p: c.replays + sum(c.recordings.values()) + sum(c.eager.values()) for p, c in counters.items()}

    before = counts()
    call()
    return {program for program, count in counts().items() if count != before.get(program, 0)}


def reported(fn: Any) -> set[Any]:
    return {graph.program for graph in fxwrap.report(fn).graphs}


# -- what is asked about ---------------------------------------------------------------------------------------------


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    torch._dynamo.graph_break()
    return helper(y) * 2


def skipped(x: torch.Tensor) -> torch.Tensor:
    """Dynamo does not resume in a loop: it skips the frame, and compiles what it calls."""
    for _ in range(2):
        x = helper(x)
        torch._dynamo.graph_break()
    return x


def skipped_around_another(x: torch.Tensor) -> torch.Tensor:
    """What Dynamo compiles of it is a function in it, which no name leads to."""
    add = lambda y: y.sin() + 2
    for _ in range(2):
        x = add(x)
        torch._dynamo.graph_break()
    return x


def calls_skipped(x: torch.Tensor) -> torch.Tensor:
    return skipped(x.exp())


def generator(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield helper(x)


@torch._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator]
def not_traced(x: torch.Tensor) -> Any:
    return helper(x)


class Net(torch.nn.Module):
    """One without parameters, one with; with a graph break or without."""

    def __init__(self, width: int = 0, breaks: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width) if width else torch.nn.ReLU()
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * 3
        if self.breaks:
            torch._dynamo.graph_break()
        return y.sin()

    def also(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) - 1


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(Net(4), Net(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


class Deep(torch.nn.Module):
    """Its skipped frame calls a module that is two attributes away."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = torch.nn.Module()
        self.outer.block = Net(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.outer.block(x)
            torch._dynamo.graph_break()
        return x


class Called:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * self.factor


def times(factor: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


Case = tuple[Any, Callable[[], Any]]
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__.replace("_", " ").strip()] = make
    return make


def called(fn: Any, *args: Any) -> Case:
    f = fast(fn)
    return f, lambda: f(*(args or (X,)))


for _name, _fn in {
    "a function": helper,
    "a graph break": broken,
    "a skipped frame": skipped,
    "a skipped inner frame": calls_skipped,
    "a disabled frame": not_traced,
}.items():
    CASES[_name] = functools.partial(called, _fn)


@case
def a_bound_method() -> Case:
    return called(Net(4).also)


@case
def a_partial() -> Case:
    return called(functools.partial(torch.mul, torch.full((4,), 3.0)))


@case
def a_second_partial() -> Case:
    first = fast(functools.partial(lambda a, x: x.sin() + a, torch.ones(4)))
    first(X)
    return called(functools.partial(lambda a, x: x.cos() + a, torch.ones(4)))


@case
def a_callable_object() -> Case:
    return called(Called(2.0))


@case
def a_second_callable_object() -> Case:
    fast(Called(2.0))(X)
    return called(Called(2.0))


@case
def a_built_in() -> Case:
    fast(torch.cos)(X)
    return called(torch.sin)


@case
def a_module_of_torch() -> Case:
    return called(torch.nn.Linear(4, 4))


@case
def hooks() -> Case:
    module = Net(4)
    module.register_forward_pre_hook(lambda module, args: (args[0].exp(),))
    module.register_forward_hook(lambda module, args, output: output.cos())
    module.layer.register_full_backward_hook(lambda module, before, after: (before[0] * 2,))
    f = fast(module)
    return f, lambda: f(X.clone().requires_grad_()).sum().backward()


@case
def hooks_and_a_graph_break() -> Case:
    module = Net(4, breaks=True)
    module.register_forward_hook(lambda module, args, output: output.cos())
    module.register_full_backward_hook(lambda module, before, after: (before[0] * 2,))
    f = fast(module)
    return f, lambda: f(X.clone().requires_grad_()).sum().backward()


def second(first: torch.nn.Module, module: torch.nn.Module) -> Case:
    fast(first)(X)
    return called(module)


for _name, _make in {
    "a second instance without parameters": lambda: second(Net(), Net()),
    "a second instance": lambda: second(Net(4), Net(4)),
    "a second instance that breaks": lambda: second(Net(4, breaks=True), Net(4, breaks=True)),
    "a second instance with inner frames": lambda: second(Outer(), Outer()),
    "a second instance that calls what is two attributes away": lambda: second(Deep(), Deep()),
    "an instance that another cannot serve": lambda: second(Net(4), Net()),
    "a sequence of others": lambda: second(torch.nn.Sequential(Net()), torch.nn.Sequential(Net(4))),
}.items():
    CASES[_name] = _make


@case
def a_second_instance_whose_mode_changed() -> Case:
    first, module = fast(Net(4)), Net(4)
    first(X)
    f = fast(module)
    f(X)
    module.eval()
    return f, lambda: [f.train()(X), f.eval()]


@case
def compiled_in_place() -> Case:
    for module in (Net(4), last := Net(4)):
        module.compile(backend="fxwrap")
        module(X)
    return last, lambda: last(X)


@case
def parts_compiled_in_place() -> Case:
    model = torch.nn.Sequential(Net(4), Net(), Net(4, breaks=True))
    for block in model:
        block.compile(backend="fxwrap")
    return model, lambda: model(X)


@case
def lambdas_of_one_line() -> Case:
    fast(times(torch.ones(4, 4)))(X)
    return called(times(torch.ones(2, 2)), torch.ones(2, 2))


@case
def other_options() -> Case:
    fast(helper)(X)
    f = fast(helper, capture="never")
    return f, lambda: f(X)


@case
def served_by_another() -> Case:
    fast(helper)(X)
    return called(helper)


@case
def inner_frames_that_another_uses() -> Case:
    fast(skipped)(X)

    def other(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        torch._dynamo.graph_break()
        return skipped(y)

    return called(other)


@case
def a_function_inside_that_another_compiled() -> Case:
    fast(skipped_around_another)(X)

    def other(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        torch._dynamo.graph_break()
        return skipped_around_another(y)

    return called(other)


@case
def what_is_inlined_here_and_compiled_elsewhere() -> Case:
    fast(helper)(X)

    def inlines(x: torch.Tensor) -> torch.Tensor:
        y = helper(x)
        torch._dynamo.graph_break()
        return y.cos()

    return called(inlines)


@case
def nested() -> Case:
    inner = fast(helper)
    inner(X)

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        torch._dynamo.graph_break()
        return inner(y)

    return called(outer)


@case
def a_step_of_an_optimizer() -> Case:
    parameters = [torch.nn.Parameter(torch.randn(4)) for _ in range(2)]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    f = fast(optimizer.step)
    return f, f


@case
def recompilations() -> Case:
    f = fast(helper)
    return f, lambda: [f(x) for x in (X, X.double(), torch.ones(3), torch.ones(5), torch.ones(2, 2, 2))]


@case
def two_threads() -> Case:
    f = fast(broken)

    def call() -> None:
        threads = [threading.Thread(target=f, args=(X.to(dtype),)) for dtype in (torch.float32, torch.float64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return f, call


@pytest.mark.parametrize("name", CASES)
def test_the_programs_of_a_function(name: str) -> None:
    """Beside one that has nothing to do with it."""
    other = fast(lambda x: x.tan() + 1)
    other(X)
    fn, call = CASES[name]()
    programs = ran(call)
    for _ in range(2):
        assert ran(call) == programs
    assert programs and reported(fn) == programs
    assert fxwrap.stats(fn)["programs"] == len(programs)
    assert len(reported(other)) == 1 and not reported(other) & programs


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    with lazy_group.default_group("gloo"):
        yield


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")
@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp of parts"])
def test_distributed(how: str, alone: None) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def make() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Net(4), Net(4))
        if how == "ddp":
            return fast(DistributedDataParallel(model, bucket_cap_mb=1))
        for block in model[1:]:
            if how == "fsdp of parts":
                block.compile(backend="fxwrap")
            fully_shard(block)
        fully_shard(model)
        return model if how == "fsdp of parts" else fast(model)

    first, f = make(), make()
    for one in (first, f):
        call = lambda: one(X).sum().backward()  # noqa: B023
        programs = ran(call)
        assert ran(call) == programs
        assert len(programs) >= 2 and reported(one) == programs


def test_a_reset_forgets() -> None:
    f = fast(helper)
    f(X)
    torch._dynamo.reset()
    with pytest.raises(FxwrapError, match="has no program"):
        fxwrap.report(f)
    assert ran(lambda: f(X)) == reported(f)


# -- what Dynamo made of it ------------------------------------------------------------------------------------------


def depends_on_data(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


def calls_disabled(x: torch.Tensor) -> torch.Tensor:
    return disabled(x.exp()).cos()


@torch.compiler.disable
def disabled(x: torch.Tensor) -> torch.Tensor:
    return x.tan()


def without_graph(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x.sin()


# What is told: (reason, code of the line) of breaks, (function, reason) of skipped functions, (function, graphs).
STORIES: dict[str, tuple[Any, list[tuple[str, str]], list[tuple[str, str]], list[tuple[str, int]]]] = {
    "whole": (helper, [], [], [("helper", 1)]),
    "broken": (
        broken,
        [("Call to `torch._dynamo.graph_break()`", "torch._dynamo.graph_break()")],
        [],
        [("broken", 1), ("broken after line", 1)],
    ),
    "nothing before the break": (
        without_graph,
        [("Call to `torch._dynamo.graph_break()`", "torch._dynamo.graph_break()")],
        [],
        [("without_graph after line", 1)],
    ),
    "depends on data": (
        depends_on_data,
        [("generic_jump", "if x.sum() > 0:")],
        [],
        [("depends_on_data", 1), ("depends_on_data after line", 1)],
    ),
    "calls a skipped function": (
        calls_skipped,
        [("Call to `torch._dynamo.graph_break()`", "torch._dynamo.graph_break()")],
        [("skipped", "Call to `torch._dynamo.graph_break()`")],
        [("calls_skipped", 1), ("helper", 1)],
    ),
    "calls a disabled function": (
        calls_disabled,
        [("Skip calling `torch.compiler.disable()`d function", "return disabled(x.exp()).cos()")],
        [],
        [("calls_disabled", 1), ("calls_disabled after line", 1)],
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_the_story(name: str) -> None:
    fn, breaks, skips, frames = STORIES[name]
    f = fast(fn)
    f(X)
    story = fxwrap.report(f).dynamo
    for found, expected in ((story.breaks, breaks), (story.skipped, skips), (story.frames, frames)):
        assert len(found) == len(expected), found
    for one, (reason, code) in zip(story.breaks, breaks, strict=True):
        assert one.reason.startswith(reason) and one.user_line.endswith(code) and __file__ in one.user_line
    for skip, (function, reason) in zip(story.skipped, skips, strict=True):
        assert skip.function == function and skip.reason.startswith(reason) and __file__ in skip.user_line
    for frame, (function, graphs) in zip(story.frames, frames, strict=True):
        assert frame.function.startswith(function) and frame.graphs == graphs
    torch._dynamo.reset()
    explained = fxwrap.explain(fn, X)
    assert {*story.breaks} <= {*explained.dynamo.breaks} and explained.dynamo.skipped[-1:] == story.skipped[-1:]
    assert len(explained.graphs) == sum(graphs for _, graphs in frames)
    assert json.loads(json.dumps(explained.to_dict()["dynamo"])) == explained.to_dict()["dynamo"]
    assert all(one.user_line in str(explained) for one in story.breaks)


@pytest.mark.parametrize(
    "fn, call, says",
    [
        (generator, lambda f: list(f(X)), "generators"),
        (lambda: 3, lambda f: f(), "nothing to compile"),
        (helper, lambda f: None, "has not seen"),
        (helper, lambda f: torch.compiler.set_stance("force_eager")(f)(X), "set_stance"),
    ],
    ids=["generator", "no tensors", "not called", "stance"],
)
def test_no_program_and_why(fn: Any, call: Callable[[Any], Any], says: str) -> None:
    f = fast(fn)
    call(f)
    with pytest.raises(FxwrapError, match=says):
        fxwrap.stats(f)


def test_a_function_that_only_another_backend_compiled() -> None:
    f = torch.compile(helper, backend="eager")
    f(X)
    with pytest.raises(FxwrapError, match="another backend"):
        fxwrap.stats(f)


@pytest.mark.parametrize("setting", ["recompile_limit", "accumulated_recompile_limit"])
@pytest.mark.parametrize("make", [Net, lambda width: torch.nn.Linear(width, 3)], ids=["user", "torch"])
def test_what_dynamo_has_compiled_as_often_as_it_may(make: Any, setting: str) -> None:
    """The third model of a class runs eagerly: reports say which limit of Dynamo's it is, and how to raise it."""
    models, inputs = [fast(make(width)) for width in (4, 5, 6)], [torch.randn(3, width) for width in (4, 5, 6)]
    x = inputs[-1]
    with torch._dynamo.config.patch({setting: 2}):
        for f, value in zip(models, inputs, strict=True):
            f(value)
        assert fxwrap.stats(models[0])["programs"] == 1  # its code is still called
        last, name = models[-1], f"torch._dynamo.config.{setting}"
        reports: tuple[Any, ...] = (fxwrap.stats, fxwrap.report, fxwrap.release)
        reports += (lambda f: fxwrap.bind(f, x), lambda f: fxwrap.record(f, (x,)))
        for ask in reports:
            with pytest.raises(FxwrapError) as raised:
                ask(last)
            assert name in raised.value.got and "compiled it 2 times" in raised.value.got, ask
            assert f"set {name}" in raised.value.remedy and "fullgraph" not in raised.value.remedy, ask
        assert name in str(fxwrap.report(models[0])), "another model, or another size, would run eagerly"
    torch._dynamo.reset()
    with torch._dynamo.config.patch({setting: 4}):  # the remedy
        last(x)
    assert fxwrap.stats(last)["programs"] == 1 and not fxwrap.report(last).dynamo.full


@torch._dynamo.config.patch(disable=True)
def test_no_program_while_compiling_is_switched_off() -> None:
    f = fast(helper)
    f(X)
    with pytest.raises(FxwrapError, match="TORCH_COMPILE_DISABLE"):
        fxwrap.stats(f)


def test_a_module_of_torch_that_was_compiled_in_place() -> None:
    """Dynamo skips its ``forward`` as it skips all files of torch's modules."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    module.compile(backend="fxwrap")
    if programs := ran(lambda: module(X)):
        assert reported(module) == programs, "torch 2.15 compiles it"
        return
    with pytest.raises(FxwrapError, match=r"does not compile this file(.|\n)*torch\.compile\(module, ") as error:
        fxwrap.stats(module)
    assert "another backend" not in str(error.value)
    f = fast(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    assert ran(lambda: f(X)) == reported(f), "what the error says helps"


@pytest.mark.skipif(not own_caches(), reason="torch before 2.13 keeps them together")
def test_explaining_leaves_nothing_with_inner_functions() -> None:
    """Dynamo would compile them no more, for anybody."""
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        assert len(fxwrap.explain(skipped, X).graphs) == 1
    f = fast(skipped)
    assert ran(lambda: f(X)) == reported(f)
