"""Native replay: what units run, that it is what Python runs, and when they leave a call to Python."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import linecache
import operator
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from conftest import Compiled, assert_same, tensors_in
from hypothesis import given, settings
from models import MODELS, SMALLER
from random_graphs import PROPERTY, GraphMaker, Recipe, build, compile_request, kernel, recipes
from threads import in_threads
from torch.multiprocessing.reductions import StorageWeakRef

import fxwrap
from fxwrap.codegen.native_library import native_replay
from fxwrap.errors import InputError
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.graphs.memory.locks import LockOwner, TryLock
from fxwrap.graphs.memory.shared_state import SHARED
from fxwrap.graphs.replay.recording import Recording
from fxwrap.native_build import built_library, cache_folder
from fxwrap.pipeline import compile_host_graph
from fxwrap.testing.simulated import SIMULATED

# Only then: without a library where there should be one, they fail.
native = pytest.mark.skipif(os.environ.get("FXWRAP_NATIVE_REPLAY") == "0", reason="native replay is switched off")
HERE = Path(__file__).resolve().parent
few = settings(PROPERTY, max_examples=min(20, PROPERTY.max_examples))

# -- operators that tests look through ----------------------------------------------------------------------

seen: list[Callable[[torch.Tensor], object]] = []  # what ``look`` calls

torch.library.define("fxwrap_units::look", "(Tensor x) -> Tensor")
torch.library.define("fxwrap_units::make", "(Tensor x) -> Tensor")
torch.library.define("fxwrap_units::plus", "(Tensor x, Tensor? y, str how, ScalarType dtype) -> Tensor")
torch.library.define("fxwrap_units::note", "(Tensor x) -> ()")
torch.library.define("fxwrap_units::two", "(Tensor x) -> (Tensor, Tensor)")
torch.library.define("fxwrap_units::many", "(Tensor x) -> Tensor[]")


@torch.library.impl("fxwrap_units::look", "CompositeExplicitAutograd")
def _look(x: torch.Tensor) -> torch.Tensor:
    for one in seen:
        one(x)
    return x * 2


@torch.library.impl("fxwrap_units::make", "CompositeExplicitAutograd")
def _make(x: torch.Tensor) -> torch.Tensor:
    made = x + 1
    for one in seen:
        one(made)
    return made


@torch.library.impl("fxwrap_units::plus", "CompositeExplicitAutograd")
def _plus(x: torch.Tensor, y: torch.Tensor | None, how: str, dtype: torch.dtype) -> torch.Tensor:
    assert how == "twice"
    return (x + x if y is None else x + y).to(dtype)


@torch.library.impl("fxwrap_units::note", "CompositeExplicitAutograd")
def _note(x: torch.Tensor) -> None:
    for one in seen:
        one(x)


@torch.library.impl("fxwrap_units::two", "CompositeExplicitAutograd")
def _two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x + 2


@torch.library.impl("fxwrap_units::many", "CompositeExplicitAutograd")
def _many(x: torch.Tensor) -> list[torch.Tensor]:
    made = [x + 1, x + 2]
    for one in seen:
        one(made)  # type: ignore[arg-type]
    return made


for _name in ("look", "make"):
    torch.library.register_fake(f"fxwrap_units::{_name}")(torch.empty_like)
torch.library.register_fake("fxwrap_units::plus")(lambda x, y, how, dtype: torch.empty_like(x, dtype=dtype))
torch.library.register_fake("fxwrap_units::two")(lambda x: (torch.empty_like(x), torch.empty_like(x)))
torch.library.register_fake("fxwrap_units::many")(lambda x: [torch.empty_like(x), torch.empty_like(x)])
torch.library.register_fake("fxwrap_units::note")(lambda x: None)
look, make, ops = torch.ops.fxwrap_units.look, torch.ops.fxwrap_units.make, torch.ops.fxwrap_units


@pytest.fixture(autouse=True)
def look_at_nothing() -> Iterator[None]:
    seen.clear()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    seen.clear()


# -- two ways to call ---------------------------------------------------------------------------------------


def recorded(f: Compiled, *inputs: Callable[[], Any], calls: int = 3) -> Recording:
    """Call with fresh inputs until the program replays; the recording."""
    for _ in range(calls):
        f(*(one() for one in inputs))
    (recording,) = f.program.specializations.recordings()
    assert recording.unit is not None, f.program.counters.to_dict()
    return recording


@contextlib.contextmanager
def in_python(*programs: Any) -> Iterator[None]:
    """Replay the same recordings without their units."""
    units = [program.specializations.units for program in programs]
    for program in programs:
        program.specializations.units = ()
    try:
        yield
    finally:
        for program, its_own in zip(programs, units, strict=True):
            program.specializations.units = its_own


@contextlib.contextmanager
def natively(*programs: Any) -> Iterator[None]:
    """Every program replays through a unit, once or more."""
    before = [_used(program) for program in programs]
    yield
    assert all(_used(program) > used for program, used in zip(programs, before, strict=True))


def _used(program: Any) -> int:
    return max((unit.used for unit in program.specializations.units), default=0)


def both_ways(f: Compiled, call: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``call`` returns through units, and what it returns in Python."""
    with natively(f.program):
        through_unit = call()
    before = _used(f.program)
    with in_python(f.program):
        through_python = call()
    assert _used(f.program) == before
    return through_unit, through_python


def run(program: Any, *inputs: Any) -> list[torch.Tensor]:
    """Call a program as compiled code does; its outputs."""
    return tensors_in(program.run(list(inputs)))


def listing(recording: Recording) -> str:
    """What a unit runs, but for looks at layouts: Inductor's wrapper has another way to ask with every version."""
    return "\n".join(line for line in recording.listing if not re.match(r"assert slot \d+ is |assert_", line))


def drawn(text: str) -> str:
    return textwrap.dedent(text).strip()


# -- what a unit runs ---------------------------------------------------------------------------------------


@native
def test_the_listing_of_a_small_program(compiled: Any) -> None:
    """
    ::

        resize(region, 80)                     resize a region to 80 bytes
        c2(v0, v1, v2, out=c1); del v0, v1     aten::addmm.out(slot 0, slot 1, slot 2, ..., <in the region>)
        v3 = empty_strided(...)            ->  drop slot 0, drop slot 1
        c6(c1, v4, out=v3)                     slot 3 = empty ..., aten::mm.out(..., slot 3)
        resize(region, 0)                      resize a region to 0 bytes
        c7(v3); return v3                      cpp_fused_add_relu_1(slot 3), return slot 3
    """
    weight, bias = torch.randn(6, 4), torch.randn(4)
    f: Compiled = compiled(lambda x: torch.relu(torch.addmm(bias, x, weight).sin() @ weight.t()) + 1)
    recording = recorded(f, lambda: torch.randn(5, 6))
    assert listing(recording) == drawn("""
    below autograd:
    resize a region to 80 bytes
    aten::addmm.out(slot 0, slot 1, slot 2, default, default, <float32[5, 4]>)
    drop slot 0
    drop slot 1
    cpp_fused_sin_0(<float32[5, 4]>)
    slot 4 = slot 2 as (4, 6), strides (1, 4), offset 0
    drop slot 2
    slot 3 = empty (5, 6), torch.float32
    aten::mm.out(<float32[5, 4]>, slot 4, slot 3)
    drop slot 4
    resize a region to 0 bytes
    cpp_fused_add_relu_1(slot 3)
    through autograd:
    return slot 3
    """)


