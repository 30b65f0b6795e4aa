"""More programs with branches and loops: what is carried, what is returned, what bodies call, and sequences."""

from __future__ import annotations

from typing import Any

import torch
from control_flow_programs import (
    COUNTS,
    PROGRAMS,
    map_rows,
    of,
    program,
    repeat,
    rows,
    scan,
    sequence,
    square,
    two,
    vector,
    while_loop,
    zero,
)
from native_calls import ops
from torch import Tensor, cond
from torch._higher_order_ops.associative_scan import associative_scan
from torch._inductor.codegen import wrapper
from torch.nn import functional

__all__ = ["PROGRAMS"]

# -- what is carried ---------------------------------------------------------------------------------------


@program(two)
def swapped(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """Two carried values change places."""
    return while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, b.clone(), a.clone()), (zero(x), x, y))


@program(two)
def swapped_and_more(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """Three values go round, and one of them is changed."""
    return while_loop(
        lambda i, a, b, c: i < n,
        lambda i, a, b, c: (i + 1, b.clone(), c.clone(), a + b * 0.5),
        (zero(x), x + 1, y * 2, x - y),
    )


@program(two)
def passed_on_unchanged(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """What is carried, and returned, is the input; it is written afterwards."""
    _, a, b = while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, a.clone(), b + a), (zero(x), x, y))
    x.add_(1)
    return a, b, x + a


@program(vector)
def previous_values(x: Tensor, n: Tensor) -> Any:
    """Read one iteration later, and one more."""
    return while_loop(
        lambda i, a, b, c: i < n,
        lambda i, a, b, c: (i + 1, b.clone(), a + b, c * 0.5 + a),
        (zero(x), x, x + 1, x.sin()),
    )


@program(vector)
def carried_and_read_besides(x: Tensor, n: Tensor) -> Any:
    """The tensor with which the loop begins is read in the body, too, under other names."""
    return while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, a + x, b * x), (zero(x), x * 1, x.clone()))


@program(vector)
def the_same_value_twice(x: Tensor, n: Tensor) -> Any:
    """The body returns one value in two places."""

    def body(i: Tensor, a: Tensor, b: Tensor) -> Any:
        c = (a + b).sin()
        return i + 1, c, c.clone()

    return while_loop(lambda i, a, b: i < n, body, (zero(x), x, x * 2))


@program(vector)
def a_flag_is_carried(x: Tensor, n: Tensor) -> Any:
    """The condition is a carried value itself."""
    return while_loop(lambda on, x: on.clone(), lambda on, x: (x.sum() + n < 9, x + 1), (n > 0, x))


@program(vector)
def no_iteration_ever(x: Tensor, n: Tensor) -> Any:
    """Results are copies of what the loop begins with."""
    y = while_loop(lambda i, x: i < 0, lambda i, x: (i + 1, x * 2), (n, x))
    x.mul_(3)
    return y


@program(lambda call: (torch.randn(()), torch.tensor(COUNTS[call])))
def numbers_in_tensors(x: Tensor, n: Tensor) -> Any:
    """Tensors without dimensions."""
    return repeat(n, lambda i, x: x.cos() + i, x), cond(x > 0, lambda x: x.exp(), lambda x: x - 1, (x,))


def _typed(x: Tensor, n: Tensor) -> Any:
    y = repeat(n, lambda i, x: x * x + x, x)
    return y, cond(n > 1, lambda y: y * 2, lambda y: y + y.flip(0), (y,))


@program(of(torch.float64))
def doubles(x: Tensor, n: Tensor) -> Any:
    """float64"""
    return _typed(x, n)


@program(of(torch.bfloat16))
def halves(x: Tensor, n: Tensor) -> Any:
    """bfloat16"""
    return _typed(x, n)


@program(of(torch.int64))
def integers(x: Tensor, n: Tensor) -> Any:
    """int64"""
    return _typed(x, n)


@program(of(torch.complex64))
def complex_numbers(x: Tensor, n: Tensor) -> Any:
    """complex64, for which there are no kernels"""
    return _typed(x, n)


@program(of(torch.bool))
def flags(x: Tensor, n: Tensor) -> Any:
    """bool"""
    return repeat(n, lambda i, x: x ^ x.roll(1), x), cond(x[0], lambda x: ~x, lambda x: x | x.flip(0), (x,))


