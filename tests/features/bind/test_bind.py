"""``fxwrap.bind``: what it takes, what it refuses, and how it is called.

caller -> torch.compile's wrapper -> frame evaluation -> guards -> code      compiled(x)
caller -----------------------------------------------> guards -> code      bound(x)
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import fxwrap
from fxwrap.errors import BindError
from fxwrap.features.bind.codegen.bound import GRAPH_BREAK, NOT_COMPILED

compiled = functools.partial(torch.compile, backend="fxwrap")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x).relu() * scale

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2

    @functools.partial(torch.compile, backend="fxwrap")
    def thrice(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 3


class Callable:
    def __init__(self) -> None:
        self.factor = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * self.factor


def plain(x: torch.Tensor, /, y: float = 1.0, *, z: float = 2.0) -> torch.Tensor:
    return x * y + z


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="fxwrap")
    return net


x = torch.linspace(-1, 1, 8).view(2, 4)


def what() -> dict[str, tuple[Any, Any]]:
    """What torch.compile returns, and what it was made of."""
    net = Net()
    thing = Callable()
    return {
        "function": (compiled(plain), plain),
        "module": (compiled(net), net),
        "module of torch": (compiled(net.linear), net.linear),
        "module compiled in place": (in_place(copy.deepcopy(net)), net),
        "method": (compiled(net.twice), net.twice),
        "decorated method": (net.thrice, lambda x: net.linear(x) * 3),
        "object": (compiled(thing), thing),
        "method of the object": (compiled(thing.__call__), thing),
        "function of torch": (compiled(torch.sin), torch.sin),
    }


@pytest.mark.parametrize("name", what())
def test_what_torch_compile_returns(name: str) -> None:
    function, original = what()[name]
    bound = fxwrap.bind(function, x)
    for _ in range(3):
        torch.testing.assert_close(bound(x), original(x))
        assert torch.equal(bound(x), function(x))
    assert bound.ordinary_calls == Counter()


def test_arguments_are_passed_as_python_passes_them() -> None:
    bound = fxwrap.bind(compiled(plain), x)
    assert torch.equal(bound(x, 3.0, z=4.0), plain(x, 3.0, z=4.0))
    assert torch.equal(bound(x, z=4.0, y=3.0), plain(x, y=3.0, z=4.0))
    for args, kwargs in (((), {}), ((x, 1.0, 2.0), {}), ((x,), {"x": x}), ((x,), {"w": 1.0})):
        with pytest.raises(TypeError):
            bound(*args, **kwargs)


def test_parameters_may_have_any_names() -> None:
    def function(_values: torch.Tensor, _code: float, _owner: float = 2.0, *_served: float) -> torch.Tensor:
        return _values * _code + _owner + sum(_served)

    bound = fxwrap.bind(compiled(function), x, 3.0)
    assert torch.equal(bound(x, 3.0), function(x, 3.0))
    assert torch.equal(bound(x, 3.0, 4.0, 5.0), function(x, 3.0, 4.0, 5.0))


def test_another_shape_is_compiled_by_the_wrapper_and_then_called_without_it() -> None:
    net = Net()
    bound = fxwrap.bind(compiled(net), x)
    for rows in (3, 3, 5, 5, 3, 2):
        torch.testing.assert_close(bound(torch.ones(rows, 4)), net(torch.ones(rows, 4)))
    assert bound.ordinary_calls == Counter({NOT_COMPILED: 1})


def test_code_that_another_call_has_compiled_is_found() -> None:
    function = compiled(plain)
    bound = fxwrap.bind(function, x)
    function(torch.ones(5, 4))
    assert torch.equal(bound(torch.ones(5, 4)), function(torch.ones(5, 4)))
    assert bound.ordinary_calls == Counter()


def test_nothing_is_called_where_the_example_is_compiled_already() -> None:
    seen: list[int] = []
    function = compiled(lambda x: x + len(seen))
    function(x)
    torch._dynamo.eval_frame.set_eval_frame(None)
    before = fxwrap.stats(function)
    fxwrap.bind(function, x)
    assert fxwrap.stats(function) == before


def test_gradients(device: torch.device) -> None:
    net = Net().to(device)
    twin = copy.deepcopy(net)
    bound, call = fxwrap.bind(compiled(net), x.to(device)), compiled(twin)
    for step in range(4):
        data = (x + step).to(device)
        bound(data).sum().backward()
        call(data).sum().backward()
    for ours, others in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, others.grad)


def test_outputs_stay_while_they_are_held(device: torch.device) -> None:
    net = Net().to(device)
    bound = fxwrap.bind(compiled(net), x.to(device))
    with torch.no_grad():
        data = [(x * scale).to(device) for scale in range(6)]
        kept = [bound(one) for one in data]
        for ours, one in zip(kept, data, strict=True):
            torch.testing.assert_close(ours, net(one))


def test_it_is_traced_where_a_caller_is_compiled() -> None:
    bound = fxwrap.bind(compiled(Net()), x)
    outer = compiled(lambda x: bound(x) + bound(x, 2.0), fullgraph=True)
    assert torch.equal(outer(x), bound(x) + bound(x, 2.0))


def test_the_reports_are_those_of_the_compiled_function() -> None:
    function = compiled(Net())
    bound = fxwrap.bind(function, x)
    for _ in range(3):
        bound(x)
    ours, theirs = ({**fxwrap.report(fn).to_dict(), "when": 0} for fn in (bound, function))
    assert ours == theirs
    assert fxwrap.stats(bound)["replays"] == fxwrap.stats(function)["replays"] > 0
    assert "ordinary" in fxwrap.stats(bound) and "ordinary" not in fxwrap.stats(function)
    assert fxwrap.release(bound) == 0


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def test_a_graph_break_is_an_error() -> None:
    with pytest.raises(BindError, match=GRAPH_BREAK):
        fxwrap.bind(compiled(breaks), x)


def test_a_graph_break_is_counted_if_that_is_allowed() -> None:
    bound = fxwrap.bind(compiled(breaks), x, strict=False)
    for _ in range(3):
        torch.testing.assert_close(bound(x), breaks(x))
    assert bound.ordinary_calls == Counter({GRAPH_BREAK: 3})
    assert fxwrap.stats(bound)["ordinary"] == {GRAPH_BREAK: 3}


def generator(x: torch.Tensor) -> Any:
    yield x + 1


@pytest.mark.parametrize("other", [plain, Net(), torch.sin, 3, torch.compiler.disable(plain)])
def test_what_is_not_compiled_is_an_error(other: Any) -> None:
    with pytest.raises(BindError, match="has returned"):
        fxwrap.bind(other, x)


def test_a_generator_is_an_error() -> None:
    with pytest.raises(BindError, match="generator"):
        fxwrap.bind(compiled(generator), x)


def test_an_example_that_raises_raises() -> None:
    with pytest.raises(TypeError):
        fxwrap.bind(compiled(plain))
    with pytest.raises(TypeError):
        fxwrap.bind(compiled(plain), x, w=1)


def test_two_backends_of_one_function_are_not_mixed() -> None:
    calls: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append("other")
            return gm.forward(*args)

        return run

    other = fxwrap.bind(torch.compile(plain, backend=backend), x)
    ours = fxwrap.bind(compiled(plain), x)
    calls.clear()
    ours(x)
    assert not calls
    other(x)
    assert calls == ["other"]


def test_after_a_reset_it_is_compiled_again() -> None:
    bound = fxwrap.bind(compiled(Net()), x)
    torch._dynamo.reset()
    for _ in range(2):
        bound(x)
    assert bound.ordinary_calls == Counter({NOT_COMPILED: 1})


def test_code_whose_guards_refer_to_an_object_that_is_gone_is_not_called() -> None:
    """The planted fault: a new object may have the identity of one that is gone, and guards compare identities."""

    class Holder:
        def __init__(self, factor: float) -> None:
            self.factor = factor

    scope: dict[str, Any] = {"holder": Holder(2.0)}
    exec("def function(x):\n    return x * holder.factor if type(holder).__name__ else x", scope)
    bound = fxwrap.bind(compiled(scope["function"]), x)
    for factor in range(3, 12):
        scope["holder"] = Holder(float(factor))
        assert torch.equal(bound(x), x * factor)


def test_a_lazy_module() -> None:
    net = nn.LazyLinear(3)
    function = compiled(net)
    function(x)
    bound = fxwrap.bind(function, x)
    assert torch.equal(bound(x), function(x))


def test_a_profile_shows_the_region() -> None:
    bound = fxwrap.bind(compiled(Net()), x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        bound(x)
    assert any("Torch-Compiled Region" in event.key for event in profile.key_averages())


def test_it_has_the_name_and_the_text_of_the_function() -> None:
    bound = fxwrap.bind(compiled(plain), x)
    assert (bound.__name__, bound.__doc__) == ("plain", plain.__doc__)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(bound)


def test_guards_that_ask_other_ranks_are_an_error() -> None:
    torch.compiler.set_enable_guard_collectives(True)
    try:
        with pytest.raises(BindError, match="set_enable_guard_collectives"):
            fxwrap.bind(compiled(plain), x)
        assert torch.compiler.set_enable_guard_collectives(False)  # it was still on
    finally:
        torch.compiler.set_enable_guard_collectives(False)
    fxwrap.bind(compiled(plain), x)
