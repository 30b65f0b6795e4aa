"""Checked mode: a program that compares its results with eager work, and says which operator is to blame.

It adds the options ``checked`` and ``through_capture``, whose programs are of a class of their own (``PROGRAMS``).
``program.py`` is that class: eager runs on copies beside some calls. ``walk.py`` is an eager run of the schedule that
watches each node; ``memory.py``, ``operators.py`` and ``replays.py`` look for the cause of a difference;
``through.py`` issues captured work again without a device graph. docs/checked.md is its page.
"""

from __future__ import annotations

from typing import Any

from ...hooks import PROGRAMS
from ...options import ADDED, AddedOption


def _parsed(value: Any) -> Any:
    # A bool is an int in Python.
    return value if type(value) is bool or (type(value) is int and value >= 1) else None


ADDED["checked"] = AddedOption(
    "compare replays with eager work, bit for bit, and look for what can make them wrong, after each recording and "
    "at every tenth call (True), or at every so many calls; fxwrap.CheckError says what was found",
    "a bool, or an int of at least 1",
    _parsed,
    default=False,
    compiling=False,
)
ADDED["through_capture"] = AddedOption(
    "run what a recording would capture at every call, in the recording's memory, without a device graph",
    "bool",
    lambda value: value if isinstance(value, bool) else None,
    default=False,
    compiling=False,
)
PROGRAMS.update(dict.fromkeys(("checked", "through_capture"), "fxwrap.features.checked.program:CheckedProgram"))
