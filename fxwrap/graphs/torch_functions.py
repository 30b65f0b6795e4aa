"""The private functions of torch that a running program needs.

``codegen/torch_runtime.py`` looks them up and hands them in: private torch interfaces are used in ``codegen/`` only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..devices import RecoverFromFailedCapture
from ..plan import MemoryPlan, ProgramPlan
from .devices.device_graph import DeviceGraph
from .memory.regions import KeptRegion
from .replay.native import NativeReplay

# A condition on the inputs of a call.
InputCheck = Callable[[list[Any]], bool]


class Traces(Protocol):
    """Writes one program's decisions to torch's structured traces."""

    def compiled(self, plan: ProgramPlan) -> None:
        """The program is compiled."""

    def planned(self, plan: ProgramPlan, memory: MemoryPlan) -> None:
        """Memory is planned for the first time."""

    def capturing(self, graph: DeviceGraph) -> None:
        """A graph is about to capture."""

    def captured(self, graph: DeviceGraph, partition: int) -> None:
        """The graph has captured the partition with this index, and can be replayed."""


@dataclass(frozen=True)
class TorchFunctions:
    """The functions of ``codegen/torch_runtime.py``, which documents each under its name, and

    Attributes:
        traces: makes the ``Traces`` of a program, by the program's name.
        native: the helper library of native replay; otherwise why it is not available, empty if it is switched off.
    """

    use_counter: Callable[[Sequence[torch.UntypedStorage]], Callable[[], list[int]]]
    pointer_check: Callable[[Sequence[Any], Sequence[int]], InputCheck]
    layout_check: Callable[[Sequence[Any], Sequence[int]], InputCheck]
    overlap: Callable[[torch.Tensor, torch.Tensor], bool]
    storage_at: Callable[[int, torch.device, int], torch.UntypedStorage]
    alive: Callable[[StorageWeakRef], torch.UntypedStorage | None]
    lay_out: Callable[..., torch.Tensor]
    saved_tensors_hooks: Callable[[], bool]
    allocations: Callable[[Callable[[], object]], Sequence[int] | None]
    after_failed_capture: RecoverFromFailedCapture
    free_workspaces: Callable[[Any], None]
    release_conditional_nodes: Callable[[torch.device, Any, int], None]
    other_threads_wait: Callable[[], bool]
    share_copies: Callable[[torch.UntypedStorage], None]
    below_autograd: Callable[[], contextlib.AbstractContextManager[Any]]
    below_modes: Callable[..., Any]
    without_modes: Callable[[], contextlib.AbstractContextManager[Any]]
    primals: Callable[[list[Any]], list[Any]]
    profiling: Callable[[], bool]
    traces: Callable[[str], Traces]
    native: Callable[[], NativeReplay | str]
    kept_region: Callable[[int], KeptRegion | None]
    kept_memory: Callable[[], int]
