"""The state that all programs of a process share: one object, which tests replace."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from .arena_pool import ArenaPool
from .locks import TryLock
from .packed_tensors import PackedTensors

# The arenas that this thread uses instead, during a rehearsal.
_instead: ContextVar[ArenaPool | None] = ContextVar("fxwrap_arenas", default=None)


@dataclass(eq=False)
class SharedState:
    """State shared by all programs.

    Attributes:
        capturing: a lock for each device: one program captures at a time, because a device's random number generator
            can be part of one capture only.
        packed_tensors: saved tensors that were packed by saved-tensors hooks.
    """

    capturing: defaultdict[torch.device, TryLock] = field(default_factory=lambda: defaultdict(TryLock))
    packed_tensors: PackedTensors = field(default_factory=PackedTensors)
    _arenas: ArenaPool = field(default_factory=ArenaPool)

    @property
    def arenas(self) -> ArenaPool:
        """The arenas of all devices."""
        instead = _instead.get()
        return self._arenas if instead is None else instead

    @arenas.setter
    def arenas(self, arenas: ArenaPool) -> None:
        self._arenas = arenas

    @contextlib.contextmanager
    def using_arenas(self, arenas: ArenaPool) -> Iterator[None]:
        """Use other arenas on this thread."""
        token = _instead.set(arenas)
        try:
            yield
        finally:
            _instead.reset(token)


SHARED = SharedState()
