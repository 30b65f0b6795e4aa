"""CHECK: proofs that share no code with what they check, but the vocabulary of ``host_graph/nodes.py``."""

from .memory import verify_memory
from .schedule import verify_schedule

__all__ = ["verify_memory", "verify_schedule"]
