"""What ``gpu.py`` checks, in the order of value. Each check says what it saw and what it demands."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.util
import itertools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from callers import (
    Mixer,
    Row,
    caches_written,
    calling,
    eager,
    forget,
    layers,
    parameter_replaced,
    recordings,
    replace_data,
)
from gpu_memory import operators_in_the_arena
from gpu_place import Findings, Place, Skipped, host_microseconds, tensors_in
from gpu_steps import mlps_step, step_within_a_limit, world_models_step
from memory_peak import UNet, loss_of
from torch import Tensor, nn

import fxwrap
from fxwrap.graphs.memory.arena_pool import AT_ONE_TIME
from fxwrap.torch_private.functions import frees_workspaces

Check = Callable[[Place, Findings], None]
# Calls until a program replays: one runs eagerly, one is recorded, and one more if it was cut anew or its arena grew.
SETTLE = 4
MIB = 1 << 20
SEGMENT = 20 * MIB  # what torch's allocator takes of the driver at once: c10/cuda, kLargeBuffer
# What mode="reduce-overhead" sets.
REDUCE_OVERHEAD: dict[str, Any] = {"triton.cudagraphs": True}


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        only_on: devices that it applies to; empty for all.
        because: why it does not apply to others.
        alone: it runs in a process of its own, as it may leave the device unusable, needs an environment, or counts
            memory.
    """

    check: Check
    only_on: tuple[str, ...] = ()
    because: str = ""
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def in_short(error: BaseException) -> str:
    """Its type and first words; a compiler's errors begin with who raised them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    many = 2 if lines and lines[0].endswith(":") else 1
    return f"{type(error).__name__}: {' '.join(lines[:many])}"


# -- graphs that are replayed ----------------------------------------------------------------------------------------


def training_step(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    return step


def settle(call: Callable[[], Any], times: int = SETTLE) -> None:
    for _ in range(times):
        call()


class InTurn:
    """Calls a function with some inputs in turn, and compares: a replay that does not see its input shows."""

    def __init__(
        self,
        place: Place,
        findings: Findings,
        fn: Callable[[Tensor], Any],
        right: Callable[[Tensor], Any],
        *shape: int,
        **tolerance: float,
    ) -> None:
        self._findings, self._fn, self._tolerance = findings, fn, tolerance
        inputs = [place.random(*shape, seed=seed) for seed in range(3)]
        self._turns = itertools.cycle([(x, right(x)) for x in inputs])

    def __call__(self) -> None:
        x, expected = next(self._turns)
        self._findings.same(self._fn(x), expected, **self._tolerance)


def each(*calls: Callable[[], Any]) -> None:
    for call in calls:
        call()


def launches_are_counted(place: Place, findings: Findings) -> None:
    seen = place.sees_launches()
    findings.demand(seen or not place.counts_launches, f"replays of a plain graph are not seen on {place.name}")
    width = place.size(512, 64)
    model = place.model(lambda: layers(width))
    ours = place.ours(calling(model))
    with torch.no_grad():
        place.steady(findings, [ours], InTurn(place, findings, ours, model, 32, width), 10)
    step, right = place.ours(training_step(model)), training_step(model)

    def gradients_of(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
        def train(x: Tensor) -> list[Tensor]:
            model.zero_grad()
            fn(x).backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        return train

    train = InTurn(place, findings, gradients_of(step), gradients_of(right), 32, width)
    place.steady(findings, [step], train, 5)


def larger_second_program(place: Place, findings: Findings) -> None:
    small, large = place.size(128, 32), place.size(2048, 256)
    models = [place.model(lambda width=width: layers(width), seed) for seed, width in enumerate((small, large))]
    functions = [place.ours(calling(model)) for model in models]
    with torch.no_grad():
        first = InTurn(place, findings, functions[0], models[0], 16, small)
        second = InTurn(place, findings, functions[1], models[1], 1024, large)
        place.steady(findings, functions[:1], first)
        place.steady(findings, functions[1:], second)
        place.steady(findings, functions, lambda: each(first, second))


def released_and_called_again(place: Place, findings: Findings) -> None:
    width = place.size(1024, 64)
    model = place.model(lambda: layers(width))
    ours = place.ours(calling(model))
    with torch.no_grad():
        call = InTurn(place, findings, ours, model, 64, width)
        for what in ("called", "released", "released, cache emptied", "all released, cache emptied"):
            faults = len(findings.faults)
            if what != "called":
                released = fxwrap.release() if what.startswith("all") else fxwrap.release(ours)
                findings.demand(released > 0, "release gave nothing back")
            if what.endswith("emptied"):
                place.empty_cache()
            place.steady(findings, [ours], call)
            findings.faults[faults:] = [f"{what}: {fault}" for fault in findings.faults[faults:]]


def _synced(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


@functools.cache
def synced_operator() -> Callable[[Tensor], Tensor]:
    """An operator whose kernel reads a value on the host, which nobody tells fxwrap."""
    operator = torch.library.custom_op("fxwrap_gpu::synced", _synced, mutates_args=(), schema="(Tensor x) -> Tensor")
    operator.register_fake(torch.empty_like)
    return operator


def innocent_after_syncing(place: Place, findings: Findings) -> None:
    operator, width = synced_operator(), place.size(512, 32)
    weight = place.random(width, width)

    def syncing(x: Tensor) -> Tensor:
        return torch.relu(operator(torch.relu(x @ weight)) @ weight) + 1

    def innocent(x: Tensor) -> Tensor:
        return torch.relu(torch.relu(x @ weight) @ weight) - 1

    with torch.no_grad():
        functions = [place.ours(syncing), place.ours(innocent)]
        first = InTurn(place, findings, functions[0], syncing, 16, width)
        second = InTurn(place, findings, functions[1], innocent, 16, width)
        settle(first, 6)
        place.steady(findings, functions[1:], second)
        drawn = torch.randn(1000, device=place.device)
        findings.demand(0.5 < drawn.std().item() < 1.5, "randn draws no normal numbers")
        place.empty_cache()
        place.steady(findings, functions, lambda: each(first, second))


# -- the ten models --------------------------------------------------------------------------------------------------


def model_both_ways(place: Place, findings: Findings, name: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    with _full_precision():
        for training in (False, True):
            try:
                _model(place, findings, name, training)
            except torch._inductor.exc.InductorError:
                if refusal := _inductors_refusal(place, name):
                    raise Skipped(f"Inductor's own wrapper refuses it: {refusal}") from None
                raise
            forget()


def _inductors_refusal(place: Place, name: str) -> str:
    """The error with which Inductor alone answers a model; empty if it runs it."""
    from models import MODELS

    forget()
    model, fresh = MODELS[name]()
    inputs = {key: value.to(place.device) for key, value in fresh().items()}
    try:
        torch.compile(model.to(place.device))(**inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _model(place: Place, findings: Findings, name: str, training: bool) -> None:
    from models import MODELS

    torch.manual_seed(0)
    model, fresh_inputs = MODELS[name]()
    model.train(training)
    twin = copy.deepcopy(model).to(place.device)
    model.to(place.device)
    for one in (model, twin):
        one.tie_weights()  # a device out of the tree gives tied parameters lives of their own

    def forward(**inputs: Any) -> Any:
        return model(**inputs)

    def step(module: nn.Module, call: Callable[..., Any], inputs: dict[str, Any]) -> list[Tensor]:
        module.zero_grad()
        with torch.set_grad_enabled(training):
            results = call(**inputs)
        if not training:
            return tensors_in(results)
        loss_of(results).backward()
        return [*tensors_in(results), *(p.grad for p in module.parameters() if p.grad is not None)]

    ours = place.ours(forward)
    batches = [{key: value.to(place.device) for key, value in fresh_inputs().items()} for _ in range(3)]
    expected = [[t.detach().clone() for t in step(twin, twin, inputs)] for inputs in batches]
    turns = itertools.cycle(range(len(batches)))

    def call() -> None:
        which = next(turns)
        findings.same(step(model, ours, batches[which]), expected[which])

    settle(call)
    place.steady(findings, [ours], call, 3)
    fallbacks = fxwrap.stats(ours)["fallbacks"]
    findings.demand(not fallbacks, f"fallbacks: {fallbacks}")


# -- random numbers --------------------------------------------------------------------------------------------------


def random_numbers(place: Place, findings: Findings) -> None:
    x = place.random(64, place.size(1024, 64))

    def dropped(x: Tensor) -> Tensor:
        return F.dropout(torch.relu(F.dropout(x, 0.3) + torch.rand_like(x)), 0.5)

    ours, theirs = place.ours(dropped), place.inductors(dropped)
    settle(lambda: ours(x))

    def draw(fn: Callable[[Tensor], Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(seed)
        first = fn(x).clone()
        return first, fn(x).clone(), torch.rand(4, device=place.device)

    for seed in range(4):
        mine, other = draw(ours, seed), draw(theirs, seed)
        findings.exactly(mine[0], other[0], "after reseeding, other numbers than Inductor's wrapper draws")
        findings.exactly(mine[1], other[1], "in the second call, other numbers than Inductor's wrapper draws")
        findings.exactly(mine[2], other[2], "the generator is elsewhere after the calls")
        findings.demand(not torch.equal(mine[0], mine[1]), "two replays draw the same numbers")
    place.steady(findings, [ours], lambda: ours(x))


def attention_with_dropout(place: Place, findings: Findings) -> None:
    shape = (2, 4, place.size(256, 16), 64)
    tensors = [place.random(*shape, seed=seed).requires_grad_() for seed in range(3)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 1.5, k, v, dropout_p=0.2, is_causal=True).square().mean()

    _trained_like_inductor(place, findings, attend, tensors, tensors)


def checkpointing(place: Place, findings: Findings) -> None:
    from torch.utils.checkpoint import checkpoint

    width = place.size(512, 32)
    model = place.model(lambda: nn.Sequential(layers(width), nn.Dropout(0.2), nn.GELU(), layers(width)))

    def forward(x: Tensor) -> Tensor:
        return checkpoint(model, torch.relu(x), use_reentrant=False).square().mean()

    x = place.random(32, width).requires_grad_()
    _trained_like_inductor(place, findings, forward, [x], [x, *model.parameters()])


def _trained_like_inductor(
    place: Place,
    findings: Findings,
    loss: Callable[..., Tensor],
    inputs: list[Tensor],
    leaves: list[Any],
    **more: Any,
) -> None:
    """Losses and gradients after the same seeds; then nothing but replays."""
    ours, theirs = place.ours(loss, **more), place.inductors(loss, **more)

    def step(fn: Callable[..., Tensor], seed: int) -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        torch.manual_seed(seed)
        value = fn(*inputs)
        value.backward()
        return [value.detach().clone(), *(leaf.grad.clone() for leaf in leaves)]

    for seed in range(6):
        findings.same(step(ours, seed), step(theirs, seed))
    place.steady(findings, [ours], lambda: step(ours, 0))


# -- what callers do -------------------------------------------------------------------------------------------------


def of_row(findings: Findings, row: Row) -> None:
    findings.note(row.measured)
    findings.demand(bool(row.held), f"wanted {row.limit}")


def one_parameter_replaced(place: Place, findings: Findings) -> None:
    with torch.no_grad():
        row = parameter_replaced(place, replace_data, calls=200)
    of_row(findings, row)


def cache_written(place: Place, findings: Findings) -> None:
    with torch.no_grad():
        of_row(findings, caches_written(place, count=1, calls=40))


def growing_and_shrinking(place: Place, findings: Findings) -> None:
    width = place.size(512, 32)
    model = place.model(lambda: Mixer(width))
    ours = place.ours(calling(model), dynamic=True)
    rows = [4, 16, 64, 256, 64, 16, 4, 1024, 8]
    inputs = [place.random(n, width, seed=n) for n in rows]
    with torch.no_grad():
        expected = [model(x) for x in inputs]

        def call_all() -> None:
            findings.same([ours(x).clone() for x in inputs], expected)

        settle(call_all, 5)
        place.steady(findings, [ours], call_all, 2)
    findings.note(f"{recordings(ours)} recordings of {len(set(rows))} sizes")


def read_on_a_side_stream(place: Place, findings: Findings) -> None:
    """The output is dropped while another stream still copies it: docs/outputs.md says which ways are right."""
    width = place.size(1024, 64)
    model, side = place.model(lambda: Mixer(width)), place.new_stream()
    inputs = [place.random(256, width, seed=seed) for seed in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]

        def read(ours: Callable[[Tensor], Tensor], leave: Callable[[Tensor], None]) -> list[Tensor]:
            settle(lambda: ours(inputs[0]))
            copies = [torch.empty_like(x) for x in inputs]
            place.synchronize()
            for x, target in zip(inputs, copies, strict=True):
                y = ours(x)
                side.wait_stream(place.current_stream())
                place.keep_busy(side, 0.02)
                with place.on(side):
                    target.copy_(y)
                leave(y)
                del y
            place.synchronize()
            return copies

        findings.same(read(place.ours(calling(model), copy_outputs=True), lambda y: y.record_stream(side)), expected)
        findings.same(read(place.ours(calling(model)), lambda y: place.current_stream().wait_stream(side)), expected)
        unguarded = read(place.ours(calling(model)), lambda y: y.record_stream(side))
        late = sum(not torch.allclose(got, right, 1e-3, 1e-4) for got, right in zip(unguarded, expected, strict=True))
        findings.note(f"with record_stream alone {late} of {len(inputs)} are overwritten")


def prefetched(place: Place, findings: Findings) -> None:
    """Batches come from pinned memory on a stream of their own, one ahead."""
    width = place.size(1024, 64)
    model, side = place.model(lambda: layers(width)), place.new_stream()
    ours = place.ours(calling(model))
    batches = [torch.randn(64, width, generator=torch.Generator().manual_seed(n)).pin_memory() for n in range(12)]
    with torch.no_grad():
        expected = [model(batch.to(place.device)) for batch in batches]
        settle(InTurn(place, findings, ours, model, 64, width), 6)
        results = []
        for batch in batches:
            with place.on(side):
                place.keep_busy(side, 0.01)
                x = batch.to(place.device, non_blocking=True)
            place.current_stream().wait_stream(side)
            x.record_stream(place.current_stream())
            results.append(ours(x).clone())
        place.synchronize()
        findings.same(results, expected)


def _sum_of(tensors: Any, sums: Any) -> None:
    sums.put(tensors.get().double().sum().item())


def shared_with_a_process(place: Place, findings: Findings) -> None:
    """An output, by the driver's handles, as data loaders and servers share tensors: a copy is what is sent."""
    from torch import multiprocessing

    model = place.model(lambda: Mixer(256))
    ours, x = place.ours(calling(model)), place.random(64, 256)
    with torch.no_grad():
        settle(lambda: ours(x))
        output = ours(x)
    context = multiprocessing.get_context("spawn")
    tensors, sums = context.Queue(), context.Queue()
    process = context.Process(target=_sum_of, args=(tensors, sums), daemon=True)
    process.start()
    try:
        # In this thread, where an error can be seen: a queue pickles in one of its own.
        multiprocessing.reductions.reduce_tensor(output)
        tensors.put(output)
        found, right = sums.get(timeout=60), output.double().sum().item()
        findings.demand(abs(found - right) <= 1e-6 * max(1.0, abs(right)), f"the process sums {found}, not {right}")
        findings.note("another process read it")
    finally:
        process.kill()
        process.join()


