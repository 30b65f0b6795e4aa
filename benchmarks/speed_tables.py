"""What benchmarks/speed.py prints: microseconds, ratios and their geometric means, numbers, parts of a call."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from alternatives import AGAIN, AHEAD, ALTERNATIVES, BOUND, FROZEN, OURS, OWN, REFERENCE
from rich.console import Console
from rich.table import Table
from speed_picture import ratio_of
from timing import geometric_mean

_AHEAD = ("aotinductor", "onnxruntime", "onnxruntime bound")
# What is shown beside fxwrap's other ways to call; beside the first one, which is compiled, are all others.
BESIDE = {
    BOUND: (REFERENCE, "inductor unsafe", "cpp_wrapper", "aot_compile", OURS),
    AHEAD: ("eager", *_AHEAD),
    FROZEN: (*_AHEAD, AHEAD),
}
_NOT_COMPILED = ("inductor unsafe", "aot_compile", *_AHEAD, BOUND, AHEAD, FROZEN)
_WAYS = {OURS: "compiled", BOUND: "bound", AHEAD: "ahead of time", FROZEN: "ahead of time, frozen and autotuned"}


def _ratios(models: dict[str, Any], ours: str) -> dict[str, dict[str, list[float]]]:
    """The medians of the ratios of one of fxwrap's, by group and alternative."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for row in models.values():
        for name, entry in row["alternatives"].items():
            if (ratio := ratio_of(entry, ours)) is not None:
                ratios.setdefault(row["group"], {}).setdefault(name, []).append(ratio[1])
    return ratios


def means(models: dict[str, Any], ours: str) -> dict[str, dict[str, float]]:
    """Geometric means of the ratios of one of fxwrap's, by group and alternative."""
    return {
        group: {name: geometric_mean(ratios) for name, ratios in by_name.items()}
        for group, by_name in _ratios(models, ours).items()
    }


def beside(models: dict[str, Any], ours: str) -> list[str]:
    """The alternatives that one of fxwrap's is shown beside, in the order of the table."""
    names = BESIDE.get(ours) or [name for name in (*ALTERNATIVES, AGAIN) if name not in (OURS, *_NOT_COMPILED)]
    return [name for name in names if any(name in row["alternatives"] for row in models.values())]


def _cell(entry: dict[str, Any] | None, ours: str) -> str:
    if entry is None:
        return "-"
    ratio = ratio_of(entry, ours)
    return f"{entry['us']:,.1f}" + ("" if ratio is None else "\n{1:.2f} [{0:.2f} {2:.2f}]".format(*ratio))


def _numbers(row: dict[str, Any], ours: str, others: Sequence[str]) -> str:
    """How far the numbers of one of fxwrap's are from the reference's, then those of others that differ."""
    entry = row["alternatives"].get(ours)
    if entry is None:
        return "-"
    differing = {name: row["alternatives"].get(name, {}).get("difference") for name in others}
    kept = row["not_replayed"] if ours == OURS else entry.get("not_replayed", {})
    return "; ".join(
        [
            f"within {entry['difference']:.0e}" if entry["difference"] else "bit for bit",
            *(f"{count} of 10 calls: {why}" for why, count in kept.items()),
            *(f"{name} within {difference:.0e}" for name, difference in differing.items() if difference),
        ]
    )


def progress(row: dict[str, Any]) -> str:
    """A model's row in one line."""
    cells = (f"{name} {_cell(entry, OURS)}".replace("\n", " ") for name, entry in row["alternatives"].items())
    return f"{', '.join(cells)}; {_numbers(row, OURS, ())}"


def _print(table: Table, columns: int, title: str = "") -> None:
    """As wide as it has to be: what is printed is read by programs, too."""
    console = Console(width=max(110 + 24 * columns, 120))
    console.print(*([f"\n{title}"] if title else []), table, highlight=False, sep="\n")


def show(found: dict[str, Any]) -> None:
    """Print a table for each of fxwrap's ways to call, beside what one would pick instead of it, and the means."""
    models = found["models"]
    print(f"{found['machine']}, torch {found['torch']}, {found['commit']}")
    shown = [ours for ours in OWN if any(ours in row["alternatives"] for row in models.values())]
    for ours in shown or [OURS]:
        _show_one(models, ours)
    if shown not in ([], [OURS]):
        _show_means(models, shown)


