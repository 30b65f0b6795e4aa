"""Native replay: how long units keep what they are given and what they make."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, tensors_in
from native_calls import (
    Odd,
    assert_clean,
    both_ways,
    in_python,
    look,
    look_at_nothing,  # noqa: F401
    make,
    native,
    natively,
    ops,
    recorded,
    run,
    seen,
)
from torch.multiprocessing.reductions import StorageWeakRef

import fxwrap
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.testing.simulated import SIMULATED

# -- lifetimes -----------------------------------------------------------------------------------------------


#   make  ->  mm  ->  look  ->  output
#    t         u      t is gone here
@native
def test_a_temporary_is_freed_at_its_last_use(compiled: Any) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        t = make(x)
        return look(t @ t)

    f: Compiled = compiled(g)
    recorded(f, lambda: torch.randn(4, 4))
    storages, alive = list[StorageWeakRef](), list[bool]()

    def watch(value: torch.Tensor) -> None:
        alive.extend(not storage.expired() for storage in storages)
        storages.append(StorageWeakRef(value.untyped_storage()))

    def call() -> list[bool]:
        storages.clear()
        alive.clear()
        f(torch.randn(4, 4))
        return [*alive, *(not storage.expired() for storage in storages)]

    seen.append(watch)
    through_unit, through_python = both_ways(f, call)
    # Is what ``make`` returned still there when ``look`` runs? And both operands, after the call?
    assert through_unit == through_python == [False, False, False]


#   caller's list: [x]  ->  []        x is freed before ``look`` runs
@native
def test_an_input_is_freed_at_its_last_use_and_its_list_is_emptied(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: look(x.sin() @ x))
    recorded(f, lambda: torch.randn(4, 4))
    inputs, freed = list[torch.Tensor](), list[bool]()
    seen.append(lambda _: freed.append(StorageWeakRef.expired(storage)))
    for way in (natively, in_python):
        inputs.append(torch.randn(4, 4))
        storage = StorageWeakRef(inputs[0].untyped_storage())
        with way(f.program):
            f.program.run(inputs)
        assert not inputs
    assert freed == [True, True]


@native
@pytest.mark.parametrize("frozen", [False, True], ids=["cpu", "simulated"])
def test_nothing_is_kept_between_calls_and_every_call_has_its_outputs(
    compiled: Any, own_arenas: Any, frozen: bool
) -> None:
    with using_runtime(SIMULATED) if frozen else contextlib.nullcontext():
        f: Compiled = compiled(lambda x: (make(x).sin() @ x, x.cos()))
        recorded(f, lambda: torch.randn(4, 4))
        made, watched = list[weakref.ref[Any]](), list[weakref.ref[Any]]()
        seen.append(lambda value: made.append(weakref.ref(value)))
        kept = list[torch.Tensor]()
        for way in (natively, natively if not frozen else in_python, in_python):
            x = torch.randn(4, 4)
            with way(f.program):
                outputs = run(f.program, x)
            watched.extend(weakref.ref(value) for value in (x, *outputs))
            kept.append(outputs[0])
            torch.testing.assert_close(outputs[1], x.cos())
            del x, outputs
            assert all(one() is None for one in made)
        addresses = {value.data_ptr() for value in kept}
        assert len(addresses) == len(kept)
        kept.clear()
        assert all(one() is None for one in watched)


#   donated: the gradient's program is given the activation, and may write over it
@native
def test_inputs_that_are_donated(compiled: Any) -> None:
    """A backward frees what the forward saved for it."""
    weight = torch.randn(8, 8, requires_grad=True)
    f: Compiled = compiled(lambda x: (x @ weight).sin().sum())
    gradients = list[torch.Tensor]()
    x = torch.randn(4, 8)
    for call in range(5):
        way = {3: natively, 4: in_python}.get(call)
        with way(*f.programs) if way is not None else contextlib.nullcontext():
            weight.grad = None
            y = f(x)
            saved = [
                StorageWeakRef(s.untyped_storage())
                for s in y.grad_fn.saved_tensors
                if s.shape == (4, 8) and s is not x
            ]
            y.backward()
            gone = [storage.expired() for storage in saved if storage.cdata != x.untyped_storage()._cdata]
        assert all(gone)
        gradients.append(weight.grad)
    assert len(f.programs) == 2
    assert_same(gradients[3:4], gradients[4:5])
    assert_same(gradients[2:3], gradients[3:4])


@native
@pytest.mark.parametrize("model", ["planned", "of an operator", "a view"])
def test_inference_and_gradient_modes(compiled: Any, model: str) -> None:
    """Outputs are inference tensors while that mode is on, as those of Python are; none has a history."""
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "planned": lambda x: (x.sin() @ x + 1, x.sum()),
        "of an operator": lambda x: x.sin().cumsum(0).sort(),
        "a view": lambda x: (x.sin() @ x).t()[1:],
    }
    f: Compiled = compiled(functions[model])
    recorded(f, lambda: torch.randn(4, 4))
    x = torch.randn(4, 4)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):

        def call(mode: Any = mode) -> list[torch.Tensor]:
            with mode():
                return run(f.program, x)

        through_unit, through_python = both_ways(f, call)
        assert_same(through_unit, through_python)
        for mine, other in zip(through_unit, through_python, strict=True):
            assert mine.is_inference() == other.is_inference() == (mode is torch.inference_mode)
            assert not mine.requires_grad and not other.requires_grad


# -- many calls ----------------------------------------------------------------------------------------------


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@native
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel does not tell resident memory")
@pytest.mark.parametrize("calls", [1_000, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_many_calls_leave_nothing_behind(compiled: Any, calls: int) -> None:
    """Library calls and kernels; sizes that depend on data; an operator that raises at every seventh call."""
    weight, bias = torch.randn(8, 8), torch.randn(8)
    one: Compiled = compiled(lambda x: torch.relu(torch.addmm(bias, x, weight)) @ weight)
    two: Compiled = compiled(lambda x: torch.nonzero(x.sin() > 0) * 2)
    three: Compiled = compiled(lambda x: look(x.sin() @ weight).cos() @ weight)
    recordings = [recorded(f, lambda: torch.randn(8, 8)) for f in (one, two, three)]
    count = [0]

    def sometimes(_: torch.Tensor) -> None:
        count[0] += 1
        if count[0] % 7 == 0:
            raise Odd

    seen.append(sometimes)
    x, raised = torch.randn(8, 8), 0

    def round_() -> int:
        one(x)
        two(x)
        try:
            three(x)
        except Odd:
            return 1
        return 0

    def state() -> tuple[int, ...]:
        gc.collect()
        counted = [weight, bias, x, *recordings, *(recording.unit for recording in recordings)]
        return len(gc.get_objects()), *map(sys.getrefcount, counted)

    for _ in range(500):
        round_()
    state()
    objects, resident = state(), _resident_bytes()
    for _ in range(calls):
        raised += round_()
    # A sanitizer keeps what was freed.
    assert _resident_bytes() - resident < 512 << 10 or "sanitize" in os.environ.get("FXWRAP_NATIVE_FLAGS", "")
    after = state()
    assert abs(after[0] - objects[0]) < 10 and after[1:] == objects[1:]
    assert raised == sum(n % 7 == 0 for n in range(501, 501 + calls))
    for recording in recordings:
        assert recording.unit.used > 0
        assert_clean(recording)


@native
def test_a_program_that_nobody_has_is_freed_with_its_unit(compiled: Any, own_arenas: Any) -> None:
    """Also if its steps call Python: what they call must not keep the recording."""
    for frozen in (False, True):
        with using_runtime(SIMULATED) if frozen else contextlib.nullcontext():
            f: Compiled = compiled(
                lambda x: look(make(x) @ x).cumsum(0) @ x, options={"eager_ops": ["fxwrap_units::look"]}
            )
            recording = recorded(f, lambda: torch.randn(4, 4), calls=5)
            gone = [weakref.ref(recording), weakref.ref(f.program)]
            del f, recording
            torch._dynamo.reset()
            gc.collect()
            assert all(one() is None for one in gone)


# -- what inputs and results live through --------------------------------------------------------------------


#   the call's list: [x, weight]  ->  []      the owner lets go of weight while ``look`` runs; @ weight comes after it
@native
@pytest.mark.parametrize("way", [natively, in_python])
@torch.no_grad()
def test_a_static_input_lives_as_long_as_the_call(compiled: Any, way: Any) -> None:
    """Its list may be the last that has it, as in a backward whose saved tensors are handed over."""

    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return look(x.sin()) @ self.weight

    model = Looks()
    f: Compiled = compiled(model)
    recording = recorded(f, lambda: torch.randn(8, 8))
    (position,) = recording.request.static_inputs
    x, storage = torch.randn(8, 8), StorageWeakRef(model.weight.untyped_storage())
    expected = x.sin() * 2 @ model.weight
    inputs, gone = [x, x], list[bool]()
    inputs[position] = model.weight

    def let_go(_: torch.Tensor) -> None:
        if "weight" in model._parameters:
            del model.weight
        gone.append(storage.expired())

    seen.append(let_go)
    with way(f.program):
        (y,) = tensors_in(f.program.run(inputs))
    assert gone == [False] and storage.expired()
    torch.testing.assert_close(y, expected)


@native
def test_backward_after_the_model_is_gone(compiled: Any) -> None:
    """Only what forward has saved has the weight, and backward takes that over."""

    def last_loss() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight = torch.nn.Parameter(torch.randn(300, 300), requires_grad=False)
        f: Compiled = compiled(lambda x: ((x @ weight).sin() @ weight).sum())
        for call in range(5):
            x = torch.randn(300, 300, requires_grad=True)
            loss = f(x)
            if call < 4:
                loss.backward()
        twin = x.detach().clone().requires_grad_()
        ((twin @ weight).sin() @ weight).sum().backward()
        assert twin.grad is not None
        return x, loss, twin.grad

    x, loss, expected = last_loss()
    gc.collect()
    loss.backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=1e-3)


@native
@pytest.mark.parametrize("way", [natively, in_python])
@torch.no_grad()
def test_an_operator_may_keep_a_parameter(compiled: Any, way: Any) -> None:
    """It gets the caller's own tensor, whose memory is there for as long as somebody has it."""
    kept = list[torch.Tensor]()

    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(700, 700))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return look(self.weight.view(490_000)).view(700, 700) @ x.sin()

    model = Keeps()
    f: Compiled = compiled(model)
    recorded(f, lambda: torch.randn(700, 700))
    seen.append(lambda weight: kept.__setitem__(slice(None), [weight]))
    with way(f.program):
        f(torch.randn(700, 700))
    storage = StorageWeakRef(model.weight.untyped_storage())
    assert kept[0].untyped_storage()._cdata == storage.cdata
    del model.weight
    assert not storage.expired() and kept[0].sum().item() == 490_000


