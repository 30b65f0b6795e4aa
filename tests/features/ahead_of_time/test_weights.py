"""Weights of a saved program: what shares memory, what they are called, and in which form they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fxwrap
from fxwrap.errors import StorageError


class Holder(nn.Module):
    """Has buffers by name."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


class Sum(Holder):
    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.buffers():
            x = x + (buffer.real if buffer.is_complex() else buffer).float()
        return x


class Times(Holder):
    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.buffers():
            x = x * buffer
        return x


class Fill(Holder):
    """Writes to ``a``, then reads all."""

    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(x)
        return sum((buffer.sum() for buffer in self.buffers()), x)  # type: ignore[return-value]


def saved(path: Path, methods: dict[str, Any], **options: Any) -> Path:
    return fxwrap.save(path / "program.fxw", methods, **options)


def loaded(path: Path, methods: dict[str, Any]) -> fxwrap.AotProgram:
    return fxwrap.load(saved(path, methods), trust=True)


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [False, True])
def test_a_conjugate_is_saved_as_its_numbers(tmp_path: Path, both: bool) -> None:
    """Alone, and beside the tensor whose memory it has."""
    c, x = torch.tensor([1 + 2j, 3 - 1j]), torch.ones(2, dtype=torch.complex64)
    model = Times(**({"c": c} if both else {}), v=c.conj())
    assert torch.equal(loaded(tmp_path, {"f": (model, (x,))}).f(x), model(x))


def test_a_view_that_negates_is_saved_as_its_numbers(tmp_path: Path) -> None:
    negated = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
    assert negated.is_neg()
    model, x = Sum(b=negated), torch.zeros(2)
    assert torch.equal(loaded(tmp_path, {"f": (model, (x,))}).f(x), model(x))


@pytest.mark.parametrize("view", [lambda t: t[1:3], lambda t: t.view(2, 2)], ids=["a part", "another shape"])
def test_a_view_of_what_another_method_writes_is_refused(tmp_path: Path, view: Any) -> None:
    cache = torch.zeros(4)
    methods = {"w": (Fill(a=cache), (torch.ones(4),)), "r": (Sum(v=view(cache)), (torch.ones(2),))}
    with pytest.raises(StorageError, match="'a' of 'w' and 'v' of 'r' share memory"):
        saved(tmp_path, methods)


def test_views_that_nobody_writes_are_saved_one_by_one(tmp_path: Path) -> None:
    table, x = torch.arange(4.0), torch.ones(2, 2)
    models = {"whole": Sum(v=table.view(2, 2)), "part": Sum(v=table[1:3])}
    program = loaded(
        tmp_path, {"plain": (Sum(v=table), (torch.ones(4),)), **{n: (m, (x,)) for n, m in models.items()}}
    )
    for name, model in models.items():
        assert torch.equal(program[name](x), model(x))


def test_parts_of_one_buffer_of_which_one_is_written_do_not_overlap(tmp_path: Path) -> None:
    cache = torch.zeros(2, 3)
    program = loaded(tmp_path, {"w": (Fill(a=cache[0]), (torch.ones(3),)), "r": (Sum(v=cache[1]), (torch.ones(3),))})
    assert program.w(torch.ones(3)).sum() == 12 and torch.equal(program.r(torch.ones(3)), torch.ones(3))


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[1:]], ids=["the same", "a part"])
def test_one_method_that_writes_to_one_of_two_names_is_refused(tmp_path: Path, view: Any) -> None:
    buffer = torch.zeros(3)
    with pytest.raises(StorageError, match="a, b"):
        saved(tmp_path, {"f": torch.export.export(Fill(a=buffer, b=view(buffer)), (torch.ones(3),))})


# -- names ---------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.dec = nn.Parameter(torch.ones(3)), nn.Module()
        self.dec.w = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w + self.dec.w * 10


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), 7.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


@pytest.mark.parametrize("order", [("enc", "dec"), ("dec", "enc")])
def test_a_name_that_is_made_up_is_nobody_elses(tmp_path: Path, order: tuple[str, str]) -> None:
    x, models = torch.ones(3), {"enc": Nested(), "dec": Single()}
    program = loaded(tmp_path, {name: (models[name], (x,)) for name in order})
    assert len(program.weights) == 3
    for name, model in models.items():
        assert torch.equal(program[name](x), model(x).detach())


