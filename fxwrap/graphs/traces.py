"""Writes fxwrap's decisions for torch's tools: structured traces (tlparse) and files of TORCH_COMPILE_DEBUG."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..host_graph.listing import list_graph
from ..host_graph.nodes import is_work
from ..host_graph.typed_json import to_data
from ..plan import MemoryPlan, ProgramPlan, Verdict
from ..torch_private.trace_artifacts import TracedCompilation
from .devices.device_graph import DeviceGraph

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProgramTraces:
    """The traces of one program. It is made while the program is compiled."""

    program: str
    compilation: TracedCompilation = field(default_factory=TracedCompilation.current)

    def compiled(self, plan: ProgramPlan) -> None:
        """Write the program that is compiled."""
        self._write("fxwrap_host_graph", lambda: list_graph(plan.graph))
        self._write("fxwrap_partitions", lambda: {"program": self.program, **partitions_data(plan)})

    def planned(self, plan: ProgramPlan, memory: MemoryPlan) -> None:
        """Write the first plan of the program's memory."""
        self._write("fxwrap_memory_plan", lambda: {"program": self.program, **memory_data(plan, memory)})

    def _write(self, name: str, make: Callable[[], Any]) -> None:
        """Write an artifact: a text, or data for JSON."""

        def text() -> str:
            content = make()
            return content if isinstance(content, str) else json.dumps(content, indent=1)

        encoding = "string" if name == "fxwrap_host_graph" else "json"
        self.compilation.write(name, encoding, text)
        if self.compilation.folder is not None:
            file = self.compilation.folder / f"{name}.{'txt' if encoding == 'string' else 'json'}"
            try:
                file.write_text(text() + "\n", encoding="utf-8")
            except OSError as error:
                log.warning("%s cannot be written: %s", file, str(error))

    def capturing(self, graph: DeviceGraph) -> None:
        """Prepare a device graph that is about to capture, so that ``captured`` can write it."""
        if self.compilation.folder is not None:
            with contextlib.suppress(Exception):  # not every device supports it
                graph.enable_debug_mode()

    def captured(self, graph: DeviceGraph, partition: int) -> None:
        """Write the captured graph of a partition in the device's own format."""
        if self.compilation.folder is None or not hasattr(graph, "debug_dump"):
            return
        paths = (self.compilation.folder / f"fxwrap_partition_{partition}_graph_{n}.dot" for n in itertools.count())
        path = next(path for path in paths if not path.exists())
        try:
            graph.debug_dump(str(path))
        except Exception as error:  # a device may raise anything; the graph itself is not affected
            log.warning("%s cannot be written: %s", path, str(error))


def partitions_data(plan: ProgramPlan) -> dict[str, Any]:
    """The partitions of a program, and the reason of each eager node, as data for JSON."""
    return {
        "phase": plan.phase,
        "device": str(plan.device),
        "partitions": to_data(plan.partitions),
        "eager_nodes": {
            name: {"reason": verdict.reason, "to_capture_it": verdict.remedy}
            for name, verdict in plan.verdicts.items()
            if verdict.verdict is Verdict.EAGER and is_work(plan.nodes[name])
        },
    }


def memory_data(plan: ProgramPlan, memory: MemoryPlan) -> dict[str, Any]:
    """The home of every storage of a program, and sizes and offsets in bytes, as data for JSON."""
    return {
        "arena_bytes": memory.size,
        "peak_bytes": memory.peak,
        "lower_bound_bytes": memory.lower_bound,
        "without_reuse_bytes": memory.plain,
        "regions": [
            {"device": str(r.device), "begin": r.begin, "end": r.end, "bytes": r.size, "arena": r.arena}
            for r in memory.regions
        ],
        "storages": [
            {
                "name": storage.name,
                "bytes": memory.sizes.get(storage.index),
                "home": place.home.value,
                "region": place.region,
                "offset": place.offset,
                "output": storage.index in memory.outputs,
            }
            for storage, place in zip(plan.facts.storages, memory.places, strict=True)
        ],
        "workspaces": [{"node": node, **to_data(place)} for node, place in memory.workspaces.items()],
    }