@program(vector)
def a_thousand_iterations(x: Tensor, n: Tensor) -> Any:
    """Long enough for whatever piles up."""
    return repeat(1000 + n, lambda i, x: (x + 0.1).sin(), x)


EIGHT = torch.arange(8.0)


@program(vector)
def a_constant_is_passed_on(x: Tensor, n: Tensor) -> Any:
    """A tensor that outlives the call is carried unchanged, and returned: tests write to it."""
    eight = EIGHT.to(x.device)
    return while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, a.clone(), b + a), (zero(x), eight, x))


@program(vector)
def a_constant_of_the_body_is_returned(x: Tensor, n: Tensor) -> Any:
    """So is one that the body makes."""
    made = lambda: torch.tensor([1.0, 2.0, 3.0, 4.0] * 2, device=x.device)
    y = cond(n > 1, lambda x: made(), lambda x: x.sin(), (x,))
    return y, while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, made(), a + b), (zero(x), x * 2, x))


@program(two)
def operands_that_end_inside(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """Temporaries that are read in an inner body alone, in its first and in its last iteration."""
    a, b, c = x @ y.outer(x), y.exp(), x.cumsum(0)

    def body(i: Tensor, z: Tensor) -> Tensor:
        first = cond(i == 0, lambda z: z + a, lambda z: z * 0.5, (z,))
        return repeat(i, lambda j, z: cond(j == 2, lambda z: z - b, lambda z: z + c, (z,)), first)

    return repeat(n, body, x.sin())


@program(vector)
def a_number_is_the_condition(x: Tensor, n: Tensor) -> Any:
    """The loop ends, or does not begin, by a number that both the condition and the body have read."""
    return while_loop(
        lambda a, x: a.sum().long() < 2 * n, lambda a, x: (a + 0.25, x + a.sum().item()), (torch.zeros_like(x), x)
    )


# -- predicates and results ----------------------------------------------------------------------------------


@program(vector)
def predicates_of_many_kinds(x: Tensor, n: Tensor) -> Any:
    """One element in a tensor with dimensions; a number that is not 0."""
    y = cond((n > 1).view(1), lambda x: x.sin(), lambda x: x.cos(), (x,))
    return y, cond((x[2:3] > 0).view(1, 1), lambda x: x + 1, lambda x: x * 2, (x,))


@program(vector)
def an_integer_decides(x: Tensor, n: Tensor) -> Any:
    """Any number but 0 is true."""
    return cond(n, lambda x: x.sin(), lambda x: x.cos(), (x,))


@program(vector)
def a_fraction_decides(x: Tensor, n: Tensor) -> Any:
    """So is any fraction but 0."""
    return cond(n * 0.25, lambda x: x.sin(), lambda x: x.cos(), (x,))


if not hasattr(wrapper, "SwitchLine"):  # from torch 2.14 on Inductor's wrapper makes an integer of it, and raises

    @program(vector)
    def no_number_decides(x: Tensor, n: Tensor) -> Any:
        """So is what is no number."""
        return cond(n * float("nan"), lambda x: x.sin(), lambda x: x.cos(), (x,))


@program(two)
def another_tensor_decides(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """A branch does not see what has decided, and the loop goes on while a sum is small."""
    z = cond(y.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
    return while_loop(lambda a, b: (b.abs().sum() < 9).logical_not(), lambda a, b: (a + 1, b * 0.5), (z, y * n))


@program(vector)
def a_branch_returns_its_operand(x: Tensor, n: Tensor) -> Any:
    """The result has the numbers of the input, or has not."""
    return cond(n > 1, lambda x: x.clone(), lambda x: x + 1, (x,))


@program(vector)
def a_branch_returns_what_was_computed(x: Tensor, n: Tensor) -> Any:
    """The result has the numbers of a temporary that is changed afterwards, or has not."""
    y = x.sin()
    z = cond(n > 1, lambda y: y.clone(), lambda y: y + 1, (y,))
    y.add_(1)
    return y, z * 2


@program(square)
def branches_return_views(x: Tensor, n: Tensor) -> Any:
    """Of what a branch has computed."""
    return cond(n > 1, lambda x: (x.sin().t(), x.exp()[0]), lambda x: ((x + 1).t(), x[2].clone()), (x,))


@program(vector)
def results_of_many_shapes(x: Tensor, n: Tensor) -> Any:
    """A dictionary, a number in a tensor, a matrix, integers."""
    return cond(
        n > 1,
        lambda x: {"a": x.sum(), "b": (x.outer(x), x.argmax())},
        lambda x: {"a": x.mean(), "b": (x.outer(x) + 1, x.argmin())},
        (x,),
    )


@program(vector)
def results_of_any_size(x: Tensor, n: Tensor) -> Any:
    """Branches return different numbers of elements."""
    return cond(n > 1, lambda x: x[:3] * 2, lambda x: x[:5].sin(), (x,)).sum()


@program(vector)
def results_that_nobody_uses(x: Tensor, n: Tensor) -> Any:
    """A branch and a loop for nothing, and loops of which a result is used."""
    cond(n > 1, lambda x: x.sin(), lambda x: x.cos(), (x,))
    repeat(n, lambda i, x: x * 2, x)
    _, _, y = while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, a * 2, b + a), (zero(x), x, x * 1))
    _, z = cond(n > 1, lambda x: (x.exp(), x.sin()), lambda x: (x.exp(), x.cos()), (x,))
    return y + z


@program(two)
def one_after_another(x: Tensor, y: Tensor, n: Tensor) -> Any:
    """Each reads what the one before it has returned."""
    a = repeat(n, lambda i, x: x + y, x)
    b = cond(a.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (a,))
    c = repeat(b.abs().sum().long(), lambda i, b: b * 0.5 + a, b)
    return cond(c[0] > 0, lambda c: c + b, lambda c: c - a, (c,)), a


# -- what bodies call ----------------------------------------------------------------------------------------


@program(square)
def products(x: Tensor, n: Tensor) -> Any:
    """mm, addmm and a batch of products in a loop and in branches."""
    w = x.t() * 0.1
    y = repeat(n, lambda i, x: torch.addmm(x, w, x @ w).tanh(), x)
    return cond(n > 1, lambda y: torch.bmm(y[None], w[None])[0], lambda y: y @ w.t(), (y,))


@program(lambda call: (torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3), torch.tensor(COUNTS[call])))
def convolutions(x: Tensor, w: Tensor, n: Tensor) -> Any:
    """As many as it happens."""
    return repeat(n, lambda i, x: functional.conv2d(x, w, padding=1).relu(), x)


