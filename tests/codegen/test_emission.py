"""Emission: what Inductor's wrapper would run becomes a host graph that means the same."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Graph, GraphModule

import fxwrap
from fxwrap import pipeline
from fxwrap.codegen.emit.statements import StatementReader, assigned_names
from fxwrap.codegen.store.stored_program import functions
from fxwrap.errors import EmissionError, PipelineError, causes
from fxwrap.host_graph.arithmetic import is_arithmetic, select
from fxwrap.host_graph.listing import list_graph
from fxwrap.host_graph.nodes import Kind, check, kind_of, launch
from fxwrap.plan import PartitionGraph

# -- reading statements --------------------------------------------------------------------------------


def _read(text: str, **names: Any) -> tuple[Graph, dict[str, Any]]:
    graph = Graph()
    for name in ("a", "b"):
        names.setdefault(name, graph.placeholder(name))
    reader = StatementReader(
        graph, names, {"torch": torch, "aten": torch.ops.aten}, {}, lambda node, _: node, lambda *_: None
    )
    reader.run(text)
    return graph, names


def _calls(graph: Graph) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(node.target, node.args) for node in graph.nodes if node.op == "call_function"]


def test_every_function_that_this_torch_prints_is_arithmetic() -> None:
    """In expressions of sizes. A torch that prints a new one shows here, before it shows as a fallback."""
    from torch.utils._sympy.printers import PythonPrinter

    printed = set(re.findall(r'f"-?([a-z_0-9.]+)\(', inspect.getsource(PythonPrinter)))
    assert {"abs", "round", "max", "math.trunc", "torch.sym_float"} <= printed
    for name in printed:
        graph, _ = _read(f"first = {name}(a, b)\nsecond = {name}(a, b)", math=math)
        ((function, _),) = _calls(graph)  # the second is the first
        assert is_arithmetic(function), name
        assert functions()[functions().name(function)] is function, f"{name} is stored"


def test_equal_numbers_of_other_types_are_other_operands() -> None:
    graph, _ = _read("first = a * 2\nsecond = a * 2.0\nthird = round(a, 1)\nfourth = round(a, ndigits=2)")
    assert len(_calls(graph)) == 4


# Lines whose Python text is complete: the converter has no method for them.
LINES_READ_AS_TEXT = frozenset(
    [
        "AllocateLine",
        "AssertAlignmentLine",
        "AssertDivByZeroLine",
        "AssertSizeStrideLine",
        "DynamicScalarLine",
        "ExternKernelAllocLine",
        "ExternKernelMultiOutLine",
        "ExternKernelOutLine",
        "GroupedAssertSizeStrideLine",
        "IndexPutFallbackLine",
        "MultiOutputLine",
        "ReinterpretLine",
        "ReuseLine",
        "ScatterFallbackLine",
        "SymbolicCallArgLine",
        "UnbackedSymbolDefsLine",
    ]
)


def test_every_wrapper_line_of_this_torch_is_known() -> None:
    """A torch with a new kind of line shows here, before it shows as a fallback or as a line that means more than its
    text says."""
    from torch._inductor.codegen import cpp_wrapper_cpu, memory_planning, wrapper  # all that define lines

    from fxwrap.codegen.emit.converter import LINES_REFUSED, HostGraphConverter

    assert cpp_wrapper_cpu and memory_planning
    # Not instantiated by Inductor itself.
    abstract = {"MemoryPlanningLine", "PoolMemoryPlanningLine"}
    todo, found = [wrapper.WrapperLine], set()
    while todo:
        for line in todo.pop().__subclasses__():
            todo.append(line)
            if line.__module__.startswith("torch.") and line.__name__ not in abstract:
                found.add(line.__name__)
    assert len(found) > 20
    for name in sorted(found):
        answers = [hasattr(HostGraphConverter, f"_line_{name}"), name in LINES_READ_AS_TEXT, name in LINES_REFUSED]
        assert sum(answers) == 1, f"{name}: handled, read as text, refused: {answers}"


def test_assignment_call_and_delete() -> None:
    graph, names = _read("c = aten.add.Tensor(a, b, alpha=2); del a\nd = c[0]  # a comment")
    assert [target.__name__ for target, _ in _calls(graph)] == ["add.Tensor", "getitem"]
    assert "a" not in names and names["d"].args == (names["c"], 0)


def test_arithmetic_without_nodes_is_evaluated_and_with_nodes_is_shared() -> None:
    graph, names = _read("x = 2 * 3 + 1\ny = a * 4 + 1\nz = a * 4\nw = max(a, 3) if a > 2 else 7")
    assert names["x"] == 7
    targets = [target for target, _ in _calls(graph)]
    assert sum(target.__name__ == "mul" for target in targets) == 1  # a * 4 stands there twice
    assert targets[-1] is select


def test_methods_of_tensors_and_asserts() -> None:
    graph, _ = _read("a.copy_(b, False)\nu0 = b.item()\nassert u0 % 2 == 0, f'odd'\ns = a.size(1)")
    targets = [target for target, _ in _calls(graph)]
    assert targets[0] is torch.ops.aten.copy_.default
    assert torch.ops.aten.item.default in targets and check in targets
    assert targets[-1] is torch.ops.aten.sym_size.int


def test_partial_results_in_a_workspace() -> None:
    """Inductor writes the last step of a reduction over rows and columns as methods of a slice."""
    graph = Graph()
    workspace = graph.placeholder("workspace")
    workspace.meta["val"] = torch.empty(24, device="meta")
    _, names = _read(
        "c = w[1 * (3) * (4) : (1 + 1) * (3) * (4)].view(3, 4).sum(dim=0).view([4]).to(torch.half)", w=workspace
    )
    chain, node = [], names["c"]
    while node is not workspace:
        chain.append((node.target, node.args[1:], dict(node.kwargs)))
        node = node.args[0]
    assert chain == [
        (torch.ops.aten._to_copy.default, (), {"dtype": torch.half}),
        (torch.ops.aten.view.default, ([4],), {}),
        (torch.ops.aten.sum.dim_IntList, (), {"dim": 0}),
        (torch.ops.aten.view.default, ([3, 4],), {}),
        (torch.ops.aten.slice.Tensor, (0, 12, 24), {}),
    ]
    with pytest.raises(EmissionError, match="a part of a tensor"):
        _read("c = a[1:2]")


@pytest.mark.parametrize(
    "text", ["while True: pass", "import os", "x = undefined + 1", "a.backward()", "for i in a: pass", "x = = 1"]
)
def test_what_is_not_straight_line_code_is_refused(text: str) -> None:
    with pytest.raises(EmissionError) as caught:
        _read(text)
    assert text.split(maxsplit=1)[0] in str(caught.value)


def test_assigned_names() -> None:
    assert assigned_names("x = 1; y = f(z)") == {"x", "y"}
    assert assigned_names("not python (") == set()


# -- host graphs of real programs ----------------------------------------------------------------------


def test_a_host_graph_runs_as_it_is_and_reads_well(compiled: Any) -> None:
    f: Compiled = compiled(lambda x, w: torch.relu(x @ w) + 1)
    x, w = torch.randn(2, 4, 4)
    f(x, w)
    gm = f.program.plan.graph
    assert torch.equal(gm(x, w), torch.relu(x @ w) + 1)
    kinds = [kind_of(node) for node in gm.graph.nodes]
    assert kinds.count(Kind.LAUNCH) == 1 and kinds.count(Kind.EXTERN) == 1
    assert (
        list_graph(gm)
        == """\
