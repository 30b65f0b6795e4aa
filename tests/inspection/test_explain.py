"""Explanations: golden text, plain data, and that looking changes nothing."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Compiled, freezes, on_simulated

import fxwrap
from fxwrap.graphs.devices.runtime import runtime_for
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.host_graph.nodes import operator_name
from fxwrap.passes.memory.workspace import measure_workspace
from fxwrap.torch_private.functions import allocations


def _function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ w)
    return (hidden @ w).sin() @ w


GOLDEN = """\
graph 0: inference on cpu --------------------------------------------------------------------------------------------
x: float32[8, 8] on cpu (arg0_1)
w: float32[8, 8] on cpu (arg1_1)
buf0 = allocate (8, 8), strides (8, 1), float32, cpu
aten.mm.out(x, w, out=buf0)
launch cpp_fused_relu_0(buf0)
buf2 = allocate (8, 8), strides (8, 1), float32, cpu
aten.mm.out(buf0, w, out=buf2)
launch cpp_fused_sin_1(buf2)
buf4 = allocate (8, 8), strides (8, 1), float32, cpu
aten.mm.out(buf2, w, out=buf4)
return buf4

partition  verdict   launches  library calls  reason
0          captured  2         3              estimate: saves 8 us of calls for 0 us of replay and 0 us of copies

memory                         storages  bytes        lower bound  without reuse
comes and goes with each call  3         512          512          768
  of which in 2 region(s)      2         512
  of which outputs             1         256
allocated by operators         0         not planned
most is alive at mm_1 (test_explain.py, line 26: return (hidden @ w).sin() @ w): buf0 256, buf2 256
predicted on cpu: a call takes 512 bytes (allocated when needed 512, by operators 0 of it)
  256 bytes are the caller's in the end

in logs and profiles: fxwrap N inference
replays: 0
recordings: 0
eager runs: 1 (warm-up)
"""


# Where addresses are frozen.
GOLDEN_ARENA = """\
memory                  storages  bytes        lower bound  without reuse
arena on cpu            3         512          512          768
  of which outputs      1         256
allocated by operators  0         not planned
most is alive at mm_1 (test_explain.py, line 26: return (hidden @ w).sin() @ w): buf0 256, buf2 256
predicted on cpu: a call takes 512 bytes (arena 512)
  256 bytes are the caller's in the end, and 512 bytes of inputs stay where they are
"""


def test_golden_text() -> None:
    explanation = fxwrap.explain(_function, torch.randn(8, 8), torch.randn(8, 8))
    assert re.sub(r"fxwrap \d+ inference", "fxwrap N inference", str(explanation)).strip() == GOLDEN.strip()


def test_golden_text_of_an_arena() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.w = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2))

        def forward(self) -> torch.Tensor:
            return _function(self.x, self.w)

    with on_simulated(), torch.no_grad():
        assert GOLDEN_ARENA in str(fxwrap.explain(Own()))


def test_what_an_operator_frees_at_once_is_no_output() -> None:
    """The graph's pool has the result until it is copied to its place in the arena."""
    with on_simulated(), torch.no_grad():
        explanation = fxwrap.explain(lambda x: torch.cummax(x + 1, 0)[0], torch.randn(8, 8))
    storages = explanation.to_dict()["graphs"][0]["memory"]["storages"]
    assert [(one["use"], one["end"] - one["begin"]) for one in storages if one["name"] == "buf1[0]"] == [
        ("output", 2),
        ("result of an operator", 1),
    ]


