"""What reports call things: inputs by the user's names, and work by the user's lines or the modules of torch's."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import freezes
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fxwrap
from fxwrap.host_graph.user_code import last_frame
from fxwrap.inspection.explanation import Explanation


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.register_buffer("calls", torch.zeros(4))
        self.kept = [torch.ones(4)]

    def forward(self, x: Tensor, *more: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x).relu() * more[0] + batch["mask"] + self.kept[0] * self.calls
        return x


OF_MODEL = {
    "x",
    "more[0]",
    "batch['mask']",
    "calls",
    "kept[0]",
    *(f"layers.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")),
}


def given() -> tuple[tuple[Tensor, Tensor], dict[str, dict[str, Tensor]]]:
    return (torch.randn(3, 4), torch.randn(3, 4)), {"batch": {"mask": torch.randn(4)}}


def inputs(explanation: Explanation, graph: int = 0) -> dict[str, str]:
    """The inputs of a graph: what a report calls each, and torch's name for it, which follows in brackets."""
    nodes = explanation.to_dict()["graphs"][graph]["nodes"].values()
    lines = [node["line"] for node in nodes if node["kind"] == "placeholder"]
    return {line.partition(": ")[0]: line.rpartition(" (")[2].removesuffix(")") for line in lines}


@pytest.mark.parametrize("how", ["module", "method", "compiled"])
def test_inputs_are_called_what_the_code_calls_them(how: str) -> None:
    model, (args, kwargs) = Model(), given()
    if how == "compiled":
        fast = torch.compile(model, backend="fxwrap")
        fast(*args, **kwargs)
        explanation = fxwrap.report(fast)
    else:
        explanation = fxwrap.explain(model if how == "module" else model.forward, *args, **kwargs)
    assert inputs(explanation).keys() == OF_MODEL
    assert all(name.startswith("primals_") for name in inputs(explanation).values())
    text = str(explanation)
    assert "aten.addmm.out(layers.0.bias, x, reinterpret" in text
    assert text.count("primals_1") == 1, "beside its name, where it is declared"


def test_inputs_of_a_backward(compiled: Any, device: torch.device) -> None:
    """What is saved of the inputs has the same name in both graphs; gradients are those of results by number."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    f = compiled(lambda x: model(x).split(1, dim=1))
    for _ in range(3):
        first, second = f(torch.randn(3, 4, device=device))
        (first.sum() + second.exp().sum()).backward()
    explanation = fxwrap.report(f)
    forward, backward = inputs(explanation), inputs(explanation, 1)
    assert {"x", "model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"} == forward.keys()
    assert {"x", "model.2.weight", "grad_outputs[0]", "grad_outputs[1]"} <= backward.keys()
    assert backward["model.2.weight"] == forward["model.2.weight"]
    assert backward["grad_outputs[1]"] == "tangents_2"
    copies = explanation.to_dict()["graphs"][0]["memory"]["copies"]
    assert [copy["name"] for copy in copies if copy["what"] == "input"] == (["x"] if freezes(device) else [])


def test_inputs_of_functions() -> None:
    model = nn.Linear(4, 4)

    def step(x: Tensor, n: int) -> Tensor:
        return model(x).relu() * n

    def named_as_a_buffer(buf0: Tensor) -> Tensor:
        return torch.mm(buf0, buf0)

    x = torch.randn(3, 4)
    of_step = {"x", "model.weight", "model.bias"}
    assert inputs(fxwrap.explain(step, x, 2)).keys() == of_step
    with torch.no_grad():
        explanation = fxwrap.explain(lambda *xs: model(xs[1]), x, x + 1)
    assert inputs(explanation).keys() == {"xs[1]", "model.weight", "model.bias"}
    assert inputs(fxwrap.explain(functools.partial(torch.mul, 2.0), x)).keys() == {"args[0]"}
    assert inputs(fxwrap.explain(named_as_a_buffer, x[:, :3])).keys() == {"arg0_1"}, "buf0 is another one"
    fast = torch.compile(step, backend="fxwrap", dynamic=True)
    fast(x, 2)
    called = inputs(fxwrap.report(fast))
    assert of_step < called.keys() and {"n", "x.size()[0]"} <= set(called.values()), "sizes keep their symbols"


def test_inputs_that_torch_takes_apart_or_puts_together() -> None:
    """The tensors of a subclass; and the base that it makes of views of one memory, of which one is written."""

    def added(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    of_two, base = TwoTensor(torch.randn(4), torch.randn(4)), torch.randn(8)
    assert inputs(fxwrap.explain(lambda x, y: (x * 2 + y).sin(), of_two, base[:4])).keys() == {"x.a", "x.b", "y"}
    assert inputs(fxwrap.explain(added, base[:4], base[2:6])).keys() == {"x._base"}


def test_inputs_of_an_optimizer() -> None:
    """Dynamo has parameters as attributes of its graph, and finds states by the number of their key."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    step = torch.compile(optimizer.step, backend="fxwrap")
    step()
    parameters = [f"param_groups[0]['params'][{number}]" for number in (0, 1)]
    assert inputs(fxwrap.report(step)).keys() == {*parameters, *(f"{name}.grad" for name in parameters)}


