"""fxwrap.suspend and fxwrap.resume: bytes go back to the device, addresses and graphs stay.

::

                     arena                 graph pool        on the device
    recorded         |in|tmp|out......|    |tmp|             all
    suspend()        |----------------|    |---|             none; the arena is locked, as by a call
    call, resume()   |??|???|??.......|    |???|             all; every byte that a replay reads is written by it

New bytes are poison: NaN on the simulated device, and on CUDA of host memory with HOSTCUDA_POISON=1.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import HOSTCUDA, Compiled, assert_same, freezes, inductor
from threads import in_threads

import fxwrap
import fxwrap.features.suspend.suspend
from fxwrap.features.suspend.memory import memory_class
from fxwrap.graphs.devices.runtime import runtime_for, using_runtime
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.locks import LockOwner
from fxwrap.graphs.memory.take_memory import empty_cache
from fxwrap.testing.simulated import SIMULATED

SUSPENDABLE = {"options": {"suspendable": True}}
NOT_RESUMED = "suspended, and the device is out of memory"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def its_own(own_arenas: ArenaPool, device: torch.device) -> Iterator[ArenaPool]:
    if not freezes(device):
        pytest.skip("nothing is kept between calls")
    if memory_class(device) is None:
        pytest.skip(f"{device} has registered no suspendable memory")
    yield own_arenas
    gc.collect()


def _mlp(device: torch.device) -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)
    )
    return model.to(device).requires_grad_(False)


def _transformer(device: torch.device) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device).requires_grad_(False)


def _step(call: Callable[..., Any], model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the loss and of all gradients."""
    model.zero_grad(set_to_none=True)
    loss = call(x).square().mean()
    loss.backward()
    results = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return results


@pytest.fixture(scope="module", autouse=True)
def another_graph() -> Iterator[None]:
    """While any graph lives, CUDA's generator keeps two numbers on the device, in a segment of 2 MiB."""
    if not torch.cuda.is_available():
        yield
        return
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)
    yield
    del graph


def _warm(call: Callable[[], Any], times: int = 4) -> None:
    for _ in range(times):
        call()
    gc.collect()


def _held(device: torch.device) -> int:
    """Bytes of suspendable memory that the device counts, or all of its memory."""
    gc.collect()
    if device.type == "cpu":
        return SIMULATED.simulator.mapped
    torch._C._cuda_clearCublasWorkspaces()  # of eager work, which recordings free as well
    empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _recordings(compiled: Compiled) -> list[int]:
    return [sum(program.counters.recordings.values()) for program in compiled.programs]


# recorded --suspend--> no bytes --call--> bytes, other ones, at the same addresses --> the same graphs replay
@pytest.mark.parametrize("name", ["mlp", "transformer", "training"])
def test_what_recordings_hold_is_given_back_and_calls_resume(device: torch.device, name: str) -> None:
    model = _transformer(device) if name == "transformer" else _mlp(device)
    if name == "training":
        model.requires_grad_(True)
    compiled, twin = Compiled(model, compile_options=SUSPENDABLE), copy.deepcopy(model)
    x, plain = torch.randn(4, 16, 64, device=device), torch.compile(twin, backend="inductor")
    expected = _step(plain, twin, x) if name == "training" else plain(x)

    def check() -> None:
        if name == "training":
            assert_same(_step(compiled, model, x), expected)
        else:
            assert_same(compiled(x).clone(), expected)

    before = _held(device)
    _warm(check)
    recorded, held = _recordings(compiled), _held(device)
    given = fxwrap.suspend(compiled.call)
    counted = held - _held(device)
    assert given >= counted > 0
    if device.type == "cpu" or HOSTCUDA:  # a driver keeps memory for graphs and modules, too
        assert counted >= 0.95 * (held - before)
    replays = sum(compiled.replays())
    for _ in range(3):
        check()
        fxwrap.suspend(compiled.call)
        assert fxwrap.resume(compiled.call) == given
    check()
    assert _recordings(compiled) == recorded
    assert sum(compiled.replays()) == replays + 4 * len(compiled.programs)


