"""The ratios of benchmarks/speed.py as an SVG, drawn without a library: a row for each model.

From a file of results:

    python benchmarks/speed_picture.py benchmarks/results/DATE-cpu.json docs/speed-overhead.svg --group overhead-bound
"""

from __future__ import annotations

import argparse
import html
import json
import math
from pathlib import Path
from typing import Any

# By alternative; the others of the table are left out.
_COLOURS = {"inductor": "#4269d0", "cpp_wrapper": "#ef7a3c", "reduce-overhead": "#3ca951", "itself": "#9aa0a6"}
_NAMES = {
    "inductor": "Inductor's Python wrapper",
    "cpp_wrapper": "Inductor's C++ wrapper",
    "reduce-overhead": "reduce-overhead",
    "itself": "fxwrap, compiled a second time",
}
_LEFT, _WIDTH, _TOP, _LINE, _GAP = 170, 560, 92, 11, 12
_TICKS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)


def _x(ratio: float) -> float:
    """Where a ratio stands, in pixels; beyond the axis, at its end."""
    low, high = math.log(_TICKS[0]), math.log(_TICKS[-1])
    return round(_LEFT + _WIDTH * (min(max(math.log(ratio), low), high) - low) / (high - low), 1)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{html.escape(text)}</text>'


def picture(found: dict[str, Any]) -> str:
    """Draw what was measured.

    Args:
        found: what ``speed.py --json`` writes.

    Returns:
        The SVG's text. A dot is the median of the ratios of a model's turns, the line through it goes from one
        quartile to the other, and the scale is logarithmic.
    """
    shown = [one for one in _COLOURS if any(one in row["alternatives"] for row in found["models"].values())]
    parts, y = list[str](), float(_TOP)
    for model, row in found["models"].items():
        ratios = [(one, row["alternatives"][one]["ratio"]) for one in shown if one in row["alternatives"]]
        height = _LINE * len(ratios)
        parts.append(_text(_LEFT - 10, y + height / 2 + 4, model, 'text-anchor="end"'))
        for one, (low, middle, high) in ratios:
            y += _LINE
            at, stroke = y - _LINE / 2, f'stroke="{_COLOURS[one]}" stroke-width="3"'
            parts.append(f'<line x1="{_x(low)}" x2="{_x(high)}" y1="{at}" y2="{at}" {stroke}/>')
            title = f"<title>{html.escape(model)}: {middle:.2f} of {html.escape(_NAMES[one])}</title>"
            parts.append(f'<circle cx="{_x(middle)}" cy="{at}" r="4" fill="{_COLOURS[one]}">{title}</circle>')
        y += _GAP
    axis = []
    for tick in _TICKS:
        colour = "#444" if tick == 1 else "#ddd"
        axis.append(f'<line x1="{_x(tick)}" x2="{_x(tick)}" y1="{_TOP - 6}" y2="{y}" stroke="{colour}"/>')
        axis.append(_text(_x(tick), y + 16, f"{tick:g}", 'text-anchor="middle"'))
    legend, at = [], float(_LEFT)
    for one in shown:
        legend.append(f'<circle cx="{at}" cy="64" r="4" fill="{_COLOURS[one]}"/>' + _text(at + 8, 68, _NAMES[one]))
        at += 24 + 6.6 * len(_NAMES[one])
    title = _text(_LEFT, 24, "fxwrap's time of a call, divided by that of", 'font-weight="bold"')
    title += _text(_LEFT, 42, f"{found['machine']}, torch {found['torch']}, {found['date']}", 'fill="#666"')
    size = f'width="{_LEFT + _WIDTH + 40}" height="{y + 30:.0f}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, title, *legend, *axis, *parts, "</svg>\n"])


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
