"""``explain(..., measure=True)``: each launch and library call has a time, and nothing else changes."""

from __future__ import annotations

import html.parser
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import chromium, needs_browser
from conftest import freezes
from torch import nn
from torch.nn import functional as F

import fxwrap
from fxwrap.features.measure.clocked_steps import _TIMES, _without_clocks
from fxwrap.features.measure.measured import MeasuredProgram, MeasuredStep
from fxwrap.limit import binary

pytestmark = pytest.mark.compiler
ALWAYS = {"capture": "always"}
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("calls", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + F.dropout(self.down(self.up(x).sin()), 0.5) + self.calls


def _measured(explanation: fxwrap.Explanation) -> list[dict[str, Any]]:
    return list(explanation.to_dict()["sections"]["measured"]["programs"].values())


@pytest.fixture(params=["natively", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr("fxwrap.graphs.replay.recording.Recording.make_unit", lambda self: "")


def test_each_launch_and_library_call_has_time_bytes_and_module(way: None, device: torch.device) -> None:
    model = nn.Sequential(Block(), Block()).to(device)
    with torch.no_grad():
        explanation = fxwrap.explain(model, torch.randn(4, 16, device=device), measure=True, fxwrap_options=ALWAYS)
    (one,), (graph,) = _measured(explanation), explanation.to_dict()["graphs"]
    work = [name for part in graph["partitions"] for name in part["nodes"] if graph["nodes"][name]["operator"]]
    assert [step["node"] for step in one["steps"]] == work and one["why_not"] == ""
    assert [step["name"] for step in one["steps"]] == [graph["nodes"][name]["operator"] for name in work]
    assert [step["module"] for step in one["steps"]] == [graph["nodes"][name]["module"] for name in work]
    products = {step["module"]: step["bytes"] for step in one["steps"] if step["name"] in ("aten::addmm", "aten::mm")}
    # For CUDA Inductor adds the bias in the kernel that follows.
    added_later = "aten::mm" in {step["name"] for step in one["steps"]}
    of_up, of_down = (0, 0) if added_later else (64, 16)
    up, down = 4 * (4 * 16 + 16 * 64 + of_up + 4 * 64), 4 * (4 * 64 + 64 * 16 + of_down + 4 * 16)
    assert products == {"0.up": up, "0.down": down, "1.up": up, "1.down": down}
    # Each reads and writes 256 numbers.
    sine = 2 * 4 * 64 + (64 if added_later else 0)
    assert {step["bytes"] for step in one["steps"] if "_sin" in step["name"]} == {4 * sine}
    assert all(step["us"] >= 0 for step in one["steps"]) and one["steps_us"] > 0 and one["runs"] >= 5
    assert one["in_graphs"] == freezes(device)
    if not one["in_graphs"]:
        assert 0 < one["steps_us"] < one["call_us"] and 0 < one["between_us"] < one["call_us"]
        assert one["host_us"] == pytest.approx(one["call_us"] - one["steps_us"])


def test_the_state_is_that_after_the_calls(way: None, device: torch.device) -> None:
    """Five calls and the one that is measured: buffers, and the random numbers that follow."""
    torch.manual_seed(0)
    model, x = Block().to(device), torch.randn(4, 16, device=device)
    with torch.no_grad():
        torch.manual_seed(1)
        fxwrap.explain(model, x, calls=6, fxwrap_options=ALWAYS)
        expected, calls = torch.randn(3), model.calls.clone()
        model.calls.zero_()
        torch.manual_seed(1)
        (one,) = _measured(fxwrap.explain(model, x, measure=True, fxwrap_options=ALWAYS))
        assert one["steps"] and torch.equal(torch.randn(3), expected)
        assert torch.equal(model.calls, calls) and torch.equal(calls, torch.full_like(calls, 6))


def test_the_measured_call_returns_what_others_do(way: None, device: torch.device) -> None:
    returned, model, x = [], Block().to(device).eval(), torch.randn(4, 16, device=device)

    def noted(x: torch.Tensor) -> torch.Tensor:
        result = F.relu(model.down(model.up(x)))
        torch._dynamo.graph_break()
        returned.append(result.clone())
        return result + 1

    with torch.no_grad():
        explanation = fxwrap.explain(noted, x, measure=True, fxwrap_options=ALWAYS)
        assert len(returned) == 6 and len(_measured(explanation)) == 2
        for result in returned:
            assert torch.allclose(result, F.relu(model.down(model.up(x))), atol=1e-5)


def test_forward_and_backward_are_measured_and_gradients_are_right(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device),
        torch.randn(8, 16, device=device),
    )
    explanation = fxwrap.explain(lambda x: model(x).sum().backward(), x, measure=True, fxwrap_options=ALWAYS)
    forward, backward = _measured(explanation)
    assert forward["steps"] and backward["steps"]
    compiled = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for _ in range(6):
        model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), compiled, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=1e-4, atol=1e-5)


