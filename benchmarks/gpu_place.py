"""The accelerator that the checks of ``gpu.py`` run on: what differs between CUDA, XPU and hostsim stands here."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from callers import Function, OnDevice, programs, reasons
from memory_peak import settings_of
from timing import own
from torch import Tensor, nn

import fxwrap
from fxwrap.backend import fxwrap as backend
from fxwrap.errors import FxwrapError
from fxwrap.plan import Verdict

HOSTSIM = Path(__file__).parent.parent / "examples" / "hostsim"
# Replays of a plain graph that the device's count has to show.
_CALIBRATION = 3
# Calls within which a program finds its ways: inputs that move, outputs that are kept and arenas that grow cost some.
_PATIENCE = 16


def first_gpu() -> str | None:
    """The kind of GPU that this machine has, or None."""
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name
    return None


class Skipped(Exception):
    """A check that does not apply, and why."""


@dataclass
class Findings:
    """What one check saw. It goes on after a fault: a GPU may be there only once."""

    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    results: int = 0
    bit_for_bit: int = 0
    wrong: int = 0
    largest_error: float = 0.0
    launches: int = 0
    uncounted: int = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def demand(self, held: bool, otherwise: str) -> None:
        if not held and otherwise not in self.faults:
            self.faults.append(otherwise)

    def same(self, got: Any, expected: Any, rtol: float = 1e-3, atol: float = 1e-4) -> None:
        """Compare tensors, nested ones, too; kernels that are tuned anew may add in another order.

        Elements near zero are sums of large ones: what they may differ by (``atol``) grows with the largest element.
        """
        mine, theirs = (tensors_in(value) for value in (got, expected))
        self.demand(len(mine) == len(theirs), f"{len(mine)} tensors instead of {len(theirs)}")
        for a, b in zip(mine, theirs, strict=False):
            a, b = a.detach().cpu(), b.detach().cpu()  # noqa: PLW2901
            self.results += 1
            if a.shape != b.shape or a.dtype != b.dtype:
                self.wrong += 1
                continue
            self.bit_for_bit += torch.equal(a, b)
            largest = b.double().abs().max().item() if b.numel() and not b.is_complex() else 0.0
            scale = max(1.0, largest) if math.isfinite(largest) else 1.0
            if not torch.allclose(a, b, rtol=rtol, atol=atol * scale):
                self.wrong += 1
                error = (a.double() - b.double()).abs().max().item()
                self.largest_error = max(self.largest_error, error) if math.isfinite(error) else error

    def exactly(self, got: Tensor, expected: Tensor, otherwise: str) -> None:
        self.same(got, expected)
        self.demand(torch.equal(got.cpu(), expected.cpu()), otherwise)

    def finish(self) -> None:
        """Say what comparisons and counts came to."""
        if self.launches:
            self.notes.append(f"{self.launches} launches")
        if self.uncounted:
            self.notes.append(f"{self.uncounted} launches by the counters, counted by nobody else")
        if self.wrong:
            error = f"off by up to {self.largest_error:.3g}"
            self.faults.append(f"{self.wrong} of {self.results} results WRONG ({error})")
        elif self.results:
            self.notes.append(f"{self.results} results right, {self.bit_for_bit} bit for bit")


def tensors_in(value: Any) -> list[Tensor]:
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass
class Launches:
    """Graph launches as the device counts them; None where nobody counts them."""

    count: int | None = None


@dataclass(frozen=True)
class _Counts:
    """One program's counters at one moment."""

    replays: int
    eager: Counter[str]
    recordings: Counter[str]

    @classmethod
    def of(cls, program: Any) -> _Counts:
        counters = program.counters
        return cls(counters.replays, counters.eager, counters.recordings)

    def otherwise(self, program: Any) -> Counter[str]:
        """What a program has done since then but replay, by reason."""
        now = _Counts.of(program)
        return now.eager - self.eager + (now.recordings - self.recordings)


