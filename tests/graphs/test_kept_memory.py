"""On the CPU the largest temporaries of a program lie in memory that is kept between calls, and that programs share.

In the drawings steps go to the right; one letter is a block of 256 KiB, or of twice as much where it is a capital.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from conftest import Compiled
from native_calls import in_python, native, natively, run
from random_graphs import GraphMaker, compile_request, kernel
from threads import in_threads

import fxwrap
from fxwrap.graphs.program import Program
from fxwrap.pipeline import compile_host_graph
from fxwrap.torch_private.native_library import kept_memory

pytestmark = native
ROOT = Path(__file__).parent.parent.parent
KIB = 1 << 10
Look = Callable[[torch.Tensor], object]


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Neither before a test nor after it: memory goes with the last program that may need it."""
    for _ in range(2):
        torch._dynamo.reset()
        fxwrap.release()
        gc.collect()
    assert kept_memory() == 0
    yield


def program_of(nbytes: int, look: Look = lambda temporary: None, **options: Any) -> Program:
    """``x + 1`` by way of a temporary of so many bytes, at which ``look`` gets a look."""

    def fill(x: torch.Tensor, temporary: torch.Tensor) -> None:
        temporary.copy_(x.sum())
        look(temporary)

    def empty(temporary: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        assert bool((temporary == x.sum()).all())
        torch.add(x, 1, out=out)

    maker = GraphMaker()
    x = maker.input("x")
    temporary, out = maker.allocate((nbytes // 4,), name="temporary"), maker.allocate(name="out")
    maker.launch(kernel("fill", fill, (1,)), x, temporary)
    maker.launch(kernel("empty", empty, (2,)), temporary, x, out)
    return compile_host_graph(maker.finish([out]), compile_request(fxwrap.options.Options(**options)))


def call(program: Program, times: int = 1) -> None:
    for _ in range(times):
        x = torch.randn(4, 4)
        torch.testing.assert_close(run(program, x)[0], x + 1)


def warm(program: Program) -> Program:
    call(program, 3)
    return program


def test_every_call_gets_the_same_memory() -> None:
    """Where a recording replays natively, and where it replays in Python.

    ::

        step       0  1  |  0  1  |  0  1
        temporary  a  a  .  a  a  .  a  a      at one address; it has memory in calls only
    """
    seen = list[int]()
    program = warm(program_of(256 * KIB, lambda temporary: seen.append(temporary.data_ptr())))
    assert kept_memory() == 256 * KIB
    with natively(program):
        call(program, 3)
    with in_python(program):
        call(program, 3)
    assert len(set(seen[-7:])) == 1
    (recording,) = program.specializations.recordings()
    assert [storage.nbytes() for storage, _ in recording._resources.regions._sizes] == [0]
    assert kept_memory() == 256 * KIB


def test_what_is_small_is_left_to_the_c_library() -> None:
    warm(program_of(64 * KIB))
    assert kept_memory() == 0


def test_programs_share_one_block_which_is_as_large_as_the_largest_needs() -> None:
    """
    ::

        small    a a . . . a a . .
        large    . . . A A . . . .      the larger block takes the place of the other, and serves both
        kept     a a a A A A A A A
    """
    small, large = warm(program_of(256 * KIB)), program_of(512 * KIB)
    assert kept_memory() == 256 * KIB
    warm(large)
    assert kept_memory() == 512 * KIB
    call(small, 2)
    assert kept_memory() == 512 * KIB
    # It goes with the last program that may need it.
    del large
    gc.collect()
    assert kept_memory() <= 256 * KIB
    call(small)
    assert kept_memory() == 256 * KIB
    del small
    gc.collect()
    assert kept_memory() == 0


def test_a_call_inside_of_a_call_has_a_block_of_its_own() -> None:
    """The outer one has the block that there is; the inner one needs another. Both stay.

    ::

        outer    A A A A
        inner    . A A .
    """
    inner = warm(program_of(512 * KIB))
    addresses = set[int]()
    nested = warm(program_of(256 * KIB, lambda temporary: (addresses.add(temporary.data_ptr()), call(inner))))
    assert kept_memory() == 2 * 512 * KIB
    addresses.clear()
    call(nested, 3)
    assert kept_memory() == 2 * 512 * KIB and len(addresses) == 1


def test_as_many_blocks_as_calls_at_one_time() -> None:
    programs = [warm(program_of(256 * KIB)) for _ in range(3)]
    assert kept_memory() == 256 * KIB
    in_threads([lambda program=program: call(program, 40) for program in programs])  # type: ignore[misc]
    assert kept_memory() in {count * 256 * KIB for count in (1, 2, 3)}
    programs.clear()
    gc.collect()
    assert kept_memory() == 0


@pytest.mark.parametrize("in_units", [True, False], ids=["native", "python"])
def test_an_error_gives_the_block_back(in_units: bool) -> None:
    fails = False

    def may_fail(_: torch.Tensor) -> None:
        if fails:
            raise ValueError("here")

    program = warm(program_of(256 * KIB, may_fail))
    fails = True
    with natively() if in_units else in_python(program), pytest.raises(ValueError, match="here"):
        call(program)
    assert kept_memory() == 256 * KIB
    fails = False
    call(program)
    assert kept_memory() == 256 * KIB


def test_a_child_that_is_forked_has_memory_of_its_own() -> None:
    """Also one that is forked inside of a call: it has no block to lend, and does not wait for one."""
    children = list[int]()

    def fork(_: torch.Tensor) -> None:
        if not children:
            return
        children.append(os.fork())

    other = warm(program_of(256 * KIB))
    program = warm(program_of(256 * KIB, fork))
    children.append(-1)
    call(program)  # the parent's and the child's
    if children[-1] == 0:
        try:
            call(other, 3)
            call(program_of(256 * KIB), 3)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(children[1], 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_max_memory() -> None:
    """A recording that would keep more keeps nothing, and runs as others do."""
    program = warm(program_of(256 * KIB, max_memory=256 * KIB - 1))
    assert kept_memory() == 0 and program.counters.replays
    program = warm(program_of(256 * KIB, max_memory=256 * KIB))
    assert kept_memory() == 256 * KIB


def test_without_the_library_memory_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxwrap.torch_private.native_library.native_replay", lambda: "it cannot be built")
    program = warm(program_of(256 * KIB))
    assert program.counters.replays
    monkeypatch.undo()
    assert kept_memory() == 0


@pytest.mark.compiler
def test_release_and_reports_say_how_much(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    x = torch.randn(256, 256)
    bill = fxwrap.record(f.call, x, dry_run=True)
    for _ in range(3):
        f(x)
    kept = kept_memory()
    assert kept >= x.nbytes and kept % x.nbytes == 0
    report = fxwrap.report(f.call)
    assert report.graphs[0].memory.kept == kept
    assert f"kept for later calls {kept:,}" in " ".join(str(report).split())
    assert report.to_dict()["graphs"][0]["memory"]["kept_bytes"] == kept
    assert bill.total == kept == bill.recordings[0].arena
    assert fxwrap.release(f.call) == kept
    assert kept_memory() == 0
    f(x)
    assert kept_memory() == kept


def test_recordings_that_end_let_go_of_it() -> None:
    program = warm(program_of(256 * KIB))
    (recording,) = program.specializations.recordings()
    regions = weakref.ref(recording._resources.regions)
    program.release()
    assert regions() is None and kept_memory() == 0


@pytest.mark.compiler
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's heap that is known")
@pytest.mark.parametrize("model", ["small-step", "small-training"])
def test_a_steady_loop_faults_no_memory_in(model: str) -> None:
    """By the kernel's count of minor faults, beside Inductor's wrapper; the fewest of some calls."""
    fewest = {}
    for side in ("inductor", "fxwrap"):
        done = processes.run("benchmarks/page_faults.py", "--measure", model, side, "8", cwd=ROOT)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        fewest[side] = min(found["faults"])
    assert found["kept"] > 3 << 20
    assert fewest["fxwrap"] <= fewest["inductor"] + 100
