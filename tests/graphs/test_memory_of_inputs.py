"""Whose bytes an input's are: one copy of them counts, and everybody reads that one.

::

    caller's tensor   x ---------------------------------------> x'  the caller, and outputs that lie in it
                       \\ copied in                   copied back /
    static buffer       b --> kernel writes --> eager part reads

Where an input moves, the static buffer is the input for all of the program. What is written to it goes back to the
caller's tensor, unless nobody reads it there. What is handed out lies in the caller's tensor, never in the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, freezes, inductor
from torch import Tensor

from fxwrap.graphs import program

Program = Callable[..., Tensor]


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Operators of a module of one's own."""
    library = torch.library.Library("memory_of_inputs", "FRAGMENT")

    @torch.library.custom_op("memory_of_inputs::loss", mutates_args=())
    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * x).sum(), 2 * x

    @loss.register_fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(()), torch.empty_like(x)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])

    loss.register_autograd(lambda ctx, loss, _: ctx.saved_tensors[0] * loss, setup_context=keep)

    @torch.library.custom_op("memory_of_inputs::made", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def made(x: Tensor) -> Tensor:
        return x + 1

    @torch.library.custom_op("memory_of_inputs::doubled_", mutates_args=("x",))
    def doubled_(x: Tensor) -> None:
        x.mul_(2)

    @torch.library.custom_op("memory_of_inputs::summed", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def summed(x: Tensor) -> Tensor:
        return x.sum()

    made.register_fake(torch.empty_like)
    doubled_.register_fake(lambda x: None)
    summed.register_fake(lambda x: x.new_empty(()))
    yield torch.ops.memory_of_inputs
    library._destroy()


@pytest.fixture
def numbers_of_data() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


# -- gradients that are written over what the forward has saved ----------------------------------------------------


def of_a_product(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
    y = torch.addmm(p, x, w)
    return (y * y).sum()


def of_an_operator(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
    return torch.ops.memory_of_inputs.loss(x @ w + p)[0]


def of_random_numbers(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
    y = torch.nn.functional.dropout(x @ w, 0.5) + p
    return y.pow(2).sum()


def with_an_eager_part(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
    y = torch.addmm(p * (x > 0).nonzero().float().sum(), x, w)
    return (y * y).sum()


def gradients(f: Any, device: torch.device, forwards: tuple[int, ...]) -> list[Tensor]:
    """The gradients of a loss that is scaled, some after several forwards."""
    torch.manual_seed(0)
    found = []
    for step, count in enumerate(forwards):
        given = [[torch.randn(4, 4, device=device, requires_grad=True) for _ in range(3)] for _ in range(count)]
        losses = [f(*one) for one in given]
        for loss, one in zip(losses, given, strict=True):
            scale = torch.tensor(3.0 + step, device=device)
            found += [gradient.clone() for gradient in torch.autograd.grad(loss, one, scale)]
    return found


@pytest.mark.parametrize(
    "forwards", [(1,) * 8, (2, 2, 2, 2), (1, 1, 1, 2, 1, 3, 1)], ids=["one by one", "two by two", "in turn"]
)
@pytest.mark.parametrize("fn", [of_a_product, of_an_operator, of_random_numbers, with_an_eager_part])
def test_a_gradient_that_is_written_over_a_saved_tensor(
    compiled: Any, device: torch.device, ops: Any, numbers_of_data: None, fn: Program, forwards: tuple[int, ...]
) -> None:
    """Inductor scales a donated saved tensor in place, and returns it: where that has moved, it is not lost."""
    f: Compiled = compiled(fn)
    got, expected = gradients(f, device, forwards), gradients(inductor(fn), device, forwards)
    assert_same(got, expected)
    assert all(f.replays())


def test_a_gradient_that_is_not_returned_is_not_copied_back(compiled: Any, device: torch.device) -> None:
    """The same saved tensor, whose bytes are scaled for a product, and which nobody gets."""

    def fn(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
        y = torch.addmm(p.detach(), x, w)
        return (y * y).sum()

    def steps(f: Any) -> list[Tensor]:
        torch.manual_seed(0)
        found = []
        for _ in range(4):
            given = [[torch.randn(4, 4, device=device, requires_grad=True) for _ in range(3)] for _ in range(2)]
            losses = [f(*one) for one in given]
            for loss, one in zip(losses, given, strict=True):
                found += [g.clone() for g in torch.autograd.grad(loss, one[:2], torch.tensor(3.0, device=device))]
        return found

    f: Compiled = compiled(fn)
    assert_same(steps(f), steps(inductor(fn)))
    backward = next(program for program in f.programs if program.plan.phase == "backward")
    assert not backward.newest_plan.copied_back and backward.counters.replays


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="this torch has no such loss")
def test_a_loss_of_torchs_own_that_saves_its_gradients(compiled: Any, device: torch.device) -> None:
    options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True, batch_chunk_size=2)  # type: ignore[attr-defined]
    model = torch.nn.LinearCrossEntropyLoss(8, 4, bias=True, options=options).to(device)  # type: ignore[attr-defined]
    f, theirs = compiled(model), inductor(model)
    for _ in range(5):
        x, target = torch.randn(8, device=device, requires_grad=True), torch.tensor(2, device=device)
        scale = torch.randn((), device=device)
        twins = [parameter for parameter in theirs._orig_mod.parameters()]
        got = torch.autograd.grad(f(x, target), [x, *model.parameters()], scale)
        assert_same(got, torch.autograd.grad(theirs(x, target), [x, *twins], scale))


# -- views of a size that data decide ------------------------------------------------------------------------------


def checked_number(n: Tensor) -> int:
    number = int(n.item())
    torch._check(number >= 1)
    torch._check(number <= 12)
    return number


def saved_for_a_kernel(n: Tensor, x: Tensor) -> Tensor:
    return x[: checked_number(n)].square().sum()  # sin() of a masked vector depends on what is in its other lanes


def saved_for_a_product(n: Tensor, x: Tensor) -> Tensor:
    rows = x[: checked_number(n)]
    return (rows.t() @ rows).sum()


def saved_twice(n: Tensor, x: Tensor) -> Tensor:
    rows = x[: checked_number(n)]
    return (rows @ rows.t()).logsumexp(1).sum()


@pytest.mark.parametrize("fn", [saved_for_a_kernel, saved_for_a_product, saved_twice])
def test_a_saved_view_of_an_input(compiled: Any, device: torch.device, numbers_of_data: None, fn: Program) -> None:
    """It lies in the caller's tensor, and not in a static buffer, which the next forward fills anew."""

    def steps(f: Any) -> list[Tensor]:
        torch.manual_seed(0)
        found = []
        for step in range(8):
            given = [torch.randn(12, 4, device=device, requires_grad=True) for _ in range(2)]
            losses = [f(torch.tensor(5 + (step + i) % 3, device=device), x) for i, x in enumerate(given)]
            for loss, x in zip(losses, given, strict=True):
                found += [gradient.clone() for gradient in torch.autograd.grad(loss, x)]
        return found

    f: Compiled = compiled(fn)
    assert_same(steps(f), steps(inductor(fn)))
    assert all(f.replays())


def of_an_input(n: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    rows = x[: checked_number(n)]
    torch.ops.memory_of_inputs.doubled_(x)
    return torch.ops.memory_of_inputs.summed(rows), rows


def of_a_kernels_result(n: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    made = x.sin()
    rows = made[: checked_number(n)]
    torch.ops.memory_of_inputs.doubled_(made)
    return torch.ops.memory_of_inputs.summed(rows), rows, made


def of_a_product_with_others(n: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    made = x.sin() @ x.t()
    return made[: checked_number(n)], made.sum()


def of_eager_work(n: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    made = torch.ops.memory_of_inputs.made(x)
    rows = made[: checked_number(n)]
    torch.ops.memory_of_inputs.doubled_(made)
    return torch.ops.memory_of_inputs.summed(rows), rows


def of_eager_work_that_is_returned_too(n: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    made = torch.ops.memory_of_inputs.made(x)
    rows = made[: checked_number(n)]
    torch.ops.memory_of_inputs.doubled_(made)
    return rows, made


def with_another_dtype(n: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    made = x.sin()
    return made[: checked_number(n)].view(torch.int32), made.sum()


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize(
    "fn",
    [
        of_an_input,
        of_a_kernels_result,
        of_a_product_with_others,
        of_eager_work,
        of_eager_work_that_is_returned_too,
        with_another_dtype,
    ],
)
def test_a_returned_view(
    compiled: Any, device: torch.device, ops: Any, numbers_of_data: None, fn: Callable[..., Any], kept: bool
) -> None:
    """It shares the memory of what it is a view of, later writes included, and keeps its values while it is held."""

    def calls(f: Any) -> tuple[list[Tensor], list[bool]]:
        torch.manual_seed(0)
        seen, held, shares = [], [], []
        with torch.no_grad():
            for call in range(8):
                x = torch.randn(12, 4, device=device)
                outputs = f(torch.tensor(5 + call % 3, device=device), x)
                seen += [x.clone(), *(output.clone() for output in outputs)]
                held += [*outputs] if kept else []
                shares.append(len({output.untyped_storage().data_ptr() for output in (x, *outputs)}))
        return [*seen, *held], shares

    f: Compiled = compiled(fn)
    got, expected = calls(f), calls(inductor(fn))
    assert_same(got[0], expected[0])
    assert got[1] == expected[1]
    assert f.program.counters.replays >= 5, f.program.counters.to_dict()
    if freezes(device) and kept:
        assert f.program.counters.events.get("an output is live at the next call", 0) <= 2


@torch.no_grad()
def test_the_layout_of_a_written_input_is_checked_at_every_call(
    compiled: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its address stays: AOTAutograd makes one input of several that overlap, and nothing guards it."""
    given, run = list[list[Any]](), program.Program.run

    def noted(self: program.Program, inputs: list[Any]) -> Any:
        given.append(list(inputs))
        return run(self, inputs)

    cache = torch.zeros(8, 4, device=device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        cache[3] = x.sum(0)
        return cache @ x.t()

    f: Compiled = compiled(fn)
    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(program.Program, "run", noted)
            f(torch.randn(3, 4, device=device))
    otherwise = [value.view(-1) if value.data_ptr() == cache.data_ptr() else value for value in given[-1]]
    with pytest.raises(AssertionError):
        f.program.run(otherwise)
    torch.testing.assert_close(f(x := torch.ones(3, 4, device=device)), fn(x))
