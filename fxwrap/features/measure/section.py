"""The section of a report about times: as text, and for the page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from ...host_graph.typed_json import from_data
from ...limit import binary
from .measured import Measured, MeasuredProgram, MeasuredStep

_LINES, _BARS = 100, 20  # at most: steps in the text, bars of a chart
_OUTSIDE = "outside of modules"


class MeasuredSection:
    """What ``hooks.REPORT_SECTIONS`` calls."""

    def __init__(self, data: Any) -> None:
        self._measured: Measured = from_data(Measured, data, foreign=True)

    def text(self, program: str) -> str:
        """A line about the call, and one for each step, the longest first."""
        if (one := self._measured.programs.get(program)) is None:
            return ""
        if one.why_not:
            return f"where the time goes: not measured: {one.why_not}"
        steps = sorted(one.steps, key=lambda step: -step.us)
        rows = [("us", "bytes", "bytes a second", "module", "kernel or library call")]
        rows += [_row(step) for step in steps[:_LINES]]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [f"where the time goes: {_headline(one)}"]
        for *numbers, module, name in rows:
            cells = [cell.rjust(width) for cell, width in zip(numbers, widths, strict=False)]
            lines.append("  ".join([*cells, module.ljust(widths[3]), name]))
        if rest := steps[_LINES:]:
            lines.append(f"{sum(step.us for step in rest):.1f} us in {len(rest)} more")
        return "\n".join(lines)

    def html(self, program: str) -> str:
        """Bars by module and by kernel, and a table of all steps."""
        if (one := self._measured.programs.get(program)) is None:
            return ""
        if one.why_not:
            return f"<section><h2>Where the time goes</h2><p>Not measured: {html.escape(one.why_not)}</p></section>"
        by_module = _bars(one, one.by(lambda step: step.module or _OUTSIDE))
        by_kernel = _bars(one, one.by(lambda step: step.name))
        rows = "".join(_table_row(step) for step in one.steps)
        numbers = "".join(f'<th class="number">{title}</th>' for title in ("us", "bytes", "bytes a second"))
        head = f"<tr><th>module</th><th>kernel or library call</th>{numbers}</tr>"
        return (
            f'<section class="measured"><h2>Where the time goes</h2><p>{html.escape(_headline(one).capitalize())}</p>'
            f"<h3>By module</h3>{by_module}<h3>By kernel</h3>{by_kernel}"
            f"<details><summary>{len(one.steps)} launches and library calls, in order</summary>"
            f"<table><thead>{head}</thead><tbody>{rows}</tbody></table></details></section>"
        )


def _headline(one: MeasuredProgram) -> str:
    steps = f"{len(one.steps)} launches and library calls"
    if one.in_graphs:
        told = f"{steps}, one at a time outside of their device graphs {one.steps_us:,.1f} us"
    else:
        share = one.host_us / one.call_us if one.call_us else 0.0
        host = f"host {one.host_us:,.1f} us ({share:.0%}), of which {one.between_us:,.1f} us between them"
        told = f"{steps} {one.steps_us:,.1f} us, {host}"
    return f"a call takes {one.call_us:,.1f} us (median of {one.runs}): {told}"


def _row(step: MeasuredStep) -> tuple[str, str, str, str, str]:
    moved = binary(step.bytes), f"{binary(step.bytes_per_second)}/s"
    return f"{step.us:,.1f}", *moved, step.module or "-", step.name


def _table_row(step: MeasuredStep) -> str:
    *numbers, module, name = map(html.escape, _row(step))
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    return f'<tr data-text="{module} {name}"><td class="line">{module}</td><td class="line">{name}</td>{cells}</tr>'


def _bars(one: MeasuredProgram, groups: dict[str, list[MeasuredStep]]) -> str:
    """A bar for each group, and one for the host, with shares of the call. The longest is as wide as the chart."""
    shown, rest = list(groups.items())[:_BARS], list(groups.items())[_BARS:]
    if rest:
        shown.append((f"{len(rest)} more", [step for _, steps in rest for step in steps]))
    widest = max([one.host_us, *(_us(steps) for _, steps in shown), 1e-9])
    rows = [_bar(name, _us(steps), _bytes(steps), one, widest) for name, steps in shown]
    if not one.in_graphs:
        rows.append(_bar("host", one.host_us, "", one, widest))
    return f'<table class="bars"><tbody>{"".join(rows)}</tbody></table>'


def _bar(name: str, us: float, moved: str, one: MeasuredProgram, widest: float) -> str:
    whole = max(one.call_us, one.steps_us, 1e-9)
    return (
        f'<tr><td class="line">{html.escape(name)}</td><td class="number">{us:,.1f} us</td>'
        f'<td class="number">{us / whole:.0%}</td><td class="number">{moved}</td>'
        f'<td><div class="bar" style="width: {100 * us / widest:.1f}%"></div></td></tr>'
    )


def _us(steps: Iterable[MeasuredStep]) -> float:
    return sum(step.us for step in steps)


def _bytes(steps: Sequence[MeasuredStep]) -> str:
    nbytes, us = sum(step.bytes for step in steps), _us(steps)
    return f"{binary(nbytes)}, {binary(nbytes / us * 1e6 if us else 0.0)}/s"
