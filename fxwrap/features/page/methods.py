"""The methods of reports that draw."""

from __future__ import annotations

import html
from pathlib import Path

from ...errors import FxwrapError, InputError
from ...inspection.explanation import Explanation, in_a_folder


def to_html(explanation: Explanation, path: str | Path, title: str = "") -> None:
    """Write an HTML page with memory, partitions, the host graph and kernels: one file that needs no network.

    Args:
        title: what was compiled, by default.

    Raises:
        FxwrapError: the library that draws is missing (``pip install 'fxwrap[page]'``).
    """
    from .page import page_of

    in_a_folder(path).write_text(page_of(explanation.to_document(), title), encoding="utf-8")


def in_notebook(explanation: Explanation) -> str | None:
    """The page in a frame, for a notebook's cell (``_repr_html_``); None without the packages that draw: then the
    cell shows the text."""
    try:
        from .page import page_of

        page = page_of(explanation.to_document())
    except (ImportError, FxwrapError):
        return None
    style = "width: 100%; height: 720px; border: 1px solid #8b8d98"
    return f'<iframe sandbox="allow-scripts" title="fxwrap" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def memory_picture(
    explanation: Explanation, path: str | Path, graph: int = 0, width: int = 900, height: int = 360
) -> None:
    """Write the memory picture of one graph, as SVG or PNG, by the ending of the name.

    Args:
        graph: its number in ``to_dict()["graphs"]``.
        width, height: pixels of the part with the storages.

    Raises:
        InputError: another ending, no such graph, or one without a plan.
        FxwrapError: the library that draws is missing.
    """
    from .memory_picture import write_picture

    graphs = explanation.to_document().graphs
    shown = graphs[graph] if 0 <= graph < len(graphs) else None
    if shown is None or shown.memory is None or not shown.memory.storages:
        got = f"number {graph}" if shown is None else f"number {graph}, {shown.phase}, without a plan"
        raise InputError("there is no memory to show", expected=f"a planned graph below {len(graphs)}", got=got)
    write_picture(shown, shown.memory, in_a_folder(path), width, height)
