"""The memory picture: time across, address up, a rectangle for each storage; as a Vega-Lite specification.

One specification makes the picture of the page, the SVG and the PNG.
"""

from __future__ import annotations

import bisect
import itertools
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...host_graph.typed_json import to_data
from ...inspection.document import GraphData
from ...inspection.memory_map import MemoryData
from .drawing import count

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name: nothing is fetched
# Colours that can be distinguished with a colour vision deficiency (Okabe and Ito).
_USES = {
    "temporary": "#56b4e9",
    "output": "#e69f00",
    "saved for backward": "#cc79a7",
    "copy of an input": "#009e73",
    "result of an operator": "#999999",
    "workspace": "#d0c98a",
}
# The pixels that an entry of a legend takes: legends have as many columns as fit.
COLUMNS = {"use": 140, "partition": 44, "line": 220}
# Labels and ticks at whole numbers alone.
_WHOLE: dict[str, Any] = {
    "format": "d",
    "labelExpr": "datum.value % 1 ? '' : datum.label",
    "tickOpacity": {"condition": {"test": "datum.value % 1", "value": 0}, "value": 1},
    "gridOpacity": {"condition": {"test": "datum.value % 1", "value": 0}, "value": 1},
}


def colours(memory: MemoryData, width: int) -> dict[str, dict[str, Any]]:
    """What the colour of a rectangle can show: first its use; the page can change it."""
    used = {storage.use for storage in memory.storages}
    use = {"scale": {"domain": [*_USES], "range": [*_USES.values()]}}
    return {
        "use": {**_colour("use", width, values=[name for name in _USES if name in used]), **use},
        "partition": {**_colour("partition", width), "scale": {"scheme": "tableau20"}, "sort": None},
    }


