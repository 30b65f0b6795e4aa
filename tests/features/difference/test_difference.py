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


def _numbers(found: Difference) -> dict[str, tuple[Any, Any]]:
    return {one.what.removeprefix("graph 0, "): (one.before, one.after) for one in found.numbers}


def _lines(found: Difference) -> list[str]:
    """Of the only graph that has any; without places."""
    (lines,) = found.lines.values()
    return [line.partition("   [")[0] for line in lines]


def test_the_same_twice() -> None:
    """Times differ, and do not count."""
    first, second = _report(_base), _report(_base)
    second["compile_us"] += 3e6
    found = difference(first, second)
    assert not found and not found.lines and not found.numbers and [one.what for one in found.times]
    assert str(found).startswith("no difference\n") and "compiling, us: " in str(found)
    assert found.to_dict()["different"] is False and found.to_dict()["schema"] == SCHEMA


def test_what_was_added_and_not_what_it_shifted() -> None:
    before, after = _report(_base), _report(_with_more)
    found = difference(before, after)
    assert [*found.lines] == ["graph 0: inference on cpu"]
    kernel, cosine, product, was, now = _lines(found)
    assert re.fullmatch(r"\+ kernel cpp_fused_cos_\d", kernel)
    assert cosine.startswith("+ launch cpp_fused_cos_") and product.startswith("+ aten.mm.out(")
    # Of two products that are alike the first is that of before. What follows works on another one.
    assert was.startswith("- launch cpp_fused_sin_") and now.startswith("+ launch cpp_fused_sin_")
    places = [line for line in found.lines["graph 0: inference on cpu"] if "[test_difference.py, line " in line]
    assert ".cos()" in places[0]
    numbers = _numbers(found)
    assert numbers["partitions.launches"] == (2, 3) and numbers["partitions.extern_calls"] == (3, 4)
    assert numbers["aten::mm: captured"] == (3, 4) and numbers["cpp_fused_cos: captured"] == (None, 1)
    back = _lines(difference(after, before))
    assert {line[2:] for line in back if line[0] == "-"} >= {line[2:] for line in (kernel, cosine, product)}


