"""Calls of a saved program: what it was not traced for, or would read wrongly, is refused."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fxwrap
from fxwrap.errors import InputError, OptionError, StorageError

AUTO = torch.export.Dim.AUTO


def loaded(path: Path, model: nn.Module, *args: Any, shapes: Any = None) -> Any:
    return of_exported(path, torch.export.export(model, args, dynamic_shapes=shapes))


def of_exported(path: Path, exported: torch.export.ExportedProgram) -> Any:
    return fxwrap.load(fxwrap.save(path / "program.fxw", {"f": exported}), trust=True).f


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0] * 2 + 1


def test_numbers_under_autocast_are_those_without(tmp_path: Path) -> None:
    x = torch.randn(3, 2, 8)
    call = loaded(tmp_path, Recurrent(), x)
    expected = call(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = call(x)
        assert (x @ x.mT).dtype is torch.bfloat16, "it is on for the caller"
    torch.testing.assert_close(found, expected)


# -- conditions on sizes -------------------------------------------------------------------------------------------


class Even(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x * 3


class Large(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum() if x.shape[0] * y.shape[0] > 20 else x.sum() - y.sum()


@pytest.mark.parametrize(
    "model, traced, right, wrong", [(Even(), (6,), (8,), (5,)), (Large(), (6, 7), (3, 8), (3, 4))]
)
def test_a_condition_that_tracing_relied_on_is_checked(
    tmp_path: Path, model: nn.Module, traced: tuple[int, ...], right: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    call = loaded(tmp_path, model, *map(torch.ones, traced), shapes=tuple({0: AUTO} for _ in traced))
    inputs = tuple(map(torch.ones, right))
    assert torch.equal(call(*inputs), model(*inputs))
    with pytest.raises(InputError, match=r"Mod|> 20"):
        call(*map(torch.ones, wrong))


def test_a_condition_of_a_program_that_was_read_from_a_file_is_checked(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Even(), (torch.ones(6),), dynamic_shapes=({0: AUTO},)), tmp_path / "e.pt2")
    call = of_exported(tmp_path, torch.export.load(tmp_path / "e.pt2"))
    assert torch.equal(call(torch.ones(4)), torch.full((4,), 2.0))
    with pytest.raises(InputError, match="Mod"):
        call(torch.ones(5))


class Groups(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 3).sum(1)


def test_a_size_that_is_made_of_another_may_vary(tmp_path: Path) -> None:
    count = torch.export.Dim("count", min=2, max=50)
    call = loaded(tmp_path, Groups(), torch.randn(12), shapes=({0: 3 * count},))
    assert torch.equal(call(torch.arange(15.0)), Groups()(torch.arange(15.0)))
    for size, expected in ((13, r"size \(12,\)"), (3, "2 to 50"), (153, "2 to 50")):
        with pytest.raises(InputError, match=expected):
            call(torch.ones(size))


# -- inputs and results that are no tensors ------------------------------------------------------------------------


class Ignores(nn.Module):
    def forward(self, x: Tensor, option: Any) -> Tensor:
        return x * 2 if option else x * 3


@pytest.mark.parametrize("option", [None, 1.5, 7, True, False, "fast", math.inf])
def test_a_constant_input_is_compiled_in_and_checked(tmp_path: Path, option: Any) -> None:
    x = torch.ones(3)
    call = loaded(tmp_path, Ignores(), x, option)
    for _ in range(3):
        assert torch.equal(call(x, option), Ignores()(x, option))
        for other in (None, 1.5, 1, 0, 7, 7.0, True, False, "fast", "slow", x):
            if type(other) is not type(option) or other != option:
                with pytest.raises(InputError, match="option"):
                    call(x, other)


def test_a_constant_that_is_no_number_is_itself(tmp_path: Path) -> None:
    x = torch.ones(3)
    try:
        call = loaded(tmp_path, Ignores(), x, math.nan)
    except StorageError:
        # The conditions that it writes for NaN cannot be evaluated.
        assert torch.__version__.startswith("2.11")
        return
    assert torch.equal(call(x, math.nan), x * 2)
    with pytest.raises(InputError, match="option"):
        call(x, 1.5)


def test_a_constant_result_is_returned_in_its_place(tmp_path: Path) -> None:
    class Results(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return "*", None, {"a": 1.5, "b": [x + 1, "*", True, x.shape[0] * 2]}, 5

    call = loaded(tmp_path, Results(), torch.ones(3), shapes=({0: AUTO},))
    first, second, third, fourth = call(torch.ones(4))
    assert (first, second, third["a"], fourth) == ("*", None, 1.5, 5)
    assert torch.equal(third["b"][0], torch.full((4,), 2.0)) and third["b"][1:] == ["*", True, 8]


def test_an_ordered_dictionary_comes_back_as_a_dictionary(tmp_path: Path) -> None:
    from collections import OrderedDict

    class Ordered(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return OrderedDict(b=x + 1, a=x)

    assert list(loaded(tmp_path, Ordered(), torch.ones(3))(torch.ones(3))) == ["b", "a"]


def test_a_method_of_constants_alone_returns_them(tmp_path: Path) -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return 5, None

    call = loaded(tmp_path, Nothing(), torch.ones(3))
    assert [call(torch.ones(3)) for _ in range(3)] == [(5, None)] * 3
    with pytest.raises(InputError, match="size"):
        call(torch.ones(4))


# -- tensors that would be read wrongly ----------------------------------------------------------------------------


def test_views_that_negate_or_conjugate_are_refused(tmp_path: Path) -> None:
    z = torch.randn(3, dtype=torch.complex64)
    call = loaded(tmp_path, Double(), z.imag)
    for _ in range(3):
        assert torch.equal(call(z.imag), Double()(z.imag))
        with pytest.raises(InputError, match="neg bit"):
            call(z.conj().imag)
    call = loaded(tmp_path, Double(), z)
    for _ in range(3):
        assert torch.allclose(call(z), Double()(z))
        with pytest.raises(InputError, match="conj bit"):
            call(z.conj())


def test_a_tensor_without_memory_of_its_own_is_refused(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    call = loaded(tmp_path, Double(), torch.ones(2))
    for _ in range(3):
        with pytest.raises(InputError, match="TwoTensor"):
            call(TwoTensor(torch.zeros(2), torch.ones(2)))
        call(nn.Parameter(torch.ones(2), requires_grad=False))


def test_what_functorch_wraps_is_refused(tmp_path: Path) -> None:
    call = loaded(tmp_path, Double(), torch.ones(3))
    for _ in range(3):
        call(torch.ones(3))
        for under, x in ((torch.vmap(call), torch.ones(2, 3)), (torch.func.functionalize(call), torch.ones(3))):
            with pytest.raises(InputError, match="memory of its own"):
                under(x)


class Mutates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        self.kept.add_(y)
        return y * 2, x * 3


def test_an_input_that_overlaps_what_is_written_is_refused(tmp_path: Path) -> None:
    exported = torch.export.export(Mutates(), (torch.ones(3), torch.ones(3)))
    program = fxwrap.load(fxwrap.save(tmp_path / "program.fxw", {"f": exported}), trust=True)
    x, y, both = torch.zeros(3), torch.ones(3), torch.zeros(5)
    kept = program.weights["kept"]
    for count in range(1, 5):
        assert torch.equal(program.f(x, y)[1], torch.full((3,), 3.0 * count))
        for one, other in ((x, x), (both[:3], both[2:]), (kept, y), (x, kept)):
            with pytest.raises(InputError, match="shares memory"):
                program.f(one, other)
        program.f(both[:2].new_zeros(3), torch.ones(6).view(2, 3)[1])
    assert torch.equal(kept, torch.full((3,), 8.0))


def test_one_memory_in_two_layouts_is_looked_at_again(tmp_path: Path) -> None:
    """Addresses that were apart are not, where one input reaches further."""

    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return y.sum()

    call = loaded(tmp_path, Adds(), torch.ones(4), torch.ones(4), shapes=({0: AUTO}, {0: AUTO}))
    memory = torch.zeros(16)
    for _ in range(3):
        call(memory[:4], memory[4:8])
    with torch.no_grad():
        call(memory[:4].detach(), memory[4:8].detach().requires_grad_())
    with pytest.raises(InputError, match="shares memory"):
        call(memory[:6], memory[4:8])


def test_a_call_without_gradients_does_not_allow_one_with_them(tmp_path: Path) -> None:
    call, x = loaded(tmp_path, nn.Linear(3, 3), torch.randn(2, 3)), torch.randn(2, 3, requires_grad=True)
    for _ in range(3):
        with pytest.raises(InputError, match="no gradient"):
            call(x)
        with torch.no_grad():
            call(x)


def test_a_tangent_is_not_dropped(tmp_path: Path) -> None:
    """Replays compute no derivatives: tangents are refused like gradients, and tensors without one pass."""
    call, x = loaded(tmp_path, nn.Linear(3, 3), torch.randn(2, 3)), torch.randn(2, 3)
    for _ in range(3):
        with torch.no_grad(), forward_ad.dual_level():
            with pytest.raises(InputError, match="a tangent"):
                call(forward_ad.make_dual(x, torch.ones_like(x)))
            call(x)
        with torch.no_grad(), pytest.raises((InputError, RuntimeError)):
            torch.func.jvp(call, (x,), (torch.ones_like(x),))


# -- what a program is not for -------------------------------------------------------------------------------------


def test_a_loaded_program_is_not_copied(tmp_path: Path) -> None:
    call = loaded(tmp_path, Double(), torch.ones(2))
    program = fxwrap.load(tmp_path / "program.fxw", trust=True)
    for what in (program, call):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(StorageError, match="load the file again"):
                copied(what)


def test_the_name_of_a_method_is_text(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Python name"):
        fxwrap.save(tmp_path / "program.fxw", {1: (Double(), (torch.ones(2),))})  # type: ignore[dict-item]
