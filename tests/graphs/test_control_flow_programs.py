"""Programs with branches and loops replay, and compute the bits of Inductor's own wrapper, whoever calls them."""

from __future__ import annotations

import functools
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor, tensors_in
from control_flow_programs import CALLS, Program, repeat
from control_flow_values import PROGRAMS
from native_calls import Odd, in_python, look, look_at_nothing, seen
from threads import in_threads
from torch import Tensor

import fxwrap

SEED = threading.Lock()  # the seed is everybody's
BY_NAME = {program.name: program for program in PROGRAMS}
assert len(BY_NAME) == len(PROGRAMS) and all(program.function.__doc__ for program in PROGRAMS)
# A recording of every kind of nesting, of written inputs, of results that are inputs, of sizes.
SOME = [
    BY_NAME[name]
    for name in (
        "three_deep",
        "body_writes_a_captured_tensor",
        "allocates_any_number",
        "swapped_and_more",
        "passed_on_unchanged",
        "a_branch_returns_what_was_computed",
        "products",
        "scan_of_several",
    )
]
pytestmark = [
    pytest.mark.usefixtures(look_at_nothing.__name__),  # it also lets numbers be read from tensors
    pytest.mark.every(2),
]


def named(programs: list[Program]) -> Any:
    return pytest.mark.parametrize("program", programs, ids=lambda program: program.name)


def run(f: Callable[..., Any], program: Program, call: int, device: torch.device) -> list[Any]:
    """Results of one call, gradients, and the inputs afterwards."""
    inputs = program.inputs(call, device)
    with torch.set_grad_enabled(program.gradients):
        leaves = [one for one in inputs if one.is_floating_point()] if program.gradients else []
        for leaf in leaves:
            leaf.requires_grad_()
        result = f(*inputs)
        if leaves:
            torch.stack([one.abs().sum() for one in tensors_in(result) if one.requires_grad]).sum().backward()
    return [result, [leaf.grad for leaf in leaves], inputs]


@functools.cache
def expected(program: Program, device: torch.device) -> list[Any]:
    """What Inductor's own wrapper does in each call."""
    theirs = inductor(program.function, dynamic=program.dynamic)
    return [run(theirs, program, call, device) for call in range(CALLS)]


def compile_it(program: Program, **options: Any) -> Compiled:
    return Compiled(program.function, compile_options={"dynamic": program.dynamic, "options": options})


def assert_replayed(f: Compiled, least: int = 2) -> None:
    assert not f.compilation.fallbacks, f.compilation.fallbacks[0]
    assert f.programs and all(count >= least for count in f.replays())


# Why a program does not run on an accelerator.
NOT_ON_ACCELERATORS = {
    "parameters_of_modules": "its modules are on the CPU",
    "not_contiguous": "Dynamo has other strides for a product there, and refuses the branches",
}
# Its counters are the host's, its kernels the device's. Older versions, which ran loops in Python, have it, too.
NOT_ON_HOSTSIM = {"loop_in_a_scan": "a known race, not explained: now and then a loop of its ends too early"}


@named(PROGRAMS)
def test_the_results_are_inductors(program: Program, device: torch.device) -> None:
    """Natively, and in the end once in Python. Whoever gets results may write to them."""
    reasons = (NOT_ON_ACCELERATORS if device.type != "cpu" else {}) | (
        NOT_ON_HOSTSIM if device.type == "hostsim" else {}
    )
    if program.name in reasons:
        pytest.skip(reasons[program.name])
    theirs, f = expected(program, device), compile_it(program)
    # A backward records again until its inputs lie where they stay.
    for call in [*range(CALLS)] * (3 if program.gradients else 2):
        mine = run(f, program, call, device)
        assert_same(mine, theirs[call])
        for one in tensors_in(mine[0]):
            one.detach().zero_()
    assert_replayed(f)
    with in_python(*f.programs):
        assert_same(run(f, program, CALLS - 1, device), theirs[-1])


