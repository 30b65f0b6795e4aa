"""Whether rows of a batch see each other, told from a traced graph (``fxwrap/features/buckets/rows.py``).

::

    a row sees itself only            a row sees others
    x  [r0]  -> linear -> [r0']       x  [r0] -+-> sum over rows -> [r0 + r1]
       [r1]  -> linear -> [r1']          [r1] -+
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import PROPERTY
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxwrap.features.buckets.row_calls import RowDimension
from fxwrap.features.buckets.rows import row_mixers

ROWS = 5


def traced(fn: Callable[..., Any], *examples: torch.Tensor, dims: tuple[int, ...] = ()) -> GraphModule:
    """The ATen graph that Inductor would get, of which dimension 0 of every example (or ``dims``) varies."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    fakes = []
    for number, (example, own) in enumerate(zip(examples, dims or (0,) * len(examples), strict=True)):
        sizes = [DimDynamic.DYNAMIC if dim == own else DimDynamic.STATIC for dim in range(example.dim())]
        context, source = StatelessSymbolicContext(dynamic_sizes=sizes), ConstantSource(f"x{number}")
        fakes.append(mode.from_tensor(example, symbolic_context=context, source=source))
    # torch 2.11 traces a linear layer in Python alone.
    with mode, torch.no_grad(), enable_python_dispatcher():
        return make_fx(fn, decomposition_table=select_decomp_table())(*fakes)


def mixers(fn: Callable[..., Any], *examples: torch.Tensor, dims: tuple[int, ...] = ()) -> list[str]:
    graph = traced(fn, *examples, dims=dims)
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.size()]
    symbol = next(size.node.expr for size in sizes if isinstance(size, torch.SymInt))
    return list(map(str, row_mixers(graph, RowDimension(symbol, "batch"))))


X = torch.randn(ROWS, 3, 4)
W = torch.randn(4, 6)
TABLE = torch.randn(11, 4)
IDS = torch.randint(0, 11, (ROWS, 3))
IMAGE = torch.randn(ROWS, 3, 8, 8)
KERNEL = torch.randn(2, 3, 3, 3)

