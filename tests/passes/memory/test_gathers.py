"""Within a limit, what was gathered from other processes is dropped, and gathered again for its next use.

::

    work                    in use              work                    in use
    w0 = gather (s0)        w0                  w0 = gather (s0)        w0
    y0 = mix (x, w0)        w0 y0               y0 = mix (x, w0)        w0 y0
    w1 = gather (s1)        w0 y0 w1      ->    w1 = gather (s1)           y0 w1
    y1 = mix (y0, w1)       w0 y0 w1 y1         y1 = mix (y0, w1)          y0 w1 y1
    out = mix (y1, w0)      w0       y1 out     w0_again = gather (s0)     w0_again y1
                                                out = mix (y1, w0_again)   w0_again y1 out
"""

from __future__ import annotations

import pytest
from lazy_group import LAZY_GROUP
from random_graphs import GraphMaker, collectives
from test_fit import assert_same_numbers, plan_of, steps
from torch.fx import GraphModule, Node

from fxwrap.errors import PlanError
from fxwrap.limit import Limit
from fxwrap.options import Options
from fxwrap.passes.analysis.aliasing import analyse_storages, overlap_groups
from fxwrap.passes.memory.gathers import gather_again
from fxwrap.passes.memory.requirements import expected_sizes
from fxwrap.passes.verify import verify_same_results
from fxwrap.pipeline import HostGraphPlanner
from fxwrap.plan import InputFacts, ProgramPlan


class Layers:
    """The graph of the drawing, in steps."""

    def __init__(self) -> None:
        self.maker = GraphMaker()
        self.x = self.maker.input("x", (4, 4))
        self.shards = [self.maker.input(name, (2, 4)) for name in ("s0", "s1")]

    def gather(self, number: int) -> Node:
        return self.wait(number, self.begin(number))

    def begin(self, number: int) -> Node:
        return self.maker.extern(
            collectives.all_gather_into_tensor.default, self.shards[number], 2, LAZY_GROUP, name=f"gather_{number}"
        )

    def wait(self, number: int, made: Node) -> Node:
        return self.maker.extern(collectives.wait_tensor.default, made, name=f"w{number}")

    def mix(self, name: str, first: Node, second: Node) -> Node:
        made = self.maker.allocate((4, 4), name=name)
        self.maker.launch("mix", first, second, made, name=f"to_{name}")
        return made


def gathered(gm: GraphModule) -> GraphModule:
    facts = analyse_storages(gm)
    return gather_again(gm, facts, expected_sizes(gm, facts), overlap_groups(gm, facts, "cpu"))[0]


def within(gm: GraphModule, limit: int) -> ProgramPlan:
    planner = HostGraphPlanner(gm, Options(capture="always"))
    return planner.partition(InputFacts(apart=True), {}, Limit(limit))


def drawing() -> tuple[Layers, GraphModule]:
    layers = Layers()
    w0 = layers.gather(0)
    y0 = layers.mix("y0", layers.x, w0)
    y1 = layers.mix("y1", y0, layers.gather(1))
    return layers, layers.maker.finish([layers.mix("out", y1, w0)])


def test_a_weight_is_gathered_again_before_its_next_use() -> None:
    layers, gm = drawing()
    assert steps(plan_of(gm)).count("gather_0") == 1
    plan = within(gm, 200)
    assert steps(plan) == "gather_0 w0 to_y0 gather_1 w1 to_y1 gather_0_again w0_again to_out"
    assert [one.repeats for one in plan.repeated] == ["gather_0", "w0"]
    assert_same_numbers(plan, gm, layers.maker.inputs)


def test_what_is_gathered_early_is_gathered_when_what_was_before_is_done_with() -> None:
    """
    ::

        gather_0  gather_1  w0  to_y0  w1  to_y1  to_out
        gather_0  w0  to_y0  gather_1  w1  to_y1  gather_0_again  w0_again  to_out
    """
    layers = Layers()
    first, second = layers.begin(0), layers.begin(1)
    w0 = layers.wait(0, first)
    y0 = layers.mix("y0", layers.x, w0)
    y1 = layers.mix("y1", y0, layers.wait(1, second))
    gm = layers.maker.finish([layers.mix("out", y1, w0)])
    plan = within(gm, 200)
    assert steps(plan) == "gather_0 w0 to_y0 gather_1 w1 to_y1 gather_0_again w0_again to_out"
    assert_same_numbers(plan, gm, layers.maker.inputs)


def test_a_gather_stays_before_what_writes_its_part() -> None:
    layers = Layers()
    first, second = layers.begin(0), layers.begin(1)
    y0 = layers.mix("y0", layers.x, layers.wait(0, first))
    layers.maker.launch("update", layers.x, layers.shards[1], name="writes_s1")
    gm = layers.maker.finish([layers.mix("out", y0, layers.wait(1, second))])
    assert gathered(gm) is gm


def test_what_is_used_before_anything_else_is_gathered_stays() -> None:
    layers = Layers()
    w0 = layers.gather(0)
    y0 = layers.mix("y0", layers.mix("twice", layers.x, w0), w0)
    gm = layers.maker.finish([layers.mix("out", y0, layers.gather(1))])
    assert gathered(gm) is gm


def test_what_was_written_meanwhile_is_not_gathered_again() -> None:
    layers = Layers()
    w0 = layers.gather(0)
    y1 = layers.mix("y1", layers.mix("y0", layers.x, w0), layers.gather(1))
    layers.maker.launch("update", layers.shards[1], layers.shards[0], name="writes_s0")
    gm = layers.maker.finish([layers.mix("out", y1, w0)])
    assert gathered(gm) is gm


def test_what_the_caller_gets_is_gathered_once() -> None:
    layers = Layers()
    w0 = layers.gather(0)
    y1 = layers.mix("y1", layers.mix("y0", layers.x, w0), layers.gather(1))
    gm = layers.maker.finish([layers.mix("out", y1, w0), w0])
    assert gathered(gm) is gm


def test_a_gather_of_something_else_is_found() -> None:
    """A planted fault: the second gather is of the other weight."""
    _, gm = drawing()
    changed = gathered(gm)
    assert changed is not gm
    verify_same_results(gm, changed, "cpu")
    again = next(node for node in changed.graph.nodes if node.name == "gather_0_again")
    again.update_arg(0, next(node for node in changed.graph.nodes if node.name == "s1"))
    with pytest.raises(PlanError, match="is another value"):
        verify_same_results(gm, changed, "cpu")
