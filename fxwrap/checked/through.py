"""Captured work without a device graph: it is issued again at every call, in the memory of the recording."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..graphs.devices.cpu_graph import CPUGraph
from ..graphs.devices.runtime import DeviceRuntime
from ..graphs.memory.static_buffers import copy_tensors


class IssuedAgain(CPUGraph):
    """Keeps calls as a CPU graph does; what they store stays where it was when they were kept, as on hardware."""

    def __init__(self) -> None:
        super().__init__()
        self._stored: list[tuple[Any, dict[int, Any]]] = []

    def capture_end(self) -> None:
        super().capture_end()
        self._stored = [
            (call, {number: _registers(call)[number] for number in getattr(call, "stores", ())})
            for call in self._calls
        ]

    def replay(self) -> None:
        for call, places in self._stored:
            call()
            for number, place in places.items():
                copy_tensors(call.registers[number], place)
                call.registers[number] = place

    def reset(self) -> None:
        super().reset()
        self._stored = []


def _registers(call: Any) -> list[Any]:
    return call.registers  # type: ignore[no-any-return]


def through_capture(runtime: DeviceRuntime) -> DeviceRuntime:
    """A runtime whose graphs are none: everything else is as it is."""
    if not runtime.frozen_addresses:
        return runtime  # its graphs issue their work again at every call
    fields = {field.name: getattr(runtime, field.name) for field in dataclasses.fields(DeviceRuntime)}
    fields.update(
        new_graph=lambda pool: IssuedAgain(),
        new_pool=lambda: None,
        runs_while_capturing=True,
        implementation=f"none, in the place of {runtime.implementation}",
    )
    return DeviceRuntime(**fields)