#   many  ->  [a, b]  ->  a @ b  ->  look        a and b are gone here
@native
def test_what_an_operator_returns_in_a_list_is_freed_at_its_last_use(compiled: Any) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        a, b = ops.many(x)
        return look(a @ b)

    f: Compiled = compiled(g)
    recorded(f, lambda: torch.randn(4, 4))
    storages, alive = list[StorageWeakRef](), list[bool]()

    def watch(value: Any) -> None:
        alive.extend(not storage.expired() for storage in storages)
        storages.extend(StorageWeakRef(item.untyped_storage()) for item in value if isinstance(value, list))

    def call() -> list[bool]:
        storages.clear()
        alive.clear()
        f(torch.randn(4, 4))
        return list(alive)

    seen.append(watch)
    through_unit, through_python = both_ways(f, call)
    assert through_unit == through_python == [False, False]


#   a, b = two(x)        a taken out twice: each local goes by itself
@native
@pytest.mark.parametrize("position", [0, -2])
def test_an_element_that_is_taken_out_twice(compiled: Any, position: int) -> None:
    class Twice(fxwrap.FxwrapCodegen):
        def passes(self) -> Any:
            def twice(gm: torch.fx.GraphModule) -> None:
                for node in list(gm.graph.nodes):
                    if node.target is operator.getitem and node.args[1] == 0:
                        *_, last = node.users
                        with gm.graph.inserting_before(last):
                            again = gm.graph.call_function(operator.getitem, (node.args[0], position))
                        again.meta = dict(node.meta)
                        last.replace_input_with(node, again)

            return (twice,)

    def g(x: torch.Tensor) -> torch.Tensor:
        a, b = ops.two(x.sin())
        return ((a @ b).cos() @ x) @ a

    f: Compiled = compiled(g, options={"codegen": Twice})
    recorded(f, lambda: torch.randn(4, 4))
    x = torch.randn(4, 4)
    for result in both_ways(f, lambda: f(x)):
        torch.testing.assert_close(result, g(x))
