"""Names of a program's ranges in profiles; reports use the same names."""

from __future__ import annotations


def partition_range(program: str, index: int) -> str:
    """The run of a partition."""
    return f"{program}, partition {index}"


def copies_after(program: str, index: int) -> str:
    """Copies of an eager partition's results to the addresses at which graphs read them."""
    return f"{program}, copies after partition {index}"


def copies_of_inputs(program: str) -> str:
    """Copies of inputs to their static buffers."""
    return f"{program}, copies of inputs"


def copies_to_inputs(program: str) -> str:
    """Copies of written static buffers back to the inputs."""
    return f"{program}, copies to inputs"


def recording(program: str) -> str:
    """The recording of a call."""
    return f"{program}, recording"
