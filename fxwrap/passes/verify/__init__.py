"""CHECK: proves each schedule and each memory plan correct, from the graph alone.

The proofs share no code with what they check, except the vocabulary of ``host_graph/nodes.py``.
"""

from .bodies import verify_bodies
from .lanes import verify_lanes
from .memory import verify_memory
from .same_results import verify_same_results
from .schedule import verify_schedule

__all__ = ["verify_bodies", "verify_lanes", "verify_memory", "verify_same_results", "verify_schedule"]
