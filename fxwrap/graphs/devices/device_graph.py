"""Device graphs: the interface of ``torch.accelerator.Graph``, and adapters for torch's older graph classes."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class DeviceGraph(Protocol):
    """The methods of ``torch.accelerator.Graph``."""

    def capture_begin(self) -> None: ...
    def capture_end(self) -> None: ...
    def instantiate(self) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None: ...
    def pool(self) -> Any: ...
    def enable_debug_mode(self) -> None: ...
    def debug_dump(self, path: str) -> None: ...


class CUDAGraphAdapter:
    """``torch.cuda.CUDAGraph`` with the methods of ``torch.accelerator.Graph``."""

    _kept = False  # whether the graph keeps what it has captured

    def __init__(self, pool: Any = None) -> None:
        self._graph: Any = torch.cuda.CUDAGraph()
        self._pool = pool

    def capture_begin(self) -> None:
        # Other threads may continue to allocate and synchronize while this one captures.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def capture_end(self) -> None:
        self._graph.capture_end()

    def instantiate(self) -> None:
        """``capture_end`` instantiates the graph, and drops what it has captured, unless that is kept to be seen."""
        if self._kept:
            self._graph.instantiate()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()

    def pool(self) -> Any:
        return self._graph.pool()

    def enable_debug_mode(self) -> None:
        self._graph, self._kept = type(self._graph)(keep_graph=True), True
        self._graph.enable_debug_mode()

    def debug_dump(self, path: str) -> None:
        self._graph.debug_dump(path)


class XPUGraphAdapter(CUDAGraphAdapter):
    """``torch.xpu.XPUGraph`` with the methods of ``torch.accelerator.Graph``."""

    def __init__(self, pool: Any = None) -> None:
        self._graph = torch.xpu.XPUGraph()
        self._pool = pool

    def capture_begin(self) -> None:
        self._graph.capture_begin(pool=self._pool)
