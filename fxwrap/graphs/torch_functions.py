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
    """
    Attributes:
        use_counter: ``(storages)``: makes a function that returns how many tensors and storage objects share each of
            the storages.
        pointer_check: ``(pointers, positions)``: makes a function that tells whether ``inputs[p]`` is at
            ``pointers[p]`` for every ``p`` in ``positions``.
        layout_check: ``(inputs, positions)``: makes a function that tells whether the tensors at these positions have
            the same size, stride, dtype and device as now; False if in doubt.
        overlap: whether two tensors over one storage share an element; True if in doubt.
        storage_at: ``(address, device, bytes)``: a storage over memory that it does not own.
        alive: the storage of a weak reference; None if it was freed.
        lay_out: ``(tensor, size, stride, offset)``: a new tensor object over the same memory.
        saved_tensors_hooks: whether this thread has hooks that pack saved tensors.
        allocations: ``(function)``: the sizes that a function allocates on the CPU; None if they cannot be measured.
        after_failed_capture: ``(device, pool)``: ends recording to a memory pool in which a capture has failed, and
            releases it once.
        free_workspaces: ``(stream)``: frees the workspaces that libraries keep for a stream, where torch can.
        other_threads_wait: whether every other Python thread waits, so that none is about to issue work.
        share_copies: makes a storage that is a slice of another send copies of itself to other processes.
        below_autograd: makes a context in which operators skip autograd's layer of the dispatcher.
        below_modes: ``(operator, *args, **kwargs)``: calls an operator; dispatch modes see only the operators that it
            calls.
        without_modes: makes a context without dispatch modes (as tracing uses them).
        profiling: whether a profiler is on; asked at every call that no unit runs.
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
    other_threads_wait: Callable[[], bool]
    share_copies: Callable[[torch.UntypedStorage], None]
    below_autograd: Callable[[], contextlib.AbstractContextManager[Any]]
    below_modes: Callable[..., Any]
    without_modes: Callable[[], contextlib.AbstractContextManager[Any]]
    profiling: Callable[[], bool]
    traces: Callable[[str], Traces]
    native: Callable[[], NativeReplay | str]