def _colour(field: str, width: int, **legend: Any) -> dict[str, Any]:
    columns = max(1, width // COLUMNS[field])
    legend = {"title": None, "orient": "top", "columns": columns, "symbolLimit": 24, **legend}
    return {"field": field, "type": "nominal", "legend": legend}


def memory_spec(graph: GraphData, memory: MemoryData, width: int = 900, height: int = 380) -> dict[str, Any]:
    """The Vega-Lite specification of a graph's memory picture.

    Args:
        width, height: pixels of the part with the storages.
    """
    scale, unit = _unit(memory)
    return {
        "$schema": SCHEMA,
        "params": [
            {"name": "search", "value": ""},
            {
                "name": "zoom",
                "select": {"type": "interval", "encodings": ["x"]},
                "bind": "scales",
                "views": ["storages", "partitions"],
            },
        ],
        "vconcat": [
            _strip(graph, memory, width),
            {
                "height": height,
                "width": width,
                "layer": [_storages(graph, memory, scale, unit, width), _lines(memory, scale, width)],
                "resolve": {"scale": {"color": "independent"}},
            },
        ],
        "spacing": 4,
        "resolve": {"scale": {"color": "independent"}},
        "config": {
            "view": {"stroke": None},
            "font": "system-ui, sans-serif",
            "legend": {"layout": {"top": {"direction": "vertical", "anchor": "start"}}},
        },
    }


def _strip(graph: GraphData, memory: MemoryData, width: int) -> dict[str, Any]:
    """The partitions, over the steps that they take."""
    verdicts = {"domain": ["captured", "eager"], "range": ["#4c9f70", "#d1495b"]}
    return {
        "name": "partitions",
        "height": 22,
        "width": width,
        "data": {"values": _partitions(graph)},
        "mark": {"type": "rect", "stroke": "white", "clip": True},
        "encoding": {
            "x": {"field": "begin", "type": "quantitative", "axis": None, "scale": _steps(memory)},
            "x2": {"field": "end"},
            "color": {
                "field": "verdict",
                "type": "nominal",
                "scale": verdicts,
                "legend": {"title": None, "orient": "top", "direction": "horizontal"},
            },
            "tooltip": [{"field": name} for name in ("partition", "verdict", "work", "reason")],
        },
    }


def _storages(graph: GraphData, memory: MemoryData, scale: float, unit: str, width: int) -> dict[str, Any]:
    values = [
        {
            **to_data(storage),
            "low": storage.address / scale,
            "high": (storage.address + storage.size) / scale,
            "size": f"{storage.size:,} bytes",
            "alive": f"steps {storage.begin} to {storage.end - 1}",
            "partition": "before the first" if storage.partition is None else f"{storage.partition}",
            "text": " ".join((storage.name, storage.use, storage.user_line, graph.nodes[storage.node].module)),
        }
        for storage in memory.storages
    ]
    shown = [{"field": name} for name in ("name", "use", "size", "alive", "partition", "user_line")]
    return {
        "name": "storages",
        "data": {"values": values},
        "mark": {"type": "rect", "stroke": "white", "strokeWidth": 0.5, "clip": True, "cursor": "pointer"},
        "encoding": {
            "x": {
                "field": "begin",
                "type": "quantitative",
                "title": f"step (of {memory.steps})",
                "axis": {**_WHOLE, "grid": False, "labelExpr": _step_label(memory)},
                "scale": _steps(memory),
            },
            "x2": {"field": "end"},
            "y": {
                "field": "low",
                "type": "quantitative",
                "title": f"address, {unit}",
                "axis": _WHOLE if scale == 1 else {},
            },
            "y2": {"field": "high"},
            "color": colours(memory, width)["use"],
            "opacity": {
                "condition": {"test": "!search || indexof(lower(datum.text), lower(search)) >= 0", "value": 1},
                "value": 0.12,
            },
            "tooltip": shown,
        },
    }


def _lines(memory: MemoryData, scale: float, width: int) -> dict[str, Any]:
    bounds = {"lower bound": memory.lower_bound_bytes, "Inductor's peak": memory.inductor_peak_bytes}
    values = [{"line": f"{name}: {size:,} bytes", "at": size / scale} for name, size in bounds.items() if size]
    return {
        "name": "bounds",
        "data": {"values": values},
        "mark": {"type": "rule", "strokeDash": [6, 3], "strokeWidth": 1.5, "clip": True},
        "encoding": {
            "y": {"field": "at", "type": "quantitative"},
            "color": {**_colour("line", width), "scale": {"range": ["#d55e00", "#0072b2"]}},
        },
    }


def _step_label(memory: MemoryData) -> str:
    """A Vega expression: the numbers of steps, and "end" where the last one has run and outputs are returned."""
    end = memory.steps
    return f"datum.value % 1 || datum.value > {end} ? '' : datum.value === {end} ? 'end' : datum.label"


def _steps(memory: MemoryData) -> dict[str, Any]:
    return {"domain": [0, memory.steps + 1], "nice": False}


def _partitions(graph: GraphData) -> list[dict[str, Any]]:
    ends = itertools.accumulate(len(partition.nodes) for partition in graph.partitions)
    return [
        {
            "begin": end - len(partition.nodes),
            "end": end,
            "partition": partition.index,
            "verdict": partition.verdict.value,
            "work": f"{count(partition.launches, 'launch')}, {count(partition.externs, 'library call')}",
            "reason": partition.reason or "-",
        }
        for partition, end in zip(graph.partitions, ends, strict=True)
    ]


_UNITS = (1, "bytes"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB")


def _unit(memory: MemoryData) -> tuple[int, str]:
    top = max((storage.address + storage.size for storage in memory.storages), default=0)
    return _UNITS[max(0, bisect.bisect_right([scale for scale, _ in _UNITS], top) - 1)]


def write_picture(graph: GraphData, memory: MemoryData, path: Path, width: int, height: int) -> None:
    """See ``Explanation.memory_picture``."""
    from .page import converter

    if path.suffix not in (".svg", ".png"):
        raise InputError("a picture's file", expected="a name that ends with .svg or .png", got=path.name)
    spec = memory_spec(graph, memory, width, height)
    spec["config"]["background"] = "white"
    if path.suffix == ".svg":
        path.write_text(converter().vegalite_to_svg(spec), encoding="utf-8")
    else:
        path.write_bytes(converter().vegalite_to_png(spec, scale=2))
