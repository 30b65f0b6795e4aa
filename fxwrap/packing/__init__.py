"""Packing buffers into one arena. On its own: nothing of torch and nothing else of fxwrap is in it."""

from .planner import plan_memory
from .problem import Buffer, Placement, Reserved, joined

__all__ = ["Buffer", "Placement", "Reserved", "joined", "plan_memory"]
