"""Suspending: physical memory of recordings goes back to the device and returns, while graphs and addresses stay.

It adds the option ``suspendable``, whose programs have arenas of a class of their own (``ARENAS``). A call that needs
their memory takes it again (``graphs/resuming.py``). ``cuda_memory.py`` is CUDA's memory,
``devices.SuspendableMemory`` what another device implements.
"""

from __future__ import annotations

from ...hooks import ARENAS
from ...options import ADDED, AddedOption

OPTION = "suspendable"

ADDED[OPTION] = AddedOption(
    "keep the memory of recordings where fxwrap.suspend can give it back to the device, while graphs and addresses "
    "stay",
    "bool",
    lambda value: value if isinstance(value, bool) else None,
    default=False,
    compiling=False,
)
ARENAS[OPTION] = "fxwrap.features.suspend.arena:SuspendableArena"
