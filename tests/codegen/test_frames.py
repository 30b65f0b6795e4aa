"""Python's frames: a compilation stands where calls are cheap."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from fxwrap.codegen.frames import with_room

# Chunks of frames, as they are where Dynamo calls a backend:
#
#     without room                          with room
#     | ... | compile |  <- full            | ... | compile |
#     | called in a loop |  <- mapped and   | with_room ......... (17,000 words) | called in a loop | free ... |
#                              unmapped     |   a chunk of 256 KiB: mapped once
#                              at each call


def _called(depth: int) -> None:
    if depth:
        _called(depth - 1)


def _loop() -> int:
    """Pages that were mapped during 1,000 calls."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(1000):
        _called(5)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _below(frames: int, function: Callable[[], int]) -> int:
    return function() if frames == 0 else _below(frames - 1, function)


DEPTHS = range(200)


def test_a_loop_that_stands_at_the_end_of_a_chunk_has_room() -> None:
    without = [_below(depth, _loop) for depth in DEPTHS]
    assert max(_below(depth, lambda: with_room(_loop)) for depth in DEPTHS) < 500
    assert with_room(_below, 100, _loop) < 500, "a compilation calls deeply itself"
    if max(without) < 500:
        pytest.skip("this Python keeps a chunk that it may need again")


def test_with_room_is_a_plain_call() -> None:
    assert with_room(divmod, 7, 2) == (3, 1)
    assert with_room(dict, one=1) == {"one": 1}
    with pytest.raises(ZeroDivisionError):
        with_room(divmod, 1, 0)
