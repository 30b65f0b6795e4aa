"""What changed between two reports: all of it, and nothing that only looks changed."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled

import fxwrap
from fxwrap.features.difference.difference import SCHEMA, Change, Difference

X, W = torch.ones(8, 8), torch.ones(8, 8)


def _base(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ w)
    return (hidden @ w).sin() @ w


def _with_more(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ w)
    hidden = (hidden @ w).cos()
    return (hidden @ w).sin() @ w


def _on_others(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ w)
    return (hidden @ x).sin() @ w


def _report(fn: Callable[..., Any], *args: Any, **how: Any) -> dict[str, Any]:
    return json.loads(json.dumps(fxwrap.explain(fn, *(args or (X, W)), **how).to_dict()))


def difference(before: dict[str, Any], after: dict[str, Any]) -> Difference:
    return fxwrap.Explanation.from_dict(before).diff(fxwrap.Explanation.from_dict(after))


def _by_name(changes: tuple[Change, ...]) -> dict[str, tuple[Any, Any]]:
    return {one.what: (one.before, one.after) for one in changes}


def _only_graph(found: Difference) -> Any:
    (graph,) = found.graphs
    return graph


def test_the_same_twice() -> None:
    """Times differ, and do not count."""
    first, second = _report(_base), _report(_base)
    second["compile_us"] += 3e6
    found = difference(first, second)
    assert not found and not found.graphs and [one.what for one in found.times]
    assert str(found).startswith("no difference\n") and "compiling: " in str(found)
    assert found.to_dict()["different"] is False and found.to_dict()["schema"] == SCHEMA


def test_what_was_added_and_not_what_it_shifted() -> None:
    before, after = _report(_base), _report(_with_more)
    graph = _only_graph(difference(before, after))
    assert graph.title == "graph 0: inference on cpu" and (graph.before, graph.after) == (0, 0)
    new = [one.after for one in graph.lines if one.before is None]
    assert len(new) == 2 and {one.split("(")[0].rstrip("_0123456789") for one in new} == {
        "aten.mm.out", "launch cpp_fused_cos"
    }  # fmt: skip
    assert all(
        "test_difference.py, line" in one.what and ".cos()" in one.what for one in graph.lines if not one.before
    )
    # The line behind it works on what is new.
    (on_another,) = (one for one in graph.lines if one.before)
    assert on_another.before.startswith("aten.mm.out(buf0,") and on_another.after.startswith("aten.mm.out(buf2,")
    assert graph.others == (0, 1), "one allocation: two of four take turns, and the names of all others shift"
    (kernel,) = graph.kernels
    assert kernel.what.startswith("kernel cpp_fused_cos_") and kernel.before is None and "cos" in kernel.after
    assert _by_name(graph.partitions) == {"launches": (2, 3), "library calls": (3, 4)}
    back = _only_graph(difference(after, before))
    assert [one.before for one in back.lines if one.after is None] == new and back.others == (1, 0)
    assert [(one.before, one.after) for one in back.kernels] == [(kernel.after, None)]


def test_text_is_short() -> None:
    text = str(difference(_report(_base), _report(_with_more)))
    where = re.search(r"\+ launch cpp_fused_cos_\d\(buf\d\)   \[test_difference.py, line (\d+): hidden = ", text)
    assert where and "  launches: 2 -> 3 (+50%)" in text and "+ kernel cpp_fused_cos_" in text

    def long(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x @ w
        return x

    found = difference(_report(_base), _report(long))
    more = re.search(r"and (\d+) lines more", str(found))
    lines = sum((one.before is not None) + (one.after is not None) for one in _only_graph(found).lines)
    assert more and int(more[1]) == lines - 12


def test_work_on_something_else() -> None:
    found = difference(_report(_base), _report(_on_others))
    (change,) = _only_graph(found).lines
    assert change.before == "aten.mm.out(buf0, w, out=buf2)"
    assert change.after == "aten.mm.out(buf0, x, out=buf2)"
    assert _only_graph(found).others == (0, 0) and not _only_graph(found).kernels


def test_what_is_captured_no_more() -> None:
    before, after = _report(_base), _report(_base, fxwrap_options={"eager_ops": ("aten::mm",)})
    graph = _only_graph(difference(before, after))
    changes = _by_name(graph.partitions)
    assert changes["3 x aten::mm"] == ("captured", "eager: listed in eager_ops")
    assert changes["captured partitions"][0] == 1 and changes["eager partitions"][0] == 0
    assert not graph.lines and not graph.kernels
    assert _by_name(_only_graph(difference(after, before)).partitions)["3 x aten::mm"][1] == "captured"


def test_memory_of_two_shapes() -> None:
    before, after = _report(_base), _report(_base, torch.ones(64, 8), W)
    graph = _only_graph(difference(before, after))
    assert _by_name(graph.memory)["peak"] == tuple(
        one["graphs"][0]["memory"]["peak_bytes"] for one in (before, after)
    )
    assert _by_name(graph.memory)["lower bound"] == (512, 4096)
    assert "  peak: 512 bytes -> 4,096 bytes (+700%)" in str(difference(before, after))
    shapes = (f"x: float32[{rows}, 8] on cpu (arg0_1)" for rows in (8, 64))
    assert graph.lines == (Change("", *shapes),)


def test_names_of_symbols_and_lines_of_the_user_may_shift() -> None:
    x = torch.ones(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    before = _report(_base, x, W)
    (symbol,) = set(re.findall(r"\bs\d+\b", before["graphs"][0]["graph"]))
    text = (
        json.dumps(before).replace(symbol, "s901").replace("test_difference.py, line ", "test_difference.py, line 9")
    )
    after = json.loads(text)
    for one in (before, after):
        for kernel in one["graphs"][0]["kernels"]:
            kernel["source"] = ""
    assert not difference(before, after)
    assert difference(_report(_base, torch.ones(6, 8), W), before)


def test_graphs_that_went_and_came() -> None:
    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return _base(y, w)

    one, two = _report(_base), _report(broken)
    assert [len(report["graphs"]) for report in (one, two)] == [1, 2]
    (new,) = difference(one, two).graphs
    assert (new.before, new.after) == (None, 0), "the other one is what it was"
    assert "added (1 launches and library calls)" in str(difference(one, two))
    (gone,) = difference(two, one).graphs
    assert (gone.before, gone.after) == (0, None) and gone


def test_forward_and_backward_are_compared_with_their_like(compiled: Any) -> None:
    documents = []
    for size in (4, 5):
        f: Compiled = compiled(torch.nn.Sequential(torch.nn.Linear(8, size), torch.nn.ReLU()))
        f(torch.ones(3, 8)).sum().backward()
        documents.append(fxwrap.report(f.call).to_dict())
    before, after = documents
    assert [one["phase"] for one in before["graphs"]] == ["forward", "backward"]
    swapped = {**after, "graphs": after["graphs"][::-1]}
    assert not difference(after, {**swapped, "graphs": swapped["graphs"][::-1]})
    titles = {one.title: (one.before, one.after) for one in difference(before, swapped).graphs}
    assert titles["graph 0, now 1: forward on cpu"] == (0, 1)
    assert titles["graph 1, now 0: backward on cpu"] == (1, 0)


def test_kernels_by_name_and_source() -> None:
    before = _report(_base)
    after = copy.deepcopy(before)
    first, second = after["graphs"][0]["kernels"]
    text = json.dumps(after).replace(first["name"], "cpp_fused_relu_7")
    assert not difference(before, json.loads(text)), "numbers shift"
    first["source"] += "\n// more"
    second["configurations"] = [{"XBLOCK": 64}]
    changes = _only_graph(difference(before, after)).kernels
    assert [one.what for one in changes] == [f"kernel {first['name']}", f"configuration of {second['name']}"]
    assert f"kernel {first['name']}: another source (2 lines new, 0 gone)" in str(difference(before, after))
    assert "configuration of" in str(difference(before, after)) and "'XBLOCK': 64" in str(difference(before, after))


def test_what_calls_were(compiled: Any) -> None:
    f: Compiled = compiled(_base)
    documents = []
    for count in (2, 3):
        for _ in range(count):
            f(X, W)
        documents.append(fxwrap.report(f.call).to_dict())
    changes = _by_name(_only_graph(difference(*documents)).counters)
    assert changes["replays"] == (0, 3) and set(changes) <= {
        "replays", "native steps of a replay", "of them in Python"
    }  # fmt: skip


def test_versions_fallbacks_and_measurements() -> None:
    before = _report(_base, calls=2)
    after = copy.deepcopy(before)
    after["versions"]["torch"] = "9.9"
    after["fallbacks"] = ["streams: a reason"]
    after["calls"][-1]["allocated_bytes"] = {"cpu": 10**6}
    found = difference(before, after)
    assert found and not found.graphs
    assert found.versions == (Change("torch", torch.__version__, "9.9"),)
    assert found.other[0] == Change("fallbacks", None, "streams: a reason")
    assert found.other[1].after == 10**6 and "on cpu" in found.other[1].what
    assert f"torch: {torch.__version__} -> 9.9" in str(found) and "+ fallbacks: streams: a reason" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["versions"][0]["after"] == "9.9"


@pytest.mark.parametrize("wrong", [{}, {"schema": "fxwrap.report/0"}, [], "text"])
def test_what_is_no_report(wrong: Any) -> None:
    with pytest.raises(fxwrap.FxwrapError, match="not a report"):
        difference(_report(_base), wrong)
