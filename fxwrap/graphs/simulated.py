"""A simulated accelerator graph on the CPU: frozen addresses without hardware.

The host graph takes new tensors at every replay. Hardware does not: a captured call reads and writes the
addresses it was captured with. This graph behaves like hardware, so that everything that follows from frozen
addresses (places for inputs, copies between eager and captured work, outputs in the graph's own memory) runs, and
can be tested, on any machine.
"""

from __future__ import annotations

from typing import Any

import torch

from .device_graph import DeviceRuntime, HostGraph
from .memory import tensors_in


class SimulatedGraph(HostGraph):
    """Replays calls on the very values they were captured with, and fills no registers: as hardware does.

    What an operator allocates lands in the memory it had when it was captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self._captured_with: list[list[Any]] = []

    def capture_end(self) -> None:
        super().capture_end()
        # Inputs are bound or copied to places: a call that reads one from a register would not survive hardware.
        self._captured_with = [
            [None] * getattr(call, "inputs", 0) + list(call.registers)[getattr(call, "inputs", 0) :]
            for call in map(_as_bound, self._calls)
        ]

    def replay(self) -> None:
        if not self._captured:
            super().replay()  # says what is wrong
        for call, captured in zip(map(_as_bound, self._calls), self._captured_with, strict=True):
            now = list(call.registers)
            call.registers[:] = captured
            try:
                call()
                for index in call.stores:
                    pairs = zip(tensors_in(call.registers[index]), tensors_in(captured[index]), strict=True)
                    for made, landed in pairs:
                        landed.copy_(made)
            finally:
                call.registers[:] = now

    def reset(self) -> None:
        super().reset()
        self._captured_with = []


def _as_bound(call: Any) -> Any:
    """A call with registers; a plain one has none."""
    if not hasattr(call, "registers"):
        call.registers, call.stores = [], []
    return call


SIMULATED = DeviceRuntime(
    torch.device("cpu"),
    lambda pool: SimulatedGraph(),
    frozen_addresses=True,
    runs_while_capturing=True,
    implementation="simulated graph",
)
