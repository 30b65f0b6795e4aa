"""``with_room``: calls a function where Python's chunk of frames has free space, which makes its loops fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def with_room(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call ``function(*args, **kwargs)`` below a frame that is larger than one of Python's chunks of frames.

    From Python 3.11 on, frames are allocated in chunks of 16 KiB, and a chunk is unmapped with its first frame. Where
    a chunk is full, each call maps a new chunk and unmaps it: a loop there takes up to eight times as long. Dynamo
    calls its backends a hundred frames deep, anywhere in a chunk. The large frame gets a chunk that is half free.
    """
    return function(*args, **kwargs)


# Words of 8 bytes. With CPython's part of the frame it needs a chunk of 256 KiB; it would fill the next smaller one.
with_room.__code__ = with_room.__code__.replace(co_stacksize=17_000)
