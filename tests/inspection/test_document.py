"""The document: its schema is what the types and the guide say, and it goes to a file and back."""

from __future__ import annotations

import json
import sys
import threading
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.host_graph.typed_json import from_data
from fxwrap.inspection import document as schema
from fxwrap.plan import Partition


@pytest.fixture(scope="module")
def explanation() -> fxwrap.Explanation:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return fxwrap.explain(lambda x: model(x).sum().backward(), torch.randn(3, 8), calls=4)


def test_documents_are_written_whole_and_read_again(explanation: fxwrap.Explanation) -> None:
    document = json.loads(json.dumps(explanation.to_dict()))
    assert document["schema"] == schema.SCHEMA
    assert [graph["phase"] for graph in document["graphs"]] == ["forward", "backward"]
    assert set(document) == {field.name for field in fields(schema.Document)}
    assert fxwrap.Explanation.from_dict(document).to_document() == explanation.to_document()
    assert set(document["graphs"][0]["partitions"][0]) == {
        "index", "verdict", "nodes", "reason", "device", "launches", "extern_calls", "benefit_us"
    }  # fmt: skip
    memory = document["graphs"][0]["memory"]
    assert set(memory["predicted"][0]) == {"device", "arena", "operators", "outside", "outputs", "total"}
    assert "bytes" in memory["storages"][0] and "size" not in memory["storages"][0]


def test_a_report_of_a_device_that_this_process_does_not_know(explanation: fxwrap.Explanation) -> None:
    """Its name is enough. In a plan it would be an error."""
    text = json.dumps(explanation.to_dict()).replace('"cpu"', '"vendor:0"')
    report = fxwrap.Explanation.from_dict(json.loads(text))
    assert "forward on vendor:0" in str(report) and json.dumps(report.to_dict()) == text
    (partition, *_) = json.loads(text)["graphs"][0]["partitions"]
    with pytest.raises(ValueError, match=r"device: .*vendor"):
        from_data(Partition, partition)


def test_triton_is_among_the_versions_if_kernels_are_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="9.8.7"))  # type: ignore[arg-type]
    assert schema.versions(with_triton=True)["triton"] == "9.8.7"
    assert "triton" not in schema.versions(with_triton=False)


def test_a_report_of_an_older_version_is_read(explanation: fxwrap.Explanation) -> None:
    """It does not say of what and of when it is."""
    document = explanation.to_dict()
    for key in ("function", "when"):
        del document[key]
    del document["graphs"][0]["memory"]["kept_bytes"]
    for kernel in document["graphs"][0]["kernels"]:
        del kernel["compiled"]
    assert not fxwrap.Explanation.from_dict(document).diff(explanation)


def test_the_guide_names_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    for kind in (schema.Document, schema.GraphData):
        for key in {field.name for field in fields(kind)} - {"schema", "phase", "device"}:
            assert f"`{key}`" in text, key
    assert f'"{schema.SCHEMA}"' in text


def test_a_report_from_a_file_says_the_same(explanation: fxwrap.Explanation, tmp_path: Path) -> None:
    explanation.save(tmp_path / "report.json")
    loaded = fxwrap.Explanation.load(tmp_path / "report.json")
    assert str(loaded) == str(explanation) and loaded.to_dict() == json.loads(json.dumps(explanation.to_dict()))
    assert not loaded.graphs and not explanation.diff(loaded)
    assert loaded.dynamo == explanation.dynamo
    loaded.to_html(tmp_path / "report.html")


def test_what_is_known_besides_graphs_is_read_too(tmp_path: Path) -> None:
    """Keys that a later version added are passed over."""
    document = json.loads(json.dumps(fxwrap.explain(_generator, torch.ones(2)).to_dict()))
    document["dynamo"]["skipped"][0]["later"] = document["dynamo"]["later"] = document["later"] = 1
    document["fallbacks"], document["not_stored"] = ["one reason"], ["another"]
    (tmp_path / "report.json").write_text(json.dumps(document))
    loaded = fxwrap.Explanation.load(tmp_path / "report.json")
    assert loaded.fallbacks == ["one reason"] and loaded.not_stored == ["another"]
    assert [one.function for one in loaded.dynamo.skipped] == ["_generator"]


def _generator(x: torch.Tensor) -> Any:
    yield x


