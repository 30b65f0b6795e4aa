"""``as_strided`` of an input that is a part of a storage: a window may reach outside of the input.

::

    storage      | 0 1 2 3 4 5 6 7 8 9 ...
    input                |-------|
    window           |-------|                 no static input buffer has what lies before the input
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, freezes, inductor, on_simulated
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fxwrap
from fxwrap.codegen.emit import emission
from fxwrap.passes.analysis import windows
from fxwrap.passes.analysis.windows import _is_dense, used_outside


def before(x: Tensor) -> Tensor:
    return x.as_strided((3, 3), (5, 1), 2) * 2


def behind(x: Tensor) -> Tensor:
    return x.as_strided((x.numel() // 3 + 1, 4), (3, 1)).sum(1)


def in_a_library_call(x: Tensor) -> Tensor:
    return torch.mm(x.as_strided((3, 3), (5, 1), 2), x.as_strided((3, 3), (3, 1), 0))


def of_a_view(x: Tensor) -> Tensor:
    return x.split(2)[1].as_strided((3, 3), (5, 1)) + 1


def of_another_type(x: Tensor) -> Tensor:
    return x.view(torch.int32).as_strided((3, 3), (5, 1), 2) + 1


def of_a_copy(x: Tensor) -> Tensor:
    """Inductor leaves the copy out."""
    return x.clone().as_strided((3, 3), (5, 1), 2) * 2


def in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, before, lambda x: x.as_strided((3, 3), (5, 1), 8) + 1, (x,))


@torch.compiler.nested_compile_region
def _region(x: Tensor) -> Tensor:
    return before(x).sin()


def in_a_region(x: Tensor) -> Tensor:
    return _region(x) + 1


OUTSIDE = [before, behind, in_a_library_call, of_a_view, of_another_type, of_a_copy, in_a_branch, in_a_region]


def part(device: torch.device) -> Tensor:
    return torch.randn(40, device=device)[4:20].view(4, 4)


@pytest.fixture(autouse=True)
def inductor_is_right(request: pytest.FixtureRequest) -> None:
    """On a GPU torch 2.11's Inductor reads a window of an input where it would lie in a storage that begins there."""
    if "device" in request.fixturenames and (device := request.getfixturevalue("device")).type in ("cuda", "xpu"):
        x = part(device)
        with torch.no_grad():
            if not torch.equal(inductor(before)(x), before(x)):
                pytest.skip("this torch's Inductor is wrong")


def compare(f: Compiled, fn: Callable[..., Any], make: Callable[[], Any], **options: Any) -> None:
    theirs = inductor(fn, **options)
    for _ in range(4):
        x = make()
        assert_same(f(x), theirs(x))
    assert not f.compilation.fallbacks