APART: dict[str, tuple[Any, ...]] = {
    # (b, t, d) -> (b * t, d) -> (b, t, e): the rows are the outermost factor of b * t
    "a linear layer": (lambda x: F.linear(x, W.t()).relu(), X),
    # (b, t, d) -> (t, b, d) -> (t * b, d) -> (t, b, d) -> (b, t, d): here the second
    "merged with the rows inside": (
        lambda x: (x.transpose(0, 1).reshape(-1, 4) * 2).view(3, -1, 4).transpose(0, 1),
        X,
    ),
    "reductions, scans and sorts over others": (lambda x: (x.sum(1), x.cumsum(1), x.sort(-1)[0], x.softmax(2)), X),
    "layer normalisation": (lambda x: F.layer_norm(x, (4,)), X),
    "batch normalisation that is trained": (
        lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)),
        X,
    ),
    "an embedding": (lambda i: F.embedding(i, TABLE), IDS),
    "a convolution, and pooling": (lambda x: F.max_pool2d(F.conv2d(x, KERNEL), 2).mean((2, 3)), IMAGE),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), torch.randn(ROWS, 2, 3, 4)),
    "matrix products by row": (lambda x: x @ x.transpose(1, 2), X),
    "joined with the same for each row": (
        lambda x: torch.cat([torch.ones(1, 1, 4).expand(x.shape[0], -1, -1), x], 1),
        X,
    ),
    "elements of each row by its own indices": (lambda x: x.gather(2, x.argmax(2, keepdim=True)), X),
    "a counter of rows": (lambda x: x + torch.arange(x.shape[0])[:, None, None], X),
    "the batch second": (lambda x: F.linear(x, W.t()).sum(0), X.transpose(0, 1), 1),
    "computed indices, and divisors": (lambda i: (F.embedding(i - 1, TABLE), i // (i + 1)), IDS),
    "places among as many columns as a table has rows": (
        lambda x: F.embedding((x.view(-1, 12)[:, :11] + torch.arange(x.shape[0])[:, None]).argmax(1), TABLE),
        X,
    ),
    "floating-point division by the number of a row": (lambda x: x / torch.arange(x.shape[0])[:, None, None], X),
    "size 1 dimensions": (lambda x: x[:, :1].squeeze(1).unsqueeze(0).squeeze(0).flip(1), X),
}

MIXED: dict[str, tuple[Any, Any, str]] = {
    "a sum": (lambda x: x.sum(0), X, "aten.sum.dim_IntList works along this dimension"),
    "a mean of all": (lambda x: x.mean(), X, "aten.mean.default works along this dimension"),
    "a softmax": (lambda x: x.softmax(0), X, "aten.amax.default works along this dimension"),
    "a batch normalisation in training": (
        lambda x: F.batch_norm(x, None, None, training=True),
        X,
        "aten.var_mean.correction works along this dimension",
    ),
    "a scan": (lambda x: x.cumsum(0), X, "aten.cumsum.default works along this dimension"),
    "a sort": (lambda x: x.sort(0)[0], X, "aten.sort.default works along this dimension"),
    "rows in reverse": (lambda x: x.flip(0), X, "prims.rev.default works along this dimension"),
    "the last row": (lambda x: x[-1], X, "aten.select.int takes one row by its number"),
    "all rows but one": (lambda x: x[: x.shape[0] - 1], X, "aten.slice.Tensor takes rows by their number"),
    "rows by indices": (lambda x: x[torch.tensor([0, 1])], X, "aten.index.Tensor takes rows by indices"),
    "similarity": (lambda x: x[:, 0] @ x[:, 0].T, X, "aten.mm.default multiplies rows with rows"),
    "pairs": (lambda x: x[:, None, 0] - x[None, :, 0], X, "combines rows with rows"),
    "a product over rows": (lambda x: x[:, 0].T @ x[:, 1], X, "multiplies along this dimension, and adds up"),
    "joined rows": (lambda x: torch.cat([x, x * 2]), X, "aten.cat.default joins tensors along this dimension"),
    "the number of rows": (lambda x: x / x.shape[0], X, "uses the number of rows as a number"),
    "random numbers": (lambda x: x + torch.rand_like(x), X, "draws random numbers for rows"),
    "indices by the number of a row": (
        lambda i: F.embedding(i + torch.arange(i.shape[0])[:, None], TABLE),
        IDS,
        "uses indices that a row's number decides",
    ),
    "places in more columns than the table has rows": (
        lambda x: F.embedding((x.view(-1, 12) + torch.arange(x.shape[0])[:, None]).argmax(1), TABLE),
        X,
        "uses indices that a row's number decides",
    ),
    "a histogram": (
        lambda i: torch.zeros(11).scatter_add(0, i[:, 0], torch.ones(i.shape[0])),
        IDS,
        "aten.scatter_add.default takes or writes rows by indices",
    ),
    "division by the number of a row": (
        lambda i: i // (5 - torch.arange(i.shape[0]))[:, None],
        IDS,
        "divides integers by what a row's number decides",
    ),
    "rows inside of a merged dimension": (
        lambda x: x.transpose(0, 1).reshape(-1, 4),
        X,
        "the graph returns a dimension of which the rows are not the outermost factor",
    ),
    "rows that are split": (lambda x: x.clone().view(3, x.shape[0], 4), X, "which splits rows"),
    "an unknown operator": (lambda x: torch.cdist(x, x), X, "aten._cdist_forward.default is not known to keep rows"),
}


@pytest.mark.parametrize("name", APART)
def test_rows_that_do_not_see_each_other(name: str) -> None:
    fn, example, *dims = APART[name]
    assert mixers(fn, example, dims=tuple(dims)) == []


@pytest.mark.parametrize("name", MIXED)
def test_an_operator_in_which_rows_see_each_other_is_named(name: str) -> None:
    fn, example, said = MIXED[name]
    found = mixers(fn, example)
    assert any(said in line for line in found), found


def test_every_offender_is_named_at_once() -> None:
    found = mixers(lambda x: (x.sum(0), x.sort(0)[0] + 1), X)
    assert [line.split(" ")[0] for line in found] == ["aten.sum.dim_IntList", "aten.sort.default"]


def test_a_reshape_that_keeps_rows_whole_is_allowed() -> None:
    """
    ::

        (b, 3, 4) -> (b, 12), (b * 3, 4), (b, 2, 6)    rows stay whole
        (b, 3, 4) -> (3, b, 4)                         "rows that are split": elements go to other rows
    """
    for shape in [(-1, 12), (-1, 4), (-1, 2, 6)]:
        assert mixers(functools.partial(torch.reshape, shape=shape), X) == []


# What a random function is made of: of each step the result has three dimensions, with the rows at some place.
_STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "permute": lambda x: x.permute(1, 0, 2),
    "transpose": lambda x: x.transpose(1, 2),
    "merge first": lambda x: x.reshape(-1, x.shape[2]).unsqueeze(1) * 2,
    "merge last": lambda x: x.reshape(x.shape[0], 1, -1) + 1,
    "sum": lambda x: x.sum(1, keepdim=True) + x,
    "largest": lambda x: x - x.amax(0, keepdim=True),
    "scan": lambda x: x.cumsum(2),
    "reverse": lambda x: x.flip(1),
    "sort": lambda x: x.sort(0)[0],
    "products": lambda x: x @ x.transpose(1, 2) @ x,
    "join": lambda x: torch.cat([x, x * 3], 2),
    "part": lambda x: x.narrow(1, 0, 1) * x,
}


@PROPERTY
@given(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=4))
def test_what_is_allowed_gives_the_same_rows_with_padding(names: list[str]) -> None:
    """Any function without offenders: its rows are the same, bit for bit, whatever rows of padding hold.

    Numbers are small integers, so that sums are exact in any order.
    """

    def fn(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = _STEPS[name](x)
        return x

    x = torch.randint(-2, 3, (ROWS, 2, 3)).double()
    if mixers(fn, x):
        return
    padding = torch.randint(-2, 3, (3, 2, 3)).double()
    own, padded = fn(x), fn(torch.cat([x, padding]))
    (dim,) = [dim for dim in range(3) if own.size(dim) != padded.size(dim)]
    assert torch.equal(padded.narrow(dim, 0, own.size(dim)), own)
