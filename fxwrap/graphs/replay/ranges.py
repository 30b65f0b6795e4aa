"""What the ranges of a program are called in a profile; reports use the same names."""

from __future__ import annotations


def partition_range(program: str, index: int) -> str:
    """The range of a partition, by the program's name."""
    return f"{program}, partition {index}"


def copies_after(program: str, index: int) -> str:
    """Results of an eager partition are copied to where graphs read them."""
    return f"{program}, copies after partition {index}"


def copies_of_inputs(program: str) -> str:
    """Inputs are copied to their static buffers."""
    return f"{program}, copies of inputs"


def copies_to_inputs(program: str) -> str:
    """Static buffers that the program has written are copied back."""
    return f"{program}, copies to inputs"


def recording(program: str) -> str:
    """A call is recorded."""
    return f"{program}, recording"