def _programs_of(functions: list[Function] | None) -> list[Any]:
    """Of those that are compiled already; of all that is alive, where no functions are given."""
    if functions is None:
        return [report.program for report in fxwrap.report().graphs]
    found: list[Any] = []
    for fn in functions:
        with contextlib.suppress(FxwrapError):
            found += programs(fn)
    return found


@dataclass
class Place(OnDevice):
    """Where the checks run."""

    name: str
    small: bool = False
    # Whether this process sees the launches that it makes; found out at the first look.
    _sees_launches: bool | None = None

    @classmethod
    def entered(cls, name: str, small: bool = False) -> Place:
        if name == "hostsim":
            sys.path.insert(0, str(HOSTSIM))
            from hostsim.inductor import register

            register()
            # As on a GPU: the host runs ahead, and what does not wait reads too early.
            torch.get_device_module(name).set_asynchronous(True)
        return cls(name, small)

    @property
    def device(self) -> torch.device:
        return torch.device(self.name, 0)

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.name)

    @property
    def simulated(self) -> bool:
        return self.name == "hostsim"

    def size(self, here: int, on_hostsim: int) -> int:
        """A size that keeps a GPU busy, or one that a CPU does at once."""
        return on_hostsim if self.simulated or self.small else here

    # -- tensors, models, functions ---------------------------------------------------------------------

    def ours(self, fn: Function, dynamic: bool | None = None, **options: Any) -> Function:
        """Compiled with fxwrap, without its being installed."""
        chosen = {"capture": "always", **options}
        given = fn if isinstance(fn, nn.Module) else own(fn)
        return torch.compile(given, backend=backend, dynamic=dynamic, options=chosen)

    def inductors(self, fn: Function, dynamic: bool | None = None, **options: Any) -> Function:
        chosen = {**settings_of(self.name), **options}
        return torch.compile(own(fn), backend="inductor", dynamic=dynamic, options=chosen or None)

    # -- streams ----------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        self.module.synchronize()

    def current_stream(self) -> Any:
        return self.module.current_stream(self.device)

    def new_stream(self) -> Any:
        return self.module.Stream(self.device)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        found: contextlib.AbstractContextManager[Any] = self.module.stream(stream)
        return found

    def keep_busy(self, stream: Any, seconds: float) -> None:
        """Give a stream something to do, so that what does not wait for it comes too early."""
        if hasattr(self.module, "delay"):
            self.module.delay(stream, seconds)
            return
        with self.on(stream):
            if self.name == "cuda":
                torch.cuda._sleep(int(seconds * 1.5e9))
                return
            factor = torch.randn(2048, 2048, device=self.device)
            for _ in range(int(seconds * 2000)):
                factor = factor @ factor * 1e-3

    # -- graphs -----------------------------------------------------------------------------------------

    def graph_of(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph as a user makes one, and what the work returned."""
        if self.name == "cuda":
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                return graph, work()
        graph = torch.accelerator.Graph()
        with self.on(self.new_stream()), graph:
            result = work()
        return graph, result

    @contextlib.contextmanager
    def _counted(self) -> Iterator[Launches]:
        """The device's own count, as it is."""
        found = Launches()
        counters = getattr(self.module, "graph_counters", None)
        if counters is not None:
            before = counters()["replays"]
            yield found
            self.synchronize()
            found.count = counters()["replays"] - before
            return
        self.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            yield found
            self.synchronize()
        results = profile.profiler.kineto_results  # type: ignore[union-attr]
        names = Counter(event.name() for event in results.events())
        # The driver's event is there where the runtime's is not recorded.
        found.count = names["cudaGraphLaunch"] or names["cuGraphLaunch"]

    @property
    def counts_launches(self) -> bool:
        """Whether there is a count at all."""
        return self.name == "cuda" or hasattr(self.module, "graph_counters")

    def sees_launches(self) -> bool:
        """Whether the device's count tells of replays that certainly took place."""
        if not self.counts_launches:
            return False
        if self._sees_launches is None:
            static = torch.zeros(4, device=self.device)
            static.add_(1)  # its kernel is loaded before the capture
            graph, _ = self.graph_of(lambda: static.add_(1))
            self.synchronize()
            with self._counted() as launches:
                for _ in range(_CALIBRATION):
                    graph.replay()
            self._sees_launches = launches.count == _CALIBRATION
        return self._sees_launches

    @contextlib.contextmanager
    def counted(self) -> Iterator[Launches]:
        if self.sees_launches():
            with self._counted() as found:
                yield found
        else:
            yield Launches()

    def steady(
        self, findings: Findings, functions: list[Function] | None, call: Callable[[], Any], times: int = 4
    ) -> None:
        """After some calls every call is a replay of all captured partitions, and the device says so, too."""
        needed = self._settled(functions, call)
        findings.demand(needed < _PATIENCE, f"still {self._otherwise(functions, call)} after {needed} calls")
        on_device = [p for p in _programs_of(functions) if p.plan.device.type == self.name]
        findings.demand(bool(on_device), "no program on the device")
        before = [_Counts.of(program) for program in on_device]
        with self.counted() as launches:
            for _ in range(times):
                call()
        expected = 0
        for program, then in zip(on_device, before, strict=True):
            replays = program.counters.replays - then.replays
            graphs = sum(p.verdict is Verdict.CAPTURED for p in program.plan.partitions)
            expected += graphs * replays
            which, otherwise = f"{program.plan.phase} program", then.otherwise(program)
            findings.demand(graphs > 0, f"{which} without a captured partition")
            findings.demand(replays > 0 and not otherwise, f"{which}: {replays} replays, else {reasons(otherwise)}")
        findings.demand(expected > 0, "nothing was replayed")
        if launches.count is None:
            findings.demand(not self.counts_launches, "the device's count is not to be had")
            findings.uncounted += expected
        else:
            otherwise_counted = f"{launches.count} graph launches, {expected} by the counters"
            findings.demand(launches.count == expected, otherwise_counted)
            findings.launches += launches.count

    def _settled(self, functions: list[Function] | None, call: Callable[[], Any]) -> int:
        """Call until two calls in a row only replay; returns how many calls that took."""
        quiet = 0
        for done in range(_PATIENCE):
            if quiet == 2:
                return done
            quiet = 0 if self._otherwise(functions, call) else quiet + 1
        return _PATIENCE

    def _otherwise(self, functions: list[Function] | None, call: Callable[[], Any]) -> str:
        """Make a call; what programs did in it but replay."""
        before = {program: _Counts.of(program) for program in _programs_of(functions)}
        call()
        found: Counter[str] = Counter()
        for program in _programs_of(functions):
            then = before.get(program)
            found += then.otherwise(program) if then is not None else Counter({"compiling": 1})
        return reasons(found) if found else ""

    # -- memory -----------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def demand_limits(self) -> None:
        if not hasattr(self.module, "set_per_process_memory_fraction"):
            raise Skipped(f"the allocator of {self.name} knows no limit")

    @contextlib.contextmanager
    def limited_to(self, more: int) -> Iterator[None]:
        """The allocator may take so many bytes more than are allocated now."""
        limit = self.module.set_per_process_memory_fraction
        self.synchronize()
        self.empty_cache()
        total = self.module.get_device_properties(self.device).total_memory
        limit((self.module.memory_reserved(self.device) + more) / total, self.device)
        try:
            yield
        finally:
            limit(1.0, self.device)


def host_microseconds(place: Place, calls: dict[str, Callable[[], Any]], count: int = 50) -> dict[str, float]:
    """Time until a call returns, not until the device is done: the least of some medians, all sides in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(11):
        for name, call in calls.items():
            place.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            found[name].append((time.perf_counter() - begin) / count * 1e6)
    place.synchronize()
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}
