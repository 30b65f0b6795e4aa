"""What saved programs return: numbers that are read from tensors, inputs as they are, named tuples."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxwrap
from fxwrap.errors import InputError, StorageError
from fxwrap.features.ahead_of_time.codegen.export import _bounds
from fxwrap.features.ahead_of_time.signature import NumberInput, Signature
from fxwrap.features.ahead_of_time.structure import with_classes
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.testing.simulated import SIMULATED

DYNAMIC = torch.export.Dim.DYNAMIC


def loaded(path: Path, model: nn.Module, *args: Any, shapes: Any = None) -> Any:
    with torch.no_grad():
        exported = torch.export.export(model, args, dynamic_shapes=shapes)
    return fxwrap.load(fxwrap.save(path / "program.fxw", {"f": exported}), trust=True).f


def assert_same(found: Any, expected: Any) -> None:
    """Values, and types: a number is no tensor, and 1 is not True."""
    found, found_spec = pytree.tree_flatten(found)
    expected, expected_spec = pytree.tree_flatten(expected)
    assert found_spec == expected_spec and list(map(type, found)) == list(map(type, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- lazy conjugates -------------------------------------------------------------------------------------------


class Conjugates(nn.Module):
    """Values between the operators have a pending conjugation or negation; so has the last result."""

    def forward(self, z: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (z.mH @ z).abs(), torch.vdot(z[0], z[1]), z.conj().imag @ x, z.conj()


@pytest.mark.parametrize("frozen", [False, True])
def test_conjugations_that_are_pending_between_operators(tmp_path: Path, frozen: bool) -> None:
    with using_runtime(SIMULATED) if frozen else contextlib.nullcontext():
        z, x = torch.complex(torch.randn(3, 3), torch.randn(3, 3)), torch.randn(3, 3)
        f = loaded(tmp_path, Conjugates(), z, x)
        for _ in range(4):
            z, x = torch.complex(torch.randn(3, 3), torch.randn(3, 3)), torch.randn(3, 3)
            results, expected = f(z, x), Conjugates()(z, x)
            torch.testing.assert_close(results, expected)
            assert [t.is_conj() for t in results] == [t.is_conj() for t in expected]


# -- numbers ---------------------------------------------------------------------------------------------------


class AddInt(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x + n.item()


class TimesFloat(nn.Module):
    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        return x * s.item()


class Number(nn.Module):
    def forward(self, n: Tensor) -> Any:
        return n.item()


class Computed(nn.Module):
    def forward(self, n: Tensor) -> Any:
        k: Any = n.item()
        return k + 1, {"half": k / 2, "more": k > 3}, [k]


class Several(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Any:
        factor, rest = n.tolist()
        return x * factor + rest, rest


class Part(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Any:
        k: Any = n.item()
        torch._check(k >= 0)
        torch._check(k <= x.size(0))
        return x[:k] * 2, k


class AddNumber(nn.Module):
    def forward(self, x: Tensor, n: int) -> Any:
        return x + n, n, n * 2


X = torch.arange(9.0)
NUMBERS: dict[str, tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]] = {
    "an integer": (AddInt(), (X, torch.tensor(4)), (X, torch.tensor(-70_000_000_000))),
    "an integer of 8 bits": (AddInt(), (X, torch.tensor(4, dtype=torch.int8)), (X, torch.tensor(-4).to(torch.int8))),
    "a float": (TimesFloat(), (X, torch.tensor(0.5)), (X, torch.tensor(-1e30))),
    "a double": (TimesFloat(), (X, torch.tensor(0.1, dtype=torch.float64)), (X, torch.tensor(0.2).double())),
    "a bool": (AddInt(), (X, torch.tensor(True)), (X, torch.tensor(False))),
    "an integer alone": (Number(), (torch.tensor(3),), (torch.tensor(-3),)),
    "a float alone": (Number(), (torch.tensor(0.5),), (torch.tensor(float("inf")),)),
    "a bool alone": (Number(), (torch.tensor(True),), (torch.tensor(False),)),
    "what is computed of it": (Computed(), (torch.tensor(4),), (torch.tensor(-3),)),
    "several": (Several(), (X, torch.tensor([2, 3])), (X, torch.tensor([-2, 5]))),
    "a size with bounds": (Part(), (X, torch.tensor(4)), (X, torch.tensor(0))),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_read_from_tensors(tmp_path: Path, name: str) -> None:
    """They have ranges without bounds, and results of their own types."""
    model, traced, others = NUMBERS[name]
    call = loaded(tmp_path, model, *traced)
    for args in (traced, others, traced):
        assert_same(call(*args), model(*args))
    assert not call.signature.ranges, "no symbols of its inputs"


def test_a_number_out_of_the_bounds_that_the_model_checks(tmp_path: Path) -> None:
    call = loaded(tmp_path, Part(), X, torch.tensor(4))
    for wrong in (-1, 10):
        with pytest.raises((RuntimeError, AssertionError)):
            call(X, torch.tensor(wrong))
    assert_same(call(X, torch.tensor(9)), (X * 2, 9))


def test_a_number_among_the_inputs_is_returned(tmp_path: Path) -> None:
    call = loaded(tmp_path, AddNumber(), X, 4, shapes=(None, DYNAMIC))
    for number in (4, 7):
        assert_same(call(X, number), AddNumber()(X, number))


def test_a_range_may_have_no_bounds() -> None:
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    assert _bounds(ValueRanges(-int_oo, int_oo)) == (None, None)
    assert _bounds(ValueRanges(-3, int_oo)) == (-3, None) and _bounds(ValueRanges(-int_oo, 7)) == (None, 7)
    import sympy

    n = sympy.Symbol("n", integer=True)

    def of(low: int | None, high: int | None) -> Signature:
        return Signature("f", (NumberInput("n", int, n),), {"n": (low, high)}, (), {}, "*")

    for value in (-(1 << 70), 0, 1 << 70):
        of(None, None).check([value])
    of(None, 7).check([-9])
    for signature, value, expected in ((of(None, 7), 8, "any to 7"), (of(-3, None), -4, "-3 to any")):
        with pytest.raises(InputError, match=expected):
            signature.check([value])
    conditions = [of(*bounds).conditions for bounds in ((None, None), (None, 7), (-3, None), (-3, 7))]
    assert conditions == ["", "n <= 7", "-3 <= n", "-3 <= n <= 7"]


# -- nothing to compute ----------------------------------------------------------------------------------------


class Same(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(40))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"y": y, "x": [x, None, 5]}, self.weight


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach().contiguous()


class Size(nn.Module):
    def forward(self, x: Tensor) -> int:
        return x.shape[0]


def test_a_method_that_returns_its_input(tmp_path: Path) -> None:
    call = loaded(tmp_path, Same(), X, shapes=({0: DYNAMIC},))
    for x in (X, torch.ones(3)):
        for _ in range(3):
            assert call(x) is x
    with pytest.raises(InputError, match="dtype"):
        call(X.int())


def test_a_method_that_returns_inputs_weights_and_constants(tmp_path: Path) -> None:
    model, y = Swapped(), torch.ones(3)
    call = loaded(tmp_path, model, X, y)
    for _ in range(3):
        found = call(X, y)
        assert_same(found, model(X, y))
        assert found[0]["y"] is y and found[0]["x"][0] is X
    assert found[1] is call.weights["weight"]


def test_methods_that_compute_no_tensor(tmp_path: Path) -> None:
    assert_same(loaded(tmp_path, Detached(), X)(X), X)
    size = loaded(tmp_path, Size(), X, shapes=({0: DYNAMIC},))
    assert_same([size(X), size(torch.ones(3))], [9, 3])


# -- named tuples ----------------------------------------------------------------------------------------------


class Found(NamedTuple):
    value: Any
    steps: int
    rest: Any


Pair = namedtuple("Pair", "first second")


class Named(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Found(x + 1, 3, [Pair(x * 2, None), (x,)])


class OfNamed(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        return pair.first - pair.second  # type: ignore[no-any-return]


def test_a_named_tuple_comes_back_as_its_class(tmp_path: Path) -> None:
    call = loaded(tmp_path, Named(), X)
    for _ in range(3):
        found = call(X)
        assert type(found) is Found and type(found.rest[0]) is Pair
        assert_same(found, Named()(X))


def test_a_named_tuple_whose_class_is_not_there(tmp_path: Path) -> None:
    """Another process cannot import it: a class with its name and fields stands for it."""
    loaded(tmp_path, Named(), X)
    script = f"""