@program(square)
def several_results_of_operators(x: Tensor, n: Tensor) -> Any:
    """sort, var_mean, split, topk: some results are used, and some are not."""

    def body(i: Tensor, x: Tensor) -> Tensor:
        values, _ = torch.sort(x, 1)
        variance, mean = torch.var_mean(values, 0)
        first, second = torch.split(values, [1, 3], 1)
        return torch.cat([second, first], 1) * mean - variance + torch.topk(x, 2, 0).indices.sum()

    return repeat(n, body, x)


@program(square)
def many_temporaries(x: Tensor, n: Tensor) -> Any:
    """Thirty in one body, which live until its end."""

    def body(i: Tensor, x: Tensor) -> Tensor:
        parts = [x]
        for _ in range(15):
            parts.append((parts[-1] @ x).tanh())
        return sum(parts[k] @ parts[-k] for k in range(1, 16)).tanh()  # type: ignore[union-attr]

    return repeat(n, body, x)


@program(vector)
def operators_of_ones_own(x: Tensor, n: Tensor) -> Any:
    """One returns a tuple, one a list, one nothing."""

    def body(i: Tensor, x: Tensor) -> Tensor:
        first, second = ops.two(x)
        many = ops.many(first)
        ops.note(second)
        return ops.plus(many[0], None, "twice", torch.float32) * 0.1 + ops.plus(many[1], x, "twice", torch.float32)

    return repeat(n, body, x)


@program(vector)
def random_numbers(x: Tensor, n: Tensor) -> Any:
    """Of another number of iterations each time."""
    y = repeat(n, lambda i, x: x + torch.rand_like(x), x)
    return cond(n > 1, lambda y: functional.dropout(y, 0.5), lambda y: y + torch.randn_like(y), (y,)), torch.rand(2)


