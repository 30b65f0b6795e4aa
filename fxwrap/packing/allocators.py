"""What torch's caching allocators take for an allocation, in bytes."""

from __future__ import annotations

# c10/core/AllocatorConfig.h: what allocators round up to; from what size on an allocation has a segment of its own,
# what that is rounded up to, and how large a rest must be to become another block.
BLOCK, PAGE = 512, 2 << 20
_LARGE, _REST = 10 << 20, 1 << 20
_DEVICES = "cuda", "xpu"


def taken(nbytes: int) -> int:
    """The bytes that an allocation takes from new segments. A rest that is too small for others belongs to it."""
    segment, block = rounded(nbytes, PAGE), rounded(nbytes, BLOCK)
    return segment if nbytes >= _LARGE and segment - block <= _REST else block


def taken_on(device: str, nbytes: int) -> int:
    """The bytes that an arena takes on a type of device; of an allocator that is not torch's nothing is known."""
    return taken(nbytes) if device in _DEVICES else nbytes


def rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
