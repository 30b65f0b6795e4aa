"""Sizes recorded ahead of time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, freezes

import fxwrap
from fxwrap.api.record import COMPILES, compiles_only
from fxwrap.graphs.compilation import live_compilations
from fxwrap.graphs.program import WARM_UPS


def _model(device: torch.device) -> torch.nn.Module:
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8)
    return torch.nn.Sequential(*layers).to(device)


def test_what_is_recorded_ahead_neither_warms_up_nor_records(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(_model(device).eval(), dynamic=True)
    examples = [(torch.randn(rows, 16, device=device),) for rows in range(2, 42)]
    with torch.no_grad():
        fxwrap.record(f.call, *examples)
        before = f.program.counters.to_dict()
        for example in examples * 2:
            f(*example)
        now = f.program.counters.to_dict()
    assert now["replays"] == before["replays"] + 80
    assert now["recordings"] == before["recordings"] and now["eager"] == before["eager"]


def test_the_largest_comes_first(compiled: Any, device: torch.device) -> None:
    """So that an arena has its size from the beginning: no recording ends because it grows."""
    f: Compiled = compiled(lambda x: (x.sin() @ x.t()).cos() @ x, dynamic=True)
    with torch.no_grad():
        made = fxwrap.record(f.call, *[torch.randn(rows, 8, device=device) for rows in (3, 50, 7)])
    assert made == 3
    assert f.program.counters.recordings == {"new shape": 3}  # all have been called before the first


# f(50 rows)   code for 50 rows alone      called once, to compile
# f(3 rows)    code for any number of rows
# f(50 rows)                               Dynamo takes this one: it is recorded
def test_code_that_is_not_called_again_neither_plans_nor_warms_up(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: (x.sin() @ x.t()).cos() @ x)
    with torch.no_grad():
        assert fxwrap.record(f.call, *[torch.randn(rows, 8, device=device) for rows in (50, 3)]) == 2
    static, dynamic = f.programs
    assert static.counters.eager == {COMPILES: 1} and static.newest_plan is None
    assert (
        sum(dynamic.counters.recordings.values()) == 2 and sum(dynamic.counters.eager[why] for why in WARM_UPS) == 2
    )


def test_what_is_collected_meanwhile_is_not_taken_off(compiled: Any, device: torch.device) -> None:
    others: list[Any] = [torch.compile(lambda x: x.cos() - 1, backend="fxwrap")]
    f: Compiled = compiled(lambda x: x.sin() + 1)

    def call(x: torch.Tensor) -> None:
        if others:
            others.clear()
            torch._dynamo.reset()
            gc.collect()
        f(x)

    x = torch.randn(8, device=device)
    with torch.no_grad():
        for _ in range(4):
            others[0](x)
        before = sum(fxwrap.stats()["recordings"].values())
        assert before >= 1 and fxwrap.record(call, x) == sum(f.program.counters.recordings.values()) > 0


def test_training_is_recorded_by_a_function_that_runs_the_backward(compiled: Any, device: torch.device) -> None:
    model = _model(device)
    f: Compiled = compiled(model, dynamic=True)

    def step(x: torch.Tensor) -> None:
        model.zero_grad(set_to_none=True)
        f(x).square().sum().backward()

    fxwrap.record(step, *[torch.randn(rows, 16, device=device) for rows in (4, 5)])
    before = [program.counters.to_dict() for program in f.programs]
    assert len(before) == 2
    for _ in range(2):
        for rows in (4, 5):
            step(torch.randn(rows, 16, device=device))
    for program, counters in zip(f.programs, before, strict=True):
        assert program.counters.recordings == counters["recordings"]
        assert program.counters.replays == counters["replays"] + 4


# called once:   2, 4, 8 rows         one specialization each, in this order
# recorded:      8: forward, backward   4: forward, backward   2: forward, backward   each pair is planned together
def test_the_forward_and_the_backward_of_one_size_are_planned_together(compiled: Any, device: torch.device) -> None:
    if not freezes(device):
        pytest.skip("recordings on this device have no arena")
    model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())])
    model.to(device)
    f: Compiled = compiled(model, dynamic=True)

    def step(x: torch.Tensor) -> None:
        f(x).square().sum().backward()

    with compiles_only():
        for rows in (2, 4, 8):
            step(torch.randn(rows, 64, device=device))
    fxwrap.record(step, *[torch.randn(rows, 64, device=device) for rows in (2, 4, 8)])
    forward, backward = (program.specializations.recordings() for program in f.programs)
    sizes = [[recording.request.memory.size for recording in several] for several in (forward, backward)]
    pairs = set(zip(*sizes, strict=True))
    assert len(pairs) == 3 and all(first == second for first, second in pairs), pairs


def test_random_numbers_go_on_as_if_nothing_had_been_recorded(compiled: Any) -> None:
    f: Compiled = compiled(_model(torch.device("cpu")))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.no_grad():
        fxwrap.record(f.call, torch.ones(2, 16))
    assert torch.equal(torch.get_rng_state(), state)


def _marked(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.mark_dynamic(x, 0)
    return x


def _shared(x: torch.Tensor) -> Any:
    return x[:, :4], x[:, 4:], x[:, :4]


EXAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "a slice": lambda: (torch.randn(4, 8)[:, 4:], 2),
    "an expanded tensor": lambda: (torch.randn(1, 4).expand(4, 4),),
    "one tensor twice": lambda: (torch.randn(4, 4),) * 2,
    "tensors that share memory": lambda: _shared(torch.randn(4, 8)),
    "a parameter": lambda: (torch.nn.Parameter(torch.randn(4, 4)),),
    "one that requires a gradient": lambda: (torch.randn(4, 4, requires_grad=True),),
    "conjugated numbers": lambda: (torch.randn(4, 4, dtype=torch.complex64).conj(),),
    "a size that is marked as dynamic": lambda: (_marked(torch.randn(5, 4)),),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_recorded_is_what_will_be_called(name: str) -> None:
    """One program, which neither warms up nor records again."""
    make = EXAMPLES[name]
    f = torch.compile(lambda *given: [x * 2 + 1 for x in given], backend="fxwrap")
    with torch.no_grad():
        fxwrap.record(f, make())
        before = fxwrap.stats(f)
        for _ in range(3):
            f(*make())
    after = fxwrap.stats(f)
    assert after["programs"] == before["programs"] == 1
    assert after["eager"] == before["eager"] and after["recordings"] == before["recordings"]


def test_every_call_gets_tensors_of_its_own_as_they_were() -> None:
    """Copies share memory among themselves, and with no example; tensors of classes of their own are there."""
    seen = []

    def call(*given: Any) -> None:
        seen.append((*given,))
        given[0].fill_(3)
        fast(given[0])

    fast = torch.compile(lambda x: x.sin() + 1, backend="fxwrap")
    x, other = torch.arange(8.0).view(2, 4), torch.ones(2).as_subclass(_Own)
    with torch.no_grad():
        fxwrap.record(call, (x[:, 1:], x, {"own": other, "sparse": torch.eye(2).to_sparse()}, "text"))
    assert len(seen) > 2 and torch.equal(x, torch.arange(8.0).view(2, 4))
    for piece, whole, tensors, text in seen:
        assert whole.data_ptr() != x.data_ptr() and piece.data_ptr() == whole.data_ptr() + 4
        assert whole.tolist() == [[0, 3, 3, 3], [4, 3, 3, 3]] and text == "text"
        assert type(tensors["own"]) is _Own and tensors["own"].data_ptr() != other.data_ptr()
        assert tensors["sparse"].layout is torch.sparse_coo


class _Own(torch.Tensor):
    pass


def test_a_function_that_inductor_runs_says_so() -> None:
    class Refused(fxwrap.FxwrapCodegen):
        def compile_graph(self, gm: torch.fx.GraphModule) -> Any:
            raise fxwrap.EmissionError("no form for this one")

    f = torch.compile(lambda x: (x @ x).relu(), backend="fxwrap", options={"codegen": Refused})
    with torch.no_grad(), pytest.raises(fxwrap.FxwrapError, match="own wrapper runs it: no form for this one"):
        fxwrap.record(f, torch.randn(4, 4))
    assert any(one.fallbacks for one in live_compilations())


def test_wrong_uses() -> None:
    with pytest.raises(fxwrap.InputError, match="nothing to call"):
        fxwrap.record(torch.sin)
    with pytest.raises(fxwrap.FxwrapError, match="called no program"):
        fxwrap.record(torch.sin, torch.ones(3))
