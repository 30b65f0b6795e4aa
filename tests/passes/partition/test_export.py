"""Partitions as graphs of their own: their signature, run alone, and compiled by somebody else."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import assert_same, inductor, on_simulated, tensors_in

import fxwrap
from fxwrap.plan import PartitionGraph, ProgramPlan, Verdict

pytestmark = pytest.mark.compiler


def handing_over(wrap: Callable[[PartitionGraph], Any]) -> tuple[type, list[PartitionGraph]]:
    """A codegen whose partitions are compiled by ``wrap``, and the partitions it got."""
    graphs: list[PartitionGraph] = []

    class Codegen(fxwrap.FxwrapCodegen):
        def compile_partition(self, graph: PartitionGraph) -> Any:
            graphs.append(graph)
            return wrap(graph)

    return Codegen, graphs


def split_by_item(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).relu()
    n = (y > 0).sum().item()
    return (y * n) @ w


def writes_its_input(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w
    x.add_(1)
    return y.softmax(-1), y.argmax(-1)


def returns_tuples(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    values, indices = torch.ops.aten.topk(x @ w, 2)
    return values.sum() + indices.sum()


CASES = [split_by_item, writes_its_input, returns_tuples]


@pytest.fixture(autouse=True)
def scalars() -> Any:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


#   mm, relu+sum   |   item, mul   |   mm
#     captured           eager       captured
def test_signature(compiled: Any) -> None:
    """Memory that two partitions touch comes into both; who writes it says so."""
    codegen, graphs = handing_over(lambda graph: None)
    f = compiled(split_by_item, options={"codegen": codegen})
    f(torch.randn(4, 4), torch.randn(4, 4))
    assert [g.partition.verdict for g in graphs] == [Verdict.CAPTURED, Verdict.EAGER, Verdict.CAPTURED]
    shown = [
        (
            list(g.signature.inputs),
            [g.signature.inputs[i] for i in g.signature.mutated],
            list(g.signature.outputs),
        )
        for g in graphs
    ]
    product, count, result = shown[0][0][2], shown[0][0][3], shown[2][1][0]
    assert shown[0] == (["arg0_1", "arg1_1", product, count], [product, count], [])
    assert shown[1] == ([count, product], [product], [])
    assert shown[2] == ([product, "arg1_1", result], [result], [])


def test_what_leaves_and_what_dies_inside(compiled: Any, device: torch.device) -> None:
    """An operator's own result leaves as an output; memory that nobody else touches is allocated inside."""
    codegen, graphs = handing_over(lambda graph: None)

    def g(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten.mode((x @ w).relu() @ w)[0]
        return torch.nonzero(y).sum() + y.sum()

    f = compiled(g, options={"codegen": codegen}, dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f(torch.randn(4, 4, device=device), torch.randn(4, 4, device=device))
    first = graphs[0].signature
    plan = f.program.plan
    assert [plan.nodes[name].target for name in first.outputs] == [torch.ops.aten.mode.default]
    assert len(first.temporaries) == 2
    assert all(plan.maker(index).target is torch.empty_strided for index in first.temporaries)
    assert first.symbols and all(plan.nodes[first.inputs[i]].meta["val"] > 0 for i in first.symbols)


@pytest.mark.parametrize("planted", [False, True])
def test_what_a_partition_is_given_shares_no_bytes(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Whoever compiles it may write a result before the last input is read.

    ::

        mm        x, w -> y       x dies here ...
        relu+sum  y -> y, n       ... and n could lie in its bytes, if nodes ran one after the other
    """
    spans: list[list[tuple[int, int]]] = []
    if planted:
        lifetimes: Any = ProgramPlan.lifetimes.func
        without = functools.partial(dataclasses.replace, compiled={})
        monkeypatch.setattr(ProgramPlan, "lifetimes", property(lambda plan: lifetimes(without(plan))))

    def note(graph: PartitionGraph) -> Any:
        def run(*inputs: Any) -> Any:
            tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
            spans.append(sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors))
            return graph.module(*inputs)

        return run

    codegen, _ = handing_over(note)
    with on_simulated():
        f = compiled(split_by_item, options={"codegen": codegen})
        w = torch.randn(4, 4)
        for _ in range(4):
            f(torch.randn(4, 4), w)
    if planted:
        refused = [
            reason for reason in f.program.counters.eager if reason.startswith("plan: arg0_1 and buf1 overlap")
        ]
        assert refused and not f.program.counters.replays
        return
    assert f.program.counters.replays and len(spans) > 3
    assert all(end <= begin for one in spans for (_, end), (begin, _) in itertools.pairwise(one))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_partitions_run_alone(compiled: Any, device: torch.device, case: Any, dynamic: bool) -> None:
    """Every partition is run as a GraphModule in place of fxwrap's own function: the same numbers, still replayed."""
    codegen, graphs = handing_over(lambda graph: graph.module)
    f = compiled(case, options={"codegen": codegen}, dynamic=dynamic)
    reference = inductor(lambda x, w: case(x, w), dynamic=dynamic)
    w = torch.randn(4, 4, device=device)
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        other = x.clone()
        assert_same(f(x, w), reference(other, w))
        assert_same(x, other)
    assert f.program.counters.replays == 2
    assert len(f.program.plan.compiled) == len(graphs) > 0
    assert str(graphs[0]).startswith("graph():")


def test_training(compiled: Any) -> None:
    codegen, graphs = handing_over(lambda graph: graph.module)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    f = compiled(model, options={"codegen": codegen})
    reference = torch.compile(lambda x: model(x), backend="inductor")
    for _ in range(4):
        x = torch.randn(4, 8)
        gradients = []
        for g in (f, reference):
            model.zero_grad()
            g(x).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert len(graphs) == 2 and all(f.replays())


def test_only_some_partitions(compiled: Any) -> None:
    """Those for which the hook returns None run as usual."""
    calls = []

    def wrap(graph: PartitionGraph) -> Any:
        if graph.partition.index != 2:
            return None

        def call(*inputs: Any) -> Sequence[Any]:
            calls.append(len(inputs))
            return torch.fx.Interpreter(graph.module).run(*inputs)

        return call

    codegen, _ = handing_over(wrap)
    f = compiled(split_by_item, options={"codegen": codegen})
    w = torch.randn(4, 4)
    for _ in range(4):
        x = torch.randn(4, 4)
        torch.testing.assert_close(f(x, w), split_by_item(x, w))
    assert len(calls) == 4


def test_an_error_of_the_other_compiler_is_the_users(compiled: Any) -> None:
    def wrap(graph: PartitionGraph) -> Any:
        raise ValueError("the other compiler has no relu")

    codegen, _ = handing_over(wrap)
    with pytest.raises(Exception, match="the other compiler has no relu"):
        compiled(split_by_item, options={"codegen": codegen, "strict": True})(torch.randn(4, 4), torch.randn(4, 4))


def test_memory_inside_is_left_to_the_other_compiler(compiled: Any) -> None:
    """What lives and dies in a partition that somebody else compiled is not in the plan; its outputs are."""
    peaks = []
    for wrap in (lambda graph: None, lambda graph: graph.module):
        codegen, _ = handing_over(wrap)
        f = compiled(lambda x, w: (x @ w).relu() @ w, options={"codegen": codegen})
        for _ in range(3):
            f(torch.randn(64, 64), torch.randn(64, 64))
        peaks.append(f.program.newest_plan.peak)
    assert peaks == [2 * 64 * 64 * 4, 64 * 64 * 4]
    assert tensors_in(f(torch.randn(64, 64), torch.randn(64, 64)))