@torch.no_grad()
@pytest.mark.parametrize("fn", OUTSIDE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_window_outside_of_an_input(compiled: Any, device: torch.device, fn: Any, dynamic: bool) -> None:
    f: Compiled = compiled(fn, dynamic=dynamic)
    compare(f, fn, lambda: part(device), dynamic=dynamic)
    counters = f.program.counters
    if freezes(device):
        assert not counters.replays and not counters.recordings.get("new shape")
        assert any("an input's storage outside of the input" in reason for reason in counters.eager)
    else:
        assert counters.replays == 2


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_window_between_the_elements_of_an_input(compiled: Any, device: torch.device, dynamic: bool) -> None:
    """
    ::

        storage      | 0 1 2 3 4 5 6 7 ...
        input          |   |   |   |        every second element: its static buffer has no others
        window           |-------|
    """

    def fn(x: Tensor) -> Tensor:
        return x.as_strided((3, 4), (4, 1), 4) * 2

    f: Compiled = compiled(fn, dynamic=dynamic)
    compare(f, fn, lambda: torch.randn(40, device=device)[::2], dynamic=dynamic)
    if freezes(device):
        assert not f.program.counters.replays


@torch.no_grad()
@pytest.mark.launches_graphs
def test_checked_mode_finds_a_window_that_nobody_has_noticed(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is planted. It is found once, and does not run again."""
    monkeypatch.setattr(emission, "used_outside", lambda gm, from_storage: {})
    with on_simulated() as device:
        f: Compiled = compiled(before, options={"checked": 1})
        with pytest.raises(fxwrap.CheckError):
            for _ in range(3):
                f(part(device))
        for _ in range(4):
            x = part(device)
            assert torch.equal(f(x), before(x))


def rows_of_two(x: Tensor) -> Tensor:
    return x.as_strided((x.numel() - 1, 2), (1, 1)).sum(1)


def from_the_start_of_the_storage(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (4, 1), 5).relu()


def rows_of_a_view(x: Tensor) -> Tensor:
    return x[1:].as_strided((x.size(0) - 2, 2, 4), (4, 4, 1)).relu()


@torch.no_grad()
@pytest.mark.parametrize(
    ("fn", "dynamic"),
    [
        (rows_of_two, False),
        (rows_of_two, True),
        (rows_of_a_view, False),
        (rows_of_a_view, True),
        (from_the_start_of_the_storage, False),
    ],
)
def test_a_window_inside_of_an_input_is_recorded(compiled: Any, device: torch.device, fn: Any, dynamic: bool) -> None:
    f: Compiled = compiled(fn, dynamic=dynamic)
    compare(f, fn, lambda: part(device), dynamic=dynamic)
    assert f.replays() == [2]


@pytest.mark.parametrize(
    ("size", "stride", "dense"),
    [
        ((3, 4), (4, 1), True),
        ((2, 3, 4), (4, 8, 1), True),
        ((3, 1, 4), (4, 7, 1), True),
        ((5, 3, 4), (0, 4, 1), True),
        ((3, 4), (8, 2), False),
        ((3, 4), (1, 1), False),
        ((2, 2, 2), (1, 1, 5), False),  # as many elements as there are from the first to the last
        ((2, 2, 3), (3, 4, 2), False),
    ],
)
def test_whether_a_tensor_has_holes(size: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert windows._is_dense(torch.empty_strided(size, stride)) == dense


def test_gradients_through_a_window(compiled: Any, device: torch.device) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.as_strided((3, 3), (5, 1), 7).sin().sum()

    f, theirs = compiled(fn), inductor(fn)
    for _ in range(4):
        base = torch.randn(40, device=device, requires_grad=True)
        expected, got = (torch.autograd.grad(g(base[4:12].view(2, 4)) * 2, base) for g in (theirs, f))
        assert_same(got, expected)


class Weight(torch.nn.Module):
    """Its weight is a part of a larger tensor."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.whole, self.use = torch.randn(40), use
        self.weight = torch.nn.Parameter(self.whole[4:20].view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.weight) + x.sum()


@torch.no_grad()
@pytest.mark.parametrize("use", [before, in_a_library_call])
def test_a_weight_that_stays_is_used_where_it_lies(compiled: Any, device: torch.device, use: Any) -> None:
    model = Weight(use)
    model.weight = torch.nn.Parameter(model.whole.to(device)[4:20].view(4, 4))
    f: Compiled = compiled(model)
    for _ in range(4):
        x = torch.randn(3, device=device)
        torch.testing.assert_close(f(x), model(x))
    assert f.replays() == [2]


def test_what_lies_outside_is_told_byte_by_byte() -> None:
    """On random views of random parts; an oracle lists the bytes."""
    draw, found = random.Random(0), {False: 0, True: 0}
    for _ in range(600):
        base = torch.zeros(128, dtype=draw.choice([torch.float32, torch.int16]))
        low = draw.choice([0, draw.randrange(16)])
        whole = base[low : low + draw.randrange(8, 40)]
        dense = draw.random() < 0.8
        if not dense:
            whole = whole.as_strided((2, 4), draw.choice([(4, 2), (9, 1), (1, 3), (1, 2), (4, 1)]), low)
        graph = Graph()
        x = node = graph.placeholder("x")
        x.meta["val"] = whole
        if dense and draw.random() < 0.5:
            node = graph.call_function(torch.ops.aten.slice.Tensor, (node, 0, draw.randrange(4), 128))
            node.meta["val"] = whole[node.args[2] :]
        if dense and draw.random() < 0.3 and whole.dtype is torch.float32:
            view = node.meta["val"].view(torch.int16)
            node = graph.call_function(torch.ops.aten.view.dtype, (node, torch.int16))
            node.meta["val"] = view
        operand = node.meta["val"]
        size = [draw.choice([0, 2, 3, 4, 5, 6]) for _ in range(draw.randrange(3))]
        stride = [draw.randrange(5) for _ in size]
        offset = draw.choice([None, draw.randrange(40)])
        window = operand.as_strided(size, stride, offset)
        graph.output(graph.call_function(torch.ops.aten.as_strided.default, (node, size, stride, offset)))
        outside = not _bytes(window) <= _bytes(whole)
        told = bool(used_outside(GraphModule({}, graph), True))
        assert told == outside or (told and not dense)  # of what has holes not all windows are known to be inside
        found[outside] += 1
    assert min(found.values()) > 150


def _bytes(tensor: Tensor) -> set[int]:
    numbers = torch.arange(tensor.untyped_storage().nbytes() // tensor.itemsize)
    elements = numbers.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).flatten().tolist()
    return {element * tensor.itemsize + byte for element in elements for byte in range(tensor.itemsize)}


def test_looking_at_sizes_makes_no_guards() -> None:
    """A guard would compile the function again for other sizes, or refuse them."""
    environment = ShapeEnv()
    symbolic = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 3)
    mode = FakeTensorMode(shape_env=environment)
    tensor = mode.from_tensor(torch.empty(3, 4, 5), symbolic_context=symbolic)
    before = list(environment.guards)
    assert _is_dense(tensor)
    assert _is_dense(tensor.transpose(0, 2))
    assert environment.guards == before
