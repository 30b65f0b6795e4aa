"""How large an arena is made: pure functions, in bytes.

::

    present |=========|             a recording needs more than half: it stays
    present |===================|   all recordings need less than half: it shrinks
    present |====|                  a recording needs more: it grows, to what others expect if that is more
"""

from __future__ import annotations

import pytest

from fxwrap.graphs.memory.arena_pool import room_around_outputs, wanted_size


@pytest.mark.parametrize(
    ("present", "needed", "expected", "wanted"),
    [
        (0, 100, 0, 100),
        (100, 60, 0, 100),
        (100, 50, 0, 100),
        (100, 49, 0, 49),
        (100, 49, 50, 100),
        (100, 101, 0, 101),
        (100, 101, 300, 300),
        (100, 100, 300, 100),
    ],
    ids=[
        "first",
        "enough",
        "just half",
        "shrinks",
        "others need half",
        "grows",
        "grows for others",
        "nobody asks yet",
    ],
)
def test_what_an_arena_should_have(present: int, needed: int, expected: int, wanted: int) -> None:
    assert wanted_size(present, needed, expected) == wanted


# live outputs of earlier calls end recordings when the arena grows: it grows by little once, and then doubles
def test_the_first_small_growth_around_outputs_is_taken_exactly() -> None:
    assert room_around_outputs(present=800, needed=900, used=800, has_grown=False) == 0
    assert room_around_outputs(present=800, needed=901, used=800, has_grown=False) == 1600
    assert room_around_outputs(present=900, needed=910, used=900, has_grown=True) == 1800
