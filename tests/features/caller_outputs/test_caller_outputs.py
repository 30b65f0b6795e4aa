"""``method.run(x, out=y)``: results are written to tensors of the caller.

::

    y = torch.empty(4, 8)
    program.f.run(x, out=y)          the last kernel of f writes to y
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import assert_same
from threads import in_threads
from torch import Tensor, nn

import fxwrap
from fxwrap.errors import InputError
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.graphs.program import WARM_UPS, Program
from fxwrap.graphs.replay.steps import CallOperator, Fill
from fxwrap.testing.simulated import SIMULATED

BATCH = torch.export.Dim("batch", min=2, max=64)


class Two(NamedTuple):
    first: Tensor
    second: Tensor


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Several(MLP):
    """A kernel's result, an operator's own, an input, a view of a result, and None."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x).sin() + 1
        values, order = torch.sort(y, dim=-1, stable=True)
        return {"two": Two(y, values), "rest": [order, x, y.mT, None]}


def programs_of_variants(program: Any) -> list[Program]:
    methods = {id(program[name].program) for name in program}
    return [found for found in program._compilation.programs if id(found) not in methods]


@pytest.fixture(params=["in memory", "from a file"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    def make(model: nn.Module, *args: Any, dynamic: bool = True) -> Any:
        shapes = {"x": {0: BATCH}} if dynamic else None
        methods = {"f": (model.eval(), args, {}, shapes)}
        program = fxwrap.aot_compile(methods)
        if request.param == "in memory":
            return program
        return fxwrap.load(fxwrap.save(tmp_path / "f.fxw", program), trust=True)

    return make


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_result_is_in_the_caller_s_tensor(made: Callable[..., Any], dynamic: bool) -> None:
    program = made(MLP(), torch.randn(4, 3, 8), dynamic=dynamic)
    for call in range(9):
        x = torch.randn(4 + (call % 3 if dynamic else 0), 3, 8)
        y = torch.full_like(x, float("nan"))
        assert program.f.run(x, out=y) is y
        assert_same(y, program.f(x))
    (variant,) = programs_of_variants(program)
    assert variant.counters.replays and set(variant.counters.eager) <= set(WARM_UPS)
    assert fxwrap.stats(program)["programs"] == 2


def test_several_results(made: Callable[..., Any]) -> None:
    """Any of them, wherever it lies in what the method returns; None stands for a new tensor."""
    program = made(Several(), torch.randn(4, 3, 8))
    for wanted in ({0, 1, 2, 3, 4}, {0}, {1, 4}, {3}, set[int]()):
        for call in range(4):
            x = torch.randn(4, 3, 8)
            expected = program.f(x)
            leaves = [*expected["two"], *expected["rest"][:3]]
            mine = [torch.empty_like(leaf) if p in wanted else None for p, leaf in enumerate(leaves)]
            got = program.f.run(x, out={"two": Two(*mine[:2]), "rest": [*mine[2:], None]})  # type: ignore[arg-type]
            assert type(got["two"]).__name__ == "Two" and got["rest"][3] is None
            assert_same([*got["two"], *got["rest"][:3]], leaves)
            for leaf, tensor in zip([*got["two"], *got["rest"][:3]], mine, strict=True):
                assert tensor is None or leaf is tensor, call


def test_no_memory_is_allocated_for_the_result() -> None:
    """
    ::

        f(x)             allocates 1 MiB for the result, and what is freed again
        f.run(x, out=y)  what is freed again
    """
    x = torch.randn(512, 512)
    program = fxwrap.aot_compile({"f": (nn.Sequential(nn.Linear(512, 512), nn.Tanh()), (x,))})
    y = torch.empty(512, 512)
    for _ in range(4):
        program.f(x)
        program.f.run(x, out=y)

    def kept(call: Callable[[], Any]) -> int:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            result = call()
        assert result is not None
        return sum(event.self_cpu_memory_usage for event in profile.key_averages())

    assert kept(lambda: program.f(x)) >= y.nbytes
    assert kept(lambda: program.f.run(x, out=y)) < y.nbytes / 16


def test_writes_are_noticed_by_autograd() -> None:
    program = fxwrap.aot_compile({"f": (MLP(), (torch.randn(4, 8),))})
    y = torch.zeros(4, 8)
    weight = torch.randn(4, 8, requires_grad=True)
    product = y * weight
    program.f.run(torch.randn(4, 8), out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# -- frozen addresses ---------------------------------------------------------------------------------------------


def test_a_tensor_that_stays_is_written_by_captured_work() -> None:
    """
    ::

        call      y at        what a replay does
        0, 1, 2   A           captured work writes to A
        3         B           eager, or another recording, which copies its result to where y is
    """
    with using_runtime(SIMULATED):
        program = fxwrap.aot_compile({"f": (MLP(), (torch.randn(4, 8),))})
        x, y = torch.randn(4, 8), torch.empty(4, 8)
        for _ in range(5):
            x.copy_(torch.randn(4, 8))
            program.f.run(x, out=y)
            assert_same(y, program.f(x))
        (variant,) = programs_of_variants(program)
        assert variant.counters.recordings == {"first": 1}
        (recording,) = variant.specializations.recordings()
        assert len(variant.plan.placeholders) - 1 in recording.request.static_inputs
        assert not recording.request.sized.input_buffers

        for _ in range(8):
            y = torch.empty(4, 8)
            program.f.run(x, out=y)
            assert_same(y, program.f(x))
        assert sum(variant.counters.recordings.values()) == 2, "one more, for tensors that move"
        *_, moving = variant.specializations.recordings()
        assert moving._replay is not None
        steps = [step for part in moving._replay.parts for step in part.steps]
        called = [step.overload for step in steps if isinstance(step, CallOperator)]
        assert called.count(torch.ops.aten.copy_.default) == 1, "the tensor is copied out"
        assert not any(isinstance(step, Fill) for step in steps), "the tensor is not copied in"


# -- wrong tensors ------------------------------------------------------------------------------------------------

X, N = torch.randn(4, 3, 8), 4 * 3 * 8
WRONG: dict[str, Callable[[], Any]] = {
    "too long": lambda: torch.empty(5, 3, 8),
    "too short": lambda: torch.empty(3, 3, 8),
    "empty": lambda: torch.empty(0, 3, 8),
    "wide": lambda: torch.empty(4, 3, 9),
    "flat": lambda: torch.empty(N),
    "one dimension more": lambda: torch.empty(1, 4, 3, 8),
    "transposed": lambda: torch.empty(4, 8, 3).mT,
    "every second": lambda: torch.empty(4, 3, 16)[..., ::2],
    "expanded": lambda: torch.empty(1, 3, 8).expand(4, 3, 8),
    "double": lambda: torch.empty(4, 3, 8, dtype=torch.float64),
    "half": lambda: torch.empty(4, 3, 8, dtype=torch.float16),
    "integers": lambda: torch.empty(4, 3, 8, dtype=torch.int32),
    "complex": lambda: torch.empty(4, 3, 8, dtype=torch.complex64),
    "meta": lambda: torch.empty(4, 3, 8, device="meta"),
    "sparse": lambda: torch.zeros(4, 3, 8).to_sparse(),
    "negated": lambda: torch._neg_view(torch.empty(4, 3, 8)),
    "made in inference mode": torch.inference_mode()(lambda: torch.empty(4, 3, 8)),
    "wants gradients": lambda: torch.empty(4, 3, 8, requires_grad=True),
    "a number": lambda: 3,
    "a list": lambda: [torch.empty(4, 3, 8)],
    "an array": lambda: torch.empty(4, 3, 8).numpy(),
    "the input": lambda: X,
}


@pytest.fixture(scope="module")
def program() -> Any:
    return fxwrap.aot_compile({"f": (MLP().eval(), (X,), {}, {"x": {0: BATCH}})})


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_tensor_is_refused(program: Any, wrong: str) -> None:
    """With the error that a wrong input gets, before anything has run; and the program works as before."""
    out = WRONG[wrong]()
    before = X.clone()
    with pytest.raises(InputError, match=r"out|shares memory"):
        program.f.run(X, out=out)
    assert torch.equal(X, before)
    y = torch.empty(4, 3, 8)
    assert_same(program.f.run(X, out=y), program.f(X))


def test_a_tensor_that_was_made_in_inference_mode_is_written_in_it(program: Any) -> None:
    with torch.inference_mode():
        for _ in range(4):
            x, y = torch.randn(4, 3, 8), torch.empty(4, 3, 8)
            assert y.is_inference() and program.f.run(x, out=y) is y
            assert_same(y, program.f(x))


def test_a_tensor_over_an_input_or_a_weight_is_refused(program: Any) -> None:
    base = torch.zeros(8, 3, 8)
    weight = program.weights["up.weight"]
    assert weight.numel() >= N
    for x, y in ((base[:4], base[2:6]), (base[:4], base[:4]), (X, weight.view(-1)[:N].view(4, 3, 8))):
        before = weight.clone()
        with pytest.raises(InputError, match="shares memory"):
            program.f.run(x, out=y)
        assert torch.equal(weight, before)
    y = base[4:]
    assert_same(program.f.run(base[:4], out=y), program.f(base[:4]))


def test_another_size_at_the_same_addresses_is_checked_again(program: Any) -> None:
    """
    ::

        base   0 1 2 3 4 5 6 7 8 9 ...
        4      x x x x y y y y            apart
        6      x x x x x x                y begins where it began, in the memory of x
                       y y y y y y
    """
    base = torch.zeros(16, 3, 8)
    for _ in range(3):
        program.f.run(base[:4], out=base[4:8])
        program.f.run(torch.ones(6, 3, 8), out=torch.empty(6, 3, 8))
    with pytest.raises(InputError, match="shares memory"):
        program.f.run(base[:6], out=base[4:10])


def test_threads(program: Any) -> None:
    wrong = []

    def work(seed: int) -> None:
        maker = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x, y = torch.randn(4, 3, 8, generator=maker), torch.empty(4, 3, 8)
            if program.f.run(x, out=y) is not y or not torch.equal(y, program.f(x)):
                wrong.append(seed)

    in_threads([functools.partial(work, seed) for seed in range(3)])
    assert not wrong


def test_the_same_tensor_for_two_results_is_refused() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x * 2

    program, y = fxwrap.aot_compile({"f": (Pair(), (torch.ones(4),))}), torch.empty(4)
    with pytest.raises(InputError, match="shares memory"):
        program.f.run(torch.ones(4), out=(y, y))
    with pytest.raises(InputError, match="a tuple of 2"):
        program.f.run(torch.ones(4), out=y)


def test_a_result_whose_size_the_data_decides_is_refused() -> None:
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0] * 2

    program = fxwrap.aot_compile({"f": (Positive(), (torch.randn(8),))})
    with pytest.raises(InputError, match="known before the call"):
        program.f.run(torch.randn(8), out=torch.empty(4))
