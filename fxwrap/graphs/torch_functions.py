"""The few functions of torch that running a program needs and that have no public name.

They are looked up in ``codegen/``, where private torch interfaces live, and handed in.
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

# Asked of the inputs at every call.
InputCheck = Callable[[list[Any]], bool]


class Traces(Protocol):
    """Hears of one program's decisions, for torch's own tools."""

    def compiled(self, plan: ProgramPlan) -> None: ...

    def planned(self, plan: ProgramPlan, memory: MemoryPlan) -> None:
        """Memory is planned, for the first time."""

    def capturing(self, graph: DeviceGraph) -> None:
        """A graph is about to capture."""

    def captured(self, graph: DeviceGraph, partition: int) -> None:
        """It has captured a partition, by number, and can be replayed."""


@dataclass(frozen=True)
class TorchFunctions:
    """
    Attributes:
        use_counter: makes a function that tells how many tensors and storage objects share each of some
            storages.
        pointer_check: ``(pointers, positions)``: makes a function that tells whether ``inputs[p]`` is at
            ``pointers[p]`` for every ``p`` in ``positions``.
        layout_check: ``(inputs, positions)``: makes a function that tells whether the tensors at these positions look
            as they do now: size, stride, dtype, device; False if in doubt.
        overlap: whether two tensors over one storage share an element; True if in doubt.
        storage_at: ``(address, device, bytes)``: a storage over memory that somebody else owns and keeps.
        alive: what a weak reference refers to; None if that is gone.
        lay_out: ``(tensor, size, stride, offset)``: a new tensor object over the same memory.
        saved_tensors_hooks: tells whether hooks pack what autograd saves, in this thread.
        allocations: tells what a function allocates on the CPU.
        after_failed_capture: ``(device, pool)``: ends recording to a memory pool in which a capture has failed, and
            lets go of it once.
        free_workspaces: ``(stream)``: frees the workspaces that libraries keep for a stream, where torch can.
        nobody_else_runs: whether every other thread of Python's waits: none is about to issue work.
        share_copies: has a storage that is a slice of another send copies of itself to other processes.
        below_autograd: makes a context in which operators skip autograd's layer of the dispatcher.
        below_modes: ``(operator, *args, **kwargs)``: calls an operator so that dispatch modes see what it calls.
        without_modes: makes a context without dispatch modes (those under which somebody traces).
        profiling: whether a profiler is on: asked at every call that a unit does not take.
        traces: makes what hears of a program's decisions, by its name, while it is compiled.
        native: the helper library of native replay; else why it cannot be had here, empty where nobody wants it.
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
    nobody_else_runs: Callable[[], bool]
    share_copies: Callable[[torch.UntypedStorage], None]
    below_autograd: Callable[[], contextlib.AbstractContextManager[Any]]
    below_modes: Callable[..., Any]
    without_modes: Callable[[], contextlib.AbstractContextManager[Any]]
    profiling: Callable[[], bool]
    traces: Callable[[str], Traces]
    native: Callable[[], NativeReplay | str]