def two_linears() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(3, 3), nn.Linear(3, 3)


def test_weights_of_one_name_in_two_modules_are_all_reached(tmp_path: Path) -> None:
    (p, q), x = two_linears(), torch.ones(3)
    program = loaded(tmp_path, {"f": (p, (x,)), "g": (q, (x,))})
    assert list(program.weights) == ["weight", "bias", "g.weight", "g.bias"]
    program.load_weights({"g.weight": torch.zeros(3, 3), "bias": torch.zeros(3)})
    assert torch.equal(program.g(x), q.bias.detach()) and torch.allclose(program.f(x), p.weight.sum(1).detach())


def test_weights_of_one_name_in_two_modules_may_be_given(tmp_path: Path) -> None:
    (p, q), x = two_linears(), torch.ones(3)
    path = saved(tmp_path, {"f": (p, (x,)), "g": (q, (x,))}, weights=False)
    given = {**p.state_dict(), **{f"g.{name}": tensor for name, tensor in q.state_dict().items()}}
    program = fxwrap.load(path, weights=given, trust=True)
    assert torch.allclose(program.f(x), p(x).detach()) and torch.allclose(program.g(x), q(x).detach())
    with pytest.raises(StorageError, match=r"no weight 'g\.weight'"):
        fxwrap.load(path, weights=p.state_dict(), trust=True)


def test_weights_that_are_given_do_not_share_what_is_written(tmp_path: Path) -> None:
    x = torch.ones(3)
    methods = {"w": (Fill(a=torch.zeros(3)), (x,)), "r": (Sum(v=torch.zeros(3), u=torch.zeros(3)), (x,))}
    path, memory = saved(tmp_path, methods, weights=False), torch.zeros(5)
    program = fxwrap.load(path, weights={"a": torch.zeros(3), "v": memory[:3], "u": memory[2:]}, trust=True)
    assert torch.equal(program.r(x), x)
    with pytest.raises(StorageError, match="'a' and 'v' that share memory"):
        fxwrap.load(path, weights={"a": memory[:3], "v": memory[2:], "u": torch.zeros(3)}, trust=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.out(self.embedding(i))


@pytest.mark.parametrize("name", ["embedding.weight", "out.weight"])
def test_a_tied_weight_is_given_under_either_name(tmp_path: Path, name: str) -> None:
    i = torch.tensor([1])
    path = saved(tmp_path, {"f": (Tied(), (i,))}, weights=False)
    program = fxwrap.load(path, weights={name: torch.zeros(5, 3)}, trust=True)
    assert not program.f(i).any() and len(program.weights) == 1
    program.load_weights({name: torch.ones(5, 3)})
    assert torch.equal(program.f(i), torch.full((1, 5), 3.0))


def test_a_tied_weight_takes_one_tensor(tmp_path: Path) -> None:
    model, i = Tied(), torch.tensor([1])
    path = saved(tmp_path, {"f": (model, (i,))})
    program = fxwrap.load(path, weights=model.state_dict(), trust=True)
    program.load_weights(model.state_dict())
    two = {"embedding.weight": torch.zeros(5, 3), "out.weight": torch.ones(5, 3)}
    with pytest.raises(StorageError, match="one tensor"):
        fxwrap.load(path, weights=two, trust=True)
    with pytest.raises(StorageError, match="one tensor"):
        program.load_weights(two)
    assert torch.equal(program.f(i), model(i).detach())


def test_a_buffer_without_elements_is_one_for_all_methods(tmp_path: Path) -> None:
    class Cat(Holder):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.e])

    model = Cat(e=torch.zeros(0, 4))
    path = saved(tmp_path, {"f": (model, (torch.ones(2, 4),)), "g": (model, (torch.ones(3, 4),))}, weights=False)
    program = fxwrap.load(path, weights=model.state_dict(), trust=True)
    assert list(program.weights) == ["e"] and program.g(torch.ones(3, 4)).size() == (3, 4)


def test_what_is_no_tensor_is_no_weight(tmp_path: Path) -> None:
    path = saved(tmp_path, {"f": (Sum(b=torch.ones(3)), (torch.ones(3),))})
    wrapper = TwoTensor(torch.zeros(3), torch.ones(3))
    for given, expected in ((None, "NoneType"), (wrapper, "TwoTensor"), (torch.ones(3).to_sparse(), "plain memory")):
        with pytest.raises(StorageError, match=expected):
            fxwrap.load(path, weights={"b": given}, trust=True)  # type: ignore[dict-item]
    program = fxwrap.load(path, trust=True)
    with pytest.raises(StorageError, match="NoneType"):
        program.load_weights({"b": None})  # type: ignore[dict-item]
    for no_weights in (None, [torch.ones(3)], "b"):
        with pytest.raises(StorageError, match="a dictionary of names"):
            program.load_weights(no_weights)  # type: ignore[arg-type]