@named(SOME)
def test_results_live_as_long_as_the_caller_keeps_them(program: Program, device: torch.device) -> None:
    """No longer, and with their numbers, while two threads call the function at once."""
    theirs, f = expected(program, device), compile_it(program)
    for call in (*range(CALLS), *range(CALLS)):
        inputs = program.inputs(call, device)
        with torch.no_grad():
            result = f(*inputs)
        gone = [weakref.ref(one) for one in tensors_in([inputs, result])]
        compiles = not f.programs[-1].counters.replays  # Dynamo and warm-ups may keep inputs of such calls
        del inputs, result
        assert compiles or [one() for one in gone] == [None] * len(gone), call

    kept = [run(f, program, call % CALLS, device) for call in range(2 * CALLS)]

    def calls() -> None:
        with SEED:
            inputs = [program.inputs(call, device) for call in range(CALLS)]
        for call in range(CALLS):
            assert_same([f(*inputs[call]), [], inputs[call]], theirs[call])

    for _ in range(2):
        in_threads([calls, calls])
    for call, one in enumerate(kept):
        assert_same(one, theirs[call % CALLS])
    assert_replayed(f)


@pytest.mark.launches_graphs
@named(SOME)
def test_checked_mode_finds_nothing(program: Program, device: torch.device) -> None:
    theirs, f = expected(program, device), compile_it(program, checked=2)
    for call in range(CALLS):
        assert_same(run(f, program, call, device), theirs[call])
    assert_replayed(f)
    assert not any(event.startswith("not") for one in f.programs for event in one.counters.events)


@named([BY_NAME[name] for name in ("three_deep", "passed_on_unchanged")])
def test_modes_of_gradients(program: Program, device: torch.device) -> None:
    """Each mode has code of its own, and they take turns."""
    theirs, f = expected(program, device), compile_it(program)
    for call in range(CALLS):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            inputs = program.inputs(call, device)
            with mode():
                assert_same([f(*inputs), [], inputs], theirs[call])
    assert_replayed(f)


@named(SOME)
def test_bound_functions(program: Program, device: torch.device) -> None:
    theirs, f = expected(program, device), compile_it(program)
    with torch.no_grad():
        bound: Any = fxwrap.bind(f.call, *program.inputs(0, device))
    for call in range(CALLS):
        assert_same(run(bound, program, call, device), theirs[call])
    assert_replayed(f)


