"""Results are written to tensors of the caller, which become inputs: which directly, which by a copy.

::

    buf0 = empty_strided((4, 4), ...)                       (out0 is the last input)
    launch mix(x, x, buf0)                        ->        launch mix(x, x, out0)
    return buf0                                             return ()
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import CPU, PROPERTY, GraphMaker, Recipe, aten, build, compile_request, expected_of, recipes, same
from torch.fx import GraphModule

from fxwrap.features.caller_outputs.rewrite import CallerOutput, caller_outputs, with_caller_outputs
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.host_graph.listing import list_graph
from fxwrap.host_graph.nodes import output_values
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import InputFacts
from fxwrap.testing.simulated import SIMULATED


def rewritten(gm: GraphModule, *positions: int) -> GraphModule:
    return with_caller_outputs(gm, caller_outputs(gm, positions))


def test_before_and_after() -> None:
    maker = GraphMaker()
    x, b = maker.input("x"), maker.allocate(name="b")
    maker.launch("mix", x, x, b, name="k")
    gm = maker.finish([b])
    assert caller_outputs(gm, [0]) == (CallerOutput(0, "b"),)
    after = rewritten(gm, 0)
    assert "allocate" in list_graph(gm) and "allocate" not in list_graph(after)
    assert list_graph(after).splitlines()[0].startswith("x: ") and list_graph(after).splitlines()[1].startswith(
        "out0: "
    )
    assert list_graph(after).endswith("return ()")
    (given_x,), y = maker.inputs(0), torch.empty(4, 4)
    assert after(given_x, y) == () and torch.equal(y, gm(given_x)[0])


def test_a_result_with_another_layout_than_its_buffer() -> None:
    """
    ::

        b = empty_strided((4, 4), ...)              b' = reinterpret(out0, (4, 4), ...)
        launch mix(x, x, b)                 ->      launch mix(x, x, b')
        return reinterpret(b, (2, 8), ...)          return ()
    """
    maker = GraphMaker()
    x, b = maker.input("x"), maker.allocate(name="b")
    maker.launch("mix", x, x, b, name="k")
    gm = maker.finish([maker.view(b, (2, 8), (8, 1))])
    assert caller_outputs(gm, [0]) == (CallerOutput(0, "b", relayout=True),)
    (given_x,), y = maker.inputs(0), torch.empty(2, 8)
    rewritten(gm, 0)(given_x, y)
    assert torch.equal(y, gm(given_x)[0])


@pytest.mark.parametrize("case", ["input", "operator", "part", "twice", "its memory is another result's", "gaps"])
def test_what_is_copied(case: str) -> None:
    """What is no buffer of its own, with all of its elements, and nothing but its elements."""
    maker = GraphMaker()
    x, b = maker.input("x"), maker.allocate(name="b")
    c = maker.extern(torch.empty_strided, (4, 4), (8, 1), dtype=torch.float32, device=CPU, name="c")
    maker.launch("mix", x, x, b, name="k")
    maker.launch("mix", x, x, c, name="l")
    results = {
        "input": lambda: [x],
        "operator": lambda: [maker.extern(aten.sin.default, b)],
        "part": lambda: [maker.view(b, (2, 4), (4, 1))],
        "twice": lambda: [b, b],
        "its memory is another result's": lambda: [maker.view(b, (16,), (1,)), maker.view(b, (4,), (1,))],
        "gaps": lambda: [maker.view(c, (4, 4), (8, 1))],
    }[case]()
    gm = maker.finish(results)
    assert caller_outputs(gm, [0]) == (CallerOutput(0),)
    (given_x,) = maker.inputs(0)
    expected = gm(given_x)
    y = torch.empty_like(expected[0])
    rest = rewritten(gm, 0)(given_x, y)
    assert same([y, *rest], expected)


@PROPERTY
@given(recipes(), st.data())
def test_the_numbers_are_those_of_the_graph(recipe: Recipe, data: st.DataObject) -> None:
    """Any results of any graph, in warm-ups, recordings and replays; moving tensors, or the same ones."""
    graph = build(recipe)
    gm = graph.gm
    example = gm(*graph.inputs(0))
    tensors = [p for p, value in enumerate(output_values(gm)) if isinstance(example[p], torch.Tensor)]
    positions = data.draw(st.lists(st.sampled_from(tensors), unique=True)) if tensors else []
    moves, simulated = data.draw(st.booleans()), data.draw(st.booleans())
    count = len(graph.inputs(0))
    written = frozenset(range(count, count + len(positions)))
    request = compile_request(graph.options, InputFacts(write_only=written))
    buffers: list[torch.Tensor] = []
    with using_runtime(SIMULATED) if simulated else torch.no_grad():
        program = compile_host_graph(rewritten(gm, *positions), request)
        for call in range(4):
            inputs = graph.inputs(call)
            expected = expected_of(gm, inputs, call)
            results = len(expected) - len(inputs)
            if moves or not buffers or any(buffers[n].shape != expected[p].shape for n, p in enumerate(positions)):
                buffers = [torch.empty_like(expected[p]) for p in positions]
            torch.manual_seed(call)
            rest = iter(program(*inputs, *buffers))
            given_back = dict(zip(positions, buffers, strict=True))
            got = [given_back[p] if p in given_back else next(rest) for p in range(results)]
            assert same([*got, *inputs], expected), f"call {call}"