def two_streams(place: Place, findings: Findings) -> None:
    """Narrow and long products, for which libraries split the sum and add the parts in a workspace of the stream."""
    long = place.size(1 << 16, 1 << 10)
    inputs = [place.random(32, long, seed=seed) * long**-0.5 for seed in range(2)]
    weights = [place.random(long, 48, seed=seed + 5) for seed in range(2)]

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu((x + 1 - 1) @ weight) @ weight[:48, :48]

    functions = [place.ours(product), place.ours(lambda x, weight: product(x, weight) * 2)]
    with torch.no_grad():
        expected = [product(inputs[0], weights[0]), product(inputs[1], weights[1]) * 2]
        place.synchronize()
        streams, kept = [place.new_stream() for _ in range(2)], [list[Tensor]() for _ in range(2)]

        def call(times: int) -> None:
            for _ in range(times):
                for which in (0, 1):
                    with place.on(streams[which]):
                        kept[which].append(functions[which](inputs[which], weights[which]).clone())

        call(SETTLE)
        place.steady(findings, functions, lambda: call(1), 30)
        place.synchronize()
        for which in (0, 1):
            findings.same(kept[which], [expected[which]] * len(kept[which]), rtol=1e-2, atol=1e-3)


def streams_in_turn(place: Place, findings: Findings) -> None:
    """A stream for each request, as servers have it."""
    width = place.size(512, 64)
    model = place.model(lambda: layers(width))
    ours, streams = place.ours(calling(model)), [place.new_stream() for _ in range(12)]
    with torch.no_grad():
        inputs = [place.random(8, width, seed=seed) for seed in range(12)]
        expected = [model(x) for x in inputs]
        place.synchronize()
        for _ in range(SETTLE):
            for stream, x, right in zip(streams, inputs, expected, strict=True):
                with place.on(stream):
                    findings.same(ours(x), right)
    findings.note(f"{recordings(ours)} recordings for {len(streams)} streams, {sum(eager(ours).values())} eager")
    findings.demand(recordings(ours) <= AT_ONE_TIME, "a recording for each of many streams")
    findings.demand(fxwrap.stats(ours)["replays"] >= len(streams), "hardly a replay")


