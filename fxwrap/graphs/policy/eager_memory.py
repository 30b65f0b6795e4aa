"""Eager runs that are out of memory: idle recordings give theirs back, and the step runs again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch
from torch.fx import Node

from ...host_graph.nodes import Kind, kernel_of, kind_of, nodes_in, only_computes, schema_of
from ...plan import ProgramPlan
from ..memory.locks import LockOwner
from ..memory.shared_state import SHARED
from .counters import Counters

log = logging.getLogger(__name__)

EVENT = "out of memory in an eager run: idle recordings were ended"
# Seconds to wait for another thread's capture.
_WAIT_S = 1.0


class GiveBack:
    """Ends the recordings that no call uses at this moment, of all programs on a device.

    It refers to no program: what its eager runs are made of holds it.
    """

    def __init__(self, device: torch.device, counters: Counters, caller_captures: Callable[[], bool]) -> None:
        self._device, self._counters, self._caller_captures = device, counters, caller_captures

    def __call__(self) -> None:
        if self._caller_captures():
            return
        owner, capturing = LockOwner(), SHARED.capturing[self._device]
        try:
            # While somebody captures, allocators free nothing, and to wait for the device could end the capture.
            nobody_captures = capturing.acquire(owner, _WAIT_S)
            if ended := SHARED.arenas.end_idle(self._device):
                self._counters.count("events", EVENT)
                log.info("%s: %s (%d)", self._device, EVENT, ended)
            if nobody_captures:
                with contextlib.suppress(Exception):  # as in take_memory
                    torch.accelerator.empty_cache()
        finally:
            capturing.release(owner)


def can_run_again(plan: ProgramPlan, node: Node) -> bool:
    """Whether a step that was out of memory may run once more: then that gives what one run would have given.

    An allocation has done nothing, and neither has a Triton kernel: what allocates there comes before the launch, or
    tunes on copies, or restores at once what it has written (torch/_inductor/runtime/triton_heuristics.py, ``bench``,
    torch 2.13 and 2.14). One of torch's operators may have written, but everything that it reads is as it was. One
    that draws random numbers may have drawn some; what others do besides computing is not known.
    """
    if kind_of(node) is Kind.ALLOCATION:
        return True
    if (kernel := kernel_of(node)) is not None:
        return kernel.language == "triton"
    overload = schema_of(node)
    if kind_of(node) is not Kind.EXTERN or overload is None or not only_computes(node) or "effect" in node.meta:
        return False
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return False
    arguments = overload._schema.arguments
    out = {a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write}
    read = nodes_in((node.args, {name: value for name, value in node.kwargs.items() if name not in out}))
    return plan.facts.behind(read).isdisjoint(plan.facts.writes(node))
