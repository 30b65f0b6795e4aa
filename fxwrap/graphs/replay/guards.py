"""What a call must look like for a unit, and a unit as the helper library takes it."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .native import NativeStep, Value


@dataclass(frozen=True)
class Guards:
    """What a call has to look like for a unit.

    Attributes:
        addresses: (position, address) of static inputs.
        numbers: (position, value) of inputs that are numbers.
        dimensions: (position, whether it is a stride, dimension, value).
        packed: storages by their handles, of which no input at the positions ``overwritten`` may be in one.
        moving: (position, whether it is mutated) of inputs of which no mutated one may overlap another one.
        static_spans: spans [begin, end) of static inputs, in order; no mutated one of ``moving`` may overlap them.
        written_static_spans: those of mutated static inputs; nothing of ``moving`` may overlap them.
        no_hooks: nobody packs what autograd saves in this thread.
        locks: owners of locks, of which there must be none, and where it is noted that a unit has the lock.
        device: the accelerator, which must be the current one; None for the CPU.
        streams: where work was issued last in each arena, which must be the current stream.
        caller_captures: whether somebody captures on the current stream.
    """

    addresses: Sequence[tuple[int, int]] = ()
    numbers: Sequence[tuple[int, int]] = ()
    dimensions: Sequence[tuple[int, bool, int, int]] = ()
    packed: Mapping[int, Any] | None = None
    overwritten: Sequence[int] = ()
    moving: Sequence[tuple[int, bool]] = ()
    static_spans: Sequence[tuple[int, int]] = ()
    written_static_spans: Sequence[tuple[int, int]] = ()
    no_hooks: bool = False
    locks: Sequence[tuple[dict[int, Any], ctypes.c_int64]] = ()
    device: torch.device | None = None
    streams: Sequence[ctypes.c_int64] = ()
    caller_captures: Callable[[], bool] | None = None


@dataclass
class Description:
    """A unit as the helper library takes it.

    Attributes:
        inputs: how many there are: they are the first slots.
        empties_inputs: whether the list of inputs is emptied at the start of the call instead of at its end: inputs
            then live no longer than they are needed.
        loads: (input, slot).
        kept_inputs: inputs that no slot holds, but the call does.
        used: slots that steps read or write.
        dropped: slots that steps empty.
        cleared: slots that hold something at the end of a call.
        clock: incremented at every call, and shared by all units.
        count: incremented at every call.
        name: of the range in profiles that a call is; empty if it is part of another one.
        ranges: (position of a step, name): the ranges inside of it, each up to the next one.
        give_back: called where one of the steps ``repeats`` is out of memory; then it runs again.
        repeats: positions of steps.
    """

    inputs: int
    empties_inputs: bool
    guards: Guards = field(default_factory=Guards)
    clock: ctypes.c_int64 | None = None
    count: ctypes.c_int64 | None = None
    name: str = ""
    slots: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)
    kept_inputs: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    cleared: list[int] = field(default_factory=list)
    steps: list[NativeStep] = field(default_factory=list)
    listing: list[str] = field(default_factory=list)
    ranges: list[tuple[int, str]] = field(default_factory=list)
    result: Value | None = None
    give_back: Callable[[], object] | None = None
    repeats: list[int] = field(default_factory=list)

    def for_library(self) -> Mapping[str, Any]:
        guards = {one.name: getattr(self.guards, one.name) for one in dataclasses.fields(Guards)}
        own = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "guards"}
        # Where numbers are that Python and the library share, beside what keeps them there.
        cells = {
            "count_address": ctypes.addressof(self.count) if self.count is not None else 0,
            "clock_address": ctypes.addressof(self.clock) if self.clock is not None else 0,
            "lock_addresses": [ctypes.addressof(cell) for _, cell in self.guards.locks],
            "stream_addresses": list(map(ctypes.addressof, self.guards.streams)),
        }
        return {**own, **guards, **cells}
