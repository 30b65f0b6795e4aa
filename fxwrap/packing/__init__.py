"""Packing buffers into one arena. On its own: nothing of torch is in it, and of fxwrap only ``native_build``."""

from .planner import plan_memory
from .problem import Buffer, Placement, Reserved, joined

__all__ = ["Buffer", "Placement", "Reserved", "joined", "plan_memory"]
