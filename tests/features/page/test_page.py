"""The page in a browser: what it shows, what a click does, and that it asks nobody for anything.

Skipped where there is no Chromium with its driver (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import datetime
import html
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import chromium, needs_browser, wait

import fxwrap
from fxwrap.features.page.drawing import count, drawings
from fxwrap.features.page.page import _summary, _vega, page_of
from fxwrap.inspection.document import NodeData
from fxwrap.plan import Verdict


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.linalg.eigvals(x.T @ x).abs().sum()  # its result has no place in the plan


@pytest.fixture(scope="module")
def explanation() -> fxwrap.Explanation:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        return fxwrap.explain(Model(), torch.randn(4, 16), calls=4)


@pytest.fixture(scope="module")
def page(explanation: fxwrap.Explanation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    explanation.to_html(path, title="a <b>model</b>")
    assert path.stat().st_size < 5_000_000
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Any]:
    """The page, drawn; afterwards its console is empty, and nothing was fetched."""
    browser.get(page.as_uri())
    wait(browser, "return views.size > 0 && !!document.querySelector('.graph-chart canvas')")
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)") == []


# Where the rectangle of a datum is on the screen: marks lie in groups, which lie in a canvas.
_PLACE = """
const [name, selector, field, value] = arguments;
const canvas = document.querySelector(selector + ' canvas'), view = eval(name).get(0);
canvas.scrollIntoView({block: 'center'});
const frame = canvas.getBoundingClientRect(), origin = view.origin();
function look(item, x, y) {
  for (const inner of item.items || []) {
    const type = inner.mark && inner.mark.marktype;
    if (type === 'rect' && inner.datum[field] === value) {
      return {x: x + inner.x + inner.width / 2, y: y + inner.y + inner.height / 2, of: inner};
    }
    const group = type === 'group';
    const found = look(inner, x + (group ? inner.x || 0 : 0), y + (group ? inner.y || 0 : 0));
    if (found) return found;
  }
  return null;
}
const {x, y, of} = look(view.scenegraph().root, 0, 0);
return {x: frame.left + origin[0] + x, y: frame.top + origin[1] + y, opacity: of.opacity, fill: of.fill};
"""


def _storage(browser: Any, name: str) -> dict[str, Any]:
    return browser.execute_script(_PLACE, "views", ".memory-chart", "name", name)


def _click(browser: Any, place: dict[str, Any]) -> None:
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    actions = ActionBuilder(browser)
    actions.pointer_action.move_to_location(int(place["x"]), int(place["y"])).click()
    actions.perform()


def _text(browser: Any, selector: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0]).innerText", selector)


@needs_browser
def test_a_click_on_a_rectangle_tells_of_the_storage(opened: Any, explanation: fxwrap.Explanation) -> None:
    storages = explanation.to_dict()["graphs"][0]["memory"]["storages"]
    largest = max(storages, key=lambda one: one["bytes"] * (one["end"] - one["begin"]))
    _click(opened, _storage(opened, largest["name"]))
    wait(opened, "return !document.querySelector('.details').hidden")
    told = _text(opened, ".details")
    assert largest["name"] in told and f"{largest['bytes']:,} bytes" in told and largest["use"] in told
    assert f"steps {largest['begin']} to {largest['end'] - 1}" in told and "test_page.py" in told


@needs_browser
def test_a_search_leaves_what_is_found(opened: Any, explanation: fxwrap.Explanation) -> None:
    graph = explanation.to_dict()["graphs"][0]
    nodes = graph["nodes"].items()  # parameters have the name of their module
    inside = [name for name, node in nodes if "layers.1" in node["line"] or node["module"].startswith("layers.1")]
    modules = {one["name"]: graph["nodes"][one["node"]]["module"] for one in graph["memory"]["storages"]}
    other, found = (next(n for n, m in modules.items() if m.startswith(f"layers.{i}")) for i in (0, 1))
    opened.find_element("id", "search").send_keys("LAYERS.1")
    wait(opened, f"return document.getElementById('found').innerText === '{len(inside)} nodes'")
    assert _storage(opened, found)["opacity"] == 1 and _storage(opened, other)["opacity"] < 0.2
    rows = opened.execute_script(
        "return [...document.querySelectorAll('.nodes tbody tr')].map((row) => row.innerText)"
    )
    assert len(rows) == len(inside) and all("layers.1" in row for row in rows)
    opened.find_element("id", "search").clear()
    opened.find_element("id", "search").send_keys("no such thing")
    wait(opened, "return document.getElementById('found').innerText === '0 nodes'")
    assert opened.execute_script("return [...document.querySelectorAll('.kernel')].every((one) => one.hidden)")


@needs_browser
def test_colours_by_partition_and_in_the_dark(opened: Any, explanation: fxwrap.Explanation) -> None:
    name = explanation.to_dict()["graphs"][0]["memory"]["storages"][0]["name"]
    before = _storage(opened, name)["fill"]
    opened.execute_script("const by = document.querySelector('.colour-by'); by.value = 'partition'; by.onchange()")
    end = time.monotonic() + 10
    while _storage(opened, name)["fill"] == before:
        assert time.monotonic() < end
    opened.find_element("id", "theme").click()
    wait(opened, "return document.documentElement.className === 'dark' && views.size > 0")
    back = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert max(int(one) for one in back[4:-1].split(",")) < 60


@needs_browser
def test_the_host_graph_opens_by_module(opened: Any, explanation: fxwrap.Explanation) -> None:
    def trail() -> list[str]:
        return [one.text.removeprefix("/ ") for one in opened.find_elements("css selector", ".crumbs button")]

    boxes = drawings(explanation.to_document().graphs[0])["top"]["boxes"]
    box = next(box for box in boxes if box["opens"])
    assert trail() == ["host graph"]
    _click(opened, opened.execute_script(_PLACE, "graphViews", ".graph-chart", "id", box["id"]))
    wait(opened, "return document.querySelectorAll('.crumbs button').length === 2")
    assert trail() == ["host graph", box["label"]]
    opened.find_elements("css selector", ".crumbs button")[0].click()
    wait(opened, "return document.querySelectorAll('.crumbs button').length === 1")


@needs_browser
def test_a_narrow_page_cuts_nothing_off(opened: Any) -> None:
    """A legend has as many columns as fit."""
    size = opened.get_window_size()
    try:
        for width in (560, 900):
            opened.set_window_size(width, 900)
            opened.refresh()
            wait(opened, "return views.size > 0 && !!document.querySelector('.graph-chart canvas')")
            for by in ("use", "partition"):
                opened.execute_script(f"document.querySelector('.colour-by').value = '{by}'; return drawMemory(0)")
                chart, canvas = opened.execute_script(
                    "const chart = document.querySelector('.memory-chart');"
                    "return [chart.clientWidth, chart.querySelector('canvas').clientWidth]"
                )
                assert 0 < canvas <= chart
    finally:
        opened.set_window_size(size["width"], size["height"])


@needs_browser
def test_titles_and_sources_are_text(opened: Any) -> None:
    assert _text(opened, "h1") == "a <b>model</b>"
    opened.execute_script("document.querySelector('.kernel').open = true")
    assert "void kernel" in " ".join(_text(opened, ".kernel .code").split())
    assert opened.execute_script("return document.querySelectorAll('.kernel .code span').length") > 20  # coloured


def test_every_node_is_in_one_drawing_and_no_drawing_is_large(explanation: fxwrap.Explanation) -> None:
    graph = explanation.to_document().graphs[0]
    found = drawings(graph)
    shown = [box["node"] for drawing in found.values() for box in drawing["boxes"] if box["node"]]
    assert sorted(shown) == sorted(name for one in graph.partitions for name in one.nodes)
    for name, drawing in found.items():
        assert len(drawing["boxes"]) <= 60
        assert not drawing["up"] or any(box["opens"] == name for box in found[drawing["up"]]["boxes"])
        places = [(box["x"], box["y"]) for box in drawing["boxes"]]
        assert len(set(places)) == len(places)
        assert all(edge["y"] < edge["y2"] for edge in drawing["edges"])  # down: nothing needs what comes later


def test_boxes_count_what_the_table_of_partitions_counts() -> None:
    """An eager partition also has views and sizes of data, which are no library calls."""

    def chosen(x: torch.Tensor) -> torch.Tensor:
        rows = x[x > 0]
        return rows.view(-1, 1).expand(-1, 2).sin().sum() + rows.size(0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (graph,) = fxwrap.explain(chosen, torch.randn(8, 8)).to_document().graphs
    counted = {box["label"]: box["about"] for box in drawings(graph)["top"]["boxes"] if box["opens"]}
    eager = [one for one in graph.partitions if len(one.nodes) > one.launches + one.externs]
    assert eager and len(graph.partitions) > 1
    for one in eager:
        launches, calls = count(one.launches, "launch"), count(one.externs, "library call")
        assert counted[f"partition {one.index}"] == f"{launches}, {calls}"


def test_a_large_graph_is_drawn_in_few_boxes() -> None:
    """4,000 nodes without any module, in 40 partitions that take turns."""

    def node(number: int) -> NodeData:
        reads = (f"buf{number - 1}",) if number else ()
        return NodeData("launch", "kernel", "", (), reads, (f"buf{number}",), 0, "", "", "", False, "", "")

    graph = fxwrap.explain(torch.sin, torch.ones(2)).to_document().graphs[0]
    nodes = {f"launch_{i}": node(i) for i in range(4000)}
    partitions = tuple(
        replace(
            graph.partitions[0],
            index=p,
            verdict=list(Verdict)[p % 2],
            nodes=tuple(f"launch_{p * 100 + i}" for i in range(100)),
        )
        for p in range(40)
    )
    found = drawings(replace(graph, nodes=nodes, partitions=partitions))
    assert max(len(drawing["boxes"]) for drawing in found.values()) <= 60
    assert sum(bool(box["node"]) for drawing in found.values() for box in drawing["boxes"]) == 4000


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_memory_picture_as_a_file(explanation: fxwrap.Explanation, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"memory.{ending}"
    explanation.memory_picture(path)
    if ending == "png":
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
        return
    text = path.read_text()
    storages = explanation.to_dict()["graphs"][0]["memory"]["storages"]
    assert text.startswith("<svg") and "Inductor's peak" in text.replace("&#39;", "'").replace("&apos;", "'")
    assert text.count('aria-roledescription="rect mark') >= len(storages)


def test_steps_are_whole_numbers_on_the_axis(tmp_path: Path) -> None:
    """Also if there is one step only, for which Vega would write 0, 1, 1, 2, 2."""
    explanation = fxwrap.explain(lambda x: x.sin(), torch.randn(4, 4), calls=3)
    explanation.memory_picture(tmp_path / "memory.svg")
    axis = (tmp_path / "memory.svg").read_text().partition("step (of 1)")[2]
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", axis.partition("Y-axis")[0])
    assert [label for label in labels if label][:3] == ["0", "end", "step (of 1)"]


def test_the_card_says_what_a_call_takes_and_compares_the_same_storages() -> None:
    f = torch.compile(lambda x: (x @ x).sin() @ x, backend="fxwrap")
    for _ in range(3):
        f(torch.randn(8, 8))
    (graph,) = fxwrap.report(f).to_document().graphs
    card, memory = _summary(graph), graph.memory
    assert memory is not None
    assert card["a call takes"] == f"{sum(part.total for part in memory.predicted):,} bytes beside inputs"
    assert card["planned memory"] == f"{memory.peak_bytes:,} bytes at most"
    assert card["the same in Inductor's order"] == f"{memory.inductor_peak_bytes:,} bytes"
    assert card["the same without reuse"] == f"{memory.without_reuse_bytes:,} bytes"


def test_a_page_says_of_what_and_of_when_it_is(explanation: fxwrap.Explanation, tmp_path: Path) -> None:
    explanation.to_html(tmp_path / "new" / "page.html")
    text = (tmp_path / "new" / "page.html").read_text()
    header = text[text.index("<header>") : text.index("</header>")]
    made = datetime.datetime.fromtimestamp(explanation.to_dict()["when"])
    assert "<h1>Model</h1>" in header and made.strftime("%Y-%m-%d %H:%M:%S") in header
    assert all(f"{name} {version}" in header for name, version in explanation.to_dict()["versions"].items())
    assert {"fxwrap", "torch", "python"} == explanation.to_dict()["versions"].keys()


@pytest.mark.parametrize("path, graph, message", [("memory.jpg", 0, ".svg or .png"), ("memory.svg", 7, "number 7")])
def test_what_cannot_be_drawn(
    explanation: fxwrap.Explanation, tmp_path: Path, path: str, graph: int, message: str
) -> None:
    with pytest.raises(fxwrap.InputError, match=message):
        explanation.memory_picture(tmp_path / path, graph)


def test_a_notebook_shows_the_page_in_a_frame(explanation: fxwrap.Explanation) -> None:
    """IPython asks objects for the method. The frame has the whole page, which asks nobody for anything."""
    shown = explanation._repr_html_()
    (source,) = re.fullmatch(
        r'<iframe sandbox="allow-scripts" .*srcdoc="([^"]*)"></iframe>', shown, re.DOTALL
    ).groups()
    assert html.unescape(source) == page_of(explanation.to_document())
    assert not hasattr(explanation, "_ipython_canary_method_should_not_exist_")


@needs_browser
def test_the_frame_of_a_notebook_draws(browser: Any, explanation: fxwrap.Explanation, tmp_path: Path) -> None:
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!DOCTYPE html><meta charset=utf-8><title>a cell</title>{explanation._repr_html_()}")
    browser.get(cell.as_uri())
    browser.switch_to.frame(0)
    wait(browser, "return views.size > 0 && document.querySelector('h1').innerText === 'Model'")
    browser.switch_to.default_content()


def test_a_page_without_a_program(tmp_path: Path) -> None:
    fxwrap.explain(lambda: 3).to_html(tmp_path / "empty.html")
    assert "nothing was compiled" in (tmp_path / "empty.html").read_text()


def test_without_the_library_that_draws(
    explanation: fxwrap.Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _vega.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(fxwrap.FxwrapError, match=r"pip install 'fxwrap\[page\]'"):
        explanation.memory_picture(tmp_path / "memory.svg")
    assert explanation._repr_html_() is None  # the text is shown
