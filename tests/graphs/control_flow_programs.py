"""Small programs with branches and loops, each with something special in it, and the inputs of six calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, cond, nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

map_rows: Any = torch_map  # whose annotations are not those of what it takes
CALLS = 6
COUNTS = (0, 1, 4, 2, 1, 3)  # of iterations
SIZES = (3, 5, 3, 5, 3, 5)  # a recording is of one size


@dataclass(frozen=True)
class Program:
    """A function, and how to call it.

    Attributes:
        make: the inputs of a call, by its number.
        gradients: of results of the forward pass with respect to the inputs, which are compared, too.
        dynamic: what ``torch.compile`` is told of sizes.
    """

    function: Callable[..., Any]
    make: Callable[[int], tuple[Any, ...]]
    gradients: bool = False
    dynamic: bool | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    def inputs(self, call: int, device: torch.device) -> tuple[Any, ...]:
        torch.manual_seed(call)
        return tuple(one.to(device) if isinstance(one, Tensor) else one for one in self.make(call))


PROGRAMS: list[Program] = []


def program(make: Callable[[int], tuple[Any, ...]], **how: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a program of a function."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(Program(function, make, **how))
        return function

    return add


# -- inputs of calls ---------------------------------------------------------------------------------------


def vector(call: int) -> tuple[Tensor, Tensor]:
    """Eight numbers, and a count."""
    return torch.randn(8), torch.tensor(COUNTS[call])


def some_again(call: int) -> tuple[Tensor, Tensor]:
    """Eight numbers, and one of two counts."""
    return torch.randn(8), torch.tensor((0, 3)[call % 2])


def two_some_again(call: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(8), torch.randn(8), torch.tensor((1, 3)[call % 2])


def square(call: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.tensor(COUNTS[call])


def two(call: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(8), torch.randn(8), torch.tensor(COUNTS[call])


def rows(call: int) -> tuple[Tensor, Tensor]:
    """As many rows as it happens."""
    return torch.randn(SIZES[call], 4), torch.tensor(COUNTS[call])


def of(dtype: torch.dtype) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make(call: int) -> tuple[Tensor, Tensor]:
        return (torch.randn(8, dtype=torch.complex64 if dtype.is_complex else None) * 3).to(dtype), torch.tensor(
            COUNTS[call]
        )

    return make


def sequence(call: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4), torch.randn(5, 4)


def zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=like.device)


def repeat(n: Tensor, body: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """``n`` times."""
    return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, body(i, x)), (zero(x), x))[1]


# -- one in another ----------------------------------------------------------------------------------------


@program(vector)
def cond_in_loop(x: Tensor, n: Tensor) -> Any:
    """Another branch in each iteration."""
    return repeat(n, lambda i, x: cond(i % 2 == 0, lambda x: x.sin(), lambda x: x * 2 - 1, (x,)), x)


@program(vector)
def loop_in_cond(x: Tensor, n: Tensor) -> Any:
    """One branch has a loop."""
    return cond(n > 1, lambda x: repeat(n, lambda i, x: x.cos() + i, x), lambda x: x.clone(), (x,))


@program(vector)
def loop_in_loop(x: Tensor, n: Tensor) -> Any:
    """The inner loop runs as often as the outer one has run."""
    return repeat(n, lambda i, x: repeat(i, lambda j, y: y * 0.5 + j, x) + i, x)


@program(vector)
def cond_in_cond(x: Tensor, n: Tensor) -> Any:
    """Two decisions."""

    def inner(x: Tensor) -> Tensor:
        return cond(n > 2, lambda x: x.exp(), lambda x: x.sin() + 1, (x,))

    return cond(n > 0, inner, lambda x: inner(x + 1) * 2, (x,))


@program(vector)
def three_deep(x: Tensor, n: Tensor) -> Any:
    """A loop in a branch in a loop, whose bodies all read ``x``."""

    def body(i: Tensor, y: Tensor) -> Tensor:
        return cond(i > 1, lambda y: repeat(i, lambda j, z: z * 0.5 + x * j, y) + x, lambda y: y - x, (y,))

    return repeat(n, body, x * 2)


@program(vector)
def cond_in_condition(x: Tensor, n: Tensor) -> Any:
    """The condition of a loop has a branch."""

    def going(i: Tensor, x: Tensor) -> Tensor:
        return cond(x.sum() > 0, lambda i: i < n, lambda i: i < 2 * n - 1, (i,))

    return while_loop(going, lambda i, x: (i + 1, x - 0.5), (zero(x), x))


@program(vector)
def loop_in_condition(x: Tensor, n: Tensor) -> Any:
    """The condition of a loop has a loop."""
    return while_loop(
        lambda i, x: repeat(n, lambda j, y: y + 1, i) < 2 * n, lambda i, x: (i + 1, x * 2), (zero(x), x)
    )


@program(vector)
def loop_of_loops_in_branches(x: Tensor, n: Tensor) -> Any:
    """Both branches have a loop, over different things."""

    def two(x: Tensor) -> Tensor:
        return while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, b.clone(), a + b), (zero(x), x, x + 1))[1]

    return cond(x.sum() > 0, two, lambda x: repeat(n + 1, lambda i, y: y.sin(), x), (x,))


# -- what is written ---------------------------------------------------------------------------------------


@program(two)
def branch_writes_an_input(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """One branch writes, the other does not."""

    def write(x: Tensor, y: Tensor) -> Tensor:
        y.add_(x)
        return x.sin()

    return cond(n > 1, write, lambda x, y: x + y, (x, y)) + y


@program(two)
def body_writes_a_captured_tensor(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """The loop writes an input of the program."""

    def body(i: Tensor, x: Tensor) -> Tensor:
        y.add_(x)
        return x * 0.5 + y

    return repeat(n, body, x)


@program(two)
def condition_writes_a_captured_tensor(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """It runs once more than the body."""

    def going(i: Tensor, x: Tensor) -> Tensor:
        y.mul_(0.5)
        return i < n

    return *while_loop(going, lambda i, x: (i + 1, x + y), (zero(x), x)), y + 1


@program(vector)
def body_writes_temporaries(x: Tensor, n: Tensor) -> Any:
    """Parts of a clone are written."""

    def body(i: Tensor, x: Tensor) -> Tensor:
        y = x.clone()
        y[2:5] += 1
        y[0].copy_(y[7])
        return y.mul_(i + 1)

    return repeat(n, body, x)


@program(vector)
def writes_before_and_after(x: Tensor, n: Tensor) -> Any:
    """The input is written on both sides of the loop."""
    x.add_(1)
    y = repeat(n, lambda i, y: y * 0.5 + x, x.sin())
    x.mul_(2)
    return y + x


# -- what bodies read from outside -------------------------------------------------------------------------


@program(two)
def closures(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """Tensors, numbers of Python, and what was computed from them."""
    scale, z = 1.5, y.exp()
    return repeat(n, lambda i, x: x * scale + z - y[0], x)


@program(vector)
def constants(x: Tensor, n: Tensor) -> Any:
    """Tensors that are made in the body."""

    def body(i: Tensor, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0] * 4, device=x.device) + torch.arange(8, device=x.device)

    y = cond(n > 1, lambda: torch.ones(3, device=x.device), lambda: torch.zeros(3, device=x.device), ())
    return repeat(n, body, x), y


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.register_buffer("shift", torch.full((4,), 0.25))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        y = repeat(n, lambda i, x: self.one(x).relu() + self.shift, x)
        return cond(n > 2, self.other, self.one, (y,))


STEPS = Steps().requires_grad_(False)


@program(square)
def parameters_of_modules(x: Tensor, n: Tensor) -> Any:
    """Weights in a loop and in branches."""
    return STEPS(x, n)


# -- sizes ------------------------------------------------------------------------------------------------


@program(rows, dynamic=True)
def any_number_of_rows(x: Tensor, n: Tensor) -> Any:
    """The loop and the branch have a symbolic size."""
    y = repeat(n, lambda i, x: x.softmax(0) + i, x)
    return cond(n > 1, lambda y: y @ y.t(), lambda y: y.sum(1, keepdim=True) * y.sum(1), (y,))


@program(rows, dynamic=True)
def allocates_any_number(x: Tensor, n: Tensor) -> Any:
    """The body sorts and multiplies, which allocates memory of a symbolic size."""

    def body(i: Tensor, x: Tensor) -> Tensor:
        return (torch.sort(x, 0).values @ x.t()).tanh() @ x + torch.ones(x.size(0), 4, device=x.device)

    return repeat(n, body, x)


@program(rows, dynamic=True)
def a_size_is_a_number(x: Tensor, n: Tensor) -> Any:
    """The body computes with the number of rows."""
    rows = x.size(0)
    return repeat(n, lambda i, x: x * (rows * 2) + x.size(0) / 3 - i, x)


@program(rows, dynamic=True)
def a_size_decides(x: Tensor, n: Tensor) -> Any:
    """The predicate is about sizes."""
    return cond(x.size(0) > 4, lambda x: x.sin(), lambda x: x.cos(), (x,)) + n


@program(rows, dynamic=True)
def as_often_as_there_are_rows(x: Tensor, n: Tensor) -> Any:
    """The condition compares with a size."""
    return while_loop(lambda i, x: i < x.size(0), lambda i, x: (i + 1, x + x[0]), (zero(x), x))


@program(rows, dynamic=True)
def views_of_any_size(x: Tensor, n: Tensor) -> Any:
    """Views inside and outside of the body."""
    y = (x + 1).t()
    return repeat(n, lambda i, z: (z.t().reshape(-1) * 2).view(-1, 4).t() + y, y * 2)


@program(lambda call: (torch.randn((0, 3)[call // 3], 4), torch.tensor(COUNTS[call])), dynamic=True)
def empty_now_and_then(x: Tensor, n: Tensor) -> Any:
    """At first there are no rows."""
    return repeat(n, lambda i, x: x.exp() + 1, x), cond(n > 1, lambda x: x.sum(0), lambda x: x.sum(0) + 1, (x,))


@program(lambda call: (torch.randn(0, 4), torch.tensor(COUNTS[call])))
def empty_tensors(x: Tensor, n: Tensor) -> Any:
    """No elements at all."""
    return repeat(n, lambda i, x: x * 2 + i, x), cond(n > 1, lambda x: x.sin(), lambda x: x + 1, (x,))


# -- gradients ----------------------------------------------------------------------------------------------


@program(two, gradients=True)
def gradients_of_cond(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """Of operands and of what a branch reads besides."""
    return cond(n > 1, lambda x: x.sin() * y, lambda x: x.exp() + y, (x * 2,)) * y


@program(vector, gradients=True)
def gradients_of_cond_in_cond(x: Tensor, n: Tensor) -> Any:
    """Two decisions, both differentiated."""

    def inner(x: Tensor) -> Tensor:
        return cond(n > 2, lambda x: x.exp(), lambda x: x.sin() * x, (x,))

    return cond(n > 0, inner, lambda x: x * x, (x,))


@program(sequence, gradients=True)
def gradients_of_scan(start: Tensor, xs: Tensor) -> Any:
    """Of the start and of what is scanned."""
    return scan(lambda carry, x: (carry * 0.5 + x.sin(), carry * x), start, xs)


@program(sequence, gradients=True)
def gradients_of_map(start: Tensor, xs: Tensor) -> Any:
    """Of rows, and of what all of them read."""
    return map_rows(lambda x, start: x.sin() * start, xs, start)


@program(some_again, gradients=True)
def gradients_of_while_loop(x: Tensor, n: Tensor) -> Any:
    """The backward pass is a loop over what the forward pass has stacked."""
    return repeat(n, lambda i, x: x.sin() * 1.5, x)


@program(two_some_again, gradients=True)
def gradients_of_what_a_loop_reads(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """The body reads a tensor besides, which needs a gradient."""
    return repeat(n, lambda i, x: (x * y).sin(), x)
