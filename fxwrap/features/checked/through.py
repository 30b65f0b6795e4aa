"""The option ``through_capture``: captured work is issued at every call, in a recording's memory, without a graph."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...graphs.devices.conditional_nodes import repeated_calls
from ...graphs.devices.cpu_graph import CPUGraph
from ...graphs.devices.runtime import DeviceRuntime
from ...graphs.memory.static_buffers import copy_tensors


class IssuedAgain(CPUGraph):
    """A device graph that repeats its calls, as the CPU's does, with results at fixed addresses, as on hardware."""

    def __init__(self) -> None:
        super().__init__()
        self._stored: list[tuple[Any, dict[int, Any]]] = []

    def capture_end(self) -> None:
        super().capture_end()
        calls: list[Any] = list(self._calls)
        self._stored = [(call, {n: call.registers[n] for n in getattr(call, "stores", ())}) for call in calls]

    def replay(self) -> None:
        for call, places in self._stored:
            call()
            for number, place in places.items():
                copy_tensors(call.registers[number], place)
                call.registers[number] = place

    def reset(self) -> None:
        super().reset()
        self._stored = []


def through_capture(runtime: DeviceRuntime) -> DeviceRuntime:
    """The same runtime with graphs that issue their work again."""
    if not runtime.frozen_addresses:
        return runtime  # its graphs issue their work again at every call already
    has_nodes = runtime.conditional_nodes is not None
    return dataclasses.replace(
        runtime,
        new_graph=lambda pool: IssuedAgain(),
        new_pool=lambda: None,
        runs_while_capturing=True,
        repeats_calls=True,
        conditional_nodes=repeated_calls(capture_runs=True) if has_nodes else None,
        implementation=f"none, in the place of {runtime.implementation}",
    )