def test_new_values_keep_their_imaginary_parts(tmp_path: Path) -> None:
    """Or are refused; other conversions are those of ``load_state_dict``."""
    real = loaded(tmp_path, {"f": (Sum(b=torch.ones(3)), (torch.ones(3),))})
    with pytest.raises(StorageError, match="real numbers"):
        real.load_weights({"b": torch.ones(3) * 1j})
    assert torch.equal(real.f(torch.ones(3)), torch.full((3,), 2.0))
    real.load_weights({"b": torch.full((3,), 2)})
    assert torch.equal(real.f(torch.ones(3)), torch.full((3,), 3.0))
    values = torch.ones(3, dtype=torch.complex64)
    numbers = loaded(tmp_path, {"f": (Times(b=values.clone()), (values,))})
    numbers.load_weights({"b": values * 1j})
    assert torch.equal(numbers.f(values), values * 1j)
    numbers.load_weights({"b": torch.full((3,), 2.0)})
    assert torch.equal(numbers.f(values), values * 2)


class Windows(Holder):
    """Looks at the storage of ``b``, from its start on."""

    offset = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.b.as_strided((2, 2), (2, 1), self.offset) * 1j).sum() + x


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_part_of_a_tensor_is_saved_where_nothing_else_of_it_is_used(
    tmp_path: Path, offset: int, dtype: torch.dtype
) -> None:
    """Offset 0 is before the part, 5 inside of it. Of complex numbers an operator makes the window, at every call."""
    model, x = Windows(b=torch.arange(16).to(dtype)[4:12]), torch.ones(3)
    model.offset = offset
    if offset == 0 or dtype.is_complex:
        with pytest.raises(StorageError, match="weight 'b' of method 'f' is a part of a larger tensor"):
            saved(tmp_path, {"f": (model, (x,))})
        model.b = model.b.clone()
        model.offset = 1
    torch.testing.assert_close(loaded(tmp_path, {"f": (model, (x,))}).f(x), model(x))


# -- forms ---------------------------------------------------------------------------------------------------------

FORMS: dict[str, Tensor] = {
    "expanded": torch.tensor([2.0]).expand(4),
    "a number, expanded": torch.tensor(2.0).expand(4),
    "transposed and expanded": torch.arange(4.0).expand(3, 4).t()[:, 0],
    "complex128": torch.ones(4, dtype=torch.complex128),
    "complex64": torch.ones(4, dtype=torch.complex64),
    "a complex number": torch.tensor(1 + 1j),
    "float8_e8m0fnu": torch.ones(4).to(torch.float8_e8m0fnu),
    "float8_e4m3fn": torch.ones(4).to(torch.float8_e4m3fn),
    "uint16": torch.ones(4).to(torch.uint16),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_weight_of_any_form_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    model, x = Sum(b=FORMS[name]), torch.arange(4.0)
    program = loaded(tmp_path, {"f": (model, (x,))})
    assert torch.equal(program.f(x), model(x))
    assert program.weights["b"].stride() == FORMS[name].stride()


def test_an_expanded_weight_takes_values_that_repeat(tmp_path: Path) -> None:
    program, x = loaded(tmp_path, {"f": (Sum(b=torch.tensor([2.0]).expand(4)), (torch.ones(4),))}), torch.ones(4)
    program.load_weights({"b": torch.full((4,), 5.0)})
    assert torch.equal(program.f(x), torch.full((4,), 6.0))
    with pytest.raises(StorageError, match="repeat"):
        program.load_weights({"b": torch.arange(4.0)})


def test_a_weight_that_is_no_plain_memory_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    class Sparse(Holder):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.b.to_dense()

    said = list[str]()
    with pytest.raises(StorageError, match="plain memory"):
        saved(tmp_path, {"f": (Sparse(b=torch.eye(3).to_sparse()), (torch.ones(3, 3),))}, progress=said.append)
    assert said == ["f: tracing"]
