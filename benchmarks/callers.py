"""What callers' habits cost: outputs that are kept, memory that moves, many shapes, threads, a limit of memory.

    python benchmarks/callers.py                          # on the CPU, with times against Inductor's own wrapper
    python benchmarks/callers.py --only threads           # rows whose name has this in it
    python benchmarks/callers.py --device simulated       # or hostsim: counts and numbers only

Every row compares numbers with Inductor's wrapper, too. Times are medians of pairs, both sides
in turn in one process. Exit code 1 if a limit was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from memory_peak import settings_of
from timing import compare, own
from torch import Tensor, nn

import fxwrap
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.graphs.memory.shared_state import SHARED

Function = Callable[..., Any]

# Where the allocator's own growth ends and a leak begins.
_RSS_NOISE = 4 << 20
_MANY = 10**9


@dataclass(frozen=True)
class Row:
    """One line of the table; ``held`` is None for what was skipped."""

    measured: str
    limit: str
    held: bool | None


class OnDevice:
    """Makes tensors and models there."""

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def random(self, *size: int, seed: int = 0) -> Tensor:
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def model(self, make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return make().to(self.device)


@dataclass(frozen=True)
class Place(OnDevice):
    """Where programs run."""

    name: str

    @property
    def device(self) -> torch.device:
        return torch.device("hostsim", 0) if self.name == "hostsim" else torch.device("cpu")

    @property
    def timed(self) -> bool:
        return self.name == "cpu"

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """For every thread that calls."""
        if self.name != "simulated":
            return contextlib.nullcontext()
        from fxwrap.testing.simulated import SIMULATED  # with pytest, which nothing else here needs

        return using_runtime(SIMULATED)

    def ours(self, fn: Function, dynamic: bool | None = None, **options: Any) -> Function:
        # What runs here is small; whether it is worth a capture on an accelerator is not the question.
        chosen = options if self.timed else {"capture": "always", **options}
        return torch.compile(own(fn), backend="fxwrap", dynamic=dynamic, options=chosen or None)

    def inductors(self, fn: Function, dynamic: bool | None = None) -> Function:
        options = settings_of(self.device.type) or None
        return torch.compile(own(fn), backend="inductor", dynamic=dynamic, options=options)


@dataclass
class Numbers:
    """Counts results that are not what they should be."""

    exact: bool = True
    wrong: int = 0
    seen: int = 0

    def check(self, got: Tensor, expected: Tensor) -> None:
        same = torch.equal(got, expected) if self.exact else torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
        self.seen += 1
        self.wrong += not same

    def check_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Of what was given and what is right; holds on to none of it."""
        for got, expected in pairs:
            self.check(got, expected)

    @property
    def right(self) -> bool:
        return self.seen > 0 and not self.wrong

    def __str__(self) -> str:
        return "numbers right" if self.right else f"{self.wrong} of {self.seen} WRONG"


# -- what a compiled function did -------------------------------------------------------------------------------


def recordings(fn: Function) -> int:
    return sum(fxwrap.stats(fn)["recordings"].values())


def eager(fn: Function) -> Counter[str]:
    return Counter(fxwrap.stats(fn)["eager"])


def reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"


def recorded(fn: Function) -> str:
    """The recordings, with their reasons."""
    found = fxwrap.stats(fn)["recordings"]
    return f"{sum(found.values())} recordings ({reasons(found)})"


def programs(fn: Function) -> list[Any]:
    return [report.program for report in fxwrap.report(fn).graphs]


def specializations(program: Any) -> list[Any]:
    """The recordings of a program by shape, whatever that is called in this tree."""
    known = getattr(program, "specializations", None)
    return list((known if known is not None else program.families).values())


def known_arenas() -> list[Any]:
    """All arenas, whatever tells them in this tree."""
    pool: Any = SHARED.arenas
    return pool.alive() if hasattr(pool, "alive") else pool._on(None)


def live(fn: Function) -> int:
    """Recordings that could be replayed."""
    return sum(len(one.recordings) for program in programs(fn) for one in specializations(program))


