"""A report as an HTML page: one file that needs no network, made from the document alone."""

from __future__ import annotations

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
from ..document import Document, GraphData, KernelData, short_line
from ..text import nothing_compiled
from .drawing import drawings
from .memory_picture import COLOURS, memory_spec

_HERE = Path(__file__).parent
_LEXERS = {"cpp": CppLexer, "triton": PythonLexer}


def page_of(document: Document, title: str = "fxwrap") -> str:
    """The page's HTML. Raises FxwrapError if the library that draws is missing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["commas"] = "{:,}".format
    environment.filters["milliseconds"] = lambda us: f"{us / 1e3:,.1f} ms"
    environment.filters["source"] = _source
    environment.filters["short"] = short_line
    graphs = document["graphs"]
    charts = [{"memory": _chart(graph), "drawings": drawings(graph), "nodes": graph["nodes"]} for graph in graphs]
    return environment.get_template("page.html").render(
        title=title,
        document=document,
        nothing_compiled=nothing_compiled,
        summaries=[_summary(graph) for graph in graphs],
        charts=_script_data(charts),
        colours=_script_data(COLOURS),
        libraries=_script(_vega()),
        script=_script((_HERE / "page.js").read_text()),
        style=(_HERE / "page.css").read_text(),
        light=HtmlFormatter(style="default").get_style_defs(".light .code"),
        dark=HtmlFormatter(style="github-dark").get_style_defs(".dark .code"),
    )


def _chart(graph: GraphData) -> dict[str, Any] | None:
    return memory_spec(graph) if graph["memory"] is not None and graph["memory"]["storages"] else None


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
    lexer = _LEXERS.get(kernel["language"], TextLexer)()
    return Markup(highlight(_code(kernel), lexer, HtmlFormatter(cssclass="code")))


def _code(kernel: KernelData) -> str:
    """The source of a kernel, without the call in which Inductor passes it as a string."""
    source = kernel["source"].strip()
    for quotes in ("'''", '"""'):
        if source.count(quotes) == 2:
            return source.split(quotes)[1].strip("\n")
    return source


def _summary(graph: GraphData) -> dict[str, str]:
    """The headline figures of a graph, by label."""
    partitions, counters, memory = graph["partitions"], graph["counters"], graph["memory"]
    captured = sum(p["verdict"] == "captured" for p in partitions)
    figures = {
        "partitions": f"{captured} captured, {len(partitions) - captured} eager",
        "work": f"{sum(p['launches'] for p in partitions)} launches, "
        f"{sum(p['extern_calls'] for p in partitions)} library calls, {len(graph['kernels'])} kernels",
        "calls": f"{counters['replays']} replays, {sum(counters['recordings'].values())} recordings, "
        f"{sum(counters['eager'].values())} eager",
    }
    if memory is not None:
        figures["memory"] = f"{memory['peak_bytes']:,} bytes at most"
        figures["Inductor's wrapper"] = f"{memory['inductor_peak_bytes']:,} bytes"
        figures["without reuse"] = f"{memory['without_reuse_bytes']:,} bytes"
    return figures
