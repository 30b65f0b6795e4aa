"""The conditions on calls that a native unit may run (``Guards``), and a unit as the helper library takes it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...torch_private.native_units import NativeStep, Value
from .overlaps import MutatedInputs


@dataclass(frozen=True)
class Guards:
    """The conditions that a call must satisfy to be run by a unit.

    Attributes:
        addresses: (position, address) of static inputs.
        numbers: (position, value) of inputs that are numbers.
        dimensions: (position, whether it is a stride, dimension, value) of sizes and strides.
        packed, overwritten: storages by handle; no input at the positions ``overwritten`` may lie in them.
        mutated_inputs: which lie apart from all others; None where it does not matter.
        no_hooks: whether a call must come from a thread without saved-tensor hooks.
        locks: for each lock, its owners, of which there must be none, and the cell that says that a unit holds it.
        device: the accelerator, which must be the current one; None for the CPU.
        streams: the stream on which work was issued last in each arena; it must be the current stream.
        caller_captures: whether the current stream is being captured; it must not be.
    """

    addresses: Sequence[tuple[int, int]] = ()
    numbers: Sequence[tuple[int, int]] = ()
    dimensions: Sequence[tuple[int, bool, int, int]] = ()
    packed: Mapping[int, Any] | None = None
    overwritten: Sequence[int] = ()
    mutated_inputs: MutatedInputs | None = None
    no_hooks: bool = False
    locks: Sequence[tuple[dict[int, Any], ctypes.c_int64]] = ()
    device: torch.device | None = None
    streams: Sequence[ctypes.c_int64] = ()
    caller_captures: Callable[[], bool] | None = None


@dataclass
class Description:
    """A unit as the helper library takes it; it reads the attributes by name.

    Attributes:
        inputs: the number of inputs; they are the first slots.
        empties_inputs: whether the list of inputs is emptied at the start of the call, so that each input is freed
            after its last use; otherwise it is emptied at the end.
        clock: a counter that all units share; each call increments it.
        count: a counter of this unit's calls.
        name: the name of a call's range in profiles; empty if the call has none of its own.
        slots: the number of slots.
        loads: inputs that steps read.
        kept_inputs: inputs that no step reads, and that live until the end of the call.
        cleared: slots that still hold a value at the end of a call.
        listing: the Python of what the unit replays, line by line.
        lines: the line of each step.
        ranges: (position of a step, name): ranges inside of the call; each ends where the next begins.
        give_back: frees memory; called when a step that may run again is out of memory, before it runs again.
        may_retry: positions of steps that may run again.
    """

    inputs: int
    empties_inputs: bool
    guards: Guards = field(default_factory=Guards)
    clock: ctypes.c_int64 | None = None
    count: ctypes.c_int64 | None = None
    name: str = ""
    slots: int = 0
    loads: list[int] = field(default_factory=list)
    kept_inputs: list[int] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    steps: list[NativeStep] = field(default_factory=list)
    listing: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    ranges: list[tuple[int, str]] = field(default_factory=list)
    result: Value | None = None
    give_back: Callable[[], object] | None = None
    may_retry: list[int] = field(default_factory=list)
