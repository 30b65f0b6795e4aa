"""fxwrap.record(..., dry_run=True): what recordings would keep, before anything is captured.

::

    fxwrap.record(f, *sizes, dry_run=True)    the same calls on programs of their own, without device graphs
        |                                         arena, pool, static buffers: allocated, counted, freed
        v
    bill.total == what the device counts after fxwrap.record(f, *sizes)
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, freezes, inductor
from cuda_memory import kept_bytes

import fxwrap
from fxwrap.features.bill.bill import DeviceBill, RecordingBill
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.program import WARM_UPS
from fxwrap.graphs.program_runs import RUNNERS
from fxwrap.torch_private.functions import frees_workspaces
from fxwrap.torch_private.native_library import kept_memory

ROWS = (2, 8, 64, 256)


@pytest.fixture(autouse=True)
def its_own(own_arenas: ArenaPool) -> Iterator[ArenaPool]:
    fxwrap.release()  # what the CPU keeps for programs of other tests
    yield own_arenas
    assert not RUNNERS


def _mlp(device: torch.device) -> torch.nn.Module:
    layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64), torch.nn.LayerNorm(64)
    return torch.nn.Sequential(*layers).to(device).requires_grad_(False)


class Sorted(torch.nn.Module):
    """An operator without an ``out=`` form in a captured part, and one that stays eager between two parts."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64, device=device).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, order = self.linear(x).sort(dim=0, stable=True)
        far = torch.cdist(values, values).softmax(-1)
        return self.linear(far @ values + order).relu()