def test_inputs_of_a_saved_method(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    program = fxwrap.aot_compile({"f": (model, (torch.randn(2, 4),))})
    fxwrap.save(tmp_path / "f.fxw", program)
    for one in (program, fxwrap.load(tmp_path / "f.fxw", trust=True)):
        assert inputs(one.explain()).keys() == {"0.weight", "0.bias", "input"}


def test_differences_do_not_see_names() -> None:
    def before(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, weight).relu()

    def after(hidden: Tensor, w: Tensor) -> Tensor:
        return torch.mm(hidden, w).relu()

    x = torch.randn(4, 4)
    first, second = (fxwrap.explain(f, x, x.T) for f in (before, after))
    assert "aten.mm.out(hidden, w" in str(second) and not first.diff(second), str(first.diff(second))


# -- lines ----------------------------------------------------------------------------------------------------


def lines(explanation: Explanation) -> list[str]:
    """The place of each launch and library call."""
    (graph,) = explanation.to_dict()["graphs"]
    return [node["user_line"] for node in graph["nodes"].values() if node["operator"]]


@pytest.mark.parametrize("how", ["explained", "compiled"])
def test_work_of_modules_of_torch_s_has_their_paths(how: str) -> None:
    """No line of the user's is in the graph, and fxwrap's own, which calls what is explained, is none."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 4))), torch.randn(3, 4)
    with torch.no_grad():
        fast = torch.compile(model, backend="fxwrap")
        fast(x)
        explanation = fxwrap.explain(model, x) if how == "explained" else fxwrap.report(fast)
    assert lines(explanation) == ["module 0", "module 1.0"]
    assert "(module 1.0)" in str(explanation) and "collection.py" not in str(explanation)


def test_work_in_the_user_s_code_has_its_line_within_modules_too() -> None:
    model, (args, kwargs) = Model(), given()
    with torch.no_grad():
        found = lines(fxwrap.explain(model, *args, **kwargs))
    assert found and all("test_names.py, line" in line and not line.startswith('"') for line in found)
    assert any('batch["mask"]' in line for line in found), "the quotes of the code are kept"


@pytest.mark.parametrize(
    "files, expected",
    [
        (("me.py", torch.__file__), "me.py, line 1: code of 0"),
        (("me.py", functools.__file__), "me.py, line 1: code of 0"),
        ((fxwrap.__file__, torch.__file__), f"{torch.__file__}, line 2: code of 1"),
        ((fxwrap.__file__,), ""),
        ((), ""),
    ],
)
def test_the_innermost_line_of_the_user_s(files: tuple[str, ...], expected: str) -> None:
    frames = [f'  File "{file}", line {n + 1}, in f\n    code of {n}' for n, file in enumerate(files)]
    assert last_frame("\n".join(frames)) == expected


# -- what a report is about -----------------------------------------------------------------------------------


def _mine(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize(
    "fn, expected",
    [
        (nn.Linear(4, 4), "Linear"),
        (Model().layers[0].forward, r"Linear.forward \(linear.py, line \d+\)"),
        (_mine, r"_mine \(test_names.py, line \d+\)"),
        (functools.partial(_mine), r"_mine \(test_names.py, line \d+\)"),
    ],
)
def test_a_report_says_of_what_it_is(fn: Callable[..., Any], expected: str) -> None:
    x = torch.randn(2, 4)
    fast = torch.compile(fn, backend="fxwrap")
    fast(x)
    for report in (fxwrap.explain(fn, x), fxwrap.report(fast)):
        assert re.fullmatch(expected, report.to_dict()["function"])
    assert fxwrap.report().to_dict()["function"] == "all that is compiled"
