"""What all tests share: a cache of their own, fresh Dynamo state, and the comparison with Inductor."""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import functools
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from kernel_cache import kernel_cache, remove_halves

# A shell starts what runs in the background with interrupts ignored; tests raise some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What torch reads when it is imported.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernel_cache()))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch._dynamo.guards
import torch._inductor.compile_fx  # compiled code is what most tests need
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as _DTYPES
from torch._inductor.exc import InductorError

from fxwrap.backend import fxwrap as backend
from fxwrap.codegen.inductor import _EMISSION
from fxwrap.devices import registered_devices
from fxwrap.features.bill.rehearsal import RehearsalRuntime
from fxwrap.graphs.compilation import Compilation
from fxwrap.graphs.devices.cpu_graph import capturing_graph
from fxwrap.graphs.devices.runtime import DeviceRuntime, runtime_for, using_runtime
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.shared_state import SHARED
from fxwrap.graphs.policy.counters import Counters
from fxwrap.graphs.record.recording_builder import RecordingBuilder
from fxwrap.graphs.replay.recording import Recording
from fxwrap.passes.memory import lanes
from fxwrap.testing.simulated import SIMULATED

# What is tested is compiled: tests/codegen/test_caches.py has the caches.
_EMISSION["fx_graph_cache"] = False
# In these folders what compiles is not tested, and many tests have the same graph, which is compiled once.
FROM_CACHES = {Path(__file__).parent / "features" / name for name in ("bind", "train_step")}
remove_halves(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
# Torch writes a line of JSON about every step of a compilation if anybody listens, and pytest listens to all loggers.
logging.Logger.manager.loggerDict.pop("torch.__trace", None)
# How long guards take is measured at every compilation with an empty cache of the processor, for a log.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
if not hasattr(_DTYPES, "_rules_key"):
    # Before 2.15 a table of hundreds of functions is filled in anew at every operation that code is written for.
    _fill, _filled = _DTYPES.__init__, set[int]()

    def _fill_in_once(self: Any) -> None:
        rules = len(torch._inductor.utils.op_dtype_propagation_rules)
        if rules not in _filled:
            _fill(self)
            _filled.add(rules)

    _DTYPES.__init__ = _fill_in_once  # type: ignore[method-assign]
# A GPU's numbers are compared with the CPU's.
torch.backends.cudnn.allow_tf32 = False
# What is there by now stays: the garbage collector need not look at it again, every time that a test collects.
gc.collect()
gc.freeze()


# In this lane tests compile in checked mode: with 1 recordings and each tenth call are checked, with 2 each second.
_LANE = int(os.environ.get("FXWRAP_CHECKED", "0"))
CHECKED: bool | int = True if _LANE == 1 else _LANE

# Tests that count what operators and devices do, see when memory goes, or plant what checks find: checks do more, and
# hold inputs until they are done.
NOT_CHECKED = {
    "test_in_every_order_of_two_all_programs_replay_in_the_end",
    "test_strict_raises_where_what_is_to_be_captured_cannot_be",
    "test_a_failed_capture_that_is_left_as_it_is_spoils_the_next",
    "test_an_arena_that_keeps_a_pool_in_which_a_capture_has_failed_captures_nothing_more",
    "test_a_replay_that_launches_nothing_is_found_out",
    "test_a_simulated_device_in_use",
    "test_a_temporary_is_freed_at_its_last_use",
    "test_many_calls_leave_nothing_behind",
    "test_an_input_is_freed_at_its_last_use_and_its_list_is_emptied",
    "test_warnings_of_operators_come_through",
    "test_effects_keep_their_order",
    "test_only_some_partitions",
    "test_asserts_are_kept_and_made",
    "test_print_prints_at_every_call",
    "test_opaque_objects",
    "test_custom_operators_that_return_nothing",
    "test_the_chosen_configuration_reaches_every_launch",
    "test_tuning_chooses_what_inductors_wrapper_chooses",
    "test_lowering_reaches_subgraphs",
    "test_a_kind_of_kernels_of_ones_own",
    "test_ranges_of_eager_runs_natively",
    "test_a_custom_operator_may_keep_what_it_is_given",
    "test_a_training_step_of_any_size_takes_what_is_alive_at_most",
    "test_a_call_of_any_size_takes_what_is_alive_at_most",
    "test_at_some_points",
    "test_an_operator_returns_its_operand_and_does_not_say_so",
    "test_an_operator_returns_its_operand_now_and_then",
}


def _gpu() -> str | None:
    for device_type in ("cuda", "xpu"):
        module = getattr(torch, device_type, None)
        if module is not None and module.is_available():
            return device_type
    return None


@contextlib.contextmanager
def on_gpu() -> Iterator[torch.device]:
    yield torch.device(_gpu() or "cuda", 0)  # with an index, as a tensor's device has one


@contextlib.contextmanager
def on_cpu() -> Iterator[torch.device]:
    yield torch.device("cpu")


@contextlib.contextmanager
def on_simulated() -> Iterator[torch.device]:
    """The CPU with graphs that behave like hardware."""
    with using_runtime(SIMULATED):
        yield torch.device("cpu")


def out_of_tree(name: str) -> Callable[[], contextlib.AbstractContextManager[torch.device]]:
    """A device of examples/. A process can have one, and it is the accelerator there: ``pytest --device <name>``."""

    @contextlib.contextmanager
    def on_device() -> Iterator[torch.device]:
        if not hasattr(torch.accelerator, "Graph"):
            pytest.skip(f"{name} needs torch >= 2.13 with torch.accelerator.Graph; this is torch {torch.__version__}")
        sys.path.insert(0, str(EXAMPLES / name))
        with importlib.import_module(f"{name}.inductor").register():
            yield torch.device(name, 0)

    return on_device


# CUDA is the device on host memory (hostcuda/), and no GPU.
HOSTCUDA = hasattr(torch.cuda, "graph_counters")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# Where programs run. Whatever stands here is tried by every test that asks for a ``device``.
DEVICES: dict[str, Callable[[], contextlib.AbstractContextManager[torch.device]]] = {
    "cpu": on_cpu,
    "simulated": on_simulated,
    "gpu": on_gpu,
    "hostsim": out_of_tree("hostsim"),
}
IN_ANY_PROCESS = ["cpu", "simulated", pytest.param("gpu", marks=pytest.mark.gpu)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=sorted(DEVICES), help="run the tests that have a device on this one, and no others"
    )
    parser.addoption(
        "--lanes",
        type=int,
        default=1,
        help="run with so many threads, and all work in lanes that may be, whether or not it takes less time",
    )
    parser.addoption(
        "--no-simulated",
        action="store_true",
        help="do not run on the simulated device what --device hostsim runs, too (torch before 2.13 has no hostsim)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--device")
        usual = IN_ANY_PROCESS
        if metafunc.config.getoption("--no-simulated") and hasattr(torch.accelerator, "Graph"):
            usual = [usual[0], usual[2]]
        if metafunc.definition.get_closest_marker("accelerator") is not None:  # what is compared with the CPU
            usual = IN_ANY_PROCESS[2:]
        elif metafunc.definition.get_closest_marker("hardware") is not None:
            usual = IN_ANY_PROCESS[1:2]
        metafunc.parametrize("device", [chosen] if chosen else usual, indirect=True)


@pytest.hookimpl(tryfirst=True)  # marks decide afterwards
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _gpu() is None:
        skip = pytest.mark.skip(reason="no GPU on this machine")
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)
    for item in items if CHECKED else ():
        if getattr(item, "originalname", "") in NOT_CHECKED:
            item.add_marker(pytest.mark.skip(reason="a check does more than a call"))
    if config.getoption("--device"):
        others = [item for item in items if "device" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if "device" in getattr(item, "fixturenames", ())]
    if config.getoption("--device") == "hostsim":
        _leave_for_the_sweep(items)


