"""The document: its schema is what the types and the guide say, and it goes to a file and back."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.inspection import document as schema
from fxwrap.inspection.memory_map import CopyData, MemoryData, PeakData, StorageData


@pytest.fixture(scope="module")
def explanation() -> fxwrap.Explanation:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return fxwrap.explain(lambda x: model(x).sum().backward(), torch.randn(3, 8), calls=4)


def _same_keys(kind: Any, found: Any) -> None:
    """A dictionary has the keys of its type, and so have those inside of it."""
    hints = typing.get_type_hints(kind)
    assert set(hints) - {"compiled"} <= set(found) <= set(hints), kind.__name__  # compiled: for another machine only
    for key, value in found.items():
        inner = [hints[key], *typing.get_args(hints[key])]
        for one in filter(typing.is_typeddict, inner):
            values = value if isinstance(value, list) else value.values() if _is_by_name(hints[key]) else [value]
            for part in values:
                if part is not None:
                    _same_keys(one, part)


def _is_by_name(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


def test_documents_are_of_their_types(explanation: fxwrap.Explanation) -> None:
    document = json.loads(json.dumps(explanation.to_dict()))
    assert document["schema"] == schema.SCHEMA
    assert [graph["phase"] for graph in document["graphs"]] == ["forward", "backward"]
    _same_keys(schema.Document, document)
    memory = document["graphs"][0]["memory"]
    for kind, found in ((MemoryData, memory), (PeakData, memory["peak"]), (StorageData, memory["storages"][0])):
        _same_keys(kind, found)
    assert set(CopyData.__annotations__) == {"what", "name", "bytes"}


def test_the_guide_names_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    for kind in (schema.Document, schema.GraphData):
        for key in set(kind.__annotations__) - {"schema", "phase", "device"}:
            if key not in ("sizes", "outside_the_plan"):
                assert f"`{key}`" in text, key
    assert f'"{schema.SCHEMA}"' in text


def test_a_report_from_a_file_says_the_same(explanation: fxwrap.Explanation, tmp_path: Path) -> None:
    explanation.save(tmp_path / "report.json")
    loaded = fxwrap.Explanation.load(tmp_path / "report.json")
    assert str(loaded) == str(explanation) and loaded.to_dict() == json.loads(json.dumps(explanation.to_dict()))
    assert not loaded.graphs and not explanation.diff(loaded)
    assert loaded.dynamo == explanation.dynamo
    loaded.to_html(tmp_path / "report.html")


@pytest.mark.parametrize("data", [{}, {"schema": "fxwrap.report/0"}, [], "text"])
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
