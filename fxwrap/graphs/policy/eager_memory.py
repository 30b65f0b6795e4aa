"""Out of memory in an eager run: idle recordings end and free their memory, and the step is retried."""

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
    """Ends all recordings on a device that no call uses at this moment, of all programs.

    It refers to no program, because the steps of a program's eager runs refer to it.
    """

    def __init__(self, device: torch.device, counters: Counters, caller_captures: Callable[[], bool]) -> None:
        self._device, self._counters, self._caller_captures = device, counters, caller_captures

    def __call__(self) -> None:
        if self._caller_captures():
            return
        owner, capturing = LockOwner(), SHARED.capturing[self._device]
        try:
            # During a capture allocators free nothing, and waiting for the device could invalidate the capture.
            no_capture = capturing.acquire(owner, _WAIT_S)
            if ended := SHARED.arenas.end_idle(self._device):
                self._counters.count("events", EVENT)
                log.info("%s: %s (%d)", self._device, EVENT, ended)
            if no_capture:
                with contextlib.suppress(Exception):  # as in take_memory
                    torch.accelerator.empty_cache()
        finally:
            capturing.release(owner)


def can_run_again(plan: ProgramPlan, node: Node) -> bool:
    """Whether a step that ran out of memory can be run again with the same result.

    An allocation can: it has had no effect. So can a Triton kernel: what allocates runs before the launch, or tunes
    on copies, or restores what it has written (torch/_inductor/runtime/triton_heuristics.py, ``bench``, torch 2.13
    and 2.14). One of torch's operators can, even if it has written a part, as long as it does not write what it
    reads. One that draws random numbers cannot: it may have drawn some. Other operators cannot, because their side
    effects are unknown.
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