@program(vector)
def sizes_of_data_in_a_body(x: Tensor, n: Tensor) -> Any:
    """A mask selects as many as it happens, in every iteration."""
    return repeat(n, lambda i, x: x * 0.5 + x[x > 0].sum() + x.nonzero().sum(), x)


@program(vector)
def numbers_read_in_a_body(x: Tensor, n: Tensor) -> Any:
    """The body reads an integer and a fraction on the host."""
    return repeat(n, lambda i, x: x * x.max().item() + x.argmax().item() * 2, x)


def strided(call: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    part, row = torch.randn(8, 8)[::2, 1::2].t(), torch.randn(1, 4).expand(4, 4)
    return torch.randn(4, 4).t(), part, row, torch.tensor(COUNTS[call])


@program(strided)
def not_contiguous(x: Tensor, y: Tensor, z: Tensor, n: Tensor) -> Any:
    """A transposed matrix is carried; a transposed part and an expanded row are read."""
    a = repeat(n, lambda i, x: x * 2 + y, x)
    return a, cond(n > 1, lambda y, z: y.t() @ z, lambda y, z: (z + y).t() + 1, (y, z))


@program(square)
def views_are_operands(x: Tensor, n: Tensor) -> Any:
    """Parts of one tensor are carried, decided on, and read."""
    y = x * 2
    a = while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, a + x[3], b * a), (zero(x), y[1], x[:, 2] + 1))
    return *a, cond(n > 1, lambda p, q: p + q, lambda p, q: p * q, (y[0], x[:, 1]))


# -- sequences -----------------------------------------------------------------------------------------------


@program(sequence)
def scan_of_several(start: Tensor, xs: Tensor) -> Any:
    """Several results are stacked, backwards."""
    return scan(lambda carry, x: (carry * 0.5 + x, (carry.sin(), x.sum(), x[:2] * 2)), start, xs, reverse=True)


@program(sequence)
def scan_with_a_branch(start: Tensor, xs: Tensor) -> Any:
    """Each step decides."""
    weight = start.exp()

    def step(carry: Tensor, x: Tensor) -> Any:
        y = cond(x.sum() > 0, lambda c, x: c + x, lambda c, x: c * x, (carry, x))
        return y, y * weight

    return scan(step, start, xs)


@program(vector)
def loop_in_a_scan(x: Tensor, n: Tensor) -> Any:
    """And a scan and a map in a loop."""

    def body(i: Tensor, x: Tensor) -> Tensor:
        _, stacked = scan(lambda carry, row: (carry * 0.5 + row, carry + row), x[:2] + i, x.exp().view(4, 2))
        return map_rows(lambda row: row.sin(), stacked).reshape(-1)

    y = repeat(n, body, x)
    return scan(
        lambda carry, row: (repeat(n, lambda i, z: z.cos(), carry) + row, carry * row), x[:2] + 1, y.view(4, 2)
    )


@program(sequence)
def scan_of_trees(start: Tensor, xs: Tensor) -> Any:
    """Two carried values, two sequences along another dimension."""
    return scan(
        lambda carry, x: ({"a": carry["b"] + x[0].sin(), "b": carry["a"] * x[1]}, carry["a"] - x[1]),
        {"a": start.sin(), "b": start.cos()},
        (xs.t(), xs.t() + 1),
        dim=1,
    )


@program(rows, dynamic=True)
def scan_of_any_length(xs: Tensor, n: Tensor) -> Any:
    """As many steps as there are rows."""
    return scan(lambda carry, x: (carry + x, carry * n), xs[0] * 2, xs)


@program(sequence)
def map_of_several(start: Tensor, xs: Tensor) -> Any:
    """Two sequences, two results, and a product."""
    return map_rows(lambda x, start: (x[0].sin() + start, (x[1][None] @ start[:, None]).sum()), (xs, xs.exp()), start)


@program(sequence)
def scans_by_halves(start: Tensor, xs: Tensor) -> Any:
    """associative_scan, forwards and backwards"""
    first = associative_scan(lambda a, b: a * b, xs, dim=0, combine_mode="generic")
    return first, associative_scan(lambda a, b: a + b, xs + start, dim=0, reverse=True, combine_mode="generic")
