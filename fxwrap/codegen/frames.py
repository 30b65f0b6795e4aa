"""with_room: calls functions where Python's frames have room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def with_room(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """``function(*args, **kwargs)``, behind a frame that is larger than a chunk of Python's frames.

    From Python 3.11 on, frames lie in chunks of 16 KiB, and a chunk is unmapped with its first frame. Where one is
    full, each call maps another and unmaps it: a loop that stands there takes up to eight times as long. Dynamo calls
    its backends a hundred frames deep, anywhere in a chunk. The large frame brings a chunk of which half is free.
    """
    return function(*args, **kwargs)


# In words of 8 bytes. With what CPython adds it takes a chunk of 256 KiB: the next smaller one would be full with it.
with_room.__code__ = with_room.__code__.replace(co_stacksize=17_000)