def most_copied(fn: Function) -> int:
    """The most bytes of inputs that a recording copies into the arena."""
    recorded = (made for graph in fxwrap.report(fn).graphs for made in graph.program.recorder.history)
    return max((made.copied_in_bytes for made in recorded), default=0)


def how(fn: Function, call: Callable[[], Any]) -> str:
    """Make one call; 'replay', or what it was instead and why."""
    before = fxwrap.stats(fn)
    call()
    after = fxwrap.stats(fn)
    for kind in ("recordings", "eager"):
        for reason, count in after[kind].items():
            if count > before[kind].get(reason, 0):
                return f"{'recording' if kind == 'recordings' else kind}: {reason}"
    return "replay"


def resident() -> int:
    """Bytes of memory that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def forget() -> None:
    """Leave nothing of the row before."""
    torch._dynamo.reset()
    gc.collect()
    with contextlib.suppress(fxwrap.FxwrapError):
        fxwrap.release()
    gc.collect()


def in_microseconds(call: Callable[[], Any], times: int = 3) -> float:
    """Roughly; the least of a few."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e6)
    return min(found)


# -- programs -----------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Two narrow matrix products and two kernels; the output is as large as the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(torch.relu(self.down(x)))
        y = y - y.mean(1, keepdim=True)
        return torch.relu(y + x) * 0.5


def calling(model: nn.Module) -> Function:
    def call(x: Tensor) -> Tensor:
        return model(x)

    return call


def layers(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, width))


# -- 1: outputs that are kept -------------------------------------------------------------------------------------

SIZES = {"16 KB": (64, 64), "1.3 MB": (512, 650), "16 MB": (2048, 2048)}
WINDOWS = (1, 2, 3, 5, 8)
LIST = 100


def window(size: int) -> tuple[Any, Callable[[Any], None]]:
    """A container, and what adds to it: the last few, or a list that is started anew when it is full."""
    if size < LIST:
        last: deque[Any] = deque(maxlen=size)
        return last, last.append
    kept: list[Any] = []

    def add(value: Any) -> None:
        if len(kept) == size:
            kept.clear()
        kept.append(value)

    return kept, add


def outputs_kept(place: Place, shape: tuple[int, int], size: int) -> Row:
    call = calling(place.model(lambda: Mixer(shape[1])))
    ours, theirs = place.ours(call), place.inductors(call)
    inputs = [place.random(*shape, seed=seed) for seed in range(3)]
    numbers = outputs_stay_right(ours, inputs, [theirs(x) for x in inputs], size)
    measured, limit, held = f"{recorded(ours)}, {numbers}", "4 recordings", True
    if place.timed:
        ratio, text = time_with_window(ours, theirs, inputs[0], size)
        # Once more: calls with one input, in a row, may have recorded, too.
        measured, limit, held = f"{text}; {recorded(ours)}, {numbers}", f"1.05 of Inductor, {limit}", ratio <= 1.05
    return Row(measured, limit, held and recordings(ours) <= 4 and numbers.right)


def outputs_stay_right(ours: Function, inputs: Sequence[Tensor], expected: Sequence[Tensor], size: int) -> Numbers:
    """Call, and compare what is kept when it leaves the window."""
    numbers = Numbers()
    kept, add = window(size)
    for turn in range(size + 20 if size == LIST else 40):
        if len(kept) == size:
            numbers.check_all(kept if size == LIST else [kept[0]])
        which = turn % len(inputs)
        add((ours(inputs[which]), expected[which]))
    numbers.check_all(kept)
    return numbers


def time_with_window(ours: Function, theirs: Function, x: Tensor, size: int) -> tuple[float, str]:
    """Both sides keep their outputs alike."""
    (_, add_ours), (_, add_theirs) = window(size), window(size)

    def first() -> None:
        add_ours(ours(x))

    def second() -> None:
        add_theirs(theirs(x))

    for _ in range(20):
        first()
        second()
    took = max(in_microseconds(first), in_microseconds(second))
    # Short turns, and many, so that a noisy machine disturbs both alike; who comes next finds the caches
    # full of the other's, so that they must not be too short. A list is full after a whole number of them.
    calls = max(2, round(4_500 / took)) if size < LIST else 200 if took < 100 else 25 if took < 2_000 else 5
    pairs = min(600, max(25, round(1_200_000 / (calls * took))))
    result = compare(first, second, pairs, calls)
    return result.ratio, f"{result.ratio:.3f} of Inductor ({result.first:,.1f} / {result.second:,.1f} us)"