def test_memory_is_predicted_before_anything_is_recorded(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    """A backward is planned with its forward: together they take what the arena is in the end, or, where there is
    none, what is allocated at one time."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).to(device)
    f: Compiled = compiled(lambda x: model(x).square().sum())

    given = [torch.ones(4, 16, device=device) for _ in range(7)]
    each = iter(given)

    def step() -> None:
        model.zero_grad()
        f(next(each)).backward()

    step()
    assert not any(program.counters.recordings for program in f.programs)
    forward, backward = fxwrap.report(f.call).graphs
    (predicted,) = forward.predicted
    assert not backward.predicted and "predicted with the forward graph" in str(fxwrap.report(f.call))
    assert f"forward and backward take {predicted.total:,} bytes" in str(fxwrap.report(f.call))
    assert predicted.outputs >= sum(p.numel() * 4 for p in model.parameters())  # gradients
    for _ in range(5):
        step()
    assert all(program.counters.replays for program in f.programs)
    if predicted.arena:
        # The loss has a block of its own, an allocator's smallest.
        assert predicted.total - 512 == predicted.arena == own_arenas.kept(device) - 4
    else:
        model.zero_grad()
        changes = allocations(step)
        assert changes is not None and device.type == "cpu"
        assert predicted.total == max(itertools.accumulate(changes)) - 4, "autograd has the loss's gradient, too"
        assert predicted.operators == 0 == own_arenas.kept(device)


def test_what_operators_allocate_is_predicted(compiled: Any, device: torch.device) -> None:
    weight = torch.randn(4, 2, 3, 3, device=device)
    f: Compiled = compiled(lambda x: F.conv2d(x, weight).sum())
    with torch.no_grad():
        f(torch.ones(1, 2, 8, 8, device=device))
    (report,) = fxwrap.report(f.call).graphs
    (predicted,) = report.predicted
    placed = freezes(device) and runtime_for(device).placements is not None  # where the plan says, in the arena
    assert (predicted.arena if placed else predicted.operators) >= 4 * 6 * 6 * 4
    assert predicted.total >= predicted.operators + predicted.arena


def test_workspace_is_measured() -> None:
    """Attention over 64 heads has workspace; a matrix product in place of the plan has none, and a custom
    operator is not run."""
    ran = []

    @torch.library.custom_op("fxwrap_explain::note", mutates_args=())
    def note(x: torch.Tensor) -> torch.Tensor:
        ran.append(x)
        return x.clone()

    note.register_fake(torch.empty_like)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return note(F.scaled_dot_product_attention(x, x, x) @ w)

    with torch.no_grad():
        explanation = fxwrap.explain(fn, torch.randn(2, 4, 32, 16), torch.randn(16, 16))
    (report,) = explanation.graphs
    calls = len(ran)
    found = measure_workspace(report.program.plan.schedule)
    measured = {node.name: nbytes for node, nbytes in found.items() if nbytes}
    nodes = report.program.plan.nodes
    assert [operator_name(nodes[name]) for name in measured] == ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert len(ran) == calls
    (attention,) = [storage for storage in report.program.plan.facts.storages if storage.node in measured][:1]
    results = 4 * (2 * 4 * 32 * 16 + 2 * 4 * 32)
    (predicted,) = report.predicted
    assert nodes[attention.node].meta["val"][0].shape == (2, 4, 32, 16)
    assert predicted.operators >= results + sum(measured.values())


def test_sizes_are_shown_in_symbols() -> None:
    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    explanation = fxwrap.explain(_function, x, torch.randn(8, 8))
    (graph,) = explanation.to_dict()["graphs"]
    rows = next(iter(set(re.findall(r"s\d+", graph["graph"]))))
    assert graph["sizes"] == {name: f"32*{rows}" for name in ("buf0", "buf2", "buf4")}
    assert f"bytes by shape: buf0 32*{rows}, buf2 32*{rows}, buf4 32*{rows}" in str(explanation)


def test_plain_data_and_page(tmp_path: Path) -> None:
    explanation = fxwrap.explain(_function, torch.randn(8, 8), torch.randn(8, 8))
    data = json.loads(json.dumps(explanation.to_dict()))
    (graph,) = data["graphs"]
    assert graph["memory"]["arena_bytes"] == 0
    assert graph["memory"]["peak_bytes"] == graph["memory"]["lower_bound_bytes"] == 512
    assert graph["memory"]["without_reuse_bytes"] == 768 and graph["memory"]["output_bytes"] == 256
    (predicted,) = graph["memory"]["predicted"]
    assert predicted == {
        "device": "cpu", "arena": 0, "operators": 0, "outside": 512, "outputs": 256, "total": 512
    }  # fmt: skip
    assert graph["partitions"][0]["verdict"] == "captured"
    work = [node for node in graph["nodes"].values() if node["operator"]]
    assert work and all(node["verdict"] == "captured" and node["partition"] == 0 for node in work)
    assert all("cpp" in kernel["source"] and kernel["launches"] for kernel in graph["kernels"])
    explanation.to_html(str(tmp_path / "page.html"))
    assert "aten.mm.out" in (tmp_path / "page.html").read_text()


def test_training_and_graph_breaks_show_every_graph() -> None:
    model = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x).relu()
        torch._dynamo.graph_break()
        loss = y.square().sum()
        loss.backward()
        return loss.detach()

    phases = [graph.phase for graph in fxwrap.explain(step, torch.randn(2, 4)).graphs]
    assert phases.count("forward") >= 1 and phases.count("backward") >= 1


def test_symbolic_sizes_are_shown_and_planned_for_the_shape_at_hand(compiled: Any) -> None:
    f: Compiled = compiled(_function, dynamic=True)
    f(torch.randn(6, 8), torch.randn(8, 8))
    f(torch.randn(6, 8), torch.randn(8, 8))
    text = str(fxwrap.report(f.call))
    assert "allocate (s" in text
    assert f.program.newest_plan.peak == 384  # two buffers of 6 * 8 floats


def test_the_newest_shape_is_shown_and_predicted(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(_function, dynamic=True)
    w = torch.randn(8, 8, device=device)
    for rows in (6, 12):
        for _ in range(3):
            f(torch.randn(rows, 8, device=device), w)
        (report,) = fxwrap.report(f.call).graphs
        (predicted,) = report.predicted
        assert report.memory is not None and report.memory.peak >= 2 * rows * 8 * 4
        assert predicted.total == report.memory.peak


def test_explaining_leaves_the_compiled_function_alone(compiled: Any) -> None:
    f: Compiled = compiled(_function)
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    for _ in range(3):
        f(x, w)
    before = f.program.counters.to_dict()
    for _ in range(12):  # more often than Dynamo compiles one function
        fxwrap.explain(f.call, x, w)
    assert f.program.counters.to_dict() == before and len(f.programs) == 1


@pytest.mark.parametrize("asked", [{"target": "cpu"}, {"measure": True}])
def test_what_a_feature_explains_is_refused_without_it(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = asked
    monkeypatch.delitem(fxwrap.hooks.EXPLAINERS, name)
    with pytest.raises(fxwrap.InputError, match=f"explain with {name}\n  expected: the feature {name}"):
        fxwrap.explain(torch.sin, torch.ones(2), **asked)


def test_stats_of_a_function_that_calls_what_dynamo_compiles_by_itself(compiled: Any) -> None:
    """Dynamo breaks the graph at an optimizer's step: the programs belong to functions of the optimizer."""
    parameters = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]
    optimizer = torch.optim.Adam(parameters, capturable=False)
    for parameter in parameters:
        parameter.grad = torch.randn(4)
    step: Compiled = compiled(lambda: optimizer.step())
    other: Compiled = compiled(lambda x: x.sin() + 1)
    for _ in range(4):
        step()
        other(torch.randn(3))
    assert [graph.program for graph in fxwrap.report(step.call).graphs] == step.programs
    assert fxwrap.stats(step.call)["programs"] == 1
    assert [graph.program for graph in fxwrap.report(other.call).graphs] == other.programs