@pytest.mark.gpu
def test_torch_is_asked_for_no_snapshot(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the memory of a pool: torch 2.14.1 drops references of the pool's identifier that it does not own.

    ::

        id = (0, 300)      references: the tuple's      memory_snapshot(id)      the tuple's, but none is left
    """
    f, x = Compiled(_mlp(device), compile_options=SUSPENDABLE), torch.randn(4, 64, device=device)
    _warm(lambda: f(x).clone())
    expected = f(x).clone()

    def refuse(*_: Any) -> None:
        raise AssertionError("asked for a snapshot")

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", refuse)
    for _ in range(3):
        assert fxwrap.suspend(f.call) > 0
        assert_same(f(x).clone(), expected)


def test_fifty_times_beside_other_programs_and_threads(device: torch.device) -> None:
    """Others: a program that is suspended, too, one that is not, and a thread that calls the same program."""
    models = [_mlp(device) for _ in range(3)]
    suspendable, second = (Compiled(model, compile_options=SUSPENDABLE) for model in models[:2])
    ordinary, plain = Compiled(models[2]), [inductor(model) for model in models]
    x = torch.randn(4, 64, device=device)
    expected = [call(x) for call in plain]
    with torch.no_grad():
        for call in (suspendable, second, ordinary):
            _warm(lambda call=call: call(x).clone())
    end, problems = threading.Event(), list[str]()

    def beside() -> None:
        while not end.is_set():
            if not torch.equal(suspendable(x).clone(), expected[0]):
                problems.append("wrong numbers")
                return

    def main() -> None:
        try:
            given = 0
            for turn in range(50):
                with contextlib.suppress(fxwrap.SuspendError):  # the other thread has an output
                    given += fxwrap.suspend((None, suspendable.call)[turn % 2])
                for call, right in zip((second, ordinary, suspendable), expected[1:] + expected[:1], strict=True):
                    assert_same(call(x).clone(), right)
            assert given
        finally:
            end.set()

    in_threads([main, beside])
    assert not problems


def test_a_suspended_recording_cannot_run(device: torch.device) -> None:
    """Its lock is held, and its arena says so: neither Python nor the native unit runs it."""
    compiled, x = Compiled(_mlp(device), compile_options=SUSPENDABLE), torch.randn(4, 64, device=device)
    _warm(lambda: compiled(x).clone())
    (recording,) = compiled.program.specializations.recordings()
    fxwrap.suspend(compiled.call)
    owner, replays = LockOwner(), sum(compiled.replays())
    assert not recording.acquire(owner)
    recording.release(owner)
    assert recording.unit is not None
    assert recording.unit([x]) is compiled.program.specializations.missed
    assert sum(compiled.replays()) == replays
    if device.type == "cpu":  # on a GPU it would end the process's work on the device
        with pytest.raises(fxwrap.CaptureError, match="into memory that is suspended"):
            recording.graphs[0].replay()
    fxwrap.resume(compiled.call)
    assert recording.acquire(owner)
    recording.release(owner)


# captured | eager, its result is copied to a static buffer | captured
def test_static_buffers_between_partitions_are_given_back(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x * 2 + 1, 0).sin() * 3

    options = {"suspendable": True, "eager_ops": "aten::cumsum"}
    compiled, plain = Compiled(fn, compile_options={"options": options}), inductor(fn)
    x = torch.randn(64, 64, device=device)
    before = _held(device)
    _warm(lambda: compiled(x).clone())
    assert compiled.program.counters.replays
    given = fxwrap.suspend(compiled.call)
    assert _held(device) <= before and given
    x.add_(1)
    assert_same(compiled(x).clone(), plain(x))


def test_another_shape_is_recorded_in_the_same_arena(device: torch.device, its_own: ArenaPool) -> None:
    model = _mlp(device)
    compiled = Compiled(model, compile_options={**SUSPENDABLE, "dynamic": True})
    sizes = [torch.randn(rows, 64, device=device) for rows in (8, 4)]
    _warm(lambda: compiled(sizes[0]).clone())
    fxwrap.suspend(compiled.call)
    _warm(lambda: compiled(sizes[1]).clone())
    assert len(its_own.alive(device)) == 1
    assert_same([compiled(x).clone() for x in sizes], [inductor(model, dynamic=True)(x) for x in sizes])


def _with_live_output(device: torch.device) -> tuple[Compiled, torch.Tensor, torch.Tensor]:
    """A program, its input, and an output that lies in its arena."""
    compiled, x = Compiled(_mlp(device), compile_options=SUSPENDABLE), torch.randn(4, 64, device=device)
    _warm(lambda: compiled(x).clone())
    return compiled, x, compiled(x)


def test_live_outputs_are_refused(device: torch.device) -> None:
    compiled, x, output = _with_live_output(device)
    value, replays = output.clone(), sum(compiled.replays())
    with pytest.raises(fxwrap.SuspendError, match=r"1 live output\(s\) of 1,024 bytes") as refused:
        fxwrap.suspend(compiled.call)
    assert 'live="copy"' in refused.value.remedy
    assert_same(output, value)
    del output
    compiled(x)  # nothing was suspended, and no lock is held
    assert sum(compiled.replays()) == replays + 1
    assert fxwrap.suspend(compiled.call)


def test_live_outputs_come_back_from_the_host(device: torch.device) -> None:
    compiled, x, output = _with_live_output(device)
    value, view = output.clone(), output[1:]
    given = fxwrap.suspend(compiled.call, live="copy")
    assert fxwrap.resume() == given
    assert_same([output, view], [value, value[1:]])
    fxwrap.suspend(live="copy")
    compiled(x + 1)  # resumes; it does not overwrite what is live
    assert_same([output, view], [value, value[1:]])
    fxwrap.suspend(live="copy")
    del output, view
    assert_same(compiled(x).clone(), value)


# suspend(f, live="copy") --> some of these, in this order --> the output has its value again
ORDERS = (
    "resume(f)",
    "resume()",
    "call f",
    "release(f), resume(f)",
    "release(f), resume()",
    "release(f), call f",
    "release(f), call f, resume()",
    "release(), resume()",
    "drop f, resume()",
)


@pytest.mark.parametrize("order", ORDERS)
def test_a_live_output_comes_back_in_every_order(device: torch.device, order: str, its_own: ArenaPool) -> None:
    compiled, x, output = _with_live_output(device)
    value, f = output.clone(), compiled.call
    fxwrap.suspend(f, live="copy")

    def drop() -> None:
        nonlocal compiled, f
        compiled = f = None  # type: ignore[assignment]
        torch._dynamo.reset()
        gc.collect()

    steps = {
        "resume(f)": lambda: fxwrap.resume(f),
        "resume()": fxwrap.resume,
        "release(f)": lambda: fxwrap.release(f),
        "release()": fxwrap.release,
        "call f": lambda: _warm(lambda: f(x + 1).clone()),
        "drop f": drop,
    }
    for step in order.split(", "):
        steps[step]()
    assert_same(output, value)
    del output
    drop()
    assert not its_own.alive(device)


def test_an_output_on_the_host_that_nobody_has_any_more_is_let_go(device: torch.device, its_own: ArenaPool) -> None:
    compiled, _, output = _with_live_output(device)
    fxwrap.suspend(compiled.call, live="copy")
    fxwrap.release(compiled.call)
    assert len(its_own.alive(device)) == len(its_own.suspended()) == 1
    del output
    fxwrap.release()
    assert its_own.kept(device) == 0 and not its_own.suspended()


def test_a_function_with_an_output_on_the_host_is_dropped_beside_one_without_the_option(device: torch.device) -> None:
    compiled, x, output = _with_live_output(device)
    value, other = output.clone(), Compiled(torch.neg)
    _warm(lambda: other(x).clone())
    fxwrap.suspend(compiled.call, live="copy")
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert fxwrap.resume()
    assert_same(output, value)


# forward --suspend(live="copy")--> saved tensors are on the host --> backward resumes before it reads them
def test_between_forward_and_backward(device: torch.device) -> None:
    model = _mlp(device).requires_grad_(True)
    compiled, x = Compiled(model, compile_options=SUSPENDABLE), torch.randn(4, 64, device=device)

    def step(between: Callable[[], object]) -> list[torch.Tensor]:
        loss = compiled(x).sum()  # its gradient needs no values
        between()
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return gradients

    _warm(lambda: step(lambda: None))
    expected, recorded = step(lambda: None), _recordings(compiled)

    def suspend() -> None:
        with pytest.raises(fxwrap.SuspendError, match="live output"):
            fxwrap.suspend(compiled.call)
        assert fxwrap.suspend(compiled.call, live="copy")

    for _ in range(3):
        assert_same(step(suspend), expected)
    assert _recordings(compiled) == recorded


def test_a_call_that_captures_nothing_resumes_live_outputs_that_it_may_read(device: torch.device) -> None:
    """The output of one program is the input of another one, which is not recorded yet and runs eagerly."""
    compiled, _, output = _with_live_output(device)
    value, other = output.clone(), Compiled(torch.neg)
    fxwrap.suspend(compiled.call, live="copy")
    assert_same(other(output), -value)


def test_suspending_twice_and_resuming_what_is_not_suspended_do_nothing(device: torch.device) -> None:
    compiled, x = Compiled(_mlp(device), compile_options=SUSPENDABLE), torch.randn(4, 64, device=device)
    compiled(x)
    assert fxwrap.suspend(compiled.call) == fxwrap.resume(compiled.call) == 0  # nothing is recorded yet
    _warm(lambda: compiled(x).clone())
    given = fxwrap.suspend(compiled.call)
    assert given and fxwrap.suspend(compiled.call) == fxwrap.suspend() == 0
    assert fxwrap.resume() == given and fxwrap.resume() == 0


def test_a_function_without_the_option(device: torch.device, its_own: ArenaPool) -> None:
    compiled, x = Compiled(_mlp(device)), torch.randn(4, 64, device=device)
    _warm(lambda: compiled(x).clone())
    (arena,) = its_own.alive(device)
    assert arena.memory is None and arena._pool is not None and arena._pool.memory is None
    for act in (fxwrap.suspend, fxwrap.resume):
        with pytest.raises(fxwrap.SuspendError, match="compiled with the option suspendable") as refused:
            act(compiled.call)
        assert '"suspendable": True' in refused.value.remedy


def test_a_device_without_such_memory(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("this device has such memory")
    with using_runtime(dataclasses.replace(SIMULATED, suspendable_memory=None)):
        compiled, x = Compiled(_mlp(device), compile_options=SUSPENDABLE), torch.randn(4, 64)
        _warm(lambda: compiled(x).clone())
        assert sum(compiled.replays()), compiled.program.counters.to_dict()  # it runs all the same
        with pytest.raises(fxwrap.DeviceError, match="cannot be suspended") as refused:
            fxwrap.suspend(compiled.call)
    assert "register_device" in refused.value.expected


def test_a_wrong_word_for_live_outputs(device: torch.device) -> None:
    with pytest.raises(fxwrap.InputError, match="'refuse' or 'copy'"):
        fxwrap.suspend(live="keep")  # type: ignore[arg-type]


@contextlib.contextmanager
def _capturing(device: torch.device) -> Iterator[None]:
    runtime = runtime_for(device)
    graph, pool = runtime.new_graph(None), None if device.type == "cpu" else torch.cuda.Stream(device)
    kept = torch.zeros(1, device=device)
    with runtime.capture_stream(pool):
        graph.capture_begin()
        try:
            yield
            if device.type != "cpu":
                kept.zero_()
        finally:
            graph.capture_end()


def test_a_stream_that_captures(device: torch.device) -> None:
    compiled, x = Compiled(_mlp(device), compile_options=SUSPENDABLE), torch.randn(4, 64, device=device)
    _warm(lambda: compiled(x).clone())
    for act in (fxwrap.suspend, fxwrap.resume):
        with _capturing(device), pytest.raises(fxwrap.SuspendError, match="the current stream captures"):
            act(compiled.call)
    given = fxwrap.suspend(compiled.call)
    with _capturing(device):
        compiled(x)  # runs eagerly, a part of the caller's graph, and resumes nothing
    assert fxwrap.resume(compiled.call) == given


def test_a_call_in_a_capture_cannot_read_what_is_on_the_host(device: torch.device) -> None:
    compiled, x, output = _with_live_output(device)
    value = output.clone()
    fxwrap.suspend(compiled.call, live="copy")
    with _capturing(device), pytest.raises(fxwrap.SuspendError, match="called while the caller captures"):
        compiled(x)
    assert fxwrap.resume(compiled.call)
    assert_same(output, value)


inside: dict[str, Callable[[], object]] = {"act": lambda: None}


@torch.library.custom_op("fxwrap_test::while_suspending", mutates_args=())
def while_suspending(x: torch.Tensor) -> torch.Tensor:
    """Takes a while, or does something else, in the middle of a call."""
    inside["act"]()
    return x.clone()


@while_suspending.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _with_a_pause(device: torch.device) -> tuple[Compiled, torch.Tensor]:
    options = {"suspendable": True, "eager_ops": "fxwrap_test::while_suspending"}
    compiled = Compiled(lambda x: while_suspending(x * 2) + 1, compile_options={"options": options})
    x = torch.ones(64, device=device)
    _warm(lambda: compiled(x).clone())
    assert compiled.program.counters.replays
    return compiled, x


def test_while_another_thread_is_in_a_call(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxwrap.features.suspend.suspend, "_WAIT_S", 0.05)
    with torch.no_grad():
        compiled, x = _with_a_pause(device)
    results, begun, may_end = list[torch.Tensor](), threading.Event(), threading.Event()

    def call() -> None:
        compiled(x)  # each thread of an accelerator warms up first
        monkeypatch.setitem(inside, "act", lambda: (begun.set(), may_end.wait(30)))
        results.append(compiled(x).clone())

    def suspend() -> None:
        try:
            assert begun.wait(30)
            with pytest.raises(fxwrap.SuspendError, match="is in use"):
                fxwrap.suspend(compiled.call)
        finally:
            may_end.set()

    in_threads([call, suspend])
    assert_same(results, [x * 2 + 1])
    assert fxwrap.suspend(compiled.call)


def test_two_threads_suspend_at_one_time(device: torch.device) -> None:
    compiled, x = Compiled(_mlp(device), compile_options=SUSPENDABLE), torch.randn(4, 64, device=device)
    _warm(lambda: compiled(x).clone())
    given = fxwrap.suspend(compiled.call)
    for _ in range(5):
        both = list[int]()
        fxwrap.resume(compiled.call)
        in_threads([lambda both=both: both.append(fxwrap.suspend(compiled.call)) for _ in range(2)])
        assert sorted(both) == [0, given]


def test_inside_of_a_call(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x = _with_a_pause(device)

    def suspend() -> None:
        with pytest.raises(fxwrap.SuspendError, match="is in use"):
            fxwrap.suspend(compiled.call)

    monkeypatch.setitem(inside, "act", suspend)
    assert_same(compiled(x).clone(), x * 2 + 1)


@contextlib.contextmanager
def _out_of_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No bytes can be taken. ``test_out_of_memory_on_the_device`` uses them up for real."""
    memory = (
        "testing.simulated.SimulatedMemory" if device.type == "cpu" else "features.suspend.cuda_memory.CudaMemory"
    )
    with monkeypatch.context() as patch:
        patch.setattr(f"fxwrap.{memory}.resume", _no_memory)
        yield


def _no_memory(self: object) -> int:
    raise torch.OutOfMemoryError("none is left")


def test_out_of_memory_when_a_call_resumes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run eagerly until there is memory again; then the same recording replays."""
    model = _mlp(device)
    compiled, x = Compiled(model, compile_options=SUSPENDABLE), torch.randn(4, 64, device=device)
    expected = inductor(model)(x)
    _warm(lambda: compiled(x).clone())
    recorded, replays = _recordings(compiled), sum(compiled.replays())
    given, held = fxwrap.suspend(compiled.call), _held(device)
    with _out_of_memory(device, monkeypatch):
        for _ in range(3):
            assert_same(compiled(x), expected)
        with pytest.raises(fxwrap.MemoryLimitError, match="is out of memory"):
            fxwrap.resume(compiled.call)
    assert compiled.program.counters.eager[NOT_RESUMED] == 3
    assert sum(compiled.replays()) == replays
    assert _held(device) <= held  # a part that was taken is given back
    assert_same(compiled(x).clone(), expected)
    assert (_recordings(compiled), sum(compiled.replays())) == (recorded, replays + 1)
    assert fxwrap.suspend(compiled.call) == given


def test_out_of_memory_raises_where_values_are_on_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, x, output = _with_live_output(device)
    value = output.clone()
    fxwrap.suspend(compiled.call, live="copy")
    with _out_of_memory(device, monkeypatch), pytest.raises(fxwrap.MemoryLimitError):
        compiled(x)
    assert_same(compiled(x).clone(), value)
    assert_same(output, value)


def test_out_of_memory_raises_with_strict(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"options": {"suspendable": True, "strict": True}}
    compiled, x = Compiled(_mlp(device), compile_options=options), torch.randn(4, 64, device=device)
    _warm(lambda: compiled(x).clone())
    fxwrap.suspend(compiled.call)
    with _out_of_memory(device, monkeypatch), pytest.raises(fxwrap.MemoryLimitError):
        compiled(x)


def test_released_while_suspended(device: torch.device, its_own: ArenaPool) -> None:
    compiled, x = Compiled(_mlp(device), compile_options=SUSPENDABLE), torch.randn(4, 64, device=device)
    before = _held(device)
    _warm(lambda: compiled(x).clone())
    value = compiled(x).clone()
    fxwrap.suspend(compiled.call)
    fxwrap.release(compiled.call)
    gc.collect()
    assert _held(device) <= before
    assert not its_own.alive(device) or its_own.kept(device) == 0
    assert fxwrap.resume(compiled.call) == 0
    _warm(lambda: compiled(x).clone())
    assert_same(compiled(x).clone(), value)
    assert _recordings(compiled) == [2]


def _suspended_and_dropped(device: torch.device, x: torch.Tensor) -> None:
    compiled = Compiled(_mlp(device), compile_options=SUSPENDABLE)
    _warm(lambda: compiled(x).clone())
    assert fxwrap.suspend(compiled.call)


def test_dropped_while_suspended(device: torch.device) -> None:
    """The program goes, and its addresses with it. What is suspended later knows nothing of it."""
    x = torch.randn(4, 64, device=device)
    _suspended_and_dropped(device, x)
    torch._dynamo.reset()
    gc.collect()
    before = _held(device)
    other = Compiled(_mlp(device), compile_options=SUSPENDABLE)
    _warm(lambda: other(x).clone())
    value, held = other(x).clone(), _held(device)
    given = fxwrap.suspend(other.call)
    assert _held(device) == held - given
    if device.type == "cpu":
        assert _held(device) == before
    assert_same(other(x).clone(), value)


# The device has 256 MiB. Somebody takes what a suspended program gave back: all of it, or some, so that the pool fits
# and the arena does not; then what was taken for the pool is given back.
ON_THE_DEVICE = """
import torch
import fxwrap
from fxwrap.graphs.memory.take_memory import empty_cache

MIB = 1 << 20
free = lambda: torch.cuda.mem_get_info()[0]
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024)).cuda()
compiled = torch.compile(model, backend="fxwrap", options={"suspendable": True, "capture": "always"})
with torch.no_grad():
    x = torch.randn(4096, 1024, device="cuda")
    for _ in range(4):
        expected = compiled(x).clone()
    given = fxwrap.suspend(compiled)
    empty_cache()
    for left in (1, given // MIB - 2):
        taken = torch.empty((free() // MIB - left) // 2 * 2 * MIB, dtype=torch.uint8, device="cuda")
        before = free()
        try:
            fxwrap.resume(compiled)
        except fxwrap.MemoryLimitError as error:
            print("out of memory" in str(error), free() == before)
        del taken
        torch.cuda.empty_cache()
    print(torch.equal(compiled(x), expected), fxwrap.stats(compiled)["recordings"], given > 32 * MIB)
"""


@pytest.mark.gpu
def test_out_of_memory_on_the_device(device: torch.device) -> None:
    if not HOSTCUDA or device.type != "cuda":
        pytest.skip("a device of 256 MiB is needed: CUDA of host memory")
    ended = subprocess.run(
        [sys.executable, "-m", "hostcuda", "-c", ON_THE_DEVICE],
        env={**os.environ, "HOSTCUDA_MEMORY": "256M"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["True True", "True True", "True {'first': 1} True"]
