"""Native replay: calls that a unit leaves to Python, and programs without a unit."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from conftest import Compiled, assert_same
from native_calls import (
    both_ways,
    look,
    look_at_nothing,  # noqa: F401
    missed,
    native,
    natively,
    recorded,
    run,
    seen,
)

from fxwrap.errors import InputError
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.graphs.memory.locks import LockOwner
from fxwrap.graphs.memory.shared_state import SHARED
from fxwrap.native_build import built_library
from fxwrap.testing.simulated import SIMULATED
from fxwrap.torch_private.native_library import native_replay

# -- calls that a unit leaves to Python ----------------------------------------------------------------------


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
    SHARED.packed_tensors.known.clear()
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
def test_a_new_recording_in_the_arena_costs_the_others_nothing(compiled: Any, own_arenas: Any) -> None:
    """
    ::

        f's bytes   |------------|
        g's bytes   |-----|                 recorded later: f's unit has to spare its outputs, and knows them already
    """
    with using_runtime(SIMULATED):
        f: Compiled = compiled(lambda x: (x.sin() @ x).cos())
        g: Compiled = compiled(lambda x: (x.cos() @ x).sin())
        recorded(f, lambda: torch.randn(8, 8))
        recorded(g, lambda: torch.randn(4, 4))
        x = torch.randn(8, 8)
        with natively(f.program):
            first = f(x).clone()
        kept = g(torch.randn(4, 4))
        before = kept.clone()
        with missed(f.program.specializations.recordings()[0]):
            assert_same(f(x), first)
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


# -- without a unit ------------------------------------------------------------------------------------------

_ALONE = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
torch._inductor.config.cpp.cxx = ("g++",)
import fxwrap
from fxwrap.torch_private.native_library import native_replay
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
    told_to_wait = done.stderr.count("fxwrap: compiling the C++ library that replays programs")
    assert told_to_wait == (what in ("a compiler that fails", "no compiler")), done.stderr


_BUILD = """
import sys
from pathlib import Path
from fxwrap.native_build import built_library, cache_folder
import ctypes
path = built_library("small", Path(sys.argv[1]), ("-O1",), patience_s=100)
print(ctypes.CDLL(str(path)).answer(), path)
"""
_BUILD_ALL = """
from fxwrap.torch_private.native_library import native_replay
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
    outs, errors = ([tmp_path / f"{name}{i}" for i in (1, 2)] for name in ("out", "error"))
    started = [
        processes.start(("-c", program, str(source)), out, error, tmp_path, **environment)
        for out, error in zip(outs, errors, strict=True)
    ]
    for process in started:
        process.join(600)
    assert [out.read_text()[:2] for out in outs] == ["42", "42"], [path.read_text() for path in outs + errors]
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 1
    assert len(list((cache / "fxwrap").iterdir())) == 1, "no folder is left behind"


def test_who_waits_for_a_compiler_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    for said in ("compiling: minutes\n", ""):
        built_library("small", source, (), patience_s=100, notice="compiling: minutes")
        assert capfd.readouterr() == ("", said)


def test_a_library_is_another_with_other_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return ANSWER; }')
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    paths = [built_library("small", source, (f"-DANSWER={n}",), patience_s=100) for n in (1, 2, 1)]
    assert paths[0] == paths[2] != paths[1]
    with pytest.raises(subprocess.SubprocessError):
        built_library("small", source, ("-DANSWER=nothing",), patience_s=100)
    assert len(list((tmp_path / "fxwrap").iterdir())) == 2


def test_a_library_is_another_with_another_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, header = tmp_path / "small.cpp", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }')
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    answers = []
    for answer in (1, 2, 1):
        header.write_text(f"#define ANSWER {answer}")
        library = ctypes.CDLL(str(built_library("small", source, (), headers=[header], patience_s=100)))
        answers.append(library.answer())
    assert answers == [1, 2, 1] and len(list((tmp_path / "fxwrap").iterdir())) == 2