def test_text_is_short() -> None:
    text = str(difference(_report(_base), _report(_with_more)))
    where = re.search(r"\+ launch cpp_fused_cos_\d\(buf\d\)   \[test_difference.py, line (\d+): hidden = ", text)
    assert where and "partitions.launches: 2 -> 3 (+50%)" in text and "+ kernel cpp_fused_cos_" in text

    def long(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x @ w
        return x

    found = difference(_report(_base), _report(long))
    more = re.search(r"and (\d+) lines more", str(found))
    assert more and int(more[1]) == len(_lines(found)) - 12


def test_work_on_something_else() -> None:
    found = difference(_report(_base), _report(_on_others))
    assert _lines(found) == ["- aten.mm.out(buf0, w, out=buf2)", "+ aten.mm.out(buf0, x, out=buf2)"]


def test_operands_of_the_same_operator_that_change_places() -> None:
    """Their lines are the same without names."""

    def one(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x @ x, w @ w)

    def other(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = x @ x, w @ w
        return torch.mm(b, a)

    changed = _lines(difference(_report(one), _report(other)))
    assert changed and all(line[2:].startswith("aten.mm.out(") for line in changed)


def test_a_layer_in_front_of_many_that_are_alike() -> None:
    """What follows has other names and other inputs, and is the same."""

    def model(*more: torch.nn.Module) -> torch.nn.Module:
        alike = ([torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)] for _ in range(6))
        return torch.nn.Sequential(*more, *(module for layer in alike for module in layer))

    with torch.no_grad():
        before, after = _report(model(), X), _report(model(torch.nn.LayerNorm(8)), X)
    lines = _lines(difference(before, after))
    work = [re.sub(r"\(.*", "", line) for line in lines if "launch" in line or "aten." in line]
    assert work == ["+ launch cpp_fused_native_layer_norm_0", "- aten.addmm.out", "+ aten.addmm.out"]


def test_other_layouts_of_the_same_values() -> None:
    changed = difference(_report(lambda x, w: x @ w), _report(lambda x, w: x @ w.t()))
    assert any(line.startswith("+ aten.mm.out(x, ") or "reinterpret" in line for line in _lines(changed))


def test_what_is_captured_no_more() -> None:
    before, after = _report(_base), _report(_base, fxwrap_options={"eager_ops": ("aten::mm",)})
    found = difference(before, after)
    numbers = _numbers(found)
    assert numbers["aten::mm: captured"] == (3, None)
    assert numbers["aten::mm: eager: listed in eager_ops"] == (None, 3)
    assert numbers["partitions.verdict captured"] == (1, 2) and not found.lines
    assert _numbers(difference(after, before))["aten::mm: captured"] == (None, 3)


def test_memory_of_two_shapes() -> None:
    before, after = _report(_base), _report(_base, torch.ones(64, 8), W)
    found = difference(before, after)
    peaks = tuple(one["graphs"][0]["memory"]["peak_bytes"] for one in (before, after))
    assert _numbers(found)["memory.peak_bytes"] == peaks
    assert _numbers(found)["memory.lower_bound_bytes"] == (512, 4096)
    assert "  graph 0, memory.peak_bytes: 512 -> 4,096 (+700%)" in str(found)
    shapes = [f"{sign} x: float32[{rows}, 8] on cpu (arg0_1)" for sign, rows in (("-", 8), ("+", 64))]
    assert [line for line in _lines(found) if "kernel" not in line and "launch" not in line] == shapes


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
    (new,) = difference(one, two).numbers
    assert (new.what, new.before) == ("graph 0", None), "the other one is what it was"
    assert "+ graph 0: inference on cpu, 1 launches and library calls" in str(difference(one, two))
    (gone,) = difference(two, one).numbers
    assert (gone.what, gone.after) == ("graph 0", None) and not difference(two, one).lines


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
    titles = difference(before, swapped).lines.keys()
    assert titles == {"graph 0, now 1: forward on cpu", "graph 1, now 0: backward on cpu"}


def test_kernels_by_name_and_source() -> None:
    before = _report(_base)
    after = copy.deepcopy(before)
    first, second = after["graphs"][0]["kernels"]
    text = json.dumps(after).replace(first["name"], "cpp_fused_relu_7")
    assert not difference(before, json.loads(text)), "numbers shift"
    first["source"] += "\n// more"
    second["configurations"] = [{"XBLOCK": 64}]
    lines = _lines(difference(before, after))
    how = f"+ kernel {second['name']} [{{'XBLOCK': 64}}]"
    names = first["name"], second["name"]
    assert sorted(lines) == sorted([*(f"- kernel {name}" for name in names), f"+ kernel {first['name']}", how])


def test_what_calls_were(compiled: Any) -> None:
    f: Compiled = compiled(_base)
    documents = []
    for count in (2, 3):
        for _ in range(count):
            f(X, W)
        documents.append(fxwrap.report(f.call).to_dict())
    changes = _numbers(difference(*documents))
    assert changes.pop("counters.replays") == (0, 3)
    assert changes.keys() <= {"native steps", "native steps in Python"}


def test_versions_fallbacks_and_measurements() -> None:
    before = _report(_base, calls=2)
    after = copy.deepcopy(before)
    after["versions"]["torch"] = "9.9"
    after["fallbacks"] = ["streams: a reason"]
    after["calls"][-1]["allocated_bytes"] = {"cpu": 10**6}
    found = difference(before, after)
    assert found and not found.lines
    assert set(found.numbers) == {
        Change("versions.torch", torch.__version__, "9.9"),
        Change("fallbacks streams: a reason", None, 1),
        Change("calls.allocated_bytes.cpu", before["calls"][-1]["allocated_bytes"]["cpu"], 10**6),
    }
    assert f"versions.torch: {torch.__version__} -> 9.9" in str(found) and "+ fallbacks streams: a reason: 1" in str(
        found
    )
    assert json.loads(json.dumps(found.to_dict()))["numbers"][0] == {
        "what": "versions.torch",
        "before": torch.__version__,
        "after": "9.9",
    }


@pytest.mark.parametrize("wrong", [{}, {"schema": "fxwrap.report/0"}, [], "text"])
def test_what_is_no_report(wrong: Any) -> None:
    with pytest.raises(fxwrap.FxwrapError, match="not a report"):
        difference(_report(_base), wrong)
