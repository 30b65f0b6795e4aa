"""benchmarks/speed.py: each way to call a model does what its column says, and wrong numbers fail."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import processes
import pytest
import torch

ROOT = Path(__file__).parent.parent
WAYS = ["fxwrap", "fxwrap bound", "fxwrap ahead of time"]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; it sets variables of the environment, which go again."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("speed")


def timed(tmp_path: Path, models: list[str], names: list[str]) -> tuple[dict[str, Any], str, str]:
    """Results of a short run, what it printed, and the picture's text."""
    written, drawn = tmp_path / "speed.json", tmp_path / "speed.svg"
    done = processes.run(
        "benchmarks/speed.py", "--models", *models, "--alternatives", *names, "--seconds", "0.1",
        "--device", "cpu", "--json", str(written), "--picture", str(drawn), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(written.read_text()), done.stdout, drawn.read_text()


@pytest.mark.compiler
def test_all_ways_to_call_fxwrap_beside_the_others(tmp_path: Path) -> None:
    others = ["eager", "inductor", "inductor unsafe", "aotinductor"]
    found, text, drawn = timed(tmp_path, ["x + 1", "mlp training"], [*others, *WAYS])
    inference, training = (found["models"][name] for name in ("x + 1", "mlp training"))
    assert not inference["failed"] and not training["failed"]
    assert set(inference["alternatives"]) == {*others, *WAYS, "itself"}
    assert set(inference["alternatives"]) - set(training["alternatives"]) == {*others[2:], "fxwrap ahead of time"}
    for row in (inference, training):
        timed_ways = [name for name in WAYS if name in row["alternatives"]]
        assert all(row["alternatives"][name]["difference"] == 0 for name in timed_ways)
        assert not row["not_replayed"]
        assert not any(row["alternatives"][name].get("not_replayed") for name in timed_ways)
        for name, entry in row["alternatives"].items():
            assert ("ratio" in entry) == (name != "fxwrap")
            assert set(entry.get("ratios", {})) == {*timed_ways} - {"fxwrap", name}
    entry = inference["alternatives"]["aotinductor"]
    assert found["means"]["least"]["aotinductor"] == pytest.approx(entry["ratio"][1])
    mean = found["means_of"]["fxwrap ahead of time"]["least"]["aotinductor"]
    assert mean == pytest.approx(entry["ratios"]["fxwrap ahead of time"][1])
    assert "the time of fxwrap, ahead of time, by it" in text and f"{mean:.3f}" in text
    titles = [title.text for title in ElementTree.fromstring(drawn).findall(".//{*}circle/{*}title")]
    ratio = f"{entry['ratios']['fxwrap ahead of time'][1]:.2f}"
    assert f"x + 1: fxwrap, ahead of time, takes {ratio} of AOTInductor's package" in titles


def test_onnx_runtime_in_short(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    names = ["inductor", "onnxruntime", "onnxruntime bound"]
    found, text, _ = timed(tmp_path, ["mlp"], [*names, "fxwrap ahead of time"])
    row = found["models"]["mlp"]
    assert set(row["alternatives"]) == {*names, "fxwrap ahead of time"} and not row["failed"]
    differences = [row["alternatives"][name]["difference"] for name in names[1:]]
    assert 0 < max(differences) < 1e-4 and differences[0] == differences[1]
    assert f"onnxruntime within {differences[0]:.0e}" in text


def test_what_is_not_installed_is_left_out_with_its_remedy(
    imported: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    alternatives = importlib.import_module("alternatives")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = "onnx and onnxruntime and onnxscript not installed: pip install 'fxwrap[rivals]'"
    without = {
        name: why for name in alternatives.defaults("cpu", False) if (why := alternatives.why_not(name, "cpu"))
    }
    without.pop("fxwrap bound", None)
    assert without == {"onnxruntime": reason, "onnxruntime bound": reason}


def test_a_turn_is_taken_in_its_context_alone(imported: ModuleType) -> None:
    inside, seen = [False], {"with": set[bool](), "without": set[bool]()}

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    functions = {name: lambda name=name: seen[name].add(inside[0]) for name in seen}
    turns = imported.take_turns(functions, 0.0, "cpu", time.perf_counter, {"with": context})
    assert seen == {"with": {True}, "without": {False}} and {*map(len, turns.values())} == {12}


def test_unsafe_calls_do_not_evaluate_guards(imported: ModuleType) -> None:
    added = [1]
    function = torch.compile(lambda x: x + added[0], backend="eager")
    x = torch.zeros(3)
    assert function(x).tolist() == [1, 1, 1]
    added[0] = 2
    with importlib.import_module("alternatives").ALTERNATIVES["inductor unsafe"].around():
        assert function(x).tolist() == [1, 1, 1]  # a guard would have seen the new number
    assert function(x).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("model", "name", "difference", "threads", "wrong"),
    [
        ("mlp", "fxwrap bound", 1e-12, 1, True),
        ("mlp", "fxwrap bound", 1e-12, 2, False),
        ("mlp", "aotinductor", 9e-4, 1, False),
        ("mlp", "onnxruntime", 2e-3, 1, True),
        ("mlp training", "eager", 2e-3, 1, False),
        ("mlp training", "fxwrap bound", 1e-12, 1, True),
    ],
)
def test_numbers_that_are_wrong(
    imported: ModuleType, model: str, name: str, difference: float, threads: int, wrong: bool
) -> None:
    row = {"failed": {}, "alternatives": {name: {"difference": difference}}, "threads": threads}
    found = {"device": "cpu", "models": {model: row}}
    assert list(imported.wrong_numbers(found)) == [f"{model}, {name}"] * wrong


def test_a_failure_of_fxwrap_is_wrong_and_that_of_another_is_not(imported: ModuleType) -> None:
    failed = {"fxwrap ahead of time": "StorageError", "onnxruntime": "Fail"}
    found = {"device": "cpu", "models": {"moe": {"failed": failed, "alternatives": {}, "threads": 1}}}
    assert list(imported.wrong_numbers(found)) == ["moe, fxwrap ahead of time"]