def _show_one(models: dict[str, Any], ours: str) -> None:
    names, mean = beside(models, ours), means(models, ours)
    columns = [name for name in names if name != AGAIN] + [ours] + [name for name in names if name == AGAIN]
    columns = [name for name in columns if any(name in row["alternatives"] for row in models.values())]
    table = Table("model", box=None, padding=(0, 1))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("numbers")
    for group in dict.fromkeys(row["group"] for row in models.values()):
        rows = {name: row for name, row in models.items() if row["group"] == group}
        for model, row in rows.items():
            if ours in row["alternatives"] or ours == OURS:
                cells = (_cell(row["alternatives"].get(name), ours) for name in columns)
                table.add_row(model, *cells, _numbers(row, ours, names))
        if mean.get(group) and len(rows) > 1:
            cells = (f"{mean[group][name]:.3f}" if name in mean[group] else "" for name in columns)
            table.add_row(f"[bold]{group}[/]", *cells, "geometric mean", end_section=True)
    _print(table, len(columns), f"microseconds a call; below, the time of fxwrap, {_WAYS[ours]}, by it")


def _show_means(models: dict[str, Any], shown: Sequence[str]) -> None:
    """All of fxwrap's by all alternatives; of how many models it is the mean where some of the group are missing."""
    ratios = {ours: _ratios(models, ours) for ours in shown}
    names = [name for name in (*ALTERNATIVES, AGAIN) if any(name in row["alternatives"] for row in models.values())]
    table = Table("group", "fxwrap", box=None, padding=(0, 1))
    for name in names:
        table.add_column(name, justify="right")
    for group in dict.fromkeys(row["group"] for row in models.values()):
        for ours in shown:
            by_name = ratios[ours].get(group, {})
            full = max(map(len, by_name.values()), default=0)
            cells = (
                f"{geometric_mean(by_name[name]):.3f}" + (f" of {len(by_name[name])}" * (len(by_name[name]) < full))
                if name in by_name
                else ""
                for name in names
            )
            if by_name:
                table.add_row(group, _WAYS[ours], *cells)
    _print(table, len(names), "geometric means of the ratios: fxwrap's time by the others'")


def show_parts(models: dict[str, Any], alternatives: Sequence[str]) -> None:
    """Print what a call is made of."""
    columns = ("call", "Dynamo", "AOTAutograd", "wrapper", "kernels", "ATen", "rest")
    table = Table("model", "", title="parts of a call, in microseconds", box=None, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="right")
    for model, row in models.items():
        found = row.get("parts", {})
        calls = [found[part]["us"] for part in ("kernels", "operators") if part in found]
        for name in (one for one in alternatives if one in found):
            its = found[name]
            its_own = (its["call"], its["dynamo"], its["aot"], its["wrapper"])
            shared = (*calls, its["wrapper"] - sum(calls)) if calls else ()
            table.add_row(model, name, *(f"{value:,.1f}" for value in (*its_own, *shared)))
    if table.rows:
        Console(width=120).print(table)


def show_processes(models: dict[str, Any], alternatives: Sequence[str]) -> None:
    """Print what was measured in processes of their own: seconds to the first result, and peaks of memory."""
    table = Table("model", "", title="a process each", box=None, padding=(0, 1))
    for name in alternatives:
        table.add_column(name, justify="right")
    for model, row in models.items():
        for caches in ("cold", "warm"):
            seconds = [row.get("start", {}).get(name, {}).get(caches) for name in alternatives]
            if any(seconds):
                cells = (f"{statistics.median(some):.2f}" if some else "-" for some in seconds)
                table.add_row(model, f"first call, s, caches {caches}", *cells)
        peaks = [row.get("peak_bytes", {}).get(name) for name in alternatives]
        if any(most is not None for most in peaks):
            table.add_row(model, "peak, bytes", *("-" if most is None else f"{most:,}" for most in peaks))
    if table.rows:
        _print(table, len(alternatives))