# -- 2: several programs --------------------------------------------------------------------------------------------


def programs_in_turn(place: Place, count: int, calls: int = 1000, slots: int = 6) -> Row:
    """Called at random; every other output is kept in a random slot."""
    chance = random.Random(count)
    models = [place.model(lambda: Mixer(640), seed) for seed in range(count)]
    functions = [place.ours(calling(model)) for model in models]
    references = [place.inductors(calling(model)) for model in models]
    inputs = [place.random(480, 640, seed=seed) for seed in range(4)]
    expected = [[reference(x) for x in inputs] for reference in references]
    numbers, kept = Numbers(), [(inputs[0], inputs[0])] * slots
    for _ in range(calls):
        which, given = chance.randrange(count), chance.randrange(len(inputs))
        output = functions[which](inputs[given])
        if chance.random() < 0.5:
            slot = chance.randrange(slots)
            numbers.check(*kept[slot])
            kept[slot] = (output, expected[which][given])
        else:
            numbers.check(output, expected[which][given])
        del output
    numbers.check_all(kept)
    made = [recordings(f) for f in functions]
    others = sum((eager(f) for f in functions), Counter())
    for expected in ("warm-up", "first call of these sizes"):
        others.pop(expected, None)
    busy = sum(n for reason, n in others.items() if "another call" in reason or "another capture" in reason)
    why = sum((Counter(fxwrap.stats(f)["recordings"]) for f in functions), Counter())
    measured = f"recordings {made} ({reasons(why)}), eager: {reasons(others)}, {numbers}"
    return Row(measured, "4 recordings each, never busy", max(made) <= 4 and not busy and numbers.right)


# -- 3: parameters that are replaced --------------------------------------------------------------------------------


def replace_data(model: nn.Module, new: Tensor) -> None:
    model.get_parameter("0.weight").data = new


def replace_by_state(model: nn.Module, new: Tensor) -> None:
    model.load_state_dict({"0.weight": new}, strict=False, assign=True)


def replace_parameter(model: nn.Module, new: Tensor) -> None:
    model.get_submodule("0").weight = nn.Parameter(new)


REPLACED = {
    "p.data = new": replace_data,
    "load_state_dict(assign=True)": replace_by_state,
    "a new nn.Parameter": replace_parameter,
}


