"""Native replay: what units run, and that it is what Python runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor, tensors_in
from hypothesis import given
from models import MODELS, SMALLER
from native_calls import (
    COMPLEX,
    both_ways,
    drawn,
    few,
    in_python,
    listing,
    look,
    look_at_nothing,  # noqa: F401
    native,
    natively,
    ops,
    recorded,
)
from random_graphs import GraphMaker, Recipe, build, compile_request, kernel, recipes

from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.pipeline import compile_host_graph
from fxwrap.testing.simulated import SIMULATED

# -- what a unit runs ----------------------------------------------------------------------------------------


@native
def test_the_listing_of_a_small_program(compiled: Any) -> None:
    """It is the Python of its steps: ``r`` are the registers, and values that a recording knows are described."""
    weight, bias = torch.randn(6, 4), torch.randn(4)
    f: Compiled = compiled(lambda x: torch.relu(torch.addmm(bias, x, weight).sin() @ weight.t()) + 1)
    recording = recorded(f, lambda: torch.randn(5, 6))
    assert listing(recording) == drawn("""
    # below autograd
    resize_(<UntypedStorage>, 80)
    v0 = r[0]; r[0] = None
    v1 = r[1]; r[1] = None
    v2 = r[2]; r[2] = None
    addmm(v0, v1, v2, out=<float32[5, 4]>)
    del v0, v1
    cpp_fused_sin_0(<float32[5, 4]>)
    v3 = _reinterpret_tensor(v2, (4, 6), (1, 4), 0)
    del v2
    v4 = _empty_strided_cpu((5, 6), (6, 1), torch.float32)
    r[3] = v4
    mm(<float32[5, 4]>, v3, out=v4)
    del v3
    resize_(<UntypedStorage>, 0)
    cpp_fused_add_relu_1(v4)
    del v4
    # through autograd
    v0 = r[3]
    return v0
    """)


@native
def test_views_of_weights_are_made_once(compiled: Any) -> None:
    """Also outside of captured partitions, where data decides sizes.

    ::

        v0 = nonzero(...)                                 v0 = nonzero(...)
        v1 = _reinterpret_tensor(v2, (4, 8), (1, 4), 0) -> (the view of the weight is bound)
        addmm(v3, ..., v1, out=...)                       addmm(<bias>, ..., <weight>, out=...)
    """

    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (rows,) = torch.nonzero(x[:, 0] > -9, as_tuple=True)
            return self.linear(x[rows])

    with torch.no_grad():
        recording = recorded(compiled(Chosen()), lambda: torch.randn(5, 4))
    text = listing(recording)
    assert "nonzero" in text and "addmm(<float32[8]>" in text
    assert "(4, 8)" not in text, text


@native
def test_the_listing_of_sizes_that_depend_on_data(compiled: Any) -> None:
    """
    ::

        indices = nonzero(y > 0)          v0 = aten.nonzero.default(...)
        u0 = indices.size(0)          ->  v1 = aten.sym_size.int(v0, 0)
        assert u0 <= 16                   v3 = le(v1, 16); require(v3, ...)
        launch(indices, out, u0)          cpp_fused_mul_1(v0, v4, v1)
    """

    def g(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.sin(x) + 0.2
        return y @ y.t(), torch.nonzero(y > 0) * 2

    f: Compiled = compiled(g)
    recording = recorded(f, lambda: torch.randn(4, 4))
    assert listing(recording) == drawn("""
    # below autograd
    resize_(<UntypedStorage>, 64)
    resize_(<UntypedStorage>, 16)
    v0 = r[0]; r[0] = None
    cpp_fused_add_gt_sin_0(v0, <float32[4, 4]>, <bool[4, 4]>)
    del v0
    v1 = _empty_strided_cpu((4, 4), (4, 1), torch.float32)
    r[1] = v1
    mm(<float32[4, 4]>, <float32[4, 4]>, out=v1)
    del v1
    resize_(<UntypedStorage>, 0)
    # through autograd
    v0 = aten.nonzero.default(<bool[4, 4]>)
    resize_(<UntypedStorage>, 0)
    v1 = aten.sym_size.int(v0, 0)
    v2 = ge(v1, 0)
    require(v2, 'u0 >= 0')
    del v2
    v3 = le(v1, 16)
    require(v3, 'u0 <= 16')
    del v3
    v4 = _empty_strided_cpu((v1, 2), (2, 1), torch.int64)
    r[2] = v4
    cpp_fused_mul_1(v0, v4, v1)
    del v0, v1, v4
    v0 = r[1]
    v1 = r[2]
    return [v0, v1]
    """)
    for _ in range(4):
        x = torch.randn(4, 4)
        with natively(f.program):
            assert torch.equal(f(x)[1], g(x)[1])


@native
def test_the_listing_where_addresses_are_frozen(compiled: Any, own_arenas: Any) -> None:
    """
    ::

        static buffers <- x, counter          fill_buffers(..., r[0], r[1])
        graph                             ->  replay()  # Python
        counter <- static buffer              aten.copy_.default(r[0], ...)
        outputs over the arena                v0 = _reinterpret_tensor(...)
    """

    def g(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return x.sin() @ x + counter

    with using_runtime(SIMULATED):
        f: Compiled = compiled(g)
        recording = recorded(f, lambda: torch.randn(4, 4), lambda: torch.zeros(4))
        assert listing(recording) == drawn("""
        fill_buffers([<float32[4]>, <float32[4, 4]>], r[0], r[1])
        replay()  # Python
        aten.copy_.default(r[0], <float32[4]>)
        v0 = _reinterpret_tensor(<float32[4, 4]>, (4, 4), (4, 1), 0)
        return v0
        """)
        counter = torch.zeros(4)
        with natively(f.program):
            f(torch.randn(4, 4), counter)
        assert torch.equal(counter, torch.ones(4))


@native
def test_the_listing_of_copied_outputs(compiled: Any, own_arenas: Any) -> None:
    """Python copies only what ``clone`` would lay out in another way: here an output with a gap.

    ::

        static buffer <- x                    fill_buffers(..., r[0])
        graph                             ->  replay()  # Python
        a copy of x.sin() @ x                 v0 = aten.clone.default(...)
        a copy of the output with a gap       v1 = copies_out(<float32[4, 2]>)  # Python
    """

    def g(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gapped = torch.empty_strided((4, 2), (4, 1), device=x.device).copy_(x[:, :2] * 2)
        return x.sin() @ x, gapped

    with using_runtime(SIMULATED):
        f: Compiled = compiled(g, options={"copy_outputs": True})
        recording = recorded(f, lambda: torch.randn(4, 4))
        assert listing(recording) == drawn("""
        fill_buffers([<float32[4, 4]>], r[0])
        replay()  # Python
        v0 = aten.clone.default(<float32[4, 4]>)
        v1 = copies_out(<float32[4, 2]>)  # Python
        return [v0, v1]
        """)
        x = torch.randn(4, 4)
        with natively(f.program):
            assert_same(f(x), inductor(g)(x))


# -- the same numbers ----------------------------------------------------------------------------------------

_SAMPLE = {("mixtral", "inference"), ("resnet", "training")}


@native
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in _SAMPLE else pytest.mark.sweep)
        for name in MODELS
        for mode in ("inference", "training")
    ],
)
def test_models_compute_the_same_both_ways(compiled: Any, name: str, mode: str) -> None:
    """One recording of each program, called through its unit and without it: outputs, gradients and statistics."""
    model, fresh_inputs = MODELS[name](**SMALLER.get(name, {}))
    training = mode == "training"
    model.train(training)
    f: Compiled = compiled(model)

    def call(inputs: dict[str, Any]) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.set_grad_enabled(training):
            outputs = tensors_in(f(**inputs))
        if training:
            sum(t.float().square().mean() for t in outputs if t.requires_grad).backward()
        found = [*outputs, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
        return [value.detach().clone() for value in found]

    for _ in range(4):
        call(fresh_inputs())
    inputs, state = fresh_inputs(), {key: value.clone() for key, value in model.state_dict().items()}
    programs = [p for p in f.programs if p.specializations.units]
    assert programs
    with natively(*programs):
        through_units = call(inputs)
    model.load_state_dict(state)
    with in_python(*programs):
        through_python = call(inputs)
    assert_same(through_units, through_python)


@native
@pytest.mark.parametrize("frozen", [False, True], ids=["cpu", "simulated"])
@few
@given(recipe=recipes())
def test_random_programs_compute_the_same_both_ways(frozen: bool, recipe: Recipe) -> None:
    """Outputs, and inputs that are updated in place."""
    graph = build(recipe)
    with using_runtime(SIMULATED) if frozen else contextlib.nullcontext():
        program = compile_host_graph(graph.gm, compile_request(graph.options))
        for seed in range(3):
            program(*graph.inputs(seed))
        found = list[list[torch.Tensor]]()
        for way in (natively, in_python):
            inputs = graph.inputs(7)
            torch.manual_seed(7)
            with way(program):
                outputs = program(*inputs)
            found.append([value.clone() for value in (*outputs, *inputs)])
            del outputs
    assert_same(*found)


# -- operands of all kinds -----------------------------------------------------------------------------------


def _pieces(x: torch.Tensor) -> torch.Tensor:
    first, _, third = torch.ops.aten.split.Tensor(x.sin().cumsum(0), 2)
    return torch.cat([first @ x, look(third) @ x, x], 0)


_CALLS: dict[str, tuple[Callable[..., Any], list[Callable[[], Any]]]] = {
    "a number as a tensor": (lambda x: x * 3j + 2, [lambda: torch.randn(6, dtype=COMPLEX)]),
    "a number keeps the other's dtype": (lambda x: x * 2.5, [lambda: torch.randn(6, dtype=COMPLEX)]),
    "an optional tensor": (
        lambda x, y: ops.plus(x, None, "twice", torch.float64) + ops.plus(x, y, "twice", torch.float32),
        [lambda: torch.randn(3), lambda: torch.randn(3)],
    ),
    "a list of tensors": (_pieces, [lambda: torch.randn(6, 6)]),
    "optional tensors in a list": (
        lambda x, i: torch.ops.aten.index.Tensor(x.sort(0).values, [None, i]).clone(),
        [lambda: torch.randn(4, 4), lambda: torch.tensor([0, 3])],
    ),
    "two results": (lambda x: x.sin().max(1), [lambda: torch.randn(4, 5)]),
    "one of two results": (lambda x: ops.two(x.sin())[1] + 1, [lambda: torch.randn(4, 5)]),
    "a tuple that is not taken apart": (lambda x: x.sin().sort(0), [lambda: torch.randn(4, 5)]),
    "no result": (lambda x: (ops.note(x.sin()), x.cos())[1], [lambda: torch.randn(4, 5)]),
    "a float from data": (lambda x, y: x.sin() * y.sum().item(), [lambda: torch.randn(4), lambda: torch.randn(2)]),
    "a boolean from data": (
        lambda x, y: x * y.any().item(),
        [lambda: torch.randn(4), lambda: torch.randn(2) > 0],
    ),
    "a result that is None": (
        lambda g, x, w: torch.ops.aten.convolution_backward(
            g, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
        )[1],
        [lambda: torch.randn(1, 3, 4, 4), lambda: torch.randn(1, 2, 6, 6), lambda: torch.randn(3, 2, 3, 3)],
    ),
    "an empty tensor": (lambda x: (x.sin() @ x.t()).sum() + x.numel(), [lambda: torch.randn(0, 4)]),
    "a scalar": (lambda x: x.sin().cumsum(0), [lambda: torch.randn(())]),
    "negative strides of numbers": (lambda x: x.flip(0).roll(1).cumsum(0), [lambda: torch.randn(5)]),
    "a conjugate": (lambda x: (x.conj() @ x).real, [lambda: torch.randn(4, 4, dtype=COMPLEX)]),
    "embedding bags": (
        lambda w, i: torch.nn.functional.embedding_bag(i, w).sin(),
        [lambda: torch.randn(9, 4), lambda: torch.randint(0, 9, (3, 2))],
    ),
    "random numbers": (lambda x: x + torch.rand(4, 4) + torch.randperm(4), [lambda: torch.randn(4, 4)]),
}


@native
@pytest.mark.parametrize("what", _CALLS)
def test_operands_and_results(compiled: Any, what: str) -> None:
    g, inputs = _CALLS[what]
    f: Compiled = compiled(g)
    recorded(f, *inputs)
    values = [one() for one in inputs]

    def call() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [value.clone() for value in tensors_in(f(*values))]

    through_unit, through_python = both_ways(f, call)
    assert_same(through_unit, through_python)
    if what != "random numbers":
        torch.testing.assert_close(through_unit, tensors_in(g(*values)), equal_nan=True)


@native
def test_arithmetic_of_integers(compiled: Any) -> None:
    """Of numbers that come from data, at every call: negative ones, too."""

    def g(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        number = n.item()
        torch._check(number >= -9)
        torch._check(number <= 9)
        larger, smaller, distance = torch.sym_max(number, 2), torch.sym_min(number + 10, 5), abs(number - 3)
        return [x.sin() @ x.new_ones(4, size) for size in (larger, smaller + 1, distance + 1, -(-larger // 3))]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        f: Compiled = compiled(g)
        recording = recorded(f, lambda: torch.randn(4, 4), lambda: torch.tensor(5))
        for name in ("max", "min", "abs"):
            lines = [line for line in recording.listing if f"= {name}(" in line]
            assert lines and not any("# Python" in line for line in lines), recording.listing
        for number in (-9, -3, 0, 2, 3, 4, 9):
            x, n = torch.randn(4, 4), torch.tensor(number)
            through_unit, through_python = both_ways(f, lambda x=x, n=n: f(x, n))
            assert_same(through_unit, through_python)
            torch.testing.assert_close(through_unit, g(x, n))


#   one kernel over 60 tensors: 60 it reads, 60 it writes
@native
def test_a_kernel_with_more_arguments_than_a_unit_can_pass(compiled: Any) -> None:
    """It is called through Python."""

    def g(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return torch._foreach_add(torch._foreach_mul(tensors, 2), 1)

    with torch._inductor.config.patch({"combo_kernels": True, "cpp.max_horizontal_fusion_size": 200}):
        f: Compiled = compiled(g)
        tensors = [torch.randn(3) for _ in range(120)]
        recording = recorded(f, lambda: [t.clone() for t in tensors])
        through_unit, through_python = both_ways(f, lambda: f(tensors))
    assert_same(through_unit, through_python)
    assert_same(through_unit, [2 * t + 1 for t in tensors])
    assert recording.listing


@native
def test_a_float_from_data_in_an_operator() -> None:
    maker = GraphMaker()
    x = maker.input("x")
    product = maker.extern(torch.ops.aten.mul.Scalar, x, maker.number(maker.view(x, (), ())))
    program = compile_host_graph(maker.finish([product]), compile_request())
    for seed in range(4):
        (given,) = maker.inputs(seed)
        with natively(program) if seed > 1 else contextlib.nullcontext():
            assert torch.equal(program(given)[0], given * given[0, 0].item())


#   launch of a kernel that is a Python function: no address, so that it is a step in Python
@native
def test_kernels_that_only_python_can_call() -> None:
    maker, numbers = GraphMaker(), list[float]()
    x = maker.input("x")
    out = maker.allocate()

    def scale(a: torch.Tensor, factor: float, into: torch.Tensor) -> None:
        numbers.append(factor)
        into.copy_(a * factor)

    number = maker.number(maker.view(x, (), ()))
    maker.launch(kernel("scale_by", scale, (2,)), x, number, out)
    program = compile_host_graph(maker.finish([out]), compile_request())
    for seed in range(4):
        given = maker.inputs(seed)
        expected = given[0] * given[0].flatten()[0].item()
        with natively(program) if seed > 1 else contextlib.nullcontext():
            assert torch.equal(program(*given)[0], expected)
        assert type(numbers[-1]) is float
    (recording,) = program.specializations.recordings()
    assert any(line.startswith("scale_by(") and line.endswith("# Python") for line in recording.listing)