# -- out of memory ---------------------------------------------------------------------------------------------------


def _sort_rows(x: Tensor) -> Tensor:
    return torch.sort(x, dim=-1)[0]


@functools.cache
def sorting() -> Callable[[Tensor], Tensor]:
    """A function of which the plan knows everything but what a custom operator allocates."""
    rows = torch.library.custom_op("fxwrap_gpu::sorted", _sort_rows, mutates_args=(), schema="(Tensor x) -> Tensor")
    rows.register_fake(torch.empty_like)
    return lambda x: rows(rows(torch.relu(x + 1) * 2) * 3 - x) * 0.5 + x


def _eager_peak(place: Place, call: Callable[[], Any]) -> int:
    place.synchronize()
    place.module.reset_peak_memory_stats(place.device)
    before = place.module.memory_allocated(place.device)
    call()
    place.synchronize()
    return place.module.max_memory_allocated(place.device) - before


def _short_of_memory(place: Place, findings: Findings, allowed: Callable[[int], int], what: str) -> None:
    # torch's allocator, which hostsim does not have, takes 20 MiB at a time where less than 10 are asked for.
    mebibytes = place.size(64, 1 if place.simulated else 10)
    x, fn = place.random(mebibytes * MIB // 4 // 1024, 1024), sorting()
    with torch.no_grad():
        expected = fn(x).cpu()
        peak, ours = _eager_peak(place, lambda: fn(x)), place.ours(fn)
        ours(x)  # compiled, and warm
        with place.limited_to(allowed(peak)):
            fn(x)  # leaves in the cache what it took
            for _ in range(SETTLE):
                try:
                    result = ours(x)
                except torch.OutOfMemoryError as error:
                    findings.demand(False, f"{what}: the caller gets {in_short(error)}")
                    break
                findings.same(result.cpu(), expected)
                del result
        innocent = place.ours(lambda x: torch.relu(x) * 2 + 1)
        small = place.random(16, 16)
        settle(lambda: findings.same(innocent(small), torch.relu(small) * 2 + 1))
        place.steady(findings, [innocent], lambda: innocent(small))
        settle(lambda: ours(x), 2)
        findings.note(f"{what}: {fxwrap.stats(ours)['eager']}")
        place.steady(findings, [ours], lambda: findings.same(ours(x).cpu(), expected), 2)


def memory_short_in_capture(place: Place, findings: Findings) -> None:
    place.demand_limits()
    _short_of_memory(place, findings, lambda peak: peak + peak // 4, "what eager work takes and a quarter")


def memory_short_in_growth(place: Place, findings: Findings) -> None:
    """An output that is kept holds the old arena, while a larger one is wanted."""
    place.demand_limits()
    holder = place.ours(calling(place.model(lambda: Mixer(1024))))
    x, spare = place.random(place.size(32, 1) * MIB // 4 // 1024, 1024, seed=3), place.size(2, 1) * MIB
    if torch.cuda.is_available() and not frees_workspaces():
        spare += 32 * MIB  # the workspace of the graphs' stream, which this torch does not free
    with torch.no_grad():
        settle(lambda: holder(x))
        kept = holder(x)
        right = kept.clone()
        _short_of_memory(place, findings, lambda peak: peak + spare, "what eager work takes")
        findings.same(kept, right)


# -- threads, training -----------------------------------------------------------------------------------------------


def two_threads(place: Place, findings: Findings) -> None:
    """With a program each, then with one program; the first calls of both meet while the other captures."""
    width, calls = place.size(512, 64), 60
    for count in (2, 1):
        models = [place.model(lambda: layers(width), seed) for seed in range(count)]
        functions = [place.ours(calling(model)) for model in models]
        inputs = [place.random(32, width, seed=seed) for seed in range(2)]
        with torch.no_grad():
            expected = [models[thread % count](x) for thread, x in enumerate(inputs)]
            for fn, x in zip(functions, inputs, strict=False):
                fn(x)  # compiled by one thread
        place.synchronize()
        start, errors, kept = threading.Barrier(2), list[BaseException](), [list[Tensor]() for _ in range(2)]

        def work(thread: int) -> None:
            try:
                with torch.no_grad(), place.on(place.new_stream()):
                    start.wait()  # noqa: B023
                    for _ in range(calls):
                        kept[thread].append(functions[thread % count](inputs[thread]).clone())  # noqa: B023
                    place.current_stream().synchronize()
            except BaseException as error:
                errors.append(error)  # noqa: B023
                start.abort()  # noqa: B023

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            findings.demand(False, in_short(error))
        for results, right in zip(kept, expected, strict=True):
            findings.same(results, [right] * len(results))
        replays = sum(fxwrap.stats(fn)["replays"] for fn in functions)
        findings.note(f"{count} program(s): {replays} of {2 * calls} replays")
        findings.demand(replays > calls, f"{count} program(s): hardly a replay")


def warm_in_one_thread(place: Place, findings: Findings) -> None:
    """What a library makes for each thread is there in the thread that warmed up, and is missing in the next one."""
    width = place.size(512, 32)
    model = place.model(lambda: layers(width))
    ours = place.ours(calling(model))
    errors: list[BaseException] = []
    with torch.no_grad():
        call = InTurn(place, findings, ours, model, 16, width)
        call()

        def work() -> None:
            try:
                with torch.no_grad():
                    settle(call)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        for error in errors:
            findings.demand(False, in_short(error))
        events = {text: count for text, count in fxwrap.stats(ours)["events"].items() if "capture failed" in text}
        findings.demand(not events, f"{events}")
        place.steady(findings, [ours], call)


def accumulation(place: Place, findings: Findings) -> None:
    width = place.size(512, 32)
    model = place.model(lambda: layers(width))
    twin = copy.deepcopy(model)
    step, right = place.ours(training_step(model)), training_step(twin)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, twin)]
    batches = [place.random(16, width, seed=seed) for seed in range(4)]

    def accumulate(fn: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
        optimizer.zero_grad()
        for x in batches:
            fn(x).backward()
        gradients = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
        optimizer.step()
        return gradients

    for _ in range(4):
        findings.same(accumulate(step, optimizers[0]), accumulate(right, optimizers[1]))
    place.steady(findings, [step], lambda: accumulate(step, optimizers[0]), 2)


def adam_with_scaler(place: Place, findings: Findings) -> None:
    """Model and optimizer compiled, half precision, a scaler that looks for infinities in between."""
    width = place.size(512, 32)
    x, trained, steps = place.random(32, width), [], []
    for compile_with in (place.ours, place.inductors):
        model = place.model(lambda: layers(width))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
        step = _scaled_step(place, model, optimizer, compile_with, x)
        settle(step, 8)
        trained.append([p.detach().clone() for p in model.parameters()])
        steps.append(step)
    findings.same(trained[0], trained[1])
    # Dynamo compiles the optimizer's own functions, behind the one that is given to it.
    place.steady(findings, None, steps[0], 3)


def _scaled_step(
    place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, compile_with: Callable[..., Any], x: Tensor
) -> Callable[[], None]:
    scaler = torch.amp.GradScaler(place.name, init_scale=1024.0)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(place.name, dtype=torch.float16):
            return model(x).float().square().mean()

    def update() -> None:
        optimizer.step()

    forward, compiled_update = compile_with(loss), compile_with(update)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(forward(x)).backward()
        scaler.unscale_(optimizer)
        compiled_update()
        scaler.update()

    return step


def convolutions(place: Place, findings: Findings) -> None:
    """A U-Net, whose convolutions Inductor may turn to channels-last, forward and backward."""
    model = place.model(lambda: UNet(place.size(32, 4)))
    twin = copy.deepcopy(model)
    x = place.random(4, 3, *[place.size(128, 16)] * 2)
    step, right = place.ours(training_step(model)), training_step(twin)

    def train(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
        module.zero_grad()
        value = fn(x)
        value.backward()
        return [value.detach().clone(), *(p.grad.clone() for p in module.parameters())]

    with _full_precision():
        expected = train(twin, right)
        settle(lambda: findings.same(train(model, step), expected, rtol=1e-2), 5)
        place.steady(findings, [step], lambda: findings.same(train(model, step), expected, rtol=1e-2), 3)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Convolutions in TF32 differ too much from run to run to see what is wrong."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def ddp(place: Place, findings: Findings) -> None:
    """One process: collectives are there, with nobody else to wait for."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    width = place.size(16384, 32)  # two buckets of a mebibyte at least, and so two graphs
    # Modules of our own: Dynamo breaks the graph in DDP's code, and does not look into torch's modules after that.
    model = place.model(lambda: nn.Sequential(Mixer(width), Mixer(width)))
    twin, x = copy.deepcopy(model), place.random(16, width)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'store'}"
        kind = "nccl" if place.name == "cuda" else "xccl"
        dist.init_process_group(kind, init_method=meeting, rank=0, world_size=1, device_id=place.device)
        try:
            parallel = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=1)
            step, right = training_step(place.ours(parallel)), training_step(twin)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (parallel, twin)]

            def train(fn: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
                optimizer.zero_grad()
                value = fn(x)
                value.backward()
                optimizer.step()
                return value.detach().clone()

            for _ in range(6):
                findings.same(train(step, optimizers[0]), train(right, optimizers[1]))
            place.steady(findings, None, lambda: train(step, optimizers[0]), 2)
        finally:
            dist.destroy_process_group()


# -- kernels of Triton -----------------------------------------------------------------------------------------------


def matmul_templates(place: Place, findings: Findings) -> None:
    size = place.size(512, 128)
    # Each configuration is compiled and timed: where kernels are interpreted, that tells nothing and takes minutes.
    few: dict[str, Any] = {"test_configs.max_mm_configs": 2} if place.small else {}

    def multiply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(x @ weight + bias) @ weight

    tensors = [place.random(*shape).half() * size**-0.5 for shape in ((size, size), (size, size), (size,))]
    # No library's product to choose from: otherwise the templates are not in it.
    ours = place.ours(multiply, max_autotune=True, max_autotune_gemm_backends="TRITON", **few)
    with torch.no_grad():
        expected = multiply(*tensors)
        place.steady(findings, [ours], lambda: findings.same(ours(*tensors), expected, rtol=1e-2, atol=1e-2))
    findings.demand("triton_tem" in str(fxwrap.report(ours).to_dict()), "no template was chosen")


def flex_attention(place: Place, findings: Findings) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = place.size(512, 128)
    tensors = [place.random(2, 4, length, 64, seed=seed).requires_grad_() for seed in range(3)]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=place.name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask).square().mean()

    _trained_like_inductor(place, findings, attend, tensors, tensors)


def own_triton_kernel(place: Place, findings: Findings) -> None:
    from gpu_triton import twice_and

    def call(x: Tensor) -> Tensor:
        return torch.relu(twice_and(torch.relu(x), x)) + 1

    def right(x: Tensor) -> Tensor:
        return torch.relu(2 * torch.relu(x) + x) + 1

    ours = place.ours(call)
    with torch.no_grad():
        place.steady(findings, [ours], InTurn(place, findings, ours, right, 64, 1000))


def reductions(place: Place, findings: Findings) -> None:
    """Over few long rows (split, with semaphores where blocks cooperate), and many kernels in one."""
    length = place.size(1 << 20, 1 << 12)

    def reduce(x: Tensor) -> tuple[Tensor, ...]:
        y = x.relu()
        return y.sum(1), y.mean(), torch.softmax(x, 1).amax(1), x.std(1)

    options: list[dict[str, Any]] = [{}]
    if hasattr(torch.cuda, "graph_counters"):  # hostcuda computes no kernels whose programs wait for each other
        options += [{"combo_kernels": True}]
    elif not place.simulated:
        options += [{"triton.force_cooperative_reductions": True}, {"combo_kernels": True}]
    with torch.no_grad():
        for chosen in options:
            ours = place.ours(reduce, **chosen)
            place.steady(findings, [ours], InTurn(place, findings, ours, reduce, 4, length))


# -- captures of others, the allocator -------------------------------------------------------------------------------


def outer_capture(place: Place, findings: Findings) -> None:
    """A user's own graph around a compiled function: after one call, and after it replays."""
    width = place.size(512, 32)
    model = place.model(lambda: layers(width))
    static, values = place.random(8, width), [place.random(8, width, seed=seed) for seed in range(5, 8)]
    with torch.no_grad():
        for calls in (1, SETTLE):
            ours = place.ours(calling(model))
            settle(lambda: ours(static), calls)  # noqa: B023
            place.synchronize()
            try:
                graph, result = place.graph_of(lambda: ours(static))  # noqa: B023
            except Exception as error:
                findings.demand(False, f"after {calls} calls: {in_short(error)}")
                continue
            for value in values:
                static.copy_(value)
                graph.replay()
                findings.same(result, model(value))
            place.steady(findings, [ours], InTurn(place, findings, ours, model, 8, width))


def expandable_segments(place: Place, findings: Findings) -> None:
    larger_second_program(place, findings)
    forget()
    released_and_called_again(place, findings)


# -- time and memory, beside others ----------------------------------------------------------------------------------


def deep(width: int, depth: int = 12) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


def host_time(place: Place, findings: Findings) -> None:
    """Of a call, beside the bare replay of a graph of the same work, and beside Inductor's own graphs."""
    if hasattr(torch.cuda, "graph_counters"):  # hostcuda
        raise Skipped("the device computes on the host; benchmarks/host_time.py times calls that compute nothing")
    model, x = place.model(lambda: deep(32)), place.random(4, 32)
    ours, theirs = place.ours(calling(model)), place.inductors(calling(model))
    with torch.no_grad():
        calls: dict[str, Callable[[], Any]] = {"fxwrap": lambda: ours(x), "Inductor": lambda: theirs(x)}
        if place.name == "cuda":
            trees = place.inductors(calling(model), **REDUCE_OVERHEAD)
            calls["reduce-overhead"] = lambda: trees(x)
        for call in calls.values():
            settle(call, 6)
        graph, _ = place.graph_of(lambda: theirs(x))
        calls["bare replay"] = graph.replay
        place.steady(findings, [ours], lambda: ours(x))
        times = host_microseconds(place, calls)
    findings.note(", ".join(f"{name} {time:.1f} us" for name, time in times.items()))
    if "reduce-overhead" in times:
        findings.demand(times["fxwrap"] <= times["reduce-overhead"], "slower than reduce-overhead")
    if not place.simulated:
        findings.demand(times["fxwrap"] <= times["Inductor"], "slower than Inductor's wrapper")


def peak_memory(place: Place, findings: Findings) -> None:
    """Of steady training steps, all that the device holds beyond model and input."""
    edge = place.size(256, 32)
    sides: dict[str, Callable[..., Any]] = {"Inductor": place.inductors, "fxwrap": place.ours}
    if place.name == "cuda":
        sides["reduce-overhead"] = functools.partial(place.inductors, **REDUCE_OVERHEAD)
    found = {name: _peaks_of_training(place, findings, name, how, edge) for name, how in sides.items()}
    for name, (allocated, reserved) in found.items():
        findings.note(f"{name} {allocated / MIB:,.1f} MiB allocated, {reserved / MIB:,.1f} reserved")
    segments = SEGMENT + place.size(0, 4 * MIB)  # in small sizes two for small blocks, of 2 MiB, count as well
    if "reduce-overhead" in found:
        most = found["reduce-overhead"][1]
        findings.demand(found["fxwrap"][1] <= 1.05 * most + segments, "reserves more than reduce-overhead")
    most = max(1.25 * found["Inductor"][1], found["Inductor"][1] + segments)
    findings.demand(found["fxwrap"][1] <= most, "reserves a quarter, and a segment, more than Inductor")


def _peaks_of_training(
    place: Place, findings: Findings, name: str, compile_with: Callable[..., Any], edge: int
) -> tuple[int, int]:
    """Allocated and reserved bytes; what earlier calls have left is given back first."""
    forget()
    if place.name == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # else the side before counts less: one is given back while it runs
    model, x = place.model(lambda: UNet(place.size(32, 8))), place.random(8, 3, edge, edge)
    place.synchronize()
    place.empty_cache()
    before = place.module.memory_allocated(place.device), place.module.memory_reserved(place.device)

    def train() -> None:
        model.zero_grad()
        step(x).backward()

    for calls in (1, 12):
        # At first kernels are tuned, with a buffer of the size of the L2 cache, which a pool of graphs keeps.
        forget()
        step = compile_with(training_step(model))
        settle(train, calls)
    model.zero_grad()
    gc.collect()
    place.synchronize()
    place.empty_cache()
    place.module.reset_peak_memory_stats(place.device)
    if name == "fxwrap":
        place.steady(findings, [step], train)
    else:
        settle(train)
    place.synchronize()
    allocated = place.module.max_memory_allocated(place.device) - before[0]
    reserved = place.module.max_memory_reserved(place.device) - before[1]
    return allocated, reserved


# -- all of them -----------------------------------------------------------------------------------------------------

MODEL_NAMES = ("gpt2", "llama", "resnet", "mixtral", "bert", "t5", "vit", "mamba", "whisper", "clip")
_GPUS = ("cuda", "xpu")


def checks() -> dict[str, Entry]:
    """By name, in the order in which they run."""
    on_triton = functools.partial(Entry, only_on=_GPUS, because="its kernels are Triton's")
    beside_trees = functools.partial(Entry, only_on=("cuda",), because="graph trees are CUDA's")
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {
        "launches counted": Entry(launches_are_counted),
        "operators in the arena": Entry(operators_in_the_arena, alone=True),
        # These two hostcuda cannot tell.
        "host time": Entry(host_time),
        "peak memory": Entry(peak_memory, alone=True),
        "training step, MLP": beside_trees(mlps_step),
        "training step, world model": beside_trees(world_models_step),
        "training step within a limit": beside_trees(step_within_a_limit, alone=True),
        "a larger second program": Entry(larger_second_program),
        "released and called again": Entry(released_and_called_again),
        "innocent after a syncing operator": Entry(innocent_after_syncing, alone=True),
        "random numbers": Entry(random_numbers),
        **{f"model {name}": Entry(functools.partial(model_both_ways, name=name)) for name in MODEL_NAMES[:4]},
        "read on a side stream": Entry(read_on_a_side_stream),
        "one parameter replaced": Entry(one_parameter_replaced),
        "a cache that is written": Entry(cache_written),
        "sizes grow and shrink": Entry(growing_and_shrinking),
        "batches prefetched on a side stream": Entry(prefetched),
        "two streams, split sums": Entry(two_streams),
        "a stream for each request": Entry(streams_in_turn),
        "memory short in a capture": Entry(memory_short_in_capture, alone=True),
        "memory short in an arena's growth": Entry(memory_short_in_growth, alone=True),
        "two threads": Entry(two_threads),
        "warm in one thread, recorded in another": Entry(warm_in_one_thread, alone=True),
        "gradient accumulation": Entry(accumulation),
        "compiled Adam with a scaler": Entry(adam_with_scaler),
        "matmul templates": on_triton(matmul_templates),
        "flex attention": on_triton(flex_attention),
        "a user's Triton kernel": on_triton(own_triton_kernel),
        "dropout in attention": Entry(attention_with_dropout),
        "checkpointing": Entry(checkpointing),
        "DDP with one process": Entry(ddp, only_on=_GPUS, because="no process group takes its tensors", alone=True),
        "outer capture": Entry(outer_capture, alone=True),
        "an output shared with a process": Entry(
            shared_with_a_process, only_on=("cuda",), because="no handles of its memory", alone=True
        ),
        "expandable segments": Entry(
            expandable_segments, only_on=("cuda",), because="CUDA's only", alone=True, environment=segments
        ),
        "convolutions, training": Entry(convolutions),
        "reductions": Entry(reductions),
        **{f"model {name}": Entry(functools.partial(model_both_ways, name=name)) for name in MODEL_NAMES[4:]},
    }


def run(name: str, entry: Entry, place: Place) -> Findings:
    """One check; raises Skipped, or what the check raised."""
    if entry.only_on and place.name not in entry.only_on:
        raise Skipped(entry.because)
    forget()
    torch.manual_seed(0)
    findings = Findings()
    try:
        entry.check(place, findings)
        place.synchronize()
    except Skipped:
        raise
    except Exception as error:
        findings.faults.append(in_short(error))
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    findings.finish()
    return findings
