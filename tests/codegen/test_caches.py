"""Programs in Inductor's caches: what is found again is what was compiled, and nothing else is found."""

from __future__ import annotations

import copy
import functools
import json
import linecache
import logging
import math
import random
import re
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from conftest import inductor_takes_chosen_sizes
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor import codecache, config
from torch._inductor.codecache import FxGraphCache, PyCodeCache
from torch._logging._internal import trace_log

import fxwrap
from fxwrap.codegen.inductor import _EMISSION
from fxwrap.codegen.store.caches import _fingerprint
from fxwrap.codegen.store.stored_program import functions
from fxwrap.errors import EmissionError
from fxwrap.graphs.program import Program
from fxwrap.host_graph.graph_json import graph_to_data
from fxwrap.host_graph.listing import list_graph
from fxwrap.host_graph.typed_json import to_data
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.partition.capturability import judge


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Both caches are on, and empty; kernels are where they always are. The folder of the entries."""
    monkeypatch.delitem(_EMISSION, "fx_graph_cache")
    monkeypatch.setattr(FxGraphCache, "_get_tmp_dir", staticmethod(lambda: str(tmp_path / "fxgraph")))
    monkeypatch.setattr(AOTAutogradCache, "_get_tmp_dir", classmethod(lambda cls: str(tmp_path / "aotautograd")))
    functorch: Any = torch._functorch.config
    sizes = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with config.patch(fx_graph_cache=True), functorch.patch(enable_autograd_cache=True), sizes:
        yield tmp_path


def hits() -> tuple[int, int]:
    """So far: of Inductor's cache, and of AOTAutograd's."""
    return counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]


def compile_anew(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="fxwrap", **options)


def programs(f: Callable[..., Any]) -> list[Program]:
    return [graph.program for graph in fxwrap.report(f).graphs]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        hidden = self.second(torch.relu(self.first(x)))
        return hidden.view(-1).softmax(0), hidden[:, ::2].exp()


def constants(x: Tensor) -> Tensor:
    return x @ torch.arange(16.0, device=x.device).diag() + torch.tensor([0.5] * 16, device=x.device)


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: (y.sin() + 1,), lambda y: (y.cos() * 2,), (x,))[0]


def drawn(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)


def data_dependent(x: Tensor) -> Tensor:
    return x[x > 0].exp().sum() * x.sin()


def undefined(x: Tensor) -> Tensor:
    rows = x.new_empty(8, 16)
    rows[:4] = x
    return rows.cumsum(0)[:4]


@torch.library.custom_op("fxwrap_caches::counted", mutates_args=())
def counted(x: Tensor) -> tuple[Tensor, int]:
    return x[x > 0].exp(), int((x > 1).sum())


@counted.register_fake
def _(x: Tensor) -> tuple[Tensor, int]:
    size = torch.library.get_ctx().new_dynamic_size
    return x.new_empty(size()), size()


def promised(x: Tensor) -> Tensor:
    with_all, number = counted(x.abs() + 1)
    torch._check(with_all.size(0) == x.numel())
    return (with_all + 1).view(4, 16).sin() @ x.t() * number


def conjugates(x: Tensor) -> list[Tensor]:
    """Lazy: views with a bit that says so, between operators that heed it."""
    z = torch.complex(x, x.sin())
    return [(z.mH @ z).abs(), torch.vdot(z[0], z[1]).real, z.conj().imag @ x.t(), z.conj()]


def sized(x: Tensor) -> list[Tensor]:
    n = x.size(0)
    sizes = round(n / 3), abs(n - 20), max(n, 5), math.trunc(math.sqrt(n)), torch.sym_ite(n > 5, n, 2 * n)
    return [torch.full((size + 1,), 1.5, device=x.device) @ x.new_ones(size + 1, 2) for size in sizes]


def run(
    f: Callable[..., Any], model: Any, shapes: tuple[int, ...], device: torch.device, training: bool
) -> list[Any]:
    found: list[Any] = []
    for step, rows in enumerate(shapes):
        torch.manual_seed(step)
        x = torch.randn(rows, 16).to(device)
        with torch.set_grad_enabled(training):
            out = f(x)
            if training:
                sum(one.square().sum() for one in out).backward()
                found += [p.grad.clone() for p in model.parameters()]
                model.zero_grad(set_to_none=True)
        found.append(torch.utils._pytree.tree_map(lambda t: t.detach().clone(), out))
    return found


PROGRAMS: dict[str, tuple[Any, bool | None, bool]] = {
    "inference": (Blocks, False, False),
    "training": (Blocks, False, True),
    "dynamic": (Blocks, True, False),
    "dynamic training": (Blocks, True, True),
    "constants": (lambda: constants, False, False),
    "drawn": (lambda: drawn, False, False),
    "data-dependent": (lambda: data_dependent, False, False),
    "promised sizes": (lambda: promised, False, False),
    "conjugates": (lambda: conjugates, False, False),
    "sizes": (lambda: sized, True, False),
    "undefined": (lambda: undefined, False, False),
}


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_found_is_what_was_compiled(device: torch.device, name: str) -> None:
    """Graph, decisions, results and replays, bit for bit."""
    if name == "sizes" and device.type == "cuda":
        pytest.skip(
            "on CUDA a hit of Inductor's cache guards on more than a miss, with any backend: two programs for one"
        )
    if name == "sizes" and not inductor_takes_chosen_sizes():
        pytest.skip("Inductor itself cannot compile it")
    make, dynamic, training = PROGRAMS[name]
    shapes = (4, 4, 4, 6, 6, 6) if dynamic else (4, 4, 4)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = make()
        model = model.to(device) if isinstance(model, nn.Module) else model
        before = hits()
        f = compile_anew(model, dynamic=dynamic)
        results = run(f, model, shapes, device, training)
        known = [(list_graph(p.plan.graph), json.dumps(to_data(p.plan)), p.counters.to_dict()) for p in programs(f)]
        # Cut again, as after a capture that failed, they are the same.
        capture_errors = {"nobody::op": "failed"}
        again = [json.dumps(to_data(p.planner.partition(p.plan.inputs, capture_errors))) for p in programs(f)]
        assert again == [plan for _, plan, _ in known]
        found.append((results, known, [after - b for after, b in zip(hits(), before, strict=True)]))
    (results, known, _), (again, known_again, hit) = found
    torch.testing.assert_close(again, results, rtol=0, atol=0)
    assert known_again == known and known
    assert hit[0] == len(known) and hit[1] >= 1


@pytest.mark.usefixtures("caches")
def test_a_stored_graph_says_all_that_analysis_needs() -> None:
    """Storages and verdicts of the graph that was read are those of the graph that was emitted."""
    for model in (Blocks(), data_dependent, promised, conjugates):
        for _ in range(2):
            f = compile_anew(model, dynamic=model is not promised)
            f(torch.randn(4, 16))
        for program in programs(f):
            plan = program.plan
            assert analyse_storages(plan.graph) == plan.facts
            # The cost model may have had partitions run eagerly that could be captured.
            again = {name: one.data_dependent for name, one in judge(plan.graph).items()}
            assert again == {name: one.data_dependent for name, one in plan.verdicts.items()}
            stored = graph_to_data(plan.graph, functions())
            assert json.loads(json.dumps(stored)) == stored


@pytest.mark.usefixtures("caches")
def test_what_is_found_knows_which_inputs_are_used_outside_of_the_tensor() -> None:
    for _ in range(2):
        before = hits()[0]
        f = compile_anew(windows)
        f(torch.randn(40)[4:20])
        (program,) = programs(f)
        assert program.plan.inputs.used_outside == {0: "aten::as_strided"}
        assert len(program.recorder.prepared.provider.whole_storage) == 1
    assert hits()[0] == before + 1


def windows(x: Tensor) -> Tensor:
    return x.as_strided((5, 4), (4, 1)).sum(1)


class Renamed(fxwrap.FxwrapCodegen):
    uuid = "one"


class Renamed2(Renamed):
    uuid = "two"


class Nameless(fxwrap.FxwrapCodegen):
    def passes(self) -> Any:
        return [lambda gm: None]


class Named(Nameless):
    uuid = "its passes, version 1"


def changes() -> dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]]:
    """Whatever makes another program of the same function, one at a time."""

    def option(**options: Any) -> Callable[[pytest.MonkeyPatch], dict[str, Any]]:
        return lambda patch: {"options": options}

    def source(patch: pytest.MonkeyPatch) -> dict[str, Any]:
        patch.setattr("fxwrap.codegen.store.caches._source_digest", lambda: "another version of fxwrap")
        return {}

    def threads(patch: pytest.MonkeyPatch) -> dict[str, Any]:
        patch.setattr(torch, "get_num_threads", lambda: 17)
        return {}

    return {
        "strict": option(strict=True),
        "warmup": option(warmup=2),
        "eager_ops": option(eager_ops=("aten::addmm",)),
        "capture": option(capture="always"),
        "min_launches": option(min_launches=2),
        "peak_budget": option(peak_budget=1.5),
        "copy_outputs": option(copy_outputs=True),
        "lanes": option(lanes=1),
        "max_memory": option(max_memory=1 << 30),
        "a predicate": option(eager_ops=(fxwrap.EagerRule("why", predicate=lambda node: None),)),
        "codegen": option(codegen=Renamed),
        "codegen's uuid": option(codegen=Renamed2),
        "passes": option(codegen=Named),
        "Inductor's option": option(max_fusion_size=3),
        "fxwrap's version": source,
        "threads": threads,
        "a setting of torch's": lambda patch: {"setting": {"realize_reads_threshold": 3}},
        "dtype": lambda patch: {"dtype": torch.float64},
        "backend": lambda patch: {"backend": "inductor"},
    }


@pytest.mark.usefixtures("caches")
def test_every_change_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is served another's entry, and each finds its own."""
    model, x = nn.Linear(16, 16), torch.randn(4, 16)

    def compile_and_run(dtype: torch.dtype = torch.float32, setting: Any = None, **settings: Any) -> list[int]:
        before = hits()
        torch._dynamo.reset()
        f = torch.compile(copy.deepcopy(model).to(dtype), **{"backend": "fxwrap", **settings})
        with torch.no_grad(), config.patch(setting or {}):
            torch.testing.assert_close(f(x.to(dtype)), model.to(dtype)(x.to(dtype)))
        model.to(torch.float32)
        return [after - b for after, b in zip(hits(), before, strict=True)]

    assert compile_and_run() == [0, 0] and compile_and_run() == [1, 1]
    for name, change in changes().items():
        with monkeypatch.context() as patch:
            settings = change(patch)
            assert compile_and_run(**settings) == [0, 0], f"{name} was served another's entry"
            assert compile_and_run(**change(patch)) == [1, 1], f"{name} does not find its own entry"