@native
def test_the_listing_of_sizes_that_depend_on_data(compiled: Any) -> None:
    """
    ::

        indices = nonzero(y > 0)          slot 3 = aten::nonzero(...)
        u0 = indices.size(0)          ->  slot 4 = aten::sym_size.int(slot 3, 0)
        assert u0 <= 16                   slot 6 = le(slot 4, 16); assert slot 6
        launch(indices, out, u0)          cpp_fused_mul_1(slot 3, slot 2, slot 4)
    """

    def g(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.sin(x) + 0.2
        return y @ y.t(), torch.nonzero(y > 0) * 2

    f: Compiled = compiled(g)
    recording = recorded(f, lambda: torch.randn(4, 4))
    assert listing(recording) == drawn("""
    below autograd:
    resize a region to 80 bytes
    cpp_fused_add_gt_sin_0(slot 0, <float32[4, 4]>, <bool[4, 4]>)
    drop slot 0
    slot 1 = empty (4, 4), torch.float32
    aten::mm.out(<float32[4, 4]>, <float32[4, 4]>, slot 1)
    through autograd:
    slot 3 = aten::nonzero(<bool[4, 4]>)
    resize a region to 0 bytes
    slot 4 = aten::sym_size.int(slot 3, 0)
    slot 5 = ge(slot 4, 0)
    assert slot 5: u0 >= 0
    drop slot 5
    slot 6 = le(slot 4, 16)
    assert slot 6: u0 <= 16
    drop slot 6
    slot 2 = empty (slot 4, 2), torch.int64
    cpp_fused_mul_1(slot 3, slot 2, slot 4)
    drop slot 3
    drop slot 4
    return (slot 1, slot 2)
    """)
    for _ in range(4):
        x = torch.randn(4, 4)
        with natively(f.program):
            assert torch.equal(f(x)[1], g(x)[1])


@native
def test_the_listing_where_addresses_are_frozen(compiled: Any, own_arenas: Any) -> None:
    """
    ::

        static buffers <- x, counter          fill static buffers with slot 0, slot 1
        graph                             ->  replay()  # Python
        counter <- static buffer              aten::copy_(slot 0, ...)
        outputs over the arena                slot 2 = <...> as (4, 4) ...
    """

    def g(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return x.sin() @ x + counter

    with using_runtime(SIMULATED):
        f: Compiled = compiled(g)
        recording = recorded(f, lambda: torch.randn(4, 4), lambda: torch.zeros(4))
        assert listing(recording) == drawn("""
        fill static buffers with slot 0, slot 1
        replay()  # Python
        aten::copy_(slot 0, <float32[4]>, default)
        slot 2 = <float32[4, 4]> as (4, 4), strides (4, 1), offset 0
        return slot 2
        """)
        counter = torch.zeros(4)
        with natively(f.program):
            f(torch.randn(4, 4), counter)
        assert torch.equal(counter, torch.ones(4))


# -- the same numbers ---------------------------------------------------------------------------------------

_SAMPLE = {("mixtral", "inference"), ("resnet", "training")}


@native
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in _SAMPLE else pytest.mark.sweep)
        for name in MODELS
        for mode in ("inference", "training")
    ],
)
def test_models_compute_the_same_both_ways(compiled: Any, name: str, mode: str) -> None:
    """One recording of each program, called through its unit and without it: outputs, gradients and statistics."""
    model, fresh_inputs = MODELS[name](**SMALLER.get(name, {}))
    training = mode == "training"
    model.train(training)
    f: Compiled = compiled(model)

    def call(inputs: dict[str, Any]) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.set_grad_enabled(training):
            outputs = tensors_in(f(**inputs))
        if training:
            sum(t.float().square().mean() for t in outputs if t.requires_grad).backward()
        found = [*outputs, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
        return [value.detach().clone() for value in found]

    for _ in range(4):
        call(fresh_inputs())
    inputs, state = fresh_inputs(), {key: value.clone() for key, value in model.state_dict().items()}
    programs = [p for p in f.programs if p.specializations.units]
    assert programs
    with natively(*programs):
        through_units = call(inputs)
    model.load_state_dict(state)
    with in_python(*programs):
        through_python = call(inputs)
    assert_same(through_units, through_python)


@native
@pytest.mark.parametrize("frozen", [False, True], ids=["cpu", "simulated"])
@few
@given(recipe=recipes())
def test_random_programs_compute_the_same_both_ways(frozen: bool, recipe: Recipe) -> None:
    """Outputs, and inputs that are updated in place."""
    graph = build(recipe)
    with using_runtime(SIMULATED) if frozen else contextlib.nullcontext():
        program = compile_host_graph(graph.gm, compile_request(graph.options))
        for seed in range(3):
            program(*graph.inputs(seed))
        found = list[list[torch.Tensor]]()
        for way in (natively, in_python):
            inputs = graph.inputs(7)
            torch.manual_seed(7)
            with way(program):
                outputs = program(*inputs)
            found.append([value.clone() for value in (*outputs, *inputs)])
            del outputs
    assert_same(*found)


# -- lifetimes ----------------------------------------------------------------------------------------------


#   make  ->  mm  ->  look  ->  output
#    t         u      t is gone here
@native
def test_a_temporary_is_freed_at_its_last_use(compiled: Any) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        t = make(x)
        return look(t @ t)

    f: Compiled = compiled(g)
    recorded(f, lambda: torch.randn(4, 4))
    storages, alive = list[StorageWeakRef](), list[bool]()

    def watch(value: torch.Tensor) -> None:
        alive.extend(not storage.expired() for storage in storages)
        storages.append(StorageWeakRef(value.untyped_storage()))

    def call() -> list[bool]:
        storages.clear()
        alive.clear()
        f(torch.randn(4, 4))
        return [*alive, *(not storage.expired() for storage in storages)]

    seen.append(watch)
    through_unit, through_python = both_ways(f, call)
    # Is what ``make`` returned still there when ``look`` runs? And both operands, after the call?
    assert through_unit == through_python == [False, False, False]


#   caller's list: [x]  ->  []        x is freed before ``look`` runs
@native
def test_an_input_is_freed_at_its_last_use_and_its_list_is_emptied(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: look(x.sin() @ x))
    recorded(f, lambda: torch.randn(4, 4))
    inputs, freed = list[torch.Tensor](), list[bool]()
    seen.append(lambda _: freed.append(StorageWeakRef.expired(storage)))
    for way in (natively, in_python):
        inputs.append(torch.randn(4, 4))
        storage = StorageWeakRef(inputs[0].untyped_storage())
        with way(f.program):
            f.program.run(inputs)
        assert not inputs
    assert freed == [True, True]


@native
@pytest.mark.parametrize("frozen", [False, True], ids=["cpu", "simulated"])
def test_nothing_is_kept_between_calls_and_every_call_has_its_outputs(
    compiled: Any, own_arenas: Any, frozen: bool
) -> None:
    with using_runtime(SIMULATED) if frozen else contextlib.nullcontext():
        f: Compiled = compiled(lambda x: (make(x).sin() @ x, x.cos()))
        recorded(f, lambda: torch.randn(4, 4))
        made, watched = list[weakref.ref[Any]](), list[weakref.ref[Any]]()
        seen.append(lambda value: made.append(weakref.ref(value)))
        kept = list[torch.Tensor]()
        for way in (natively, natively if not frozen else in_python, in_python):
            x = torch.randn(4, 4)
            with way(f.program):
                outputs = run(f.program, x)
            watched.extend(weakref.ref(value) for value in (x, *outputs))
            kept.append(outputs[0])
            torch.testing.assert_close(outputs[1], x.cos())
            del x, outputs
            assert all(one() is None for one in made)
        addresses = {value.data_ptr() for value in kept}
        assert len(addresses) == len(kept)
        kept.clear()
        assert all(one() is None for one in watched)


#   donated: the gradient's program is given the activation, and may write over it
@native
def test_inputs_that_are_donated(compiled: Any) -> None:
    """A backward frees what the forward saved for it."""
    weight = torch.randn(8, 8, requires_grad=True)
    f: Compiled = compiled(lambda x: (x @ weight).sin().sum())
    gradients = list[torch.Tensor]()
    x = torch.randn(4, 8)
    for call in range(5):
        way = {3: natively, 4: in_python}.get(call)
        with way(*f.programs) if way is not None else contextlib.nullcontext():
            weight.grad = None
            y = f(x)
            saved = [
                StorageWeakRef(s.untyped_storage())
                for s in y.grad_fn.saved_tensors
                if s.shape == (4, 8) and s is not x
            ]
            y.backward()
            gone = [storage.expired() for storage in saved if storage.cdata != x.untyped_storage()._cdata]
        assert all(gone)
        gradients.append(weight.grad)
    assert len(f.programs) == 2
    assert_same(gradients[3:4], gradients[4:5])
    assert_same(gradients[2:3], gradients[3:4])


@native
@pytest.mark.parametrize("model", ["planned", "of an operator", "a view"])
def test_inference_and_gradient_modes(compiled: Any, model: str) -> None:
    """Outputs are inference tensors while that mode is on, as those of Python are; none has a history."""
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "planned": lambda x: (x.sin() @ x + 1, x.sum()),
        "of an operator": lambda x: x.sin().cumsum(0).sort(),
        "a view": lambda x: (x.sin() @ x).t()[1:],
    }
    f: Compiled = compiled(functions[model])
    recorded(f, lambda: torch.randn(4, 4))
    x = torch.randn(4, 4)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):

        def call(mode: Any = mode) -> list[torch.Tensor]:
            with mode():
                return run(f.program, x)

        through_unit, through_python = both_ways(f, call)
        assert_same(through_unit, through_python)
        for mine, other in zip(through_unit, through_python, strict=True):
            assert mine.is_inference() == other.is_inference() == (mode is torch.inference_mode)
            assert not mine.requires_grad and not other.requires_grad


