"""Programs in Inductor's caches: what is found again is what was compiled, and nothing else is found."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor import config
from torch._inductor.codecache import FxGraphCache

import fxwrap
from fxwrap.codegen.inductor import _EMISSION
from fxwrap.codegen.stored_program import functions
from fxwrap.graphs.program import Program
from fxwrap.host_graph.graph_json import graph_to_data
from fxwrap.host_graph.listing import list_graph
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.partition.capturability import judge
from fxwrap.plan_json import to_data


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Both caches are on, and empty; kernels are where they always are. The folder of the entries."""
    monkeypatch.delitem(_EMISSION, "fx_graph_cache")
    monkeypatch.setattr(FxGraphCache, "_get_tmp_dir", staticmethod(lambda: str(tmp_path / "fxgraph")))
    monkeypatch.setattr(AOTAutogradCache, "_get_tmp_dir", classmethod(lambda cls: str(tmp_path / "aotautograd")))
    functorch: Any = torch._functorch.config
    with config.patch(fx_graph_cache=True), functorch.patch(enable_autograd_cache=True):
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
}


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_found_is_what_was_compiled(device: torch.device, name: str) -> None:
    """Graph, decisions, results and replays, bit for bit."""
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
        again = [json.dumps(to_data(p._planner.partition({"nobody::op": "failed"}))) for p in programs(f)]
        assert again == [plan for _, plan, _ in known]
        found.append((results, known, [after - b for after, b in zip(hits(), before, strict=True)]))
    (results, known, _), (again, known_again, hit) = found
    torch.testing.assert_close(again, results, rtol=0, atol=0)
    assert known_again == known and known
    assert hit[0] == len(known) and hit[1] >= 1


@pytest.mark.usefixtures("caches")
def test_a_stored_graph_says_all_that_analysis_needs() -> None:
    """Storages and verdicts of the graph that was read are those of the graph that was emitted."""
    for model, x in ((Blocks(), torch.randn(4, 16)), (data_dependent, torch.randn(4, 16))):
        for _ in range(2):
            f = compile_anew(model, dynamic=True)
            f(x)
        for program in programs(f):
            plan = program.plan
            assert analyse_storages(plan.graph) == plan.facts
            # The cost model may have had partitions run eagerly that could be captured.
            again = {name: one.data_dependent for name, one in judge(plan.graph).items()}
            assert again == {name: one.data_dependent for name, one in plan.verdicts.items()}
            stored = graph_to_data(plan.graph, functions())
            assert json.loads(json.dumps(stored)) == stored


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
        patch.setattr("fxwrap.codegen.caches._sources", lambda: "another version of fxwrap")
        return {}

    def threads(patch: pytest.MonkeyPatch) -> dict[str, Any]:
        patch.setattr(torch, "get_num_threads", lambda: 17)
        return {}

    def torch_setting(patch: pytest.MonkeyPatch) -> dict[str, Any]:
        return {"context": config.patch(realize_reads_threshold=3)}

    return {
        "strict": option(strict=True),
        "warmup": option(warmup=2),
        "eager_ops": option(eager_ops=("aten::addmm",)),
        "capture": option(capture="always"),
        "min_launches": option(min_launches=2),
        "peak_budget": option(peak_budget=1.5),
        "copy_outputs": option(copy_outputs=True),
        "max_memory": option(max_memory=1 << 30),
        "a predicate": option(eager_ops=(fxwrap.EagerRule("why", predicate=lambda node: None),)),
        "codegen": option(codegen=Renamed),
        "codegen's uuid": option(codegen=Renamed2),
        "passes": option(codegen=Named),
        "Inductor's option": option(max_fusion_size=3),
        "fxwrap's version": source,
        "threads": threads,
        "a setting of torch's": torch_setting,
        "dtype": lambda patch: {"dtype": torch.float64},
        "backend": lambda patch: {"backend": "inductor"},
    }


@pytest.mark.usefixtures("caches")
def test_every_change_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is served another's entry, and each finds its own."""
    model, x = nn.Linear(16, 16), torch.randn(4, 16)

    def compile_and_run(dtype: torch.dtype = torch.float32, context: Any = None, **settings: Any) -> list[int]:
        before = hits()
        torch._dynamo.reset()
        f = torch.compile(copy.deepcopy(model).to(dtype), **{"backend": "fxwrap", **settings})
        with torch.no_grad(), context or contextlib.nullcontext():
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
def test_a_codegen_that_changes_something_has_to_say_which_version_it_is() -> None:
    for codegen, expected in ((Nameless, [0, 0]), (Named, [1, 1])):
        for _ in range(2):
            before = hits()
            compile_anew(lambda x: x.sin() + 2, options={"codegen": codegen})(torch.randn(8))
        assert [after - b for after, b in zip(hits(), before, strict=True)] == expected


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