class Convolutions(torch.nn.Module):
    """Results of operators.

    Arenas are small: above 1 MiB torch's allocator may give a block of its cache with a rest of up to 1 MiB.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3, padding=1)
        ).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.unflatten(1, (1, 8, 8))).mean(dim=(1, 2, 3))


MODELS: dict[str, Callable[[torch.device], torch.nn.Module]] = {
    "mlp": _mlp,
    "sorted": Sorted,
    "convolutions": Convolutions,
}


def _inputs(device: torch.device, rows: tuple[int, ...] = ROWS) -> list[torch.Tensor]:
    return [torch.randn(n, 64, device=device) for n in rows]


def _counted(device: torch.device, arenas: ArenaPool) -> int:
    """Bytes by the device's own count; on other devices, of arenas and of storages that recordings own."""
    if device.type == "cuda":
        return kept_bytes()
    gc.collect()
    if not freezes(device):
        return kept_memory()
    kept = {s._cdata: s for a in arenas.alive() for r, _ in a.users() for s in r.own_storages}
    storages = [*(arena.block for arena in arenas.alive() if arena.block is not None), *kept.values()]
    return sum(-(-storage.nbytes() // 512) * 512 for storage in storages)


# bill of each size, and of all, == counted afterwards
@pytest.mark.skipif(
    torch.cuda.is_available() and not frees_workspaces(),
    reason="this torch frees no workspace of one stream: each thread keeps its own, and warm-ups keep some",
)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bill_is_what_the_device_counts(
    device: torch.device, its_own: ArenaPool, name: str, training: bool
) -> None:
    model, inputs = MODELS[name](device).requires_grad_(training), _inputs(device)
    for examples in ([inputs[1]], inputs):
        compiled = Compiled(model, compile_options={"dynamic": True})

        def call(x: torch.Tensor, compiled: Compiled = compiled) -> None:
            result = compiled(x)
            if training:
                result.square().sum().backward()
                model.zero_grad(set_to_none=True)

        bill = fxwrap.record(call, *examples, dry_run=True)
        before = _counted(device, its_own)
        assert fxwrap.record(call, *examples) == len(bill.recordings) == len(examples) * (1 + training)
        counted = _counted(device, its_own) - before
        assert counted <= bill.total <= 1.02 * counted
        assert not bill.not_kept and bool(bill.devices) == (freezes(device) or counted > 0)
        billed = [(b.program, b.graphs, b.arena, b.own) for b in bill.recordings]
        assert sorted(billed) == sorted(_made(compiled))
        fxwrap.release(compiled.call)


def _made(compiled: Compiled) -> list[tuple[str, int, int, int]]:
    """What the recordings of a function take: program, graphs, bytes of the arena and of their own."""
    return [
        (program.name, len(recording.graphs), memory.size + memory.kept, recording.own_bytes)
        for program in compiled.programs
        for recording in program.specializations.recordings()
        for memory in (recording.request.memory,)
    ]


def test_nothing_is_recorded_counted_or_moved(device: torch.device, its_own: ArenaPool) -> None:
    """Recordings that exist stay, with their memory, and are replayed afterwards."""
    model, (small, large) = _mlp(device), _inputs(device, (4, 128))
    f, expected = Compiled(model, compile_options={"dynamic": True}), inductor(model, dynamic=True)(small)
    fxwrap.record(f.call, small)
    blocks = [arena.block.data_ptr() for arena in its_own.alive() if arena.block is not None]
    stats, kept = fxwrap.stats(f.call), its_own.kept()
    bill = fxwrap.record(f.call, small, large, dry_run=True)
    assert fxwrap.stats(f.call) == stats and its_own.kept() == kept
    assert blocks == [arena.block.data_ptr() for arena in its_own.alive() if arena.block is not None]
    assert len(bill.recordings) == 2 and bill.total >= kept
    assert_same(f(small), expected)
    assert f.program.counters.replays == stats["replays"] + 1


def test_results_of_a_dry_run_are_right(device: torch.device) -> None:
    """Calls of the function's own code read them. They are copies: their arena is gone afterwards."""
    model, results = Sorted(device), []
    f, inputs = Compiled(model, compile_options={"dynamic": True}), _inputs(device, (8, 16))
    fxwrap.record(lambda x: results.append(f(x).clone()), *inputs, dry_run=True)
    expected = inductor(model, dynamic=True)
    assert len(results) >= 4
    for result in results:
        assert_same(result, expected(inputs[result.shape[0] == 16]))


def test_sizes_that_max_memory_leaves_out_are_named(device: torch.device) -> None:
    """The dry run evicts as the recordings do."""
    if not freezes(device):
        pytest.skip("nothing is kept between calls")
    inputs, model = _inputs(device), _mlp(device)
    whole = fxwrap.record(Compiled(model, compile_options={"dynamic": True}).call, *inputs, dry_run=True)
    limit = whole.recordings[1].arena  # the largest does not fit
    f = Compiled(model, compile_options={"dynamic": True, "options": {"max_memory": limit}})
    bill = fxwrap.record(f.call, *inputs, dry_run=True)
    (left_out,) = bill.not_kept
    assert left_out.sizes == whole.recordings[0].sizes and left_out.not_kept == "more than max_memory"
    assert fxwrap.record(f.call, *inputs) == 3
    assert f.program.counters.eager["more than max_memory"] > 0
    assert "not kept: " in str(bill) and "more than max_memory" in str(bill)


def test_sizes_that_max_recordings_leaves_out_are_named(device: torch.device) -> None:
    f = Compiled(_mlp(device), compile_options={"dynamic": True, "options": {"max_recordings": 2}})
    bill = fxwrap.record(f.call, *_inputs(device), dry_run=True)
    kept = {recording.arena for recording in bill.recordings if not recording.not_kept}
    assert len(bill.not_kept) == 2 and all("max_recordings" in recording.not_kept for recording in bill.not_kept)
    fxwrap.record(f.call, *_inputs(device))
    assert kept == {recording.request.memory.size for recording in f.program.specializations.recordings()}


def test_code_with_dynamic_sizes_is_what_later_calls_run(device: torch.device) -> None:
    """The first size compiles for itself, the second for all sizes. Dynamo prefers what is newer: so does record."""
    f = Compiled(_mlp(device))
    inputs = _inputs(device, (32, 16, 8))
    assert len(fxwrap.record(f.call, *inputs, dry_run=True).recordings) == 3
    assert fxwrap.record(f.call, *inputs) == 3
    first, for_all = f.programs
    assert not first.counters.recordings and sum(for_all.counters.recordings.values()) == 3
    before = for_all.counters.replays
    for x in inputs:
        f(x)
    assert for_all.counters.replays == before + 3 and set(first.counters.eager) <= set(WARM_UPS)


def test_other_threads_call_as_usual(device: torch.device) -> None:
    f, x = Compiled(_mlp(device)), _inputs(device, (4,))[0]
    own, before = list[Any](), list[Any]()

    def call(value: torch.Tensor) -> None:
        if not before:
            thread = threading.Thread(target=lambda: before.append(f(x)))
            thread.start()
            thread.join()
        own.append(f(value).clone())

    bill = fxwrap.record(call, x, dry_run=True)
    counters = f.program.counters
    assert len(bill.recordings) == 1 and counters.eager == {"warm-up": 1} and not counters.recordings
    assert_same(own[-1], before[0])


def test_an_error_ends_the_dry_run(device: torch.device) -> None:
    f, x = Compiled(_mlp(device)), _inputs(device, (4,))[0]

    def fails(value: torch.Tensor) -> None:
        f(value)
        raise ValueError("from the function")

    with pytest.raises(ValueError, match="from the function"):
        fxwrap.record(fails, x, dry_run=True)
    assert not RUNNERS
    assert fxwrap.record(f.call, x) == 1
    with pytest.raises(fxwrap.FxwrapError, match="called no program"):
        fxwrap.record(torch.sin, x, dry_run=True)
    with pytest.raises(fxwrap.InputError, match="nothing to call"):
        fxwrap.record(f.call, dry_run=True)


def test_buckets_are_billed(device: torch.device) -> None:
    """One recording for a bucket, at its size."""
    f = Compiled(_mlp(device), compile_options={"options": {"buckets": {"batch": (4, 16)}}})

    def marked(rows: int) -> torch.Tensor:
        x = torch.randn(rows, 64, device=device)
        fxwrap.mark_bucket(x, 0, "batch")
        return x

    bill = fxwrap.record(f.call, *map(marked, (3, 4, 9, 15)), dry_run=True)
    assert len(bill.recordings) == len({str(recording.sizes) for recording in bill.recordings}) == 2
    assert fxwrap.record(f.call, *map(marked, (3, 4, 9, 15))) == 2


def test_the_text() -> None:
    device = DeviceBill(torch.device("cuda", 0), 1_572_864, 33_554_432, 33_554_432, 512)
    recordings = (
        RecordingBill("fxwrap 0 inference", {"s0": 256}, 1_572_864, 524_288, 0, 1, 2, 2),
        RecordingBill("fxwrap 0 inference", {"s0": 512}, 3_145_728, 1_048_576, 0, 1, 2, 2, "more than max_memory"),
    )
    assert str(fxwrap.Bill((device,), recordings)).splitlines() == [
        "1 of 2 recordings would be kept, with 35,127,808 bytes",
        "",
        "device       total     arenas  graph pools  workspaces in them  static buffers",
        "cuda:0  35,127,808  1,572,864   33,554,432          33,554,432             512",
        "",
        "program             sizes       arena  copied in  own  graphs  kernels  library calls",
        "fxwrap 0 inference  s0=256  1,572,864    524,288    0       1        2              2",
        "fxwrap 0 inference  s0=512  3,145,728  1,048,576    0       1        2              2",
        "not kept: fxwrap 0 inference, s0=512: more than max_memory",
    ]