# -- errors -------------------------------------------------------------------------------------------------


class Odd(Exception):
    """No exception that anybody knows."""


def _fail(error: BaseException) -> Callable[[torch.Tensor], None]:
    def fail(_: torch.Tensor) -> None:
        raise error

    return fail


def _raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def _assert_clean(recording: Recording) -> None:
    """Locks are free, and regions and registers empty."""
    assert not any(lock.locked() for lock in recording._locks)
    assert recording._resources is not None and recording._replay is not None
    assert not any(storage.nbytes() for storage, _ in recording._resources.regions._sizes)
    assert not any(value is not None for value in recording._replay.registers)


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
            assert (way is natively) == any("raised by" in note and "fxwrap_units::look" in note for note in notes)
            caught.__notes__ = []
        caught.__traceback__ = caught.__context__ = None
        error.__traceback__ = error.__context__ = None
        del caught, x
        _assert_clean(recording)
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
    positions = _positions(f, fine)

    def call(values: Sequence[torch.Tensor]) -> Any:
        return f.program.run([values[position] for position in positions])

    with natively(f.program):
        call(fine)
    mine = _raised(lambda: call(wrong))
    _assert_clean(recording)
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


def _positions(f: Compiled, values: Sequence[torch.Tensor]) -> list[int]:
    """Which argument of the function each input of the program is."""
    found, its_own = list[int](), f.program.run
    addresses = [value.data_ptr() for value in values]

    def note(inputs: list[Any]) -> Any:
        found.extend(addresses.index(value.data_ptr()) for value in inputs)
        return its_own(inputs)

    f.program.run = note
    f(*values)
    del f.program.run
    return found


