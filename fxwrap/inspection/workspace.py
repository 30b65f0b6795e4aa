"""What library calls take for themselves while they run: nobody tells, so that it is measured, on the CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from ..host_graph import Kind, kind_of, schema_of
from ..passes.symbols import hint

# Operators that only compute: a custom one may do anything.
_NAMESPACES = ("aten", "mkldnn", "onednn")
_MARK = "fxwrap workspace "


def measure_workspace(nodes: Iterable[Node]) -> dict[Node, int]:
    """Bytes that calls allocate beyond what they return, at most at one time.

    Each runs twice on zeros of the sizes that the program was compiled for, the second time under torch's profiler.
    What cannot be run so (custom operators, operands that are no tensors or numbers) is missing, as is all work on
    accelerators.
    """
    calls: dict[Node, Callable[[], Any]] = {}
    for node in nodes:
        overload = schema_of(node) if kind_of(node) is Kind.EXTERN else None
        if overload is not None and overload.namespace in _NAMESPACES:
            try:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _zeros)
                function = node.meta.get("call", node.target)

                def call(function: Any = function, args: Any = args, kwargs: Any = kwargs) -> Any:
                    return function(*args, **kwargs)

                with torch.no_grad():
                    call()  # what a library keeps from its first call on is no workspace
            except Exception:
                continue
            calls[node] = call
    if not calls:
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        for number, run in enumerate(calls.values()):
            with torch.profiler.record_function(f"{_MARK}{number}"):
                result = run()
            del result
    peaks = _peaks(profile)
    return {node: peaks[number] for number, node in enumerate(calls) if peaks.get(number)}


class _Unknown(Exception):
    """A value that nothing stands for."""


def _zeros(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout is torch.strided:
        size, stride = [[hint(n) for n in numbers] for numbers in (value.size(), value.stride())]
        if None not in size and None not in stride:
            return torch.empty_strided(size, stride, dtype=value.dtype).zero_()  # type: ignore[arg-type]
    if isinstance(value, (int, torch.SymInt)) and (number := hint(value)) is not None:
        return number
    raise _Unknown


def _peaks(profile: Any) -> dict[int, int]:
    """By number of the mark: the most bytes allocated while it was open, less those at its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    found = {}
    for event in events:
        if event.get("ph") == "X" and str(event.get("name", "")).startswith(_MARK):
            held = most = 0
            for when, change in changes:
                if event["ts"] <= when <= event["ts"] + event["dur"]:
                    held += change
                    most = max(most, held)
            found[int(event["name"].removeprefix(_MARK))] = most - held
    return found
