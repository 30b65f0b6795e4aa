"""The ratios of benchmarks/speed.py as an SVG, drawn without a library: a row for each model, and a panel for each of
fxwrap's ways to call that was timed.

From a file of results:

    python benchmarks/speed_picture.py benchmarks/results/DATE-cpu.json docs/speed-overhead.svg --group overhead-bound
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# By alternative: a colour, and what the legend says.
_SHOWN = {
    "inductor": ("#4269d0", "Inductor's Python wrapper"),
    "inductor unsafe": ("#38b6c9", "Inductor's Python wrapper, unsafe"),
    "cpp_wrapper": ("#ef7a3c", "Inductor's C++ wrapper"),
    "reduce-overhead": ("#3ca951", "reduce-overhead"),
    "itself": ("#9aa0a6", "fxwrap, compiled a second time"),
    "eager": ("#8c6d4f", "eager"),
    "aotinductor": ("#3ca951", "AOTInductor's package"),
    "onnxruntime": ("#f28cb1", "ONNX Runtime"),
    "onnxruntime bound": ("#a463f2", "ONNX Runtime, I/O binding"),
}
# fxwrap's ways to call, as JSON names them: a title, and the alternatives that are drawn. The others are left out.
_PANELS = {
    "fxwrap": ("fxwrap, compiled", ("inductor", "cpp_wrapper", "reduce-overhead", "itself")),
    "fxwrap bound": ("fxwrap, bound", ("inductor", "inductor unsafe", "cpp_wrapper")),
    "fxwrap ahead of time": ("fxwrap, ahead of time", ("eager", "aotinductor", "onnxruntime", "onnxruntime bound")),
}
# In pixels. A panel that is alone is as wide as two.
_LEFT, _WIDTH, _BETWEEN, _TOP, _LINE, _GAP = 170, 250, 36, 76, 11, 12
# Ends of the scale, and what is marked between them.
_ENDS = (0.02, 0.05, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0, 20.0)
_MARKS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 20.0)


@dataclass(frozen=True)
class _Panel:
    """A logarithmic scale of ratios and what stands on it.

    Attributes:
        left, width: where the scale begins and how long it is, in pixels.
        low, high: the ratios at its ends.
        rows: by model, the alternatives with the quartiles of their ratios.
    """

    title: str
    shown: Sequence[str]
    rows: dict[str, list[tuple[str, Sequence[float]]]]
    low: float
    high: float
    left: float
    width: float

    def x(self, ratio: float) -> float:
        """Where a ratio stands, in pixels."""
        low, high = math.log(self.low), math.log(self.high)
        return round(self.left + self.width * (math.log(ratio) - low) / (high - low), 1)

    def head(self) -> Iterable[str]:
        """The title and the legend, an alternative a line."""
        yield _text(self.left, 64, self.title, 'font-weight="bold"')
        for line, name in enumerate(self.shown):
            colour, text = _SHOWN[name]
            y = _TOP + 14 * line
            yield f'<circle cx="{self.left + 4}" cy="{y}" r="4" fill="{colour}"/>'
            yield _text(self.left + 14, y + 4, text)

    def axis(self, top: float, bottom: float) -> Iterable[str]:
        for mark in _MARKS:
            if self.low <= mark <= self.high:
                x, colour = self.x(mark), "#444" if mark == 1 else "#ddd"
                yield f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="{colour}"/>'
                yield _text(x, bottom + 16, f"{mark:g}", 'text-anchor="middle"')

    def dots(self, model: str, middle: float) -> Iterable[str]:
        """A model's ratios, one below the other around a height in the picture."""
        ratios = self.rows[model]
        for line, (name, (low, median, high)) in enumerate(ratios):
            y, (colour, text) = middle + _LINE * (line - (len(ratios) - 1) / 2), _SHOWN[name]
            stroke = f'stroke="{colour}" stroke-width="3"'
            yield f'<line x1="{self.x(low)}" x2="{self.x(high)}" y1="{y}" y2="{y}" {stroke}/>'
            title = f"<title>{html.escape(model)}: {self.title}, takes {median:.2f} of {html.escape(text)}</title>"
            yield f'<circle cx="{self.x(median)}" cy="{y}" r="4" fill="{colour}">{title}</circle>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{html.escape(text)}</text>'


