"""A report as an HTML page: one file that needs no network, made from the document alone."""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers import CppLexer, PythonLexer
from pygments.lexers.special import TextLexer

from ...errors import FxwrapError
from ...hooks import report_sections
from ...host_graph.typed_json import to_data
from ...inspection.document import Document, GraphData, KernelData, short_line
from ...inspection.text import nothing_compiled
from ...plan import Verdict
from .drawing import count, drawings
from .memory_picture import COLUMNS, colours, memory_spec

_HERE = Path(__file__).parent
_WIDTH = 900  # of pictures, until the page knows its own
_LEXERS = {"cpp": CppLexer, "triton": PythonLexer}


def page_of(document: Document, title: str = "") -> str:
    """The page's HTML. Raises FxwrapError if the library that draws is missing.

    Args:
        title: the function that the report is about, by default.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["commas"] = "{:,}".format
    environment.filters["milliseconds"] = lambda us: f"{us / 1e3:,.1f} ms"
    environment.filters["source"] = _source
    environment.filters["short"] = short_line
    graphs, when = document.graphs, document.when
    sections = report_sections(document.sections)
    charts = [{**_chart(graph), "drawings": drawings(graph), "nodes": to_data(graph.nodes)} for graph in graphs]
    return environment.get_template("page.html").render(
        title=title or document.function or "fxwrap",
        when=datetime.datetime.fromtimestamp(when).astimezone() if when else None,
        document=document,
        nothing_compiled=nothing_compiled,
        sections=[[Markup(section.html(graph.name)) for section in sections] for graph in graphs],
        summaries=[_summary(graph) for graph in graphs],
        charts=_script_data(charts),
        columns=_script_data(COLUMNS),
        libraries=_script(_vega()),
        script=_script((_HERE / "page.js").read_text()),
        style=(_HERE / "page.css").read_text(),
        light=HtmlFormatter(style="default").get_style_defs(".light .code"),
        dark=HtmlFormatter(style="github-dark").get_style_defs(".dark .code"),
    )


def _chart(graph: GraphData) -> dict[str, Any]:
    if (memory := graph.memory) is None or not memory.storages:
        return {"memory": None, "colours": {}}
    return {"memory": memory_spec(graph, memory), "colours": colours(memory, _WIDTH)}


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed, as one script."""
    return str(converter().javascript_bundle())


def converter() -> Any:
    """The library that includes Vega, and draws without a browser.

    Raises:
        FxwrapError: the library is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise FxwrapError(
            "pictures and pages are drawn by Vega",
            expected="the package vl-convert-python",
            got=str(error),
            remedy="pip install 'fxwrap[page]'; to_dict() and print() need nothing",
        ) from error
    return vl_convert


def _script(text: str) -> Markup:
    """Escape text for a script element, which ends at the first ``</script``, even inside of a string."""
    return Markup(text.replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def _script_data(data: Any) -> Markup:
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _source(kernel: KernelData) -> Markup:
    lexer = _LEXERS.get(kernel.language, TextLexer)()
    return Markup(highlight(_code(kernel), lexer, HtmlFormatter(cssclass="code")))


def _code(kernel: KernelData) -> str:
    """The source of a kernel, without the call in which Inductor passes it as a string."""
    source = kernel.source.strip()
    for quotes in ("'''", '"""'):
        if source.count(quotes) == 2:
            return source.split(quotes)[1].strip("\n")
    return source


def _summary(graph: GraphData) -> dict[str, str]:
    """The headline figures of a graph, by label."""
    partitions, counters, memory = graph.partitions, graph.counters, graph.memory
    captured = sum(p.verdict is Verdict.CAPTURED for p in partitions)
    launches, calls = sum(p.launches for p in partitions), sum(p.externs for p in partitions)
    kernels, recordings = len(graph.kernels), sum(counters.recordings.values())
    replays, eager = counters.replays, sum(counters.eager.values())
    figures = {
        "partitions": f"{captured} captured, {len(partitions) - captured} eager",
        "work": f"{count(launches, 'launch')}, {count(calls, 'library call')}, {count(kernels, 'kernel')}",
        "calls": f"{count(replays, 'replay')}, {count(recordings, 'recording')}, {eager} eager",
    }
    if memory is not None:
        if memory.predicted:
            together = "forward and backward take" if memory.predicted_with == "backward" else "a call takes"
            figures[together] = f"{sum(part.total for part in memory.predicted):,} bytes beside inputs"
        # The three below are of the same storages: those in the plan.
        figures["planned memory"] = f"{memory.peak_bytes:,} bytes at most"
        figures["the same in Inductor's order"] = f"{memory.inductor_peak_bytes:,} bytes"
        figures["the same without reuse"] = f"{memory.without_reuse_bytes:,} bytes"
    return figures
