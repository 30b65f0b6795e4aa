"""Packs buffers into one arena: a stand-alone memory planner.

It imports nothing of torch, and of fxwrap only ``native_build``, which compiles the exact search.
"""

from .planner import plan_memory
from .problem import Buffer, Placement, Reserved, joined

__all__ = ["Buffer", "Placement", "Reserved", "joined", "plan_memory"]
