"""Packs buffers into one arena: a stand-alone memory planner.

It imports nothing of torch, and nothing of fxwrap.
"""

from .planner import plan_memory
from .problem import Buffer, Placement, Reserved, joined

__all__ = ["Buffer", "Placement", "Reserved", "joined", "plan_memory"]