import torch, fxwrap
found = fxwrap.load({str(tmp_path / "program.fxw")!r}, trust=True).f(torch.arange(9.0))
print(type(found).__name__, found._fields, found.steps, type(found.rest[0]).__name__, found.rest[0].first[1].item())
"""
    run = subprocess.run([sys.executable, "-c", script], cwd="/", stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.strip() == "Found ('value', 'steps', 'rest') 3 Pair 2.0"


def test_a_class_that_has_changed_is_not_taken() -> None:
    def of(module: str, name: str, *fields: str) -> Any:
        ((_, (found, _)),) = with_classes({"named tuple": [module, name, [[f, "*"] for f in fields]]}).items()
        return found

    assert of(__name__, "Pair", "first", "second") is Pair
    for module, name in ((__name__, "Pair"), (__name__, "Path"), (__name__, "Gone"), ("no.such.module", "Pair")):
        found = of(module, name, "first", "third")
        assert found is not Pair and (found.__name__, found._fields) == (name, ("first", "third"))
    with pytest.raises(ValueError):
        of("no.such.module", "Pair", "no name")


def test_a_named_tuple_among_the_arguments(tmp_path: Path) -> None:
    call = loaded(tmp_path, OfNamed(), Pair(X, X + 1))
    assert_same(call(Pair(X, X + 2)), X - (X + 2))
    assert_same(call(namedtuple("Mine", "first second")(X, X)), X - X)
    for wrong in ((X, X), [X, X], namedtuple("Mine", "second first")(X, X), X):
        with pytest.raises(InputError, match="named tuple Pair with the fields first, second"):
            call(wrong)


def test_a_class_that_is_no_named_tuple_is_refused(tmp_path: Path) -> None:
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.view(3, 3).max(1)

    with pytest.raises(StorageError, match="named tuples"):
        loaded(tmp_path, Largest(), X)