@pytest.mark.usefixtures("caches")
def test_what_is_found_is_traced_as_what_is_compiled(caches: Path) -> None:
    heard: list[tuple[str, Any]] = []
    listener = logging.Handler(logging.DEBUG)
    listener.emit = lambda record: heard.append((record.metadata.get("artifact", {}).get("name"), record))  # type: ignore
    level = trace_log.level
    trace_log.addHandler(listener)
    trace_log.setLevel(logging.DEBUG)
    try:
        found = []
        for _ in range(2):
            compile_anew(constants)(torch.randn(4, 16))
            found.append([(name, one) for name, one in heard if name in ("fxwrap_host_graph", "fxwrap_partitions")])
            heard.clear()
    finally:
        trace_log.removeHandler(listener)
        trace_log.setLevel(level)
    assert hits()[1] > 0
    compiled, restored = ([(name, re.sub(r"fxwrap \d+", "", one.payload)) for name, one in told] for told in found)
    assert restored == compiled and len(compiled) == 2
    assert all(one.metadata["frame_compile_id"] == 0 for _, one in found[1])


@pytest.mark.usefixtures("caches")
def test_a_codegen_that_changes_something_has_to_say_which_version_it_is() -> None:
    for codegen, expected in ((Nameless, [0, 0]), (Named, [1, 1])):
        for _ in range(2):
            before = hits()
            f = compile_anew(lambda x: x.sin() + 2, options={"codegen": codegen})
            f(torch.randn(8))
        assert [after - b for after, b in zip(hits(), before, strict=True)] == expected
        said = fxwrap.stats(f)["not_stored"]
        why = "what Nameless compiles: it changes passes, and has no uuid"
        assert list(said) == ([] if codegen is Named else [why])