def parameter_replaced(place: Place, replace: Callable[[nn.Module, Tensor], None], calls: int = 200) -> Row:
    model = place.model(layers)
    ours, theirs, numbers = place.ours(calling(model)), place.inductors(calling(model)), Numbers()
    inputs = [place.random(8, 64, seed=seed) for seed in range(4)]
    for x in inputs * 5:
        numbers.check(ours(x), theirs(x))
    before = fxwrap.stats(ours)
    replace(model, place.random(64, 64, seed=9))
    for x in inputs * (calls // len(inputs)):
        numbers.check(ours(x), theirs(x))
    after = fxwrap.stats(ours)
    why = Counter(after["recordings"]) - Counter(before["recordings"])
    replays = after["replays"] - before["replays"]
    measured = f"{why.total()} more recordings ({reasons(why)}), {replays} of {calls} replays, {numbers}"
    return Row(measured, "2 more recordings", why.total() <= 2 and numbers.right)


# -- 4: caches that are written into --------------------------------------------------------------------------------


def write_row(cache: Tensor, new: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    cache[position] = torch.relu(new @ weight)
    return (cache[position] * 2).sum(1)


def caches_written(place: Place, count: int, calls: int) -> Row:
    """8 MiB each, mutated in place, in turn."""
    ours, theirs, numbers = place.ours(write_row), place.inductors(write_row), Numbers()
    caches = [place.random(2048, 1024, seed=seed) for seed in range(count)]
    copies = [cache.clone() for cache in caches]
    news, weight = [place.random(1, 64, seed=seed) for seed in range(5)], place.random(64, 1024)
    for turn in range(calls):
        which, position = turn % count, torch.tensor([turn * 7 % 2048]).to(place.device)
        new = news[turn % len(news)]
        got = ours(caches[which], new, weight, position)
        numbers.check(got, theirs(copies[which], new, weight, position))
        numbers.check(caches[which], copies[which])
    made, copied = recordings(ours), most_copied(ours)
    measured = f"{recorded(ours)}, {copied:,} bytes are copied in, {numbers}"
    if count == 1:
        wanted = "2 recordings, less than 65,536 bytes are copied in"
        return Row(measured, wanted, made <= 2 and copied < 64 << 10 and numbers.right)
    return Row(measured, f"4 recordings in {calls} calls", made <= 4 and numbers.right)


# -- 5 and 6: many shapes -------------------------------------------------------------------------------------------


@dataclass
class ManyShapes:
    """One program with a dynamic batch, its inputs, and what is right."""

    place: Place
    count: int
    inputs: list[Tensor] = field(init=False)
    expected: list[Tensor] = field(init=False)
    most: int = 0

    def __post_init__(self) -> None:
        self.model = self.place.model(layers)
        self.inputs = [self.place.random(n, 64, seed=n) for n in range(2, 2 + self.count)]
        theirs = self.place.inductors(calling(self.model), dynamic=True)
        self.expected = [theirs(x) for x in self.inputs]

    def call_all(self, fn: Function) -> None:
        for x in self.inputs:
            fn(x)

    def check_all(self, fn: Function, numbers: Numbers) -> None:
        for x, expected in zip(self.inputs, self.expected, strict=True):
            numbers.check(fn(x), expected)
            self.most = max(self.most, live(fn))

    def eagerly(self) -> Function:
        """Compiled to run eagerly at every call: the fastest of the ways to have that."""
        found = []
        for keep in (1, 10 * self.count):
            options = {"capture": "never", "warmup": _MANY, "max_recordings": keep}
            fn = self.place.ours(calling(self.model), dynamic=True, **options)
            self.call_all(fn)
            assert not recordings(fn), "meant to run eagerly"
            found.append((in_microseconds(lambda fn=fn: self.call_all(fn)), fn))  # type: ignore[misc]
        return min(found, key=lambda one: one[0])[1]


def shapes_in_rounds(place: Place) -> Row:
    shapes, numbers = ManyShapes(place, 200), Numbers()
    ours = place.ours(calling(shapes.model), dynamic=True, max_recordings=64)
    memory = []
    for _ in range(3):
        shapes.check_all(ours, numbers)
        gc.collect()
        memory.append((SHARED.arenas.kept(), resident()))
    (kept, process), (kept_then, process_then) = memory[1:]
    flat = kept_then <= 1.05 * kept and process_then - process <= _RSS_NOISE
    measured = f"at most {shapes.most} live; kept {kept:,} then {kept_then:,}, RSS {process_then - process:+,}; "
    measured += f"{recorded(ours)}, eager: {reasons(eager(ours))}, {numbers}"
    limit, held = "64 live, memory flat", shapes.most <= 64 and flat and numbers.right
    if place.timed:
        by_host = shapes.eagerly()
        result = compare(lambda: shapes.call_all(ours), lambda: shapes.call_all(by_host), 60, 1)
        measured = f"{result.ratio:.3f} of eager; {measured}"
        limit, held = f"1.2 of eager, {limit}", held and result.ratio <= 1.2
    return Row(measured, limit, held)


def recorded_ahead(place: Place) -> Row:
    limit = "neither warm-up nor recording"
    record = getattr(fxwrap, "record", None)
    if record is None:
        return Row("fxwrap has no record", limit, None)
    shapes, numbers = ManyShapes(place, 40), Numbers()
    ours = place.ours(calling(shapes.model), dynamic=True)
    record(ours, *((x,) for x in shapes.inputs))
    before = fxwrap.stats(ours)
    for _ in range(2):
        shapes.check_all(ours, numbers)
    after = fxwrap.stats(ours)
    made = Counter(after["recordings"]) - Counter(before["recordings"])
    by_host = Counter(after["eager"]) - Counter(before["eager"])
    replays = after["replays"] - before["replays"]
    measured = f"{replays} of {2 * shapes.count} replays, recorded: {reasons(made)}, eager: {reasons(by_host)}"
    return Row(f"{measured}, {numbers}", limit, not made and not by_host and numbers.right)


# -- 7: threads -----------------------------------------------------------------------------------------------------


def in_threads(place: Place, count: int, calls: int, call: Callable[[int, int], None], meet: Function) -> None:
    """Call from several threads, which start together and meet again after 20 calls, where ``meet`` is called."""
    start, met = threading.Barrier(count), threading.Barrier(count, action=meet)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            with place.entered(), torch.no_grad():
                start.wait()
                for turn in range(calls):
                    if turn == 20:
                        met.wait()
                    call(thread, turn)
        except BaseException as error:
            errors.append(error)
            start.abort()
            met.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The others only hear that a barrier was broken.
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error


def threads_call(place: Place, threads: int, count: int, calls: int = 500) -> Row:
    """Each thread has its program; several may have the same."""
    models = [place.model(lambda: layers(128), seed) for seed in range(count)]
    functions = [place.ours(calling(model)) for model in models]
    inputs = [place.random(32, 128, seed=seed) for seed in range(threads)]
    expected = [models[thread % count](x) for thread, x in enumerate(inputs)]
    for f, x in zip(functions, inputs, strict=False):
        f(x)  # compiled before they start
    numbers = [Numbers(exact=False) for _ in range(threads)]
    replays: list[int] = []

    def call(thread: int, turn: int) -> None:
        numbers[thread].check(functions[thread % count](inputs[thread]), expected[thread])

    def meet() -> None:
        replays.append(sum(fxwrap.stats(f)["replays"] for f in functions))

    in_threads(place, threads, calls, call, meet)
    meet()
    share = (replays[1] - replays[0]) / (threads * (calls - 20))
    all_numbers = Numbers(wrong=sum(n.wrong for n in numbers), seen=sum(n.seen for n in numbers))
    arenas, most = len(known_arenas()), max(live(f) for f in functions)
    by_host = sum((eager(f) for f in functions), Counter())
    made = sum((Counter(fxwrap.stats(f)["recordings"]) for f in functions), Counter())
    measured = f"{share:.1%} replays, {arenas} arenas, at most {most} live recordings of a program"
    measured += f"; recorded: {reasons(made)}; eager: {reasons(by_host)}; {all_numbers}"
    # Memory is bounded by the arenas; in one of them a program may be recorded twice, around somebody's live outputs.
    bounded = arenas <= threads and most <= 2 * threads
    return Row(measured, f"95%, {threads} arenas", share >= 0.95 and bounded and all_numbers.right)


# -- 8: a limit of memory -------------------------------------------------------------------------------------------

TOO_LARGE = "more than max_memory"


def needed(place: Place, fn: Function, inputs: Sequence[Tensor]) -> int:
    """What a program keeps when nothing is held and nothing limits it."""
    free, most = place.ours(fn), 0
    for x in list(inputs) * 10:
        free(x)
        most = max(most, SHARED.arenas.kept())
    del free
    forget()
    return most


def memory_comes_back(place: Place, by_another: bool) -> Row:
    """Outputs, of the program itself or of another, take the room; then all of them go."""
    calls = [calling(place.model(lambda: Mixer(640), seed)) for seed in range(2)]
    # In turn, so that no input is found to stay where it is, which would save the room for its copy.
    inputs = [place.random(480, 640, seed=seed) for seed in range(2)]
    limit = max(1, needed(place, calls[0], inputs))  # 0 would be no limit
    expected = [[theirs(x) for x in inputs] for theirs in map(place.inductors, calls)]
    ours, *others = [place.ours(call, max_memory=limit) for call in calls[: 1 + by_another]]
    holder, numbers = (others or [ours])[0], Numbers()

    def once(turn: int) -> None:
        numbers.check(ours(inputs[turn % 2]), expected[0][turn % 2])

    for turn in range(20):
        once(turn)
    start = how(ours, lambda: once(0))
    held: list[Tensor] = []
    while len(held) < 40 and not eager(ours)[TOO_LARGE]:
        held.append(holder(inputs[len(held) % 2]))
        once(len(held))
    numbers.check_all(zip(held, itertools.cycle(expected[by_another]), strict=False))
    came = f"eager after {len(held)} outputs held" if eager(ours)[TOO_LARGE] else "never eager with 40 outputs held"
    held.clear()
    others.clear()
    del holder
    gc.collect()
    then = [how(ours, functools.partial(once, turn)) for turn in range(10)]
    right = all(one == "replay" for one in then[1:]) and not then[0].startswith("eager")
    found = ", ".join(f"{count} {what}" for what, count in Counter(then).items())
    measured = f"limit {limit:,}, {start} before, {came}; then {found}; {SHARED.arenas.kept():,} kept, {numbers}"
    return Row(measured, "then 10 replays, but the first", right and numbers.right)


# -- all of them ----------------------------------------------------------------------------------------------------


def checks() -> dict[str, Callable[[Place], Row]]:
    """By name, in the order of the table."""
    found: dict[str, Callable[[Place], Row]] = {}
    for label, shape in SIZES.items():
        for size in (*WINDOWS, LIST):
            kept = f"the last {size}" if size < LIST else f"lists of {size}"
            found[f"outputs of {label}, {kept} kept"] = functools.partial(outputs_kept, shape=shape, size=size)
    for count in (2, 3, 4):
        found[f"{count} programs, outputs kept at random"] = functools.partial(programs_in_turn, count=count)
    for name, replace in REPLACED.items():
        found[f"parameter replaced: {name}"] = functools.partial(parameter_replaced, replace=replace)
    found["cache of 8 MiB written"] = functools.partial(caches_written, count=1, calls=60)
    found["three caches of 8 MiB in turn"] = functools.partial(caches_written, count=3, calls=60)
    found["200 shapes, three rounds"] = shapes_in_rounds
    found["40 shapes recorded ahead"] = recorded_ahead
    found["threads: 8 with one program"] = functools.partial(threads_call, threads=8, count=1)
    found["threads: 4 with 4 programs"] = functools.partial(threads_call, threads=4, count=4)
    found["max_memory, own outputs held"] = functools.partial(memory_comes_back, by_another=False)
    found["max_memory, another's outputs held"] = functools.partial(memory_comes_back, by_another=True)
    return found


@contextlib.contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(name: str, check: Callable[[Place], Row], place: Place, usual_threads: int) -> Row:
    """One row; what raises has missed its limit."""
    forget()
    count = usual_threads if name.startswith("threads") else 1
    try:
        with threads_of_torch(count), place.entered(), torch.no_grad():
            return check(place)
    except Exception as error:
        traceback.print_exc()
        return Row(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", "no error", False)


_VERDICTS = {True: "held", False: "[bold red]missed[/]", None: "skipped"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name has this in it")
    parser.add_argument("--device", default="cpu", choices=["cpu", "simulated", "hostsim"])
    args = parser.parse_args(argv)
    if args.device == "hostsim":
        from hostsim.inductor import register

        register()
    from rich.console import Console
    from rich.table import Table

    place, usual_threads = Place(args.device), torch.get_num_threads()
    table = Table(
        "check", "measured", "limit", "", title=f"callers' habits, {args.device}, torch {torch.__version__}"
    )
    missed = []
    for name, check in checks().items():
        if args.only not in name:
            continue
        begin = time.perf_counter()
        row = run(name, check, place, usual_threads)
        table.add_row(name, row.measured, row.limit, _VERDICTS[row.held])
        took = f"{time.perf_counter() - begin:.1f} s"
        print(f"{name}: {row.measured} ({row.limit}: {row.held}) {took}", file=sys.stderr, flush=True)
        if row.held is False:
            missed.append(name)
    Console(width=150).print(table)
    print(f"missed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
