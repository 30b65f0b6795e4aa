"""What is known of live outputs stays true when an interrupt arrives while it is looked at."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fxwrap.graphs.memory.live_outputs import OutputStorage, WatchedOutputs
from fxwrap.graphs.replay.liveness_guard import LivenessGuard
from fxwrap.torch_private.functions import use_counter

CPU = torch.device("cpu")


class Memory:
    """An arena, as far as a guard looks at it."""

    def __init__(self) -> None:
        self.device, self.version = CPU, ctypes.c_int64()
        self.watched_outputs: list[WatchedOutputs] = []

    def watch(self, outputs: WatchedOutputs) -> None:
        self.watched_outputs.append(outputs)
        self.version.value += 1


def handed_out(by_recording: bool = False) -> tuple[WatchedOutputs, torch.Tensor]:
    """Outputs, and the tensor that the caller has of them; the recording had one, too, and has ended."""
    storage = torch.empty(16).untyped_storage()
    own = [torch.empty(0).set_(storage)] if by_recording else []
    watched = WatchedOutputs([OutputStorage(storage, frozenset({0}), CPU)], use_counter)
    own.clear()
    return watched, torch.empty(0).set_(storage)


def test_an_interrupt_while_the_outputs_of_others_are_collected() -> None:
    """
    ::

        guard:  collects  ^C              is asked again
        other:  has a live output         it is live
    """

    def counter(storages: Sequence[torch.UntypedStorage]) -> Callable[[], list[int]]:
        if interrupts and storages:
            raise interrupts.pop()
        return use_counter(storages)

    interrupts: list[BaseException] = []
    memory = Memory()
    guard = LivenessGuard({memory: [(0, 64)]}, WatchedOutputs(), {}, counter)
    assert guard.all_dead()
    other, tensor = handed_out()
    memory.watch(other)
    interrupts.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        guard.all_dead()
    assert not guard.all_dead() and [output.low for output in guard.live_of_others()] == [0]
    del tensor
    assert guard.all_dead()
    storages, counts, versions = guard.expected()
    assert len(storages) == len(counts) == 1 and [value for *_, value in versions] == [1]


def test_an_interrupt_while_a_recording_ends() -> None:
    """It has let go of its outputs by then: there is one reference fewer than when it began to watch them."""

    class Interrupted(list[Any]):
        def __len__(self) -> int:
            raise KeyboardInterrupt

    watched, tensor = handed_out(by_recording=True)
    outputs, watched.outputs = watched.outputs, Interrupted(watched.outputs)
    with pytest.raises(KeyboardInterrupt):
        watched.retire()
    watched.outputs = outputs
    assert not watched.is_dead()
    watched.retire()
    assert not watched.is_dead(), "the caller has it still"
    del tensor, outputs