x: float32[4, 4] on cpu (arg0_1)
w: float32[4, 4] on cpu (arg1_1)
buf0 = allocate (4, 4), strides (4, 1), float32, cpu
aten.mm.out(x, w, out=buf0)
launch cpp_fused_add_relu_0(buf0)
return buf0"""
    )


def test_asserts_are_kept_and_made(compiled: Any) -> None:
    """Promise 4: what Inductor would have checked is checked, on eager runs and when recording."""
    f: Compiled = compiled(lambda x: x.sin() @ x)
    f(torch.randn(4, 4))
    checks = [node for node in f.program.plan.graph.graph.nodes if kind_of(node) is Kind.CHECK]
    assert checks
    for _ in range(3):
        with pytest.raises(AssertionError, match="expected size 5==4"):
            f.program(torch.randn(5, 5))
        torch.testing.assert_close(f.program(x := torch.randn(4, 4)), x.sin() @ x)


def test_a_wrong_stride_prediction_raises_instead_of_giving_wrong_numbers(compiled: Any) -> None:
    @torch.library.custom_op("fxwrap_test::lies_about_strides", mutates_args=())
    def lies(x: torch.Tensor) -> torch.Tensor:
        return x.clone().t()

    @lies.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape)  # contiguous, which the real result is not

    f: Compiled = compiled(lambda x: lies(x * 2) + 1)
    for _ in range(3):
        with pytest.raises((AssertionError, RuntimeError), match="stride"):
            f(torch.randn(4, 4))


# -- subclasses ----------------------------------------------------------------------------------------


def test_a_backend_written_against_compile_graph_works_unchanged(compiled: Any) -> None:
    seen: list[GraphModule] = []

    class Printing(fxwrap.FxwrapCodegen):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
            seen.append(gm)
            return gm.forward

    f: Compiled = compiled(lambda x: x.sin() @ x, options={"codegen": Printing})
    for _ in range(3):
        x = torch.randn(4, 4)
        torch.testing.assert_close(f(x), x.sin() @ x)
    assert len(seen) == 1 and any(node.target is launch for node in seen[0].graph.nodes)


def test_passes_see_the_graph_before_it_is_planned(compiled: Any) -> None:
    class Negating(fxwrap.FxwrapCodegen):
        def passes(self) -> Any:
            def negate(gm: GraphModule) -> None:
                """Replace every aten.mm.out(a, b) by aten.mm.out(b, a)."""
                for node in gm.graph.nodes:
                    if node.target is torch.ops.aten.mm.out:
                        node.args = (node.args[1], node.args[0])
                gm.recompile()

            return [negate]

    f: Compiled = compiled(lambda x, y: x @ y, options={"codegen": Negating})
    for _ in range(4):
        x, y = torch.randn(2, 4, 4)
        torch.testing.assert_close(f(x, y), y @ x)
    assert f.program.counters.replays == 2


def _of_passes() -> type[fxwrap.FxwrapCodegen]:
    def nameless(gm: GraphModule) -> None:
        gm.graph.nobody  # type: ignore[attr-defined]

    class Raising(fxwrap.FxwrapCodegen):
        def passes(self) -> Any:
            return [nameless]

    return Raising


def _of_compile_graph() -> type[fxwrap.FxwrapCodegen]:
    class Raising(fxwrap.FxwrapCodegen):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
            return json.loads("no JSON")  # type: ignore[no-any-return]  # in Python's own library

    return Raising


def _of_compile_partition() -> type[fxwrap.FxwrapCodegen]:
    class Raising(fxwrap.FxwrapCodegen):
        def compile_partition(self, graph: PartitionGraph) -> Callable[..., Any]:
            return torch.ones(2) @ torch.ones(3)  # type: ignore[return-value]  # in torch

    return Raising


@pytest.mark.parametrize(
    "codegen, name, error",
    [
        (_of_passes, "nameless", "AttributeError: 'Graph' object has no attribute 'nobody'"),
        (_of_compile_graph, "compile_graph", "JSONDecodeError: Expecting value"),
        (_of_compile_partition, "compile_partition", "RuntimeError: "),
    ],
)
def test_code_of_the_user_s_that_raises_is_named(
    compiled: Any, codegen: Callable[[], type[fxwrap.FxwrapCodegen]], name: str, error: str
) -> None:
    """It is no fault of fxwrap's, which nobody need report."""
    x = torch.randn(4, 4)
    with pytest.raises(BackendCompilerFailed) as raised:
        compiled(lambda x: x.sin() @ x, options={"codegen": codegen(), "strict": True})(x)
    (cause,) = (one for one in causes(raised.value) if isinstance(one, PipelineError))
    assert re.search(
        rf"^(\S+\.)?{name}, which is the user's, raises {error}.*test_emission\.py:\d+\)$", cause.subject
    )
    assert "report this" not in str(cause)
    f: Compiled = compiled(lambda x: x.sin() @ x, options={"codegen": codegen()})
    with pytest.warns(UserWarning, match=rf"{name}, which is the user's, raises {error}"):
        torch.testing.assert_close(f(x), x.sin() @ x)


