"""A buffer that is read has been written. A graph whose writer was erased is refused, one that may be so is not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor
from random_graphs import GraphMaker, build, random_recipe
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import fxwrap
from fxwrap.errors import PlanError
from fxwrap.host_graph.control_flow import switch
from fxwrap.host_graph.nodes import is_work, launch
from fxwrap.host_graph.storages import Origin
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.verify import verify_schedule


def verify(gm: GraphModule) -> None:
    verify_schedule(gm, [node for node in gm.graph.nodes if is_work(node)])


def erased_writers() -> Iterator[tuple[GraphModule, set[str]]]:
    """Random graphs, each without one launch; and the buffers that are read or returned before anything writes them.

    What launches write counts as read, too, because nobody knows: if the next one writes the buffer again, it may be
    that it reads nothing.
    """
    for seed in range(120):
        recipe = random_recipe(random.Random(seed))
        for number in range(len(launches_of(build(recipe).gm))):
            gm = build(recipe).gm
            facts, erased = analyse_storages(gm), launches_of(gm)[number]
            undefined = set[str]()
            for index in facts.writes(erased):
                first, *later = (node for node in gm.graph.nodes if is_work(node) and index in facts.touched(node))
                returned = index in facts.behind(gm.graph.find_nodes(op="output")[0].all_input_nodes)
                read = index not in facts.writes(later[0]) if later else returned
                if first is erased and read and facts.storages[index].origin is Origin.ALLOCATION:
                    undefined.add(facts.storages[index].name)
            gm.graph.erase_node(erased)
            yield gm, undefined


def launches_of(gm: GraphModule) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=launch)


def test_each_writer_that_is_erased_is_missed() -> None:
    found: Counter[bool] = Counter()
    for gm, undefined in erased_writers():
        found[bool(undefined)] += 1
        if undefined:
            with pytest.raises(PlanError, match=r"^graph: nothing writes ") as told:
                verify(gm)
            assert told.value.subject.split()[3] in undefined
        else:
            verify(gm)
    print(f"\nerased: {dict(found)}")
    assert min(found.values()) > 50


def test_what_is_known_to_hold_nothing_may_be_read() -> None:
    for mark, size in ((False, (4, 4)), (True, (4, 4)), (False, (0, 4))):
        maker = GraphMaker()
        nothing, out = maker.allocate(size, name="nothing"), maker.allocate()
        maker.launch("mix", nothing, nothing, out, name="reader")
        if mark:
            nothing.meta["uninitialised"] = True
        gm = maker.finish([out])
        if mark or 0 in size:
            verify(gm)
        else:
            with pytest.raises(PlanError, match="nothing writes nothing before reader reads it"):
                verify(gm)


def test_a_buffer_that_is_returned_was_written() -> None:
    maker = GraphMaker()
    maker.input("x")
    gm = maker.finish([maker.allocate(name="b")])
    with pytest.raises(PlanError, match="nothing writes b before output returns it"):
        verify(gm)


def test_a_branch_reads_what_it_has_written() -> None:
    branch = GraphMaker()
    v, b, c = branch.input("v"), branch.allocate(name="b"), branch.allocate(name="c")
    branch.launch("mix", v, b, c, name="reader")
    modules, graph = torch.nn.Module(), Graph()
    modules.branch = branch.finish([c])
    p, x, handle = graph.placeholder("p"), graph.placeholder("x"), graph.create_node("get_attr", "branch")
    graph.output([graph.call_function(switch, (p, (x,), handle, handle))])
    with pytest.raises(PlanError, match="nothing writes b before reader reads it"):
        verify(GraphModule(modules, graph))


# -- compiled -----------------------------------------------------------------------------------------------------


class Erasing(fxwrap.FxwrapCodegen):
    """A pass that erases the first launch."""

    def passes(self) -> Any:
        def erase(gm: GraphModule) -> None:
            gm.graph.erase_node(next(node for node in gm.graph.nodes if node.target is launch))

        return [erase]


@torch.no_grad()
def test_a_pass_that_erases_a_writer_is_found(compiled: Any, device: torch.device) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() @ x

    x = torch.randn(4, 4, device=device)
    with pytest.raises(Exception, match="PlanError: graph: nothing writes buf0") as told:
        compiled(fn, options={"codegen": Erasing, "strict": True})(x)
    assert "may have erased the writer" in str(told.value)
    with pytest.warns(UserWarning, match="nothing writes buf0"):
        f: Compiled = compiled(fn, options={"codegen": Erasing})
        assert_same(f(x), inductor(fn)(x))
    assert f.compilation.fallbacks and not f.programs


def half_filled(x: Tensor) -> Tensor:
    rows = torch.empty(4, 4, device=x.device)
    rows[:2] = x[:2]
    return rows.cumsum(0)[:2]


def two_halves(x: Tensor) -> Tensor:
    rows = x.new_empty(8, 4)
    rows[:4], rows[4:] = x, x + 1
    return rows.sort(0)[0]


def nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, 4).sin() @ x, torch.cat([x[:0], x[:1]]).cumsum(0)


def only_its_size(x: Tensor) -> Tensor:
    return torch.empty_like(x).mul(0).nan_to_num(0) @ x + x


def filled_by_an_operator(x: Tensor) -> Tensor:
    out = torch.empty(4, 4, device=x.device)
    torch.mm(x, x.sin(), out=out)
    return out.cos()


@torch.no_grad()
@pytest.mark.parametrize("fn", [half_filled, two_halves, nothing, only_its_size, filled_by_an_operator])
def test_what_torch_leaves_undefined_is_accepted(
    compiled: Any, device: torch.device, fn: Callable[[Tensor], Any]
) -> None:
    f, theirs = compiled(fn, options={"strict": True}), inductor(fn)
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        assert_same(f(x), theirs(x))


@torch.no_grad()
def test_what_is_returned_undefined(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: (torch.empty(3, device=x.device), x.sin()), options={"strict": True})
    for _ in range(4):
        empty, _ = f(torch.randn(4, device=device))
        assert empty.shape == (3,)