def ratio_of(entry: dict[str, Any] | None, ours: str) -> Sequence[float] | None:
    """The quartiles of the time of one of fxwrap's ways to call by that of an alternative, from the latter's JSON."""
    entry = entry or {}
    return entry.get("ratio") if ours == "fxwrap" else entry.get("ratios", {}).get(ours)


def _panels(models: dict[str, Any]) -> list[_Panel]:
    """A panel for each of fxwrap's ways to call that has ratios, all on the same scale."""
    drawn = []
    for ours, (title, names) in _PANELS.items():
        rows = {
            model: [(name, ratio) for name in names if (ratio := ratio_of(row["alternatives"].get(name), ours))]
            for model, row in models.items()
        }
        shown = [name for name in names if any(name in dict(ratios) for ratios in rows.values())]
        if shown:
            drawn.append((title, shown, rows))
    every = [value for _, _, rows in drawn for ratios in rows.values() for _, ratio in ratios for value in ratio]
    low = max((end for end in _ENDS if end <= min(every, default=1.0) and end < 1), default=_ENDS[0])
    high = min((end for end in _ENDS if end >= max(every, default=1.0) and end > 1), default=_ENDS[-1])
    width = _WIDTH if len(drawn) > 1 else 2 * _WIDTH
    lefts = itertools.count(_LEFT, width + _BETWEEN)
    return [_Panel(*panel, low, high, left, width) for panel, left in zip(drawn, lefts, strict=False)]


def picture(found: dict[str, Any]) -> str:
    """Draw what was measured.

    Args:
        found: what ``speed.py --json`` writes.

    Returns:
        The SVG's text. A dot is the median of the ratios of a model's turns, the line through it goes from one
        quartile to the other, and the scale is logarithmic.
    """
    panels = _panels(found["models"])
    right = max(panel.left + panel.width for panel in panels)
    top = y = float(_TOP + 14 * max(len(panel.shown) for panel in panels) + 8)
    bands, parts = list[str](), list[str]()
    for number, model in enumerate(found["models"]):
        height = _LINE * max(len(panel.rows[model]) for panel in panels) + _GAP
        if number % 2 == 0:
            bands.append(f'<rect x="0" y="{y}" width="{right + 20}" height="{height}" fill="#f4f5f7"/>')
        parts.append(_text(_LEFT - 14, y + height / 2 + 4, model, 'text-anchor="end"'))
        parts += [part for panel in panels for part in panel.dots(model, y + height / 2)]
        y += height
    axes = [part for panel in panels for part in (*panel.head(), *panel.axis(top, y))]
    large = 'font-weight="bold" font-size="14"'
    title = _text(_LEFT, 24, "A call's time with fxwrap, divided by that of others", large)
    title += _text(_LEFT, 42, f"{found['machine']}, torch {found['torch']}, {found['date']}", 'fill="#666"')
    width, height = round(right + 20), round(y + 30)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, title, *bands, *axes, *parts, "</svg>\n"])


def of_group(found: dict[str, Any], group: str) -> dict[str, Any]:
    """The results of one group of models, such as ``overhead-bound``."""
    return {**found, "models": {name: row for name, row in found["models"].items() if row["group"] == group}}


def main() -> None:
    """Draw one group of models out of a file of results, as for the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="what speed.py --json wrote")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--group", help="a group of models, such as overhead-bound; all without it")
    args = parser.parse_args()
    found = json.loads(args.results.read_text())
    args.picture.write_text(picture(found if args.group is None else of_group(found, args.group)))


if __name__ == "__main__":
    main()
