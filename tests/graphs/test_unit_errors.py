"""Native replay: errors in units, and faults while one is made."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, tensors_in
from native_calls import (
    Odd,
    assert_clean,
    both_ways,
    in_python,
    look,
    look_at_nothing,  # noqa: F401
    missed,
    native,
    natively,
    positions,
    recorded,
    seen,
)

import fxwrap
from fxwrap.native_build import cache_folder

# -- errors --------------------------------------------------------------------------------------------------


def _fail(error: BaseException) -> Callable[[torch.Tensor], None]:
    def fail(_: torch.Tensor) -> None:
        raise error

    return fail


def _raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def _drawn_from(x: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(x @ x.t(), 1) + x


def _lookup(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.sin()[index] @ x


#   sin  ->  look (raises)  ->  mm
@native
@pytest.mark.parametrize(
    "error", [Odd("why", 3), ValueError("no"), KeyboardInterrupt(), SystemExit(3), StopIteration()], ids=repr
)
def test_an_error_of_a_python_operator(compiled: Any, error: BaseException) -> None:
    """It is the same object, with the step's line; nothing is kept; the next call is right."""

    def g(x: torch.Tensor) -> torch.Tensor:
        return look((x.sin() @ x).cos()) @ x

    f: Compiled = compiled(g)
    recording = recorded(f, lambda: torch.randn(4, 4))
    watched = list[weakref.ref[Any]]()
    seen.extend([lambda value: watched.append(weakref.ref(value)), _fail(error)])
    for way in (in_python, natively):
        x = torch.randn(4, 4)
        watched.append(weakref.ref(x))
        with way(f.program) if way is in_python else contextlib.nullcontext():
            caught = _raised(lambda x=x: f.program.run([x]))
        assert type(caught) is type(error) and caught.args == error.args
        notes = getattr(caught, "__notes__", [])
        if sys.version_info >= (3, 11):
            assert (way is natively) == any("raised by" in note and "fxwrap_units.look" in note for note in notes)
            caught.__notes__ = []
        caught.__traceback__ = caught.__context__ = None
        error.__traceback__ = error.__context__ = None
        del caught, x
        assert_clean(recording)
        gc.collect()  # what caught the error refers to itself
        assert all(one() is None for one in watched)
    seen.clear()
    x = torch.randn(4, 4)
    with natively(f.program):
        torch.testing.assert_close(f(x), g(x))


@native
@pytest.mark.parametrize("what", ["an operand that is refused", "an index out of range", "an assertion"])
def test_an_error_of_torch(compiled: Any, what: str) -> None:
    """Its type and its text are those of the Python replay."""
    good = torch.eye(4)
    if what == "an operand that is refused":
        f: Compiled = compiled(_drawn_from)
        fine, wrong = (good,), (torch.zeros(4, 4),)
    elif what == "an index out of range":
        f = compiled(_lookup)
        fine, wrong = (good, torch.tensor([0, 3])), (good, torch.tensor([0, 9]))
    else:
        f = compiled(lambda x, n: x.sin() @ x + torch.ones(_checked(n.item()), 4).sum(0))
        fine, wrong = (good, torch.tensor(3)), (good, torch.tensor(9))
    recording = recorded(f, *(lambda value=value: value.clone() for value in fine))
    given = positions(f, fine)

    def call(values: Sequence[torch.Tensor]) -> Any:
        return f.program.run([values[position] for position in given])

    with natively(f.program):
        call(fine)
    mine = _raised(lambda: call(wrong))
    assert_clean(recording)
    with in_python(f.program):
        theirs = _raised(lambda: call(wrong))
    assert type(mine) is type(theirs) and str(mine) == str(theirs)
    if sys.version_info >= (3, 11):
        (note,) = mine.__notes__
        assert note.startswith("fxwrap: raised by ")
    through_unit, through_python = both_ways(f, lambda: tensors_in(call(fine)))
    assert_same(through_unit, through_python)


def _checked(size: Any) -> Any:
    torch._check(size >= 1)
    torch._check(size <= 4)
    return size


@native
def test_an_interrupt_that_arrives_in_a_step(compiled: Any) -> None:
    """Ctrl-C while a Python operator runs ends the call there."""
    f: Compiled = compiled(lambda x: look(x.sin() @ x).cos())
    recording = recorded(f, lambda: torch.randn(4, 4))
    seen.append(lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        f(torch.randn(4, 4))
    assert_clean(recording)
    seen.clear()
    x = torch.eye(4)
    with natively(f.program):
        torch.testing.assert_close(f(x), ((x.sin() @ x) * 2).cos())


@native
def test_warnings_of_operators_come_through(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: x.to(torch.float32))
    recorded(f, lambda: torch.randn(4, dtype=torch.complex64))
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:

        def call() -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                f(torch.randn(4, dtype=torch.complex64))
            return [str(one.message).partition("(")[0] for one in caught]

        through_unit, through_python = both_ways(f, call)
    finally:
        torch.set_warn_always(always)
    assert through_unit == through_python and "Casting complex values to real" in through_unit[0]


# -- what must not fail a call -------------------------------------------------------------------------------


@native
def test_a_partition_that_has_no_hash(compiled: Any) -> None:
    """What ``compile_partition`` returns is called; nothing else is asked of it."""

    @dataclasses.dataclass
    class Runs:
        module: Any

        def __call__(self, *inputs: Any) -> Any:
            return self.module(*inputs)

    class Mine(fxwrap.FxwrapCodegen):
        def compile_partition(self, graph: Any) -> Any:
            return Runs(graph.module)

    f: Compiled = compiled(lambda x: (x.sin() @ x).cos(), options={"codegen": Mine})
    recorded(f, lambda: torch.randn(4, 4))
    x = torch.randn(4, 4)
    torch.testing.assert_close(f(x), (x.sin() @ x).cos())


@native
@pytest.mark.parametrize("eager", [False, True], ids=["recording", "eager runs"])
def test_a_fault_while_a_unit_is_made(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eager: bool
) -> None:
    """Planted. The call has run: it returns, the recording replays in Python, and that is told."""

    def planted(*_: Any) -> bool:
        raise KeyError("planted")

    monkeypatch.setattr("fxwrap.graphs.replay.lowering.Lowering._value", planted)
    f: Compiled = compiled(lambda x: x.sin(), options={"warmup": 1 << 40} if eager else {})
    for _ in range(5):
        x = torch.randn(4, 4)
        torch.testing.assert_close(f(x), x.sin())
    assert "its unit cannot be made" in caplog.text
    assert eager or "replays in Python: KeyError: 'planted'" in f.program.counters.events


def test_nobody_tells_where_home_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is not in its list of users: an error that callers expect."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for name in ("FXWRAP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match="FXWRAP_CACHE_DIR can name a folder"):
        cache_folder()


#   p --lazy clone--> q       one memory until somebody writes to p or q
@native
@torch.no_grad()
def test_a_static_input_that_has_been_cloned_lazily(compiled: Any) -> None:
    """A kernel that writes by address would write the clone, too."""

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("p", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.p.add_(x)
            return self.p.sin()

    model = Counts()
    f: Compiled = compiled(model)
    recording = recorded(f, lambda: torch.ones(64))
    before, clone = model.p[0].item(), torch._lazy_clone(model.p)
    with missed(recording):
        f(torch.ones(64))
    assert clone[0].item() == before and model.p[0].item() == before + 1