@native
def test_an_interrupt_that_arrives_in_a_step(compiled: Any) -> None:
    """Ctrl-C while a Python operator runs ends the call there."""
    f: Compiled = compiled(lambda x: look(x.sin() @ x).cos())
    recording = recorded(f, lambda: torch.randn(4, 4))
    seen.append(lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        f(torch.randn(4, 4))
    _assert_clean(recording)
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


# -- threads ------------------------------------------------------------------------------------------------


@native
def test_a_call_while_another_thread_is_in_the_unit(compiled: Any) -> None:
    """
    ::

        thread   sin  look ............................ mm       in the unit
        other               replay or eager run, right           the unit misses
    """

    def g(x: torch.Tensor) -> torch.Tensor:
        return look(x.sin() @ x) @ x

    f: Compiled = compiled(g)
    recording = recorded(f, lambda: torch.randn(4, 4))
    inside, over, first = threading.Event(), threading.Event(), threading.get_ident
    main, results = first(), dict[str, torch.Tensor]()

    def wait(_: torch.Tensor) -> None:
        if first() != main and not inside.is_set():
            inside.set()
            assert over.wait(60)

    seen.append(wait)
    x, y = torch.randn(2, 4, 4)
    thread = threading.Thread(target=lambda: results.update(there=run(f.program, x)[0]))
    with natively(f.program):
        thread.start()
        assert inside.wait(60)
        used = recording.unit.used
        assert any(lock.locked() for lock in recording._locks)
        results["here"] = run(f.program, y)[0]
        assert recording.unit.used == used
        over.set()
        thread.join()
    seen.clear()
    torch.testing.assert_close(results["here"], g(y))
    torch.testing.assert_close(results["there"], g(x))
    _assert_clean(recording)


@native
def test_two_threads_call_one_program(compiled: Any) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ x).cos() @ x

    f: Compiled = compiled(g)
    recorded(f, lambda: torch.randn(32, 32))

    def calls(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(300):
            x = torch.randn(32, 32, generator=generator)
            (y,) = run(f.program, x)
            torch.testing.assert_close(y, g(x), rtol=1e-4, atol=1e-4)

    with natively(f.program):
        in_threads([lambda: calls(1), lambda: calls(2)])


@native
def test_other_threads_run_while_a_unit_computes(compiled: Any) -> None:
    """Nobody is asked to let go of the interpreter's lock here: who has it gives it away, or nobody else runs."""
    f: Compiled = compiled(lambda x: x.sort(0).values.cumsum(0))
    recorded(f, lambda: torch.randn(8))
    torch._dynamo.reset()
    f = compiled(lambda x: x.sort(0).values.cumsum(0))
    x = torch.randn(2_000_000)
    recorded(f, lambda: x)
    inside, end, turns = [False], [False], [0]

    def count() -> None:
        while not end[0]:
            turns[0] += inside[0]
            time.sleep(0)  # gives the lock away

    before, thread = sys.getswitchinterval(), threading.Thread(target=count)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        with natively(f.program):
            inside[0] = True
            f.program.run([x])
            inside[0] = False
    finally:
        end[0] = True
        sys.setswitchinterval(before)
        thread.join()
    assert turns[0] > 0


@native
def test_a_program_that_calls_itself(compiled: Any) -> None:
    """
    ::

        unit:  sin  look --> the same program --> look      the inner call finds the unit in use
    """

    def g(x: torch.Tensor) -> torch.Tensor:
        return look(x.sin() @ x) @ x

    f: Compiled = compiled(g)
    recording = recorded(f, lambda: torch.randn(4, 4))
    z, inner = torch.randn(4, 4), list[torch.Tensor]()

    def call_again(_: torch.Tensor) -> None:
        one = seen.pop()
        inner.extend(run(f.program, z))
        seen.append(one)

    x = torch.randn(4, 4)
    seen.append(call_again)
    with natively(f.program):
        (outer,) = run(f.program, x)
    seen.clear()
    torch.testing.assert_close(outer, g(x))
    torch.testing.assert_close(inner[0], g(z))
    _assert_clean(recording)


def _in_a_child(check: Callable[[], bool]) -> int:
    """The exit code of a forked process: 0 if ``check`` returns true there, 1 if not, 2 if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = int(not check())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@native
def test_a_process_that_is_forked_while_a_thread_is_in_a_unit(compiled: Any) -> None:
    """Nobody will end that call in the child, where the unit is free; in the parent it goes on."""

    def g(x: torch.Tensor) -> torch.Tensor:
        return look(x.sin() @ x) @ x

    f: Compiled = compiled(g)
    recording = recorded(f, lambda: torch.randn(4, 4))
    inside, over, results = threading.Event(), threading.Event(), list[torch.Tensor]()

    def wait(_: torch.Tensor) -> None:
        inside.set()
        assert over.wait(60)

    x, y = torch.randn(2, 4, 4)
    expected = g(x), g(y)
    seen.append(wait)
    thread = threading.Thread(target=lambda: results.extend(run(f.program, x)))
    thread.start()
    assert inside.wait(60)

    def check() -> bool:
        seen.clear()
        before = recording.unit.used
        outputs = [run(f.program, y)[0] for _ in range(2)]
        assert recording.unit.used > before
        return all(torch.allclose(output, expected[1]) for output in outputs)

    code = _in_a_child(check)
    over.set()
    thread.join()
    assert code == 0
    torch.testing.assert_close(results[0], expected[0])
    _assert_clean(recording)


# -- calls that a unit leaves to Python -----------------------------------------------------------------------


@contextlib.contextmanager
def missed(recording: Recording) -> Iterator[None]:
    """No call in here is replayed by this unit, which has done nothing."""
    before = recording.unit.used
    yield
    assert recording.unit.used == before
    assert not any(lock.locked() for lock in recording._locks)


@native
def test_a_static_input_at_another_address(compiled: Any) -> None:
    model = torch.nn.Linear(8, 8).requires_grad_(False)
    f: Compiled = compiled(model)
    x = torch.randn(2, 8)
    recording = recorded(f, lambda: x)
    old = model.weight.data
    model.weight.data = torch.randn(8, 8)
    with missed(recording):
        torch.testing.assert_close(f(x), model(x))
    model.weight.data = old
    with natively(f.program):
        torch.testing.assert_close(f(x), model(x))


@native
def test_other_sizes(compiled: Any) -> None:
    """Each size has a recording and a unit; a size that nobody has recorded is run by none."""
    f: Compiled = compiled(lambda x: x.sin().sum(0) + x.shape[0], dynamic=True)
    sizes = {}
    for size in (3, 5):
        for _ in range(4):
            f(torch.randn(size, 4))
        sizes[size] = f.program.specializations.recordings()[-1]
    assert len(f.program.specializations.units) == 2
    for size, other in ((3, 5), (5, 3)):
        x, before = torch.randn(size, 4), sizes[size].unit.used
        with missed(sizes[other]):
            torch.testing.assert_close(f(x), x.sin().sum(0) + size)
        assert sizes[size].unit.used > before
    x = torch.randn(7, 4)
    with missed(sizes[3]), missed(sizes[5]):
        torch.testing.assert_close(f(x), x.sin().sum(0) + 7)


@native
def test_numbers_that_are_inputs(compiled: Any) -> None:
    """A unit is for one whole number, and takes neither a boolean for it, nor a float, nor more than 64 bits."""
    f: Compiled = compiled(lambda x, n: x.sin() + n, dynamic=True)
    for n in (2, 3, 1, 1, 1):
        f(torch.randn(4), n)
    inputs = list[Any]()
    its_own = f.program.run
    f.program.run = lambda given: (inputs.extend(given), its_own(given))[1]
    f(torch.randn(4), 1)
    del f.program.run
    where = next(position for position, value in enumerate(inputs) if type(value) is int)
    recording = max(f.program.specializations.recordings(), key=lambda one: one.used)
    for other in (True, 1.0, 2, (1 << 64) + 1, None):
        with missed(recording), contextlib.suppress(Exception):
            f.program.run([*inputs[:where], other, *inputs[where + 1 :]])
    with natively(f.program):
        f.program.run(list(inputs))


@native
def test_a_list_that_is_too_short_or_too_long(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: x.sin() @ x)
    recording = recorded(f, lambda: torch.randn(4, 4))
    x = torch.randn(4, 4)
    for wrong in ([], [x, x]):
        with missed(recording), pytest.raises(InputError, match="wrong number of inputs"):
            f.program.run(list(wrong))
    with natively(f.program):
        torch.testing.assert_close(run(f.program, x)[0], x.sin() @ x)


@native
def test_only_a_list_of_inputs(compiled: Any) -> None:
    """A unit called by hand with anything else says so, and leaves it alone."""
    f: Compiled = compiled(lambda x: x.sin() @ x)
    recording = recorded(f, lambda: torch.randn(4, 4))
    unit: Any = recording.unit
    x = torch.randn(4, 4)
    for wrong in ((x,), x, None):
        with missed(recording), pytest.raises(TypeError, match="list of inputs"):
            unit(wrong)
    with missed(recording), pytest.raises(TypeError):
        unit()
    inputs = [x, x]
    with missed(recording):
        assert unit(inputs) is native_replay().missed
    assert len(inputs) == 2


class Tagged(torch.Tensor):
    """A tensor of another class, and nothing else."""


@native
def test_a_subclass_of_tensor(compiled: Any) -> None:
    """The same numbers as in Python, of plain tensors."""
    f: Compiled = compiled(lambda x: x.sin() @ x)
    recorded(f, lambda: torch.randn(4, 4))
    x = torch.randn(4, 4)
    through_unit, through_python = both_ways(f, lambda: run(f.program, x.as_subclass(Tagged))[0])
    assert torch.equal(torch.Tensor(through_unit), torch.Tensor(through_python))
    assert type(through_unit) is type(through_python)


@native
def test_while_hooks_pack_what_autograd_saves(compiled: Any) -> None:
    """Python notes what the hooks get; the unit of a forward program does not."""
    weight = torch.randn(8, 8, requires_grad=True)
    f: Compiled = compiled(lambda x: (x @ weight).sin().sum())

    def step() -> torch.Tensor:
        weight.grad = None
        f(x).backward()
        return weight.grad

    x = torch.randn(4, 8)
    for _ in range(4):
        expected = step()
    forward = next(program for program in f.programs if program.plan.phase == "forward")
    (recording,) = forward.specializations.recordings()
    with natively(forward):
        assert_same(step(), expected)
    packed = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t), missed(recording):
        assert_same(step(), expected)
    assert packed
    packed.clear()
    SHARED.packed.known.clear()
    with natively(forward):
        assert_same(step(), expected)


@native
def test_a_lock_that_python_has(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: x.sin() @ x)
    recording = recorded(f, lambda: torch.randn(4, 4))
    owner, x = LockOwner(), torch.randn(4, 4)
    assert recording.acquire(owner)
    before = recording.unit.used
    torch.testing.assert_close(f(x), x.sin() @ x)
    assert recording.unit.used == before
    recording.release(owner)
    with natively(f.program):
        torch.testing.assert_close(f(x), x.sin() @ x)


@native
def test_an_output_that_somebody_has(compiled: Any, own_arenas: Any) -> None:
    """Where outputs lie in the arena: the unit sees the use count, and Python decides what becomes of it."""
    with using_runtime(SIMULATED):
        f: Compiled = compiled(lambda x: (x.sin() @ x).cos())
        recording = recorded(f, lambda: torch.randn(4, 4))
        x = torch.randn(4, 4)
        with natively(f.program):
            kept = f(x)
        before = kept.clone()
        with missed(recording):
            assert_same(f(x), kept)
        assert torch.equal(kept, before)


@native
def test_a_recording_that_has_ended(compiled: Any) -> None:
    """Its unit lets go of everything, and misses."""
    f: Compiled = compiled(lambda x: x.sin() @ x)
    recording = recorded(f, lambda: torch.randn(4, 4))
    unit = recording.unit
    f.program.release()
    inputs = [torch.randn(4, 4)]
    assert unit(inputs) is native_replay().missed and len(inputs) == 1 and unit.used == 0
    x = torch.randn(4, 4)
    torch.testing.assert_close(f(x), x.sin() @ x)


@native
def test_a_recording_that_ends_during_a_call(compiled: Any) -> None:
    """What the call needs stays until it is over."""

    def g(x: torch.Tensor) -> torch.Tensor:
        return look(x.sin() @ x).cos() @ x

    f: Compiled = compiled(g)
    recording = recorded(f, lambda: torch.randn(4, 4))
    unit = recording.unit
    seen.append(lambda _: unit.clear())
    x = torch.randn(4, 4)
    (got,) = run(f.program, x)
    seen.clear()
    torch.testing.assert_close(got, g(x))
    assert unit([x]) is native_replay().missed


# -- without a unit -----------------------------------------------------------------------------------------

_ALONE = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
torch._inductor.config.cpp.cxx = ("g++",)
import fxwrap
from fxwrap.codegen.native_library import native_replay
f = torch.compile(lambda x: (x.sin() @ x).cos(), backend="fxwrap", options={"capture": "always"})
for _ in range(5):
    x = torch.randn(4, 4)
    torch.testing.assert_close(f(x), (x.sin() @ x).cos())
g = torch.compile(lambda x: x.cos() @ x, backend="fxwrap", options={"capture": "always"})
for _ in range(5):
    x = torch.randn(4, 4)
    torch.testing.assert_close(g(x), x.cos() @ x)
print("native:", native_replay() if isinstance(native_replay(), str) else "yes")
"""


@pytest.mark.parametrize("what", ["a compiler that fails", "no compiler", "nowhere to keep it", "switched off"])
def test_where_there_is_no_library(tmp_path: Path, what: str) -> None:
    """Everything runs in Python, and the reason is told once; not if it was asked for."""
    environment = {"CXX": "/bin/false", "FXWRAP_CACHE_DIR": str(tmp_path), "FXWRAP_NATIVE_REPLAY": ""}
    if what == "no compiler":
        environment["CXX"] = "/nowhere/c++"
    if what == "nowhere to keep it":
        environment["FXWRAP_CACHE_DIR"] = "/dev/null"
    if what == "switched off":
        environment["FXWRAP_NATIVE_REPLAY"] = "0"
    done = processes.run("-c", _ALONE, timeout=300, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    switched_off = what == "switched off"
    assert done.stdout.count("recordings replay in Python") == (not switched_off), done.stdout
    said = done.stdout.partition("\nnative:")[2].strip() if not switched_off else done.stdout.strip()
    assert said.startswith("the helper library cannot be built: " if not switched_off else "native:"), done.stdout
    assert not list(tmp_path.rglob("*.so"))


_BUILD = """
import sys
from pathlib import Path
from fxwrap.native_build import built_library, cache_folder
import ctypes
path = built_library("small", Path(sys.argv[1]), ("-O1",), patience_s=100)
print(ctypes.CDLL(str(path)).answer(), path)
"""
_BUILD_ALL = """
from fxwrap.codegen.native_library import native_replay
assert not isinstance(native_replay(), str), native_replay()
print(42, "/")
"""


# The real one takes every process half a minute.
@pytest.mark.parametrize("what", ["a small one", pytest.param("the helper", marks=pytest.mark.sweep)])
def test_two_processes_build_at_one_time(tmp_path: Path, what: str) -> None:
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    program, cache = (_BUILD if what == "a small one" else _BUILD_ALL), tmp_path / "cache"
    environment = {"FXWRAP_CACHE_DIR": str(cache), "FXWRAP_NATIVE_REPLAY": ""}
    outs = [tmp_path / f"out{i}" for i in (1, 2)]
    started = [processes.start(("-c", program, str(source)), out, out, tmp_path, **environment) for out in outs]
    for process in started:
        process.join(600)
    assert [out.read_text()[:2] for out in outs] == ["42", "42"], [out.read_text() for out in outs]
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 1
    assert len(list((cache / "fxwrap").iterdir())) == 1, "no folder is left behind"


def test_a_library_is_another_with_other_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return ANSWER; }')
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    paths = [built_library("small", source, (f"-DANSWER={n}",), patience_s=100) for n in (1, 2, 1)]
    assert paths[0] == paths[2] != paths[1]
    with pytest.raises(subprocess.SubprocessError):
        built_library("small", source, ("-DANSWER=nothing",), patience_s=100)
    assert len(list((tmp_path / "fxwrap").iterdir())) == 2


# -- operands of all kinds ------------------------------------------------------------------------------------

_COMPLEX = torch.complex64


def _pieces(x: torch.Tensor) -> torch.Tensor:
    first, _, third = torch.ops.aten.split.Tensor(x.sin().cumsum(0), 2)
    return torch.cat([first @ x, look(third) @ x, x], 0)


_CALLS: dict[str, tuple[Callable[..., Any], list[Callable[[], Any]]]] = {
    "a number as a tensor": (lambda x: x * 3j + 2, [lambda: torch.randn(6, dtype=_COMPLEX)]),
    "a number keeps the other's dtype": (lambda x: x * 2.5, [lambda: torch.randn(6, dtype=_COMPLEX)]),
    "an optional tensor": (
        lambda x, y: ops.plus(x, None, "twice", torch.float64) + ops.plus(x, y, "twice", torch.float32),
        [lambda: torch.randn(3), lambda: torch.randn(3)],
    ),
    "a list of tensors": (_pieces, [lambda: torch.randn(6, 6)]),
    "optional tensors in a list": (
        lambda x, i: torch.ops.aten.index.Tensor(x.sort(0).values, [None, i]).clone(),
        [lambda: torch.randn(4, 4), lambda: torch.tensor([0, 3])],
    ),
    "two results": (lambda x: x.sin().max(1), [lambda: torch.randn(4, 5)]),
    "one of two results": (lambda x: ops.two(x.sin())[1] + 1, [lambda: torch.randn(4, 5)]),
    "a tuple that is not taken apart": (lambda x: x.sin().sort(0), [lambda: torch.randn(4, 5)]),
    "no result": (lambda x: (ops.note(x.sin()), x.cos())[1], [lambda: torch.randn(4, 5)]),
    "a float from data": (lambda x, y: x.sin() * y.sum().item(), [lambda: torch.randn(4), lambda: torch.randn(2)]),
    "a boolean from data": (
        lambda x, y: x * y.any().item(),
        [lambda: torch.randn(4), lambda: torch.randn(2) > 0],
    ),
    "a result that is None": (
        lambda g, x, w: torch.ops.aten.convolution_backward(
            g, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
        )[1],
        [lambda: torch.randn(1, 3, 4, 4), lambda: torch.randn(1, 2, 6, 6), lambda: torch.randn(3, 2, 3, 3)],
    ),
    "an empty tensor": (lambda x: (x.sin() @ x.t()).sum() + x.numel(), [lambda: torch.randn(0, 4)]),
    "a scalar": (lambda x: x.sin().cumsum(0), [lambda: torch.randn(())]),
    "negative strides of numbers": (lambda x: x.flip(0).roll(1).cumsum(0), [lambda: torch.randn(5)]),
    "a conjugate": (lambda x: (x.conj() @ x).real, [lambda: torch.randn(4, 4, dtype=_COMPLEX)]),
    "embedding bags": (
        lambda w, i: torch.nn.functional.embedding_bag(i, w).sin(),
        [lambda: torch.randn(9, 4), lambda: torch.randint(0, 9, (3, 2))],
    ),
    "random numbers": (lambda x: x + torch.rand(4, 4) + torch.randperm(4), [lambda: torch.randn(4, 4)]),
}


@native
@pytest.mark.parametrize("what", _CALLS)
def test_operands_and_results(compiled: Any, what: str) -> None:
    g, inputs = _CALLS[what]
    f: Compiled = compiled(g)
    recorded(f, *inputs)
    values = [one() for one in inputs]

    def call() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [value.clone() for value in tensors_in(f(*values))]

    through_unit, through_python = both_ways(f, call)
    assert_same(through_unit, through_python)
    if what != "random numbers":
        torch.testing.assert_close(through_unit, tensors_in(g(*values)), equal_nan=True)


@native
def test_arithmetic_of_integers(compiled: Any) -> None:
    """Of numbers that come from data, at every call: negative ones, too."""

    def g(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        number = n.item()
        torch._check(number >= -9)
        torch._check(number <= 9)
        larger, smaller, distance = torch.sym_max(number, 2), torch.sym_min(number + 10, 5), abs(number - 3)
        return [x.sin() @ x.new_ones(4, size) for size in (larger, smaller + 1, distance + 1, -(-larger // 3))]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        f: Compiled = compiled(g)
        recording = recorded(f, lambda: torch.randn(4, 4), lambda: torch.tensor(5))
        for name in ("max", "min", "abs"):
            lines = [line for line in recording.listing if f"= {name}(" in line]
            assert lines and not any("# Python" in line for line in lines), recording.listing
        for number in (-9, -3, 0, 2, 3, 4, 9):
            x, n = torch.randn(4, 4), torch.tensor(number)
            through_unit, through_python = both_ways(f, lambda x=x, n=n: f(x, n))
            assert_same(through_unit, through_python)
            torch.testing.assert_close(through_unit, g(x, n))


#   one kernel over 60 tensors: 60 it reads, 60 it writes
@native
def test_a_kernel_with_more_arguments_than_a_unit_can_pass(compiled: Any) -> None:
    """It is called through Python."""

    def g(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return torch._foreach_add(torch._foreach_mul(tensors, 2), 1)

    with torch._inductor.config.patch({"combo_kernels": True, "cpp.max_horizontal_fusion_size": 200}):
        f: Compiled = compiled(g)
        tensors = [torch.randn(3) for _ in range(120)]
        recording = recorded(f, lambda: [t.clone() for t in tensors])
        through_unit, through_python = both_ways(f, lambda: f(tensors))
    assert_same(through_unit, through_python)
    assert_same(through_unit, [2 * t + 1 for t in tensors])
    assert recording.listing


@native
def test_a_float_from_data_in_an_operator() -> None:
    maker = GraphMaker()
    x = maker.input("x")
    product = maker.extern(torch.ops.aten.mul.Scalar, x, maker.number(maker.view(x, (), ())))
    program = compile_host_graph(maker.finish([product]), compile_request())
    for seed in range(4):
        (given,) = maker.inputs(seed)
        with natively(program) if seed > 1 else contextlib.nullcontext():
            assert torch.equal(program(given)[0], given * given[0, 0].item())


#   launch of a kernel that is a Python function: no address, so that it is a step in Python
@native
def test_kernels_that_only_python_can_call() -> None:
    maker, numbers = GraphMaker(), list[float]()
    x = maker.input("x")
    out = maker.allocate()

    def scale(a: torch.Tensor, factor: float, into: torch.Tensor) -> None:
        numbers.append(factor)
        into.copy_(a * factor)

    number = maker.number(maker.view(x, (), ()))
    maker.launch(kernel("scale_by", scale, (2,)), x, number, out)
    program = compile_host_graph(maker.finish([out]), compile_request())
    for seed in range(4):
        given = maker.inputs(seed)
        expected = given[0] * given[0].flatten()[0].item()
        with natively(program) if seed > 1 else contextlib.nullcontext():
            assert torch.equal(program(*given)[0], expected)
        assert type(numbers[-1]) is float
    (recording,) = program.specializations.recordings()
    assert any("slot 3" in line and line.endswith("# Python") for line in recording.listing)


# -- many calls ---------------------------------------------------------------------------------------------


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@native
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel does not tell resident memory")
@pytest.mark.parametrize("calls", [1_000, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_many_calls_leave_nothing_behind(compiled: Any, calls: int) -> None:
    """Library calls and kernels; sizes that depend on data; an operator that raises at every seventh call."""
    weight, bias = torch.randn(8, 8), torch.randn(8)
    one: Compiled = compiled(lambda x: torch.relu(torch.addmm(bias, x, weight)) @ weight)
    two: Compiled = compiled(lambda x: torch.nonzero(x.sin() > 0) * 2)
    three: Compiled = compiled(lambda x: look(x.sin() @ weight).cos() @ weight)
    recordings = [recorded(f, lambda: torch.randn(8, 8)) for f in (one, two, three)]
    count = [0]

    def sometimes(_: torch.Tensor) -> None:
        count[0] += 1
        if count[0] % 7 == 0:
            raise Odd

    seen.append(sometimes)
    x, raised = torch.randn(8, 8), 0

    def round_() -> int:
        one(x)
        two(x)
        try:
            three(x)
        except Odd:
            return 1
        return 0

    def state() -> tuple[int, ...]:
        gc.collect()
        counted = [weight, bias, x, *recordings, *(recording.unit for recording in recordings)]
        return len(gc.get_objects()), *map(sys.getrefcount, counted)

    for _ in range(500):
        round_()
    state()
    objects, resident = state(), _resident_bytes()
    for _ in range(calls):
        raised += round_()
    # A sanitizer keeps what was freed.
    assert _resident_bytes() - resident < 512 << 10 or "sanitize" in os.environ.get("FXWRAP_NATIVE_FLAGS", "")
    after = state()
    assert abs(after[0] - objects[0]) < 10 and after[1:] == objects[1:]
    assert raised == sum(n % 7 == 0 for n in range(501, 501 + calls))
    for recording in recordings:
        assert recording.unit.used > 0
        _assert_clean(recording)


@native
def test_a_program_that_nobody_has_is_freed_with_its_unit(compiled: Any, own_arenas: Any) -> None:
    """Also if its steps call Python: what they call must not keep the recording."""
    for frozen in (False, True):
        with using_runtime(SIMULATED) if frozen else contextlib.nullcontext():
            f: Compiled = compiled(
                lambda x: look(make(x) @ x).cumsum(0) @ x, options={"eager_ops": ["fxwrap_units::look"]}
            )
            recording = recorded(f, lambda: torch.randn(4, 4), calls=5)
            gone = [weakref.ref(recording), weakref.ref(f.program)]
            del f, recording
            torch._dynamo.reset()
            gc.collect()
            assert all(one() is None for one in gone)


# -- calls at one time, forks and odd numbers: each was wrong once ---------------------------------------------


@native
def test_a_call_that_begins_before_python_hears_of_an_error(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    ::

        thread   unit: look raises | nobody is in the unit |  Python hears of it, and leaves memory alone
        other                        unit: ... look .......................... | kernels use a region at address 0

    The unit has emptied its regions when it raised. By the time that Python hears of it they are another call's.
    """
    f: Compiled = compiled(lambda x: look((x.sin() @ x).cos().sin() @ x) @ x.sin())
    recording = recorded(f, lambda: torch.randn(4, 4))
    assert recording._resources is not None
    storages = [storage for storage, _ in recording._resources.regions._sizes]
    main, sizes, real = threading.get_ident(), list[list[int]](), Recording.failed_natively
    inside, over = threading.Event(), threading.Event()

    def hook(_: torch.Tensor) -> None:
        if threading.get_ident() == main:
            raise Odd
        sizes.append([storage.nbytes() for storage in storages])
        inside.set()
        over.wait(60)
        sizes.append([storage.nbytes() for storage in storages])
        if sizes[0] != sizes[1]:
            raise Odd  # or the process ends here

    def other() -> None:
        with contextlib.suppress(Odd):
            f.program.run([torch.randn(4, 4)])

    def failed(self: Recording, error: BaseException, owner: LockOwner) -> None:
        if threading.get_ident() == main:
            thread.start()
            assert inside.wait(60)
        real(self, error, owner)
        over.set()

    thread = threading.Thread(target=other)
    monkeypatch.setattr(Recording, "failed_natively", failed)
    seen.append(hook)
    with pytest.raises(Odd):
        f.program.run([torch.randn(4, 4)])
    thread.join()
    assert any(sizes[0]) and sizes[0] == sizes[1]


@native
def test_a_unit_that_begins_while_python_takes_the_lock(compiled: Any) -> None:
    """
    ::

        TryLock._try   is a unit inside? no |                               | owners[0] = me: acquired
        other                                 unit: nobody owns it; go on ......................

    Both work in the same memory then.
    """
    f: Compiled = compiled(lambda x: look(x.sin() @ x) @ x)
    recording = recorded(f, lambda: torch.randn(4, 4))
    lock, owner = recording._locks[0], LockOwner()
    inside, over = threading.Event(), threading.Event()
    seen.append(lambda _: (inside.set(), over.wait(60)))
    thread = threading.Thread(target=lambda: run(f.program, torch.randn(4, 4)))

    def trace(frame: Any, event: str, _: Any) -> Any:
        """Start the other thread at the line of ``_try`` that takes the lock."""
        if frame.f_code is not TryLock._try.__code__:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "setdefault" in line and not inside.is_set():
            thread.start()
            assert inside.wait(60)
        return trace

    sys.settrace(trace)
    try:
        acquired = lock.acquire(owner)
    finally:
        sys.settrace(None)
    both = acquired and lock.native.value == os.getpid()
    over.set()
    if inside.is_set():
        thread.join()
    lock.release(owner)
    assert not both


def _times_a_size(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x * x.shape[0]


def _times_a_number(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x * n.item()


@native
@pytest.mark.parametrize("runs", ["replayed", "eager"])
@pytest.mark.parametrize("g", [_times_a_size, _times_a_number])
def test_a_size_as_a_tensor(compiled: Any, g: Callable[..., Any], runs: str) -> None:
    """Complex kernels are ATen's: ``aten::mul.Tensor(x, u0)``, of which Python makes a wrapped number."""
    f: Compiled = compiled(g, dynamic=True)
    for call in range(6):
        x, n = torch.randn(5 if runs == "replayed" else 5 + call, dtype=_COMPLEX), torch.tensor(2 + call)
        torch.testing.assert_close(f(x, n), g(x, n))


@native
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_number_from_data_as_a_tensor(kind: str) -> None:
    """The same in a graph by hand, for a whole number and for a float."""
    maker = GraphMaker()
    x, n = maker.input("x"), maker.input("n", (), torch.int64 if kind == "integer" else torch.float32)
    number = maker.integer(n) if kind == "integer" else maker.number(n)
    product = maker.extern(torch.ops.aten.mul.Tensor, x, number)
    program = compile_host_graph(maker.finish([product]), compile_request())
    for seed in range(5):
        given = maker.inputs(seed)
        assert torch.equal(program(*given)[0], given[0] * given[1].item())


@native
def test_a_process_that_is_forked_while_inputs_are_copied(compiled: Any, own_arenas: Any) -> None:
    """
    ::

        thread   fill static buffers with x, y ........     its list of sources is full
        main                 fork --> child: fill static buffers: the list has four entries for two buffers
    """
    with using_runtime(SIMULATED):
        f: Compiled = compiled(lambda x, y: x.sum(0) + y.sum(0))
        pairs = [
            (torch.ones(4096, 4096), torch.ones(64, 4096)) for _ in range(3)
        ]  # all there: none stays where it is
        first, second = ([pair[position] for pair in pairs] for position in (0, 1))
        recording = recorded(f, first.pop, second.pop)
        assert "fill static buffers with slot 0, slot 1" in recording.listing
        x, y = pairs[0]
        given = [(x, y)[position] for position in _positions(f, (x, y))]
        cell, errors = recording._locks[0].native, list[BaseException]()

        def in_thread() -> None:
            try:
                f.program.run(list(given))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=in_thread)
        thread.start()
        end = time.monotonic() + 60
        while cell.value != os.getpid() and time.monotonic() < end:
            pass
        code = _in_a_child(lambda: torch.equal(run(f.program, *given)[0], x.sum(0) + y.sum(0)))
        thread.join()
        assert not errors and code == 0


@native
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_input_that_is_a_float(value: float) -> None:
    """A program whose inputs are numbers may be given any float."""
    maker = GraphMaker()
    x, number = maker.input("x"), maker.graph.placeholder("number")
    number.meta["val"] = maker._fake.shape_env.create_unbacked_symfloat()
    product = maker.extern(torch.ops.aten.mul.Scalar, x, number)
    program = compile_host_graph(maker.finish([product]), compile_request())
    for seed in range(4):
        (given,) = maker.inputs(seed)
        torch.testing.assert_close(program(given, value)[0], given * value, equal_nan=True)


@native
def test_a_step_that_refers_to_its_program() -> None:
    """
    ::

        program --> recording --> unit --> step in Python --> function --> program

    The garbage collector sees through none of this unless units tell it what they hold.
    """

    class Copy:
        program: Any = None

        def __call__(self, a: torch.Tensor, into: torch.Tensor) -> None:
            into.copy_(a)

    def made() -> weakref.ref[Any]:
        maker, copy = GraphMaker(), Copy()
        x, out = maker.input("x"), maker.allocate()
        maker.launch(kernel("copy", copy, (1,)), x, out)
        copy.program = program = compile_host_graph(maker.finish([out]), compile_request())
        for seed in range(3):
            program(*maker.inputs(seed))
        assert any(line.endswith("# Python") for r in program.specializations.recordings() for line in r.listing)
        return weakref.ref(program)

    program = made()
    gc.collect()
    assert program() is None


@native
def test_after_hooks_have_packed_something_units_replay_again(compiled: Any) -> None:
    """What hooks got and keep is not overwritten; what others were given is nobody's business."""
    kept: list[Any] = []
    f: Compiled = compiled(lambda x: (x.sin() * x.cos()).exp().sum())

    def step() -> torch.Tensor:
        x = torch.randn(16, 16, requires_grad=True)
        f(x).backward()
        return x.grad  # type: ignore[return-value]

    for _ in range(4):
        step()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        step()
    assert kept and SHARED.packed.known
    recordings = [r for program in f.programs for r in program.specializations.recordings()]
    before = [recording.unit.used for recording in recordings]
    for _ in range(3):
        step()
    assert all(r.unit.used > used for r, used in zip(recordings, before, strict=True))


# -- what inputs and results live through ---------------------------------------------------------------------


#   the call's list: [x, weight]  ->  []      the owner lets go of weight while ``look`` runs; @ weight comes after it
@native
@pytest.mark.parametrize("way", [natively, in_python])
@torch.no_grad()
def test_a_static_input_lives_as_long_as_the_call(compiled: Any, way: Any) -> None:
    """Its list may be the last that has it, as in a backward whose saved tensors are handed over."""

    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return look(x.sin()) @ self.weight

    model = Looks()
    f: Compiled = compiled(model)
    recording = recorded(f, lambda: torch.randn(8, 8))
    (position,) = recording.request.static_inputs
    x, storage = torch.randn(8, 8), StorageWeakRef(model.weight.untyped_storage())
    expected = x.sin() * 2 @ model.weight
    inputs, gone = [x, x], list[bool]()
    inputs[position] = model.weight

    def let_go(_: torch.Tensor) -> None:
        if "weight" in model._parameters:
            del model.weight
        gone.append(storage.expired())

    seen.append(let_go)
    with way(f.program):
        (y,) = tensors_in(f.program.run(inputs))
    assert gone == [False] and storage.expired()
    torch.testing.assert_close(y, expected)


@native
def test_backward_after_the_model_is_gone(compiled: Any) -> None:
    """Only what forward has saved has the weight, and backward takes that over."""

    def last_loss() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight = torch.nn.Parameter(torch.randn(300, 300), requires_grad=False)
        f: Compiled = compiled(lambda x: ((x @ weight).sin() @ weight).sum())
        for call in range(5):
            x = torch.randn(300, 300, requires_grad=True)
            loss = f(x)
            if call < 4:
                loss.backward()
        twin = x.detach().clone().requires_grad_()
        ((twin @ weight).sin() @ weight).sum().backward()
        assert twin.grad is not None
        return x, loss, twin.grad

    x, loss, expected = last_loss()
    gc.collect()
    loss.backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=1e-3)


@native
@pytest.mark.parametrize("way", [natively, in_python])
@torch.no_grad()
def test_an_operator_may_keep_a_parameter(compiled: Any, way: Any) -> None:
    """It gets the caller's own tensor, whose memory is there for as long as somebody has it."""
    kept = list[torch.Tensor]()

    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(700, 700))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return look(self.weight.view(490_000)).view(700, 700) @ x.sin()

    model = Keeps()
    f: Compiled = compiled(model)
    recorded(f, lambda: torch.randn(700, 700))
    seen.append(lambda weight: kept.__setitem__(slice(None), [weight]))
    with way(f.program):
        f(torch.randn(700, 700))
    storage = StorageWeakRef(model.weight.untyped_storage())
    assert kept[0].untyped_storage()._cdata == storage.cdata
    del model.weight
    assert not storage.expired() and kept[0].sum().item() == 490_000


#   many  ->  [a, b]  ->  a @ b  ->  look        a and b are gone here
@native
def test_what_an_operator_returns_in_a_list_is_freed_at_its_last_use(compiled: Any) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        a, b = ops.many(x)
        return look(a @ b)

    f: Compiled = compiled(g)
    recorded(f, lambda: torch.randn(4, 4))
    storages, alive = list[StorageWeakRef](), list[bool]()

    def watch(value: Any) -> None:
        alive.extend(not storage.expired() for storage in storages)
        storages.extend(StorageWeakRef(item.untyped_storage()) for item in value if isinstance(value, list))

    def call() -> list[bool]:
        storages.clear()
        alive.clear()
        f(torch.randn(4, 4))
        return list(alive)

    seen.append(watch)
    through_unit, through_python = both_ways(f, call)
    assert through_unit == through_python == [False, False]


#   a, b = two(x)        a taken out twice: each local goes by itself
@native
@pytest.mark.parametrize("position", [0, -2])
def test_an_element_that_is_taken_out_twice(compiled: Any, position: int) -> None:
    class Twice(fxwrap.FxwrapCodegen):
        def passes(self) -> Any:
            def twice(gm: torch.fx.GraphModule) -> None:
                for node in list(gm.graph.nodes):
                    if node.target is operator.getitem and node.args[1] == 0:
                        *_, last = node.users
                        with gm.graph.inserting_before(last):
                            again = gm.graph.call_function(operator.getitem, (node.args[0], position))
                        again.meta = dict(node.meta)
                        last.replace_input_with(node, again)

            return (twice,)

    def g(x: torch.Tensor) -> torch.Tensor:
        a, b = ops.two(x.sin())
        return ((a @ b).cos() @ x) @ a

    f: Compiled = compiled(g, options={"codegen": Twice})
    recorded(f, lambda: torch.randn(4, 4))
    x = torch.randn(4, 4)
    for result in both_ways(f, lambda: f(x)):
        torch.testing.assert_close(result, g(x))


# -- what must not fail a call -----------------------------------------------------------------------------------


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

    monkeypatch.setattr("fxwrap.graphs.replay.lowering.Lowering.kernel", planted)
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
