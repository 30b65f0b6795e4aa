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


class SimulatedGraph(HostGraph):
    """A host graph whose results keep the addresses they had when they were captured."""

    def __init__(self) -> None:
        super().__init__()
        self._results: list[tuple[list[Any], int, torch.Tensor]] = []
        self.replays = 0

    def capture_end(self) -> None:
        super().capture_end()
        for call in self._calls:
            registers = getattr(call, "registers", [])
            for index in getattr(call, "stores", ()):
                if isinstance(registers[index], torch.Tensor):
                    self._results.append((registers, index, registers[index]))

    def replay(self) -> None:
        super().replay()
        self.replays += 1
        for registers, index, captured in self._results:
            # What an operator allocates lands where it did during capture.
            captured.copy_(registers[index])
            registers[index] = captured

    def reset(self) -> None:
        super().reset()
        self._results = []


SIMULATED = DeviceRuntime(
    torch.device("cpu"),
    SimulatedGraph,
    frozen_addresses=True,
    runs_while_capturing=True,
    implementation="simulated graph",
)
