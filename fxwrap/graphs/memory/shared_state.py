"""What all programs of a process share: one object, which tests replace in one place."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

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
        keeping: operators that keep what they allocate.
        kept: memory that they have kept: nobody else may ever have it.
    """

    arenas: ArenaPool = field(default_factory=ArenaPool)
    capturing: defaultdict[torch.device, TryLock] = field(default_factory=lambda: defaultdict(TryLock))
    packed: PackedTensors = field(default_factory=PackedTensors)
    keeping: set[Any] = field(default_factory=set)
    kept: list[torch.UntypedStorage] = field(default_factory=list)


SHARED = SharedState()
