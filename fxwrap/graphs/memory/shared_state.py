"""The state that all programs of a process share: one object, which tests replace."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from .arenas import ArenaPool
from .locks import TryLock
from .packed_tensors import PackedTensors


@dataclass(eq=False)
class SharedState:
    """State shared by all programs.

    Attributes:
        arenas: the arenas of all devices.
        capturing: a lock for each device: one program captures at a time, because a device's random number generator
            can be part of one capture only.
        packed: saved tensors that were packed by saved-tensors hooks.
    """

    arenas: ArenaPool = field(default_factory=ArenaPool)
    capturing: defaultdict[torch.device, TryLock] = field(default_factory=lambda: defaultdict(TryLock))
    packed: PackedTensors = field(default_factory=PackedTensors)


SHARED = SharedState()
