"""What all programs of a process share: one object, which tests replace in one place."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from .arenas import ArenaPool
from .locks import TryLock
from .packed_tensors import PackedTensors


@dataclass(eq=False)
class SharedState:
    """
    Attributes:
        arenas: by device.
        capturing: by device. Hardware captures one program at a time: a device's generator can be part of one capture
            only.
        packed: saved tensors that hooks have packed.
    """

    arenas: ArenaPool = field(default_factory=ArenaPool)
    capturing: defaultdict[torch.device, TryLock] = field(default_factory=lambda: defaultdict(TryLock))
    packed: PackedTensors = field(default_factory=PackedTensors)


SHARED = SharedState()
