"""What one call adds to its memory, so that it can be recorded: the request of a recording, and its guards."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from .devices.runtime import capture_check, runtime_for
from .memory.memory_provider import RecordingMemory
from .memory.shared_state import SHARED
from .policy.specialization import Specialization
from .prepared import Prepared, ProgramContext
from .replay.guards import Guards
from .replay.overlaps import MutatedInputs
from .replay.recording import RecordingRequest
from .traces import ProgramTraces


def request_for(
    context: ProgramContext,
    prepared: Prepared,
    traces: ProgramTraces,
    specialization: Specialization,
    inputs: Sequence[Any],
    static: list[int],
    memory: RecordingMemory,
) -> RecordingRequest:
    """The request of a recording of this call.

    Args:
        static: positions of inputs whose addresses stay.
    """
    mutated = context.mutated_inputs.with_static(inputs, static) if context.mutated_inputs else None
    return RecordingRequest(
        sized=memory.sized,
        memory=memory.memory,
        arenas=memory.arenas,
        reused_inputs=memory.reused_inputs,
        name=context.name,
        traces=traces,
        runtime=runtime_for(prepared.plan.device),
        static_inputs=static,
        copied=specialization.output_copies.of(index for _, index in prepared.outputs) | prepared.copied,
        mutated_inputs=mutated,
        guards=_guards(context, prepared, inputs, mutated),
        count=context.counters.cell(),
        policy=weakref.ref(specialization),
    )


def _guards(
    context: ProgramContext, prepared: Prepared, inputs: Sequence[Any], mutated: MutatedInputs | None
) -> Guards | None:
    """The guards of a native call that come from the recorded call; None if a unit cannot check them.

    These are sizes, and inputs that must not overlap; besides, what the program asks of every call.
    ``Recording.make_unit`` adds those of the recording's memory: addresses, locks, device and streams.
    """
    sizes = context.sizes.at(inputs)
    numbers = [(p, value) for (p, how, _), value in sizes if how is None and value is not None]
    if not all(type(number) is int for _, number in numbers):
        return None
    return Guards(
        numbers=numbers,
        dimensions=[(p, how == "stride", dim, value) for (p, how, dim), value in sizes if how is not None],
        packed=SHARED.packed_tensors.known,
        overwritten=prepared.overwritten,
        mutated_inputs=mutated,
        no_hooks=prepared.plan.phase == "forward",
        caller_captures=capture_check(prepared.plan.device),
    )