class Method(torch.nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program.function

    def forward(self, *inputs: Tensor) -> Any:
        return self.program(*inputs)


@named([BY_NAME[name] for name in ("three_deep", "swapped_and_more", "products", "cond_in_condition")])
def test_ahead_of_time(program: Program, device: torch.device, tmp_path: Path) -> None:
    """In memory, and in a file; into new tensors, and where the caller says."""
    theirs = expected(program, device)
    with torch.no_grad():
        exported = torch.export.export(Method(program), program.inputs(0, device))
        compiled = fxwrap.aot_compile({"method": exported}, options={"capture": "always"})
        fxwrap.save(tmp_path / "program.fxw", compiled)
        for one in (compiled, fxwrap.load(tmp_path / "program.fxw", trust=True)):
            for call in range(CALLS):
                assert_same(run(one.method, program, call, device), theirs[call])
            for call in (*range(CALLS), *range(CALLS)):
                out = torch.utils._pytree.tree_map_only(Tensor, torch.empty_like, theirs[call][0])
                inputs = program.inputs(call, device)
                result = one.method.run(*inputs, out=out)
                assert [t.data_ptr() for t in tensors_in(result)] == [t.data_ptr() for t in tensors_in(out)]
                assert_same([out, [], inputs], theirs[call])
            assert one.method.program.counters.replays >= 2


# -- errors ------------------------------------------------------------------------------------------------


def _outcome(f: Callable[..., Any], *inputs: Tensor) -> Any:
    try:
        return f(*inputs)
    except (RuntimeError, IndexError) as error:
        return type(error), str(error).splitlines()[0]


def assert_in_branch_in_loop(x: Tensor, n: Tensor) -> Any:
    """Fails in a later iteration."""

    def check(x: Tensor) -> Tensor:
        torch._assert_async(x.sum() < 100, "too large")
        return x * 2

    return repeat(n, lambda i, x: torch.cond(i > 1, check, lambda x: x * 3, (x,)), x)


def index_in_loop(x: Tensor, n: Tensor) -> Any:
    """Reads what is not there."""
    return repeat(n, lambda i, x: x + x[(i * x[0].long()).view(1)], x)


def error_of_an_operator(x: Tensor, n: Tensor) -> Any:
    """An operator gets what is infinite, in a later iteration."""
    return repeat(n, lambda i, x: torch.histc(x / (2 - i), 4) + x, x)


def number_in_a_loop(x: Tensor, n: Tensor) -> Any:
    """A number is asserted on the host."""

    def body(i: Tensor, x: Tensor) -> Tensor:
        number = x.sum().long().item()
        torch._check(number < 100, lambda: "too large a number")
        return x + number

    return repeat(n, body, x)


ERRORS = [assert_in_branch_in_loop, index_in_loop, error_of_an_operator, number_in_a_loop]


@torch.no_grad()
@pytest.mark.parametrize("function", ERRORS)
def test_errors_are_inductors_and_leave_nothing_behind(function: Callable[..., Any], device: torch.device) -> None:
    if device.type not in ("cpu", "hostsim"):
        pytest.skip("an error in a kernel of a GPU is the end of its context")
    f, theirs = Compiled(function), inductor(function)
    small, large = torch.ones(4, device=device), torch.full((4,), 20.0, device=device)
    failed = 0
    for x, count in [(small, 1), (small, 2), (large, 3), (small, 1), (large, 4), (large, 0), (small, 2)]:
        n = torch.tensor(count, device=device)
        mine, other = _outcome(f, given := x.clone(), n), _outcome(theirs, x.clone(), n)
        if isinstance(other, tuple):
            assert mine == other or (
                device.type == "hostsim" and mine[1].endswith(other[1])
            )  # a node of a graph failed
            failed += 1
        else:
            assert_same(mine, other)
        gone = weakref.ref(given)
        del given, mine
        if gone() is not None:
            gc.collect()  # of what an error's traceback holds
        assert gone() is None
    assert failed == 2
    assert not f.compilation.fallbacks and all(count >= 2 for count in f.replays())


@torch.no_grad()
def test_operators_in_a_loop_raise_and_call_the_function_again(device: torch.device) -> None:
    """An operator of one's own, written in Python, in an inner loop."""
    if device.type != "cpu":
        pytest.skip("a graph calls no Python when it is replayed")

    def function(x: Tensor, n: Tensor) -> Any:
        return repeat(n, lambda i, x: repeat(n, lambda j, y: look(y).sin() + x, x * 1), x)

    f, theirs, x = Compiled(function), inductor(function), torch.randn(8, device=device)
    few, more = (torch.tensor(count, device=device) for count in (1, 3))
    small, large = theirs(x, few), theirs(x, more)
    at = [0]

    def fail(_: object) -> None:
        at[0] += 1
        if at[0] == 5:
            raise Odd("in the second pass")

    def again(_: object) -> None:
        seen.clear()
        assert_same(f(x, few), small)
        seen.append(again)

    for one in (None, None, fail, None, again, again, fail, again, None):
        seen[:] = [one] if one is not None else []
        at[0] = 0
        if one is fail:
            with pytest.raises(Odd, match="in the second pass"):
                f(x, more)
        else:
            assert_same(f(x, more), large)
    assert_replayed(f)


class _Enough(Exception):
    """Raised by a signal."""


@torch.no_grad()
def test_a_signal_ends_a_loop(device: torch.device) -> None:
    """One that would run for hours, in its inner loop; afterwards the function is right."""
    if device.type not in ("cpu", "hostsim"):
        pytest.skip("nothing interrupts what a GPU runs")

    def function(x: Tensor, n: Tensor) -> Any:
        return repeat(n, lambda i, x: repeat(n.clamp(max=3), lambda j, x: (x + 1).sin(), x), x)

    def interrupt(*_: object) -> None:
        raise _Enough

    f, theirs, x = Compiled(function), inductor(function), torch.randn(8, device=device)
    few, many = (torch.tensor(count, device=device) for count in (5, 10**9))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(3):
            for _ in range(3):
                assert_same(f(x, few), theirs(x, few))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(_Enough):
                f(x, many)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not f.compilation.fallbacks and all(count >= 5 for count in f.replays())