@pytest.mark.parametrize(
    "path",
    [
        "versions",
        "dynamo.seen",
        "calls.0.us",
        "graphs.0.nodes",
        "graphs.0.partitions.0.verdict",
        "graphs.0.kernels.0.source",
        "graphs.0.stages.0.us",
        "graphs.0.memory.peak.step",
        "graphs.0.memory.storages.0.bytes",
        "graphs.0.memory.predicted.0.arena",
        "graphs.0.counters.replays",
    ],
)
def test_damage_is_told_before_anything_is_read(explanation: fxwrap.Explanation, path: str) -> None:
    document: Any = json.loads(json.dumps(explanation.to_dict()))
    *names, last = path.split(".")
    holder = document
    for name in names:
        holder = holder[int(name) if isinstance(holder, list) else name]
    holder[last] = b"something else"
    with pytest.raises(fxwrap.InputError, match=f"{last}: .*b'something"):
        fxwrap.Explanation.from_dict(document)
    del holder[last]
    with pytest.raises(fxwrap.InputError, match=f"without {last}"):
        fxwrap.Explanation.from_dict(document)


@pytest.mark.parametrize("data", [b"hello", b"\xff\xfe", b"", b"[" * 10**5], ids=["text", "bytes", "empty", "deep"])
def test_what_is_no_json(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(data)
    with pytest.raises(fxwrap.InputError, match=r"other\.json is no report"):
        fxwrap.Explanation.load(tmp_path / "other.json")


@pytest.mark.parametrize("number", [-1, 7])
def test_there_is_no_such_graph(explanation: fxwrap.Explanation, number: int, tmp_path: Path) -> None:
    with pytest.raises(fxwrap.InputError, match=f"number {number}"):
        explanation.memory_picture(tmp_path / "memory.svg", number)
    assert not (tmp_path / "memory.svg").exists()


@pytest.mark.parametrize("data", [{}, {"schema": "fxwrap.report/0"}, {"schema": schema.SCHEMA}, [], "text"])
def test_what_is_no_report(data: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(data))
    with pytest.raises(fxwrap.InputError, match=r"fxwrap\.report/1"):
        fxwrap.Explanation.load(tmp_path / "other.json")


def test_calls_are_measured_and_nothing_is_before_the_second(explanation: fxwrap.Explanation) -> None:
    document = explanation.to_dict()
    assert len(document["calls"]) == 3
    assert all(call["us"] > 0 and call["allocated_bytes"]["cpu"] > 0 for call in document["calls"])
    (predicted,) = document["graphs"][0]["memory"]["predicted"]
    assert document["graphs"][0]["memory"]["predicted_with"] == "backward"
    assert document["calls"][-1]["allocated_bytes"]["cpu"] == predicted["total"] + 4  # the loss's gradient
    assert not fxwrap.explain(torch.sin, torch.randn(3)).to_dict()["calls"]


def test_stages_tell_their_time(explanation: fxwrap.Explanation) -> None:
    graph = explanation.to_dict()["graphs"][0]
    stages = {one["stage"]: one for one in graph["stages"]}
    assert {"aliasing", "dependencies", "capturability", "cut", "cost model", "memory"} <= set(stages)
    assert all(one["runs"] >= 1 and one["us"] > 0 for one in stages.values())
    assert sum(one["us"] for one in stages.values()) < explanation.to_dict()["compile_us"]


def test_recordings_tell_why_and_for_which_sizes() -> None:
    fast = torch.compile(lambda x: (x @ x.T).relu().sum(), backend="fxwrap", dynamic=True)
    for rows in (2, 2, 2, 3, 3, 3):
        fast(torch.randn(rows, 4))
    (graph,) = fxwrap.report(fast).to_dict()["graphs"]
    assert [one["why"] for one in graph["recordings"]] == ["first", "new shape"]
    assert [list(one["sizes"].values()) for one in graph["recordings"]] == [[2, 4], [3, 4]]
    text = str(fxwrap.report(fast))
    assert "new shape" in text and "=3, " in text


def test_reports_are_made_while_another_thread_records() -> None:
    """What it appends to is looked at as it is at one moment."""
    fast = torch.compile(lambda x: x.sin() + 1, backend="fxwrap")
    for _ in range(3):
        fast(torch.randn(3))
    (graph,) = fxwrap.report(fast).graphs
    stages, (made,) = graph.program.stages, graph.program.history
    assert isinstance(stages, dict)
    usual = dict(stages)
    stop, interval = threading.Event(), sys.getswitchinterval()

    def record() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            graph.program.history.append(made)
            stages[f"stage {number % 300}"] = 1, 1.0
            if number % 300 == 0:
                for name in stages.keys() - usual:
                    del stages[name]

    thread = threading.Thread(target=record)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(100):
            assert fxwrap.stats(fast)["replays"] == 1
            assert len(fxwrap.report(fast).to_dict()["graphs"][0]["recordings"]) > 0
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_counting_makes_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked often, and a document takes milliseconds."""
    fast = torch.compile(lambda x: x.sin() + 1, backend="fxwrap")
    fast(torch.randn(3))
    monkeypatch.setattr(fxwrap.Explanation, "to_document", None)
    assert fxwrap.stats(fast)["eager"] == {"warm-up": 1}