def test_a_fault_of_fxwrap_s_is_not_the_user_s(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A codegen of the user's is among the callers."""

    class Calling(fxwrap.FxwrapCodegen):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
            return super().compile_graph(gm)

    monkeypatch.setattr(pipeline, "HostGraphPlanner", None)
    with pytest.raises(BackendCompilerFailed, match=r"emission failed with TypeError(.|\n)*please report this"):
        compiled(lambda x: x.sin() @ x, options={"codegen": Calling, "strict": True})(torch.randn(4, 4))


def test_a_pass_that_drops_dead_code_keeps_launches_and_asserts(compiled: Any) -> None:
    """No result of a launch is used; dropping them would give wrong numbers without a word."""

    class Tidy(fxwrap.FxwrapCodegen):
        def passes(self) -> Any:
            def tidy(gm: GraphModule) -> GraphModule:
                gm.graph.eliminate_dead_code()
                return GraphModule(gm, gm.graph)

            return [tidy]

    f: Compiled = compiled(lambda x: (x.sin() @ x).relu(), options={"codegen": Tidy})
    for _ in range(4):
        x = torch.randn(4, 4)
        torch.testing.assert_close(f(x), (x.sin() @ x).relu())
    kinds = [kind_of(node) for node in f.program.plan.graph.graph.nodes]
    assert Kind.CHECK in kinds
    assert kinds.count(Kind.LAUNCH) == 2 and f.program.counters.replays == 2