def _leave_for_the_sweep(items: list[pytest.Item]) -> None:
    """Of the cases of tests that compile for long, every nth is a sample. The CPU runs all, and ``-m "sweep or not
    sweep"`` does on any device."""
    cases = collections.Counter[str]()
    for item in items:
        if (sample := item.get_closest_marker("every")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % sample.args[0]:
                item.add_marker("sweep")
            cases[test] += 1


@pytest.fixture(autouse=True)
def _from_caches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not FROM_CACHES.isdisjoint(request.path.parents):
        monkeypatch.setitem(_EMISSION, "fx_graph_cache", True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of a test."""
    with DEVICES[request.param]() as device:
        yield device


def freezes(device: torch.device) -> bool:
    """Whether graphs of a device freeze addresses: then outputs lie in memory of the recording's own."""
    return runtime_for(device).frozen_addresses


def assert_nothing_captures(device: torch.device) -> None:
    """A thread that captures cannot wait for its device."""
    assert capturing_graph() is None
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
        assert torch.ones(3, device=device).sum().item() == 3


@contextlib.contextmanager
def all_in_lanes(threads: int = 2) -> Iterator[None]:
    """So many threads, and work in lanes wherever it may be, whether or not that is estimated to take less time.

    Kernels have no threads of their own. (Several add up an embedding's gradient in any order, in Inductor's own
    wrapper, too.)
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    everywhere = mock.patch.multiple(lanes, _FORK=0.0, _EDGE=0.0, _WORTH=float("inf"))
    try:
        with torch._inductor.config.patch({"cpp.threads": 1}), everywhere:
            yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Several threads add up an embedding's gradient in any order, in Inductor's own wrapper, too.
    torch.set_num_threads(1)
    # On torch 2.11 a call of what is compiled with fullgraph=True sets a variable that all threads share, and puts
    # back what it found. Where calls overlap, it can stay set: then Dynamo compiles nothing behind a graph break.
    if hasattr(torch._dynamo.eval_frame, "set_eval_frame_override"):
        torch._dynamo.eval_frame.set_eval_frame_override(torch._C._dynamo.eval_frame._EvalFrameOverride.NONE)
    # Before torch 2.13, threads that call what is compiled with dynamic=True can leave Dynamo's settings changed.
    with contextlib.ExitStack() as around:
        around.enter_context(torch._dynamo.config.patch(assume_static_by_default=True))
        if (threads := request.config.getoption("--lanes")) > 1:
            around.enter_context(all_in_lanes(threads))
        yield
    torch._dynamo.reset()


def launches(device_type: str) -> int:
    """Graph launches so far, as a device that counts them counts them."""
    if device_type == "cpu":
        return SIMULATED.simulator.replays
    count = getattr(getattr(torch, device_type, None), "graph_counters", None)
    return int(count()["replays"]) if count is not None else 0


@contextlib.contextmanager
def launches_compared() -> Iterator[None]:
    """Compare, in the end, what counters say with what recordings did, and that with what devices counted.

    A recording launches all of its graphs at every replay, and at its first call where capturing runs nothing.
    """
    counted, replayed, broken_off = list[str](), list[bool](), list[bool]()  # threads append
    natively: list[tuple[ctypes.c_int64, DeviceRuntime, int]] = []
    expected: dict[str, list[int]] = {"cpu": [], "hostsim": []}
    if HOSTCUDA:
        expected["cuda"] = []
    count, capture, run = Counters.count, RecordingBuilder._capture, Recording.run
    make_unit, failed = Recording.make_unit, Recording.failed_natively

    def expect(runtime: DeviceRuntime, graphs: int) -> None:
        its_own = getattr(runtime, "simulator", SIMULATED.simulator) is not SIMULATED.simulator
        rehearsed = isinstance(runtime, RehearsalRuntime)
        if runtime.frozen_addresses and runtime.device.type in expected and not its_own and not rehearsed:
            expected[runtime.device.type].append(graphs)

    @contextlib.contextmanager
    def broken_off_noted() -> Iterator[None]:
        try:
            yield
        except BaseException:
            broken_off.append(True)  # some graphs were launched
            raise

    @functools.wraps(count)
    def noting_count(self: Counters, kind: str, reason: str = "") -> int:
        if kind == "replays":
            counted.append(reason)
        return count(self, kind, reason)

    @functools.wraps(capture)
    def noting_capture(self: RecordingBuilder, *args: Any) -> None:
        before = len(self._graphs)
        with broken_off_noted():
            capture(self, *args)
        if not self.request.runtime.runs_while_capturing:
            expect(self.request.runtime, max(0, len(self._graphs) - before))  # one that is given up has none left

    @functools.wraps(run)
    def noting_run(self: Recording, *args: Any) -> Any:
        graphs = len(self.graphs)
        with broken_off_noted():
            outputs = run(self, *args)
        expect(self.request.runtime, graphs)
        replayed.append(not self.without_graphs)
        return outputs

    @functools.wraps(make_unit)
    def noting_make_unit(self: Recording) -> str:
        if self.request.guards is not None:
            natively.append((self.request.count, self.request.runtime, len(self.graphs)))
        return make_unit(self)

    @functools.wraps(failed)
    def noting_failed(self: Recording, error: BaseException) -> None:
        broken_off.append(True)
        failed(self, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recording, "make_unit", noting_make_unit)
        patch.setattr(Recording, "failed_natively", noting_failed)
        patch.setattr(Counters, "count", noting_count)
        patch.setattr(RecordingBuilder, "_capture", noting_capture)
        patch.setattr(Recording, "run", noting_run)
        before = {device_type: launches(device_type) for device_type in expected}
        yield
    for cell, runtime, graphs in natively:
        for _ in range(cell.value):
            expect(runtime, graphs)
    for device_type, graphs in expected.items():
        now, least = launches(device_type) - before[device_type], sum(graphs)
        assert now == least or (broken_off and now > least), (
            f"{device_type} has launched {now} graphs, and recordings say that it was {least}"
        )
    if not broken_off:
        assert len(counted) == sum(replayed), f"{len(counted)} replays were counted, and there were {sum(replayed)}"


@pytest.fixture(autouse=True)
def counters_tell_the_truth(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: what programs count is what devices count, and no capture has left anything behind."""
    if request.node.get_closest_marker("launches_graphs") is not None or CHECKED:  # checks replay, too
        yield
        return
    with launches_compared():
        yield
    assert SIMULATED.simulator.is_clean()


@dataclass
class Compiled:
    """A function compiled with fxwrap, and its programs."""

    fn: Callable[..., Any]
    compilation: Compilation = field(default_factory=Compilation)
    compile_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What is tested is small; whether it is worth a capture is a test of its own.
        settings = dict(self.compile_options)
        if "mode" not in settings:
            lane = {"checked": CHECKED} if CHECKED else {}
            settings["options"] = {"capture": "always", **lane, **settings.get("options", {})}
        self.call = torch.compile(
            self.fn, backend=functools.partial(backend, compilation=self.compilation), **settings
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def programs(self) -> list[Any]:
        return self.compilation.programs

    @property
    def program(self) -> Any:
        (program,) = self.compilation.programs
        return program

    def replays(self) -> list[int]:
        return [program.counters.replays for program in self.programs]


@pytest.fixture
def compiled() -> Callable[..., Compiled]:
    """``compiled(fn, options=..., dynamic=...)`` compiles with fxwrap and keeps hold of the programs."""

    def make(fn: Callable[..., Any], **compile_options: Any) -> Compiled:
        return Compiled(fn, compile_options=compile_options)

    return make


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a (nested) result, in order."""
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def assert_same(got: Any, expected: Any) -> None:
    """Bit for bit, layout included; NaN equals NaN. Hardware's kernels are tuned anew for each compiled function, and
    round differently: there numbers are close."""
    mine, theirs = tensors_in(got), tensors_in(expected)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        assert a.stride() == b.stride()
        assert a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()
        x, y = _as_comparable(a.detach()), _as_comparable(b.detach())
        if x.is_floating_point() and x.device.type in ("cuda", "xpu") and not HOSTCUDA:
            torch.testing.assert_close(x, y, equal_nan=True)
        elif x.is_floating_point():
            assert torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) and torch.equal(x.isnan(), y.isnan())
        else:
            assert torch.equal(x, y)


def _as_comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits in a dtype that can be compared."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    narrow = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.view(torch.uint8) if narrow else tensor


def inductor(fn: Callable[..., Any], **compile_options: Any) -> Callable[..., Any]:
    """The same function through Inductor's own Python wrapper, on code of its own."""
    if isinstance(fn, torch.nn.Module):
        fn = copy.deepcopy(fn)
    # On a device out of the tree Inductor needs the settings of its registration.
    settings = {key: value for device in registered_devices().values() for key, value in device.config.items()}
    options = {**settings, **compile_options.pop("options", {})}
    return torch.compile(fn, backend="inductor", options=options or None, **compile_options)


@functools.cache
def inductor_takes_chosen_sizes() -> bool:
    """Whether Inductor's C++ kernels take a size that ``torch.sym_ite`` chooses. Torch 2.15 divides it, which sympy
    refuses for some lengths of the processor's vectors."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(torch.sym_ite(x.size(0) > 14, x.size(0), 2 * x.size(0))) * 2

    try:
        inductor(function, dynamic=True)(torch.zeros(12, 4))
    except InductorError as error:
        if "Piecewise generators" not in str(error):
            raise
        return False
    return True


@pytest.fixture
def own_arenas(monkeypatch: pytest.MonkeyPatch) -> ArenaPool:
    """Arenas that no other test has recorded in."""
    arenas = ArenaPool()
    monkeypatch.setattr(SHARED, "arenas", arenas)
    return arenas