def test_stats_and_report_of_one_function_and_of_all(compiled: Any) -> None:
    f: Compiled = compiled(torch.nn.Linear(4, 4))
    g: Compiled = compiled(lambda x: x + 1)
    with torch.no_grad():
        for _ in range(4):
            f(torch.randn(2, 4))
            g(torch.randn(3))
    assert fxwrap.stats(f.call)["replays"] == 2
    assert fxwrap.stats(f.call)["programs"] == 1
    assert fxwrap.stats()["programs"] >= 2
    assert len(fxwrap.report(g.call).graphs) == 1
    assert fxwrap.report(g.call).graphs[0].program is g.program


def test_a_function_without_tensors() -> None:
    assert "nothing was compiled" in str(fxwrap.explain(lambda: 3))


def test_nothing_is_said_of_a_function_that_dynamo_has_not_looked_at() -> None:
    def has_operations(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    with torch._dynamo.config.patch(disable=True):
        disabled = fxwrap.explain(has_operations, torch.ones(3))
    with torch.compiler.set_stance("force_eager"):
        eager = fxwrap.explain(has_operations, torch.ones(3))
    for one in (str(fxwrap.Explanation([])), str(disabled), str(eager)):
        assert "no tensor operations" not in one and "no function" in one and "TORCH_COMPILE_DISABLE" in one


def test_measuring_leaves_random_numbers_and_profilers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler of the caller does not see what is measured beside, and what was measured before is known."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.conv2d(x, w, padding=1), 0.5)

    x, w = torch.randn(2, 3, 11, 13), torch.randn(7, 3, 3, 3)
    torch.manual_seed(3)
    expected = [torch.compile(fn)(x, w) for _ in range(3)]
    torch._dynamo.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.manual_seed(3)
        first = torch.compile(fn, backend="fxwrap")
        assert torch.equal(first(x, w), expected[0])
        assert measure_workspace(fxwrap.report(first).graphs[0].program.plan.schedule)
    assert sum(event.name == "aten::_convolution" for event in profile.events()) == 1
    torch._dynamo.reset()
    torch.manual_seed(3)
    f = torch.compile(fn, backend="fxwrap")
    for value in expected:
        assert torch.equal(f(x, w), value)
        (report,) = fxwrap.report(f).graphs
        assert report.predicted  # this is what measures; calls do not
    monkeypatch.setattr("fxwrap.passes.memory.workspace.allocations", lambda run: None)
    assert measure_workspace(report.program.plan.schedule)
