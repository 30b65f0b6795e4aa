"""When storages are in use: from the first step that uses one to the last.

::

    step    0  1  2  3
    uses    a  ab .  b      a: steps 0 and 1, b: steps 1 to 3
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import PROPERTY, GraphMaker, compile_request

from fxwrap.packing.lifetimes import Lifetimes
from fxwrap.pipeline import compile_host_graph


def test_from_the_first_step_to_the_last() -> None:
    lifetimes = Lifetimes.of([[0], [0, 1], [], [1]])
    assert lifetimes == {0: range(2), 1: range(1, 4)}
    assert lifetimes.peak({0: 5, 1: 7}) == 12
    assert Lifetimes.of([]).peak({}) == 0


@PROPERTY
@given(st.lists(st.sets(st.integers(0, 5))), st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_the_peak_is_the_step_with_most(steps: list[set[int]], sizes: list[int]) -> None:
    def is_alive(index: int, step: int) -> bool:
        return any(index in used for used in steps[: step + 1]) and any(index in used for used in steps[step:])

    alive = [sum(size for index, size in enumerate(sizes) if is_alive(index, step)) for step in range(len(steps))]
    assert Lifetimes.of(steps).peak(dict(enumerate(sizes))) == max(alive, default=0)


def test_a_result_of_an_operator_exists_from_its_call_on() -> None:
    """Also one that nobody reads: it exists in the step of the call."""
    maker = GraphMaker()
    x, out = maker.input("x"), maker.allocate(name="out")
    maker.launch("mix", x, x, out)
    unread = maker.extern(torch.ops.aten.sin.default, x, name="unread")
    read = maker.extern(torch.ops.aten.cos.default, x, name="read")
    maker.launch("mix", read, x, out)
    plan = compile_host_graph(maker.finish([out]), compile_request()).plan
    lifetimes = {node.name: plan.lifetimes[min(plan.facts.of(node))] for node in (x, out, unread, read)}
    assert lifetimes == {"x": range(4), "out": range(4), "unread": range(1, 2), "read": range(2, 4)}