class Elsewhere(fxwrap.FxwrapCodegen):
    """Compiles partitions itself: code, not data."""

    uuid = "elsewhere"

    def compile_partition(self, graph: Any) -> Any:
        return graph.module


@pytest.mark.usefixtures("caches")
def test_what_cannot_be_stored_is_told_and_compiled_again() -> None:
    for _ in range(2):
        before = hits()
        f = compile_anew(lambda x: x.sin() + 3, options={"codegen": Elsewhere})
        x = torch.randn(8)
        torch.testing.assert_close(f(x), x.sin() + 3)
        assert hits() == before
        assert fxwrap.stats(f)["not_stored"] == {"a partition that compile_partition compiled": 1}


class Failing(fxwrap.FxwrapCodegen):
    uuid = "failing"

    def compile_graph(self, gm: Any) -> Any:
        raise EmissionError("it cannot be emitted")


def _overlapping() -> tuple[Tensor, Tensor]:
    base = torch.arange(16.0).view(4, 4)
    return base[:3], base[1:]


def _overlapping_elsewhere() -> tuple[Tensor, Tensor]:
    base = torch.arange(16.0).view(4, 4)
    return base[1:], base[:3]


def _separate() -> tuple[Tensor, Tensor]:
    return torch.arange(16.0).view(4, 4)[:3], torch.arange(16.0).view(4, 4)[1:]


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "order", [(_overlapping, _separate), (_separate, _overlapping), (_overlapping, _overlapping_elsewhere)]
)
def test_inputs_of_one_storage_are_not_taken_for_others(order: tuple[Any, ...], training: bool) -> None:
    """Torch's own key does not tell them apart: with Inductor the second program is the first one's, and wrong."""

    def program(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        x.mul_(2)
        return (y + x).sin() @ w

    for make in (*order, *order):
        f, before = compile_anew(program, dynamic=False), hits()
        for _ in range(3):
            w = torch.eye(4, requires_grad=training)
            (x, y), (a, b) = make(), make()
            torch.testing.assert_close(f(x, y, w), program(a, b, w))
            assert torch.equal(x, a) and torch.equal(y, b)
    assert hits() != before, "the second of a kind is found"


@pytest.mark.parametrize("training", [False, True])
def test_what_falls_back_is_not_stored(caches: Path, training: bool) -> None:
    for _ in range(2):
        before = hits()
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        f = compile_anew(model, options={"codegen": Failing})
        with torch.set_grad_enabled(training), pytest.warns(UserWarning, match="it cannot be emitted"):
            out = f(x)
            torch.testing.assert_close(out, model(x))
            if training:
                out.backward(x)
        assert hits() == before and not entries(caches)
        assert sum(fxwrap.stats(f)["fallbacks"].values()) == 1 + training


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_entry_is_a_miss(caches: Path, seed: int) -> None:
    """A byte of it is another one, or its end is missing: it is made again, and the numbers are right."""
    draw = random.Random(seed)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(4, 16)
    with torch.no_grad():
        compile_anew(model)(x)
        for path in entries(caches) if seed % 3 else entries(caches)[:1]:
            content = bytearray(path.read_bytes())
            place = draw.randrange(len(content))
            content[place] ^= 1 << draw.randrange(8)
            path.write_bytes(bytes(content[:place] if draw.random() < 0.3 else content))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            f = compile_anew(model)
            torch.testing.assert_close(f(x), model(x))
    assert any("a cache entry is damaged, and is made again" in str(w.message) for w in told)
    assert fxwrap.stats(f)["fallbacks"] == {}
    before = hits()
    with torch.no_grad():
        compile_anew(model)(x)
    assert hits() != before, "it was made again, and is found"


@pytest.mark.parametrize("how", ["another text", "half of it", "no Python"])
def test_a_damaged_module_is_written_again_from_its_entry(caches: Path, how: str) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(4, 16)
    with torch.no_grad():
        compile_anew(model)(x)
        (path,) = modules_of(entries(caches))
        text = path.read_text()
        damaged = {
            "another text": text.replace("tanh", "relu"),
            "half of it": text[: len(text) // 2],
            "no Python": "}",
        }
        path.write_text(damaged[how])
        before = hits()
        torch.testing.assert_close(compile_anew(model)(x), model(x))
    assert hits() != before and path.read_text() == text


def modules_of(paths: list[Path]) -> list[Path]:
    """Where Inductor keeps the modules of entries."""
    import pickle

    from torch._inductor.codecache import get_path

    graphs = [pickle.loads(path.read_bytes()) for path in paths if "fxgraph" in path.parts]
    return [Path(get_path(graph.cache_key, "py")[2]) for graph in graphs]


def ahead_of_time(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight).sum(1)


@pytest.mark.usefixtures("caches")
def test_functions_that_are_compiled_ahead_of_time_run_from_their_file(tmp_path: Path) -> None:
    """``torch.compile(...).aot_compile``: torch's own way of saving one function, with a pickle (docs/saving.md)."""
    compiled: Any = torch.compile(ahead_of_time, fullgraph=True, backend="fxwrap")
    if not hasattr(compiled, "aot_compile"):
        pytest.skip("this torch has no aot_compile")
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    compiled.aot_compile(((x, weight), {})).save_compiled_function(str(tmp_path / "function"))
    torch._dynamo.reset()
    with open(tmp_path / "function", "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    before = fxwrap.stats()["replays"]
    for _ in range(4):
        torch.testing.assert_close(loaded(x, weight), ahead_of_time(x, weight))
    assert fxwrap.stats()["replays"] >= before + 2


@pytest.mark.parametrize("damages", [8, pytest.param(1000, marks=pytest.mark.sweep)])
def test_whatever_is_damaged_is_made_again(
    caches: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, damages: int
) -> None:
    """One or several files of the caches, and of the modules that Inductor writes beside them.

    A module of a program that was made again may be one that nobody needs any more: it stays as it is.
    """
    if device.type == "cuda":
        pytest.skip("Inductor reads its modules of Triton kernels unchecked (PyCodeCache.load), with any backend")
    usual = codecache.get_path

    def get_path(name: str, extension: str, folder: str = "") -> Any:
        return usual(name, extension, str(caches / "modules") if extension == "py" else folder)

    monkeypatch.setattr(codecache, "get_path", get_path)  # compiled kernels are where they always are
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(device)

    def compile_and_run() -> tuple[list[Any], Any]:
        PyCodeCache.cache_clear()
        f = compile_anew(model)
        return run(f, model, (4,), device, training=True), f

    expected, _ = compile_and_run()
    for seed in range(damages):
        draw = random.Random(seed)
        files, damaged = [path for path in entries(caches) if path.stat().st_size], {}
        for path in draw.sample(files, draw.choice((1, 1, 2, len(files)))):
            content = bytearray(path.read_bytes())
            place = draw.randrange(len(content))
            content[place] ^= 1 << draw.randrange(8)
            damaged[path] = bytes(content[:place] if draw.random() < 0.3 else content)
            path.write_bytes(damaged[path])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, f = compile_and_run()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda text, seed=seed: f"{seed}: {text}")
        assert fxwrap.stats(f)["fallbacks"] == {}, seed
        left = {str(path) for path, content in damaged.items() if path.exists() and path.read_bytes() == content}
        used = {module.__file__ for module in PyCodeCache.modules}
        assert used and not left & used and all(path.endswith(".py") for path in left), seed


SEVERAL = """
import json, pathlib, sys, time
import torch
import fxwrap
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache

counters.clear()  # this process is a fork of one that has compiled
FxGraphCache._get_tmp_dir = staticmethod(lambda: sys.argv[3] + "/fxgraph")
AOTAutogradCache._get_tmp_dir = classmethod(lambda cls: sys.argv[3] + "/aotautograd")
torch.set_num_threads(1)
begin, wanted = pathlib.Path(sys.argv[1]), sys.argv[2]
pathlib.Path(f"{begin}.{wanted}").touch()
while wanted != "after" and len(list(begin.parent.glob(f"{begin.name}.*"))) < 2:
    time.sleep(0.001)
found = []
for width in (8, 16, 24, 32):
    torch.manual_seed(width)
    torch._dynamo.reset()
    model, x = torch.nn.Linear(width, width, bias=False), torch.randn(4, width)  # no kernel to compile
    f = torch.compile(model, backend="fxwrap")
    f(x).backward(x)
    assert torch.equal(f(x), model(x)) and torch.equal(model.weight.grad, x.T @ x)
    found += [model.weight.grad.tolist(), fxwrap.stats(f)["fallbacks"]]
print(json.dumps([found, counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def test_two_processes_fill_one_cache_at_once(tmp_path: Path) -> None:
    script, cache = tmp_path / "several.py", tmp_path / "cache"
    script.write_text(SEVERAL)

    def begin(name: str) -> Any:
        out, err = tmp_path / f"{name}.out", tmp_path / f"{name}.err"
        return name, processes.start((str(script), str(tmp_path / "begin"), name, str(cache)), out, err)

    def result(name: str, process: Any) -> Any:
        process.join(300)
        assert process.exitcode == 0, (tmp_path / f"{name}.err").read_text()
        return json.loads((tmp_path / f"{name}.out").read_text())

    (one, *_), (two, *_) = (result(*started) for started in [begin("one"), begin("two")])
    known = entries(cache / "fxgraph") + entries(cache / "aotautograd")
    assert known and [codecache.sha256_hash(path.read_bytes()) for path in known] == [path.name for path in known]
    after, *hit = result(*begin("after"))
    assert one == two == after
    assert hit == [8, 4] and entries(cache / "fxgraph") + entries(cache / "aotautograd") == known


CARRIED = """
import json, sys
import torch
import fxwrap
from torch._dynamo.utils import counters

counters.clear()  # this process is a fork of one that has compiled
torch.set_num_threads(1)
path = sys.argv[1]
if sys.argv[2] == "load":
    torch.compiler.load_cache_artifacts(open(path, "rb").read())
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.randn(4, 8)
f = torch.compile(model, backend="fxwrap")
with torch.no_grad():
    y = f(x)
    torch.testing.assert_close(y, model(x))
if sys.argv[2] == "save":
    open(path, "wb").write(torch.compiler.save_cache_artifacts()[0])
found = [y.tolist(), len(fxwrap.report(f).graphs), fxwrap.stats(f)["fallbacks"]]
print(json.dumps([found, counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def test_a_cache_is_carried_to_another_machine(tmp_path: Path) -> None:
    """What one process has saved is all that a second one has, whose own cache is empty."""
    script = tmp_path / "carried.py"
    script.write_text(CARRIED)
    found = []
    for what in ("save", "load"):
        there = str(tmp_path / f"cache-of-{what}")  # a blank in it is too much for Inductor
        done = processes.run(str(script), str(tmp_path / "artifacts"), what, TORCHINDUCTOR_CACHE_DIR=there)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    (saved, *missed), (loaded, *hit) = found
    assert loaded == saved and (missed, hit) == ([0, 0], [1, 1])


# -- what a key has to know ----------------------------------------------------------------------------------------

_names: list[str] = []
_settings: Any = types.ModuleType("settings_of_a_user")


def _named(node: Any) -> str | None:
    return "named" if any(name in str(node.target) for name in _names) else None


class Names:
    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, node: Any) -> str | None:
        return "named" if any(name in str(node.target) for name in self.names) else None

    def has(self, node: Any) -> str | None:
        return self(node)


class SlottedNames(Names):
    __slots__ = ()


def _predicates(*names: str) -> dict[str, Any]:
    """Predicates that are alike but for what they know."""
    _settings.kept_out = names
    nested = lambda known: lambda node: _named(node)
    return {
        "an object": Names(*names),
        "a method": Names(*names).has,
        "a default": lambda node, known=names: Names(*known)(node),
        "a closure": lambda node: Names(*names)(node),
        "a partial": functools.partial(lambda known, node: Names(*known)(node), names),
        "a global": _named,
        "a global of a function in it": nested(None),
        "slots": SlottedNames(*names),
        "an attribute of a module": lambda node: Names(*_settings.kept_out)(node),
    }


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize("how", _predicates())
def test_rules_that_are_alike_but_for_what_they_know(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second keeps an operator out of captures that the first lets in; and each finds its own entry."""
    verdicts, before = list[str](), hits()
    for names in ((), ("mm",), ("mm",)):
        monkeypatch.setattr(sys.modules[__name__], "_names", list(names))
        rule = fxwrap.EagerRule("rule", predicate=_predicates(*names)[how])
        f = compile_anew(lambda x: (x @ x).sin(), options={"capture": "always", "eager_ops": [rule]})
        f(torch.randn(4, 4))
        verdicts.append(fxwrap.report(f).graphs[0].partitions[0].verdict.value)
        if len(verdicts) == 2:
            assert hits() == before
    assert verdicts == ["captured", "eager", "eager"]
    assert hits() > before


class _Versioned(fxwrap.FxwrapCodegen):
    uuid = "1"

    def passes(self) -> Any:
        return [lambda gm: None]


def _edited(seen: list[int], version: int, base: type, hook: str) -> type:
    """A subclass as it stands in one process, and in the next."""

    original = getattr(base, hook)

    def overridden(self: Any, *args: Any) -> Any:
        seen.append(version)
        return original(self, *args)

    return type("Edited", (base,), {hook: overridden})


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize("base", [_Versioned, fxwrap.FxwrapCodegen])
@pytest.mark.parametrize("hook", ["passes", "run_wrapper_ir_passes"])
def test_a_uuid_speaks_for_the_class_that_has_it_alone(base: type, hook: str) -> None:
    """What a subclass of it changes is not cached; nor is any other method of Inductor's wrapper."""
    for version in (1, 2):
        seen = list[int]()
        f = compile_anew(lambda x: (x @ x).cos(), options={"codegen": _edited(seen, version, base, hook)})
        f(torch.randn(4, 4))
        assert seen == [version]
        assert list(fxwrap.stats(f)["not_stored"]) == [f"what Edited compiles: it changes {hook}, and has no uuid"]


def test_functions_that_name_each_other_are_told_of_once() -> None:
    """Each of thirty names the next one twice: there are 2 ** 30 ways to the last."""
    space: dict[str, Any] = {}
    for number in range(30):
        exec(f"def g{number}(node): return f{number + 1}(node)", space)
        exec(f"def f{number}(node): return g{number}(node) or f{number + 1}(node)", space)
    space["f30"] = lambda node: None
    before = repr(_fingerprint(space["f0"]))
    space["f30"] = lambda node: "last"
    assert len(before) < 100_000 and repr(_fingerprint(space["f0"])) != before


# -- lines of the user's --------------------------------------------------------------------------------------

BODY = """
def {name}(x):
    y = x @ x
    return look(y.relu()) + 0.125
"""


def from_text(path: Path, text: str, name: str) -> Callable[..., Any]:
    """A function of a file with this text."""
    path.write_text(text)
    linecache.checkcache()
    scope: dict[str, Any] = {"look": torch.ops.fxwrap_caches.look}
    exec(compile(text, str(path), "exec"), scope)
    return scope[name]  # type: ignore[no-any-return]


@torch.library.custom_op("fxwrap_caches::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    return x.clone()


look.register_fake(torch.empty_like)


def lines_of(f: Callable[..., Any]) -> tuple[set[str], str]:
    """The lines that a report names: of its nodes, and in the reason of what is eager."""
    (graph,) = fxwrap.report(f).to_dict()["graphs"]
    reason = "".join(one["reason"] for one in graph["partitions"])
    return {node["user_line"] for node in graph["nodes"].values() if node["operator"]}, reason


def test_a_program_from_a_cache_has_the_names_of_the_code_that_is_compiled_now(caches: Path) -> None:
    """Of inputs and of modules, also in the reason of what is eager, and in the backward."""

    def called(graph: Any) -> set[str]:
        nodes = graph["nodes"].values()
        return {node["line"].partition(": ")[0] for node in nodes if node["kind"] == "placeholder"}

    for number, (first, second) in enumerate([("up", "act"), ("up", "act"), ("proj", "squash")]):
        model = nn.Sequential(OrderedDict([(first, nn.Linear(16, 16)), (second, nn.Tanh())]))
        f = compile_anew(model, options={"eager_ops": ["aten::addmm"]})
        before = hits()
        f(torch.randn(4, 16, requires_grad=True)).sum().backward()
        assert (hits() != before) == (number > 0)
        forward, backward = fxwrap.report(f).to_dict()["graphs"]
        assert called(forward) == {"input", f"{first}.weight", f"{first}.bias"}
        assert called(backward) >= {"input", f"{first}.weight", "grad_outputs[0]"}
        assert {node["module"] for node in forward["nodes"].values() if node["operator"]} == {first, second}
        assert forward["partitions"][0]["reason"].endswith(f"(module {first})")


def test_a_program_from_a_cache_names_the_lines_of_the_code_that_is_compiled_now(
    caches: Path, tmp_path: Path
) -> None:
    """Not of the code that was compiled first: it has moved, or belongs to another script.

    ::

        a.py, compiled     a.py, five lines more     b.py, an equal graph     c.py, the same in one line
        line 3, line 4  -> line 8, line 9            line 3, line 4           no line is known
    """
    x, options = torch.randn(4, 4), {"eager_ops": ["fxwrap_caches::look"]}

    def compiled(name: str, text: str) -> tuple[set[str], str]:
        before = hits()
        f = compile_anew(from_text(tmp_path / f"{name}.py", text, name), options=options)
        with torch.no_grad():
            f(x)
        assert (hits() != before) == (text != BODY.format(name="a"))
        return lines_of(f)

    def there(name: str, first: int) -> set[str]:
        texts = "y = x @ x", "return look(y.relu()) + 0.125"
        return {f"{tmp_path / name}.py, line {first + i}: {text}" for i, text in enumerate(texts)}

    for name, text, first in (
        ("a", BODY, 3),
        ("a", "# a comment\n" * 5 + BODY, 8),
        ("b", BODY, 3),
    ):
        lines, reason = compiled(name, text.format(name=name))
        assert lines == there(name, first)
        assert f"{tmp_path / name}.py, line {first + 1}: return look" in reason
    lines, reason = compiled("c", "def c(x): return look((x @ x).relu()) + 0.125")
    assert lines == {""} and "fxwrap_caches::look" in reason and "line" not in reason