def test_a_long_step_takes_longest() -> None:
    def fn(x: torch.Tensor, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ x, small @ small

    with torch.no_grad():
        (one,) = _measured(fxwrap.explain(fn, torch.randn(512, 512), torch.randn(8, 8), measure=True))
    long, short = one["steps"]
    assert long["us"] > 20 * short["us"] and long["us"] > 0.3 * one["call_us"]  # the machine may be busy
    assert long["bytes"] == 2 * 4 * 512 * 512  # both operands are one
    assert long["bytes_per_second"] == pytest.approx(long["bytes"] / long["us"] * 1e6)


def test_a_decoder_step_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and what lies between them are most of a call. Bounds are wide: the machine may be busy."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    model, arguments = importlib.import_module("speed_models").decoder()
    with torch.no_grad():
        (one,) = _measured(fxwrap.explain(model, *arguments, measure=True))
    assert 0.6 < (one["steps_us"] + one["between_us"]) / one["call_us"] < 1.2
    assert len(one["steps"]) > 30 and all(step["module"] for step in one["steps"])


def test_clocks_are_subtracted() -> None:
    """Nothing takes 3, and 2 lie between two clocks; then a step of 10, 5 before it and 7 behind it."""
    ticks, now = list[int](), 0
    for _ in range(_TIMES):
        ticks += [now, now + 3]
        now += 5
    ticks += [now + 5, now + 5 + 13, now + 5 + 13 + 9]
    assert _without_clocks(ticks) == [10, 5 + 7]


def test_what_is_not_replayed_says_why() -> None:
    explanation = fxwrap.explain(
        lambda x: x.sin() @ x, torch.randn(8, 8), measure=True, fxwrap_options={"warmup": 99}
    )
    (one,) = _measured(explanation)
    assert one["why_not"] == "its calls are no replays: warm-up" and not one["steps"]
    assert "where the time goes: not measured: its calls are no replays: warm-up" in str(explanation)


def test_measure_and_target_exclude_each_other() -> None:
    with pytest.raises(fxwrap.InputError, match="leave one of them out"):
        fxwrap.explain(torch.sin, torch.ones(2), measure=True, target="cuda:90")
    assert not fxwrap.explain(torch.sin, torch.ones(2)).to_dict()["sections"]


# -- how it is shown ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explanation() -> fxwrap.Explanation:
    torch._dynamo.reset()
    model = nn.Sequential(Block(), Block())
    with torch.no_grad():
        return fxwrap.explain(model, torch.randn(4, 16), measure=True, fxwrap_options=ALWAYS)


def test_the_text_has_a_line_for_each(explanation: fxwrap.Explanation) -> None:
    (one,) = _measured(explanation)
    text = str(explanation)
    lines = text[text.index("where the time goes") :].splitlines()
    assert f"a call takes {one['call_us']:,.1f} us" in lines[0] and f"host {one['host_us']:,.1f} us" in lines[0]
    rows = sorted(one["steps"], key=lambda step: -step["us"])
    for line, step in zip(lines[2:], rows, strict=False):
        assert line.split()[0] == f"{step['us']:,.1f}" and line.endswith(
            f"{step['module'] or '-':<6}  {step['name']}"
        )
        assert binary(step["bytes"]) in line


def test_a_report_from_a_file_says_the_same(explanation: fxwrap.Explanation, tmp_path: Path) -> None:
    explanation.save(tmp_path / "report.json")
    loaded = fxwrap.Explanation.load(tmp_path / "report.json")
    assert str(loaded) == str(explanation) and not loaded.diff(explanation)
    assert loaded.to_dict() == json.loads(json.dumps(explanation.to_dict()))


def test_a_section_of_a_feature_that_is_not_here_is_left_out(explanation: fxwrap.Explanation) -> None:
    data = explanation.to_dict()
    data["sections"] = {"of a later version": {"programs": 3}}
    assert "where the time goes" not in str(fxwrap.Explanation.from_dict(data))


class Balanced(html.parser.HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.text, self.widths = list[str](), list[str](), list[float]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "input", "br", "link", "col"):
            self.open.append(tag)
        if ("class", "bar") in attrs:
            self.widths.append(float(str(dict(attrs)["style"]).removeprefix("width: ").removesuffix("%")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_has_bars_by_module_and_by_kernel(explanation: fxwrap.Explanation, tmp_path: Path) -> None:
    explanation.to_html(tmp_path / "page.html")
    parser = Balanced()
    parser.feed((tmp_path / "page.html").read_text())
    (one,) = _measured(explanation)
    modules, kernels = ({step[key] or "outside of modules" for step in one["steps"]} for key in ("module", "name"))
    assert not parser.open and len(parser.widths) == len(modules) + len(kernels) + 2  # the host has two
    assert max(parser.widths) == 100 and {*modules, *kernels, "host", "By module", "By kernel"} <= set(parser.text)


def test_names_are_escaped_and_few_bars_are_drawn() -> None:
    steps = tuple(MeasuredStep(f"n{i}", f"<k{i}>", f"a&{i}", 1.0 + i, 2048) for i in range(50))
    program = MeasuredProgram(runs=5, call_us=2000.0, steps=steps)
    section = importlib.import_module("fxwrap.features.measure.section")
    data = importlib.import_module("fxwrap.host_graph.typed_json").to_data
    measured = importlib.import_module("fxwrap.features.measure.measured").Measured
    shown = section.MeasuredSection(data(measured({"p": program}))).html("p")
    parser = Balanced()
    parser.feed(shown)
    assert not parser.open and "<k49>" in parser.text and "30 more" in parser.text and len(parser.widths) == 2 * 22
    assert section.MeasuredSection(data(measured({"p": program}))).html("another") == ""


@pytest.mark.parametrize(
    "number, text",
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"),
     (1 << 30, "1.0 GiB"), (5 << 40, "5.0 TiB"), (5 << 50, "5,120.0 TiB")],
)  # fmt: skip
def test_units(number: int, text: str) -> None:
    assert binary(number) == text


@needs_browser
def test_the_page_in_a_browser(explanation: fxwrap.Explanation, tmp_path: Path) -> None:
    explanation.to_html(tmp_path / "page.html")
    with chromium() as browser:
        browser.get((tmp_path / "page.html").as_uri())
        widths = (
            "return [...document.querySelectorAll('.measured .bar')].map((bar) => bar.getBoundingClientRect().width)"
        )
        drawn = browser.execute_script(widths)
        assert max(drawn) > 150 and all(width >= 1 for width in drawn)
        assert "host" in browser.execute_script("return document.querySelector('.measured').innerText")
        rows = "return [...document.querySelectorAll('.bars tr')].map((row) => row.getBoundingClientRect().height)"
        assert max(browser.execute_script(rows)) < 80  # names have room
        assert browser.get_log("browser") == []
