"""Products of matrices in native replay: the BLAS where it computes the operator's bits; elsewhere the operator."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import Compiled
from hypothesis import given
from hypothesis import strategies as st
from native_calls import BLAS, listing, native, natively, recorded
from random_graphs import PROPERTY
from torch.utils._python_dispatch import TorchDispatchMode

from fxwrap.graphs.replay import steps
from fxwrap.graphs.replay.flat_python import Part, as_python
from fxwrap.graphs.replay.guards import Description
from fxwrap.graphs.replay.operands import Bound, Local, Operand, Register
from fxwrap.graphs.replay.units import make_unit
from fxwrap.torch_private.native_library import native_replay
from fxwrap.torch_private.native_units import NativeReplay, Unit

MM, ADDMM = torch.ops.aten.mm.out, torch.ops.aten.addmm.out
_GEMM = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)
_RESULT = 11  # its position among gemm's arguments


def _library() -> NativeReplay:
    library = native_replay()
    assert not isinstance(library, str)
    return library


def _exported() -> bool:
    library = native_replay()
    return not isinstance(library, str) and library.gemms is not None


# Only where torch exports no BLAS: not where it does, and the library does not find it.
blas = pytest.mark.skipif(
    not torch.__version__.startswith("2.13.0+cpu") and not _exported(), reason="no BLAS to call"
)


class Multiplier:
    """A unit of one product, which is called as ``unit(*operands, out)``.

    Attributes:
        calls: of gemm, of which the first is the trial.

    Args:
        threads: the address of the function that sets how many threads the BLAS has; 0 for none.
    """

    def __init__(self, operands: int, wrong: bool = False, threads: int = 0, **factors: float) -> None:
        self.calls = 0
        library, self._wrong = _library(), wrong
        assert library.gemms is not None
        # The functions live as long as this.
        self._gemms = tuple(_GEMM(self._counted(_GEMM(address))) for address in library.gemms[:2])
        addresses = tuple(ctypes.cast(gemm, ctypes.c_void_p).value for gemm in self._gemms)
        library = dataclasses.replace(library, gemms=(*addresses, threads))  # type: ignore[arg-type]
        locals_ = [Local(f"v{i}") for i in range(operands + 1)]
        loads = [steps.Load(Register(i), False, results=(local,)) for i, local in enumerate(locals_)]
        kwargs: dict[str, Operand] = {name: Bound(factor) for name, factor in factors.items()}
        overload = MM if operands == 2 else ADDMM
        product = steps.Multiply(
            overload, tuple(locals_[:-1]), {**kwargs, "out": locals_[-1]}, overload=overload, results=(Local("made"),)
        )
        self.unit = self._unit(library, [*loads, product], Local("made"), operands + 1)

    def _unit(self, library: NativeReplay, lines: Sequence[steps.Step], result: Operand, count: int) -> Unit:
        description = Description(count, False)
        part = Part(as_python(lines, result)[0], lines, result, below_autograd=True)
        unit = make_unit(library, [part], count, description)
        assert any(line.endswith(BLAS) for line in description.listing)
        return unit

    def _counted(self, gemm: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.calls += 1
            gemm(*arguments)
            if self._wrong:
                ctypes.cast(arguments[_RESULT], ctypes.POINTER(ctypes.c_uint8))[0] ^= 1

        return call

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        made = self.unit(list(tensors))
        assert made.data_ptr() == tensors[-1].data_ptr()
        return made

    def same(self, *tensors: torch.Tensor, **factors: float) -> bool:
        """Whether it writes what the operator writes, around the result, too, and whether gemm was called for it."""
        operator, (*operands, out) = (MM if len(tensors) == 3 else ADDMM), tensors
        expected = torch.empty(0, dtype=out.dtype)
        expected.set_(out.untyped_storage().clone(), out.storage_offset(), out.size(), out.stride())  # type: ignore[call-overload]
        versions = out._version, expected._version
        operator(*operands, **factors, out=expected)
        before = self.calls
        self(*tensors)
        assert list(out.untyped_storage()) == list(expected.untyped_storage())
        assert out._version - versions[0] == expected._version - versions[1]
        return self.calls > before


@blas
def test_a_small_product_has_one_thread_of_the_blas() -> None:
    """
    ::

        torch has 2 threads       trial: operator, BLAS with 2 threads, BLAS with 1: the same bits
                                  calls: 1 thread, then what it was before
        torch has 3 threads       the BLAS has all of them: with so many nobody has tried
    """
    set_to = list[int]()

    def threads(number: int) -> int:
        set_to.append(number)
        return 7

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(threads)
    torch.set_num_threads(2)
    try:
        multiplier = Multiplier(2, threads=ctypes.cast(function, ctypes.c_void_p).value or 0)
        a, b, out = torch.randn(8, 32), torch.randn(32, 8), torch.empty(8, 8)
        for _ in range(2):
            assert multiplier.same(a, b, out)
        assert set_to == [1, 7] * 3 and multiplier.calls == 4
        torch.set_num_threads(3)
        assert multiplier.same(a, b, out) and set_to == [1, 7] * 3
    finally:
        torch.set_num_threads(1)


@blas
def test_with_several_threads_products_have_the_bits_of_the_operator() -> None:
    """Whatever MKL does with them; the number of threads that MKL has afterwards is what it was."""
    torch.set_num_threads(2)
    try:
        for rows, inner, columns in ((8, 8, 8), (1, 64, 64), (32, 32, 32), (5, 700, 9), (64, 64, 64), (3, 4096, 2)):
            multiplier = Multiplier(2, threads=_library().gemms[2])
            for _ in range(3):
                operands = torch.randn(rows, inner), torch.randn(inner, columns), torch.empty(rows, columns)
                multiplier.same(*operands)
    finally:
        torch.set_num_threads(1)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]


# -- the same bits -----------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[int, int, torch.dtype], torch.Tensor]] = {
    "rows": lambda m, n, dtype: torch.randn(m, n, dtype=dtype),
    "columns": lambda m, n, dtype: torch.randn(n, m, dtype=dtype).t(),
    "rows of more": lambda m, n, dtype: torch.randn(m + 1, n + 3, dtype=dtype)[1:, 1 : n + 1],
    "columns of more": lambda m, n, dtype: torch.randn(n + 1, m + 3, dtype=dtype)[1:, 1 : m + 1].t(),
    "every second": lambda m, n, dtype: torch.randn(2 * m, 2 * n, dtype=dtype)[::2, ::2],
    "repeated": lambda m, n, dtype: torch.randn(1, n, dtype=dtype).expand(m, n),
    "overlapping": lambda m, n, dtype: torch.randn(m + n, dtype=dtype).as_strided((m, n), (1, 1)),
}
BIASES: dict[str, Callable[[int, int, torch.dtype], torch.Tensor]] = {
    **LAYOUTS,
    "row": lambda m, n, dtype: torch.randn(n, dtype=dtype),
    "row with gaps": lambda m, n, dtype: torch.randn(2 * n, dtype=dtype)[::2],
    "one row": lambda m, n, dtype: torch.randn(1, n, dtype=dtype),
    "one column": lambda m, n, dtype: torch.randn(m, 1, dtype=dtype),
    "one number": lambda m, n, dtype: torch.randn(1, dtype=dtype),
    "a scalar": lambda m, n, dtype: torch.randn((), dtype=dtype),
}
OUTS = [name for name in LAYOUTS if name not in ("repeated", "overlapping")]
FACTORS: dict[str, dict[str, float]] = {
    "default": {},
    "of integers": {"beta": 2, "alpha": -1},
    "of numbers": {"beta": 0.3, "alpha": 0.7},
    "no bias": {"beta": 0},
    "no product": {"alpha": 0},
    "no number": {"beta": float("nan")},
}
SIZES = st.integers(0, 9) | st.sampled_from([1, 16, 32, 33])


@native
@blas
@PROPERTY
@given(
    size=st.tuples(SIZES, SIZES, SIZES),
    layouts=st.tuples(st.sampled_from(list(LAYOUTS)), st.sampled_from(list(LAYOUTS)), st.sampled_from(OUTS)),
    bias=st.sampled_from([None, *BIASES]),
    factors=st.sampled_from(list(FACTORS)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    special=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_product_has_the_operators_bits(
    size: tuple[int, int, int],
    layouts: tuple[str, str, str],
    bias: str | None,
    factors: str,
    dtype: torch.dtype,
    special: bool,
    seed: int,
) -> None:
    """With every layout, also those that ATen copies; and what was in the result matters as little."""
    torch.manual_seed(seed)
    m, k, n = size
    factor = {} if bias is None else FACTORS[factors]
    multiplier = Multiplier(2 if bias is None else 3, **factor)

    def made() -> list[torch.Tensor]:
        first, second, out = (
            LAYOUTS[name](*size, dtype) for name, size in zip(layouts, ((m, k), (k, n), (m, n)), strict=True)
        )
        added = [] if bias is None else [BIASES[bias](m, n, dtype)]
        _whole(out).fill_(float("nan"))
        if special:
            for tensor in (first, second, *added):
                _whole(tensor)[:1] = float("inf") if seed % 2 else -0.0
        return [*added, first, second, out]

    directly = [multiplier.same(*made(), **factor) for _ in range(2)]
    assert directly[0] == directly[1]
    if {*layouts} <= {"rows", "columns", "rows of more", "columns of more"} and min(size) > 0:
        assert directly[0] and multiplier.calls == 3  # with the trial


@native
@blas
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [(4, 32, 32), (4, 96, 96), (1, 256, 256), (64, 64, 64), (256, 8, 100)])
def test_linear_layers(size: tuple[int, int, int], threads: int) -> None:
    """As Inductor emits them, the weight transposed."""
    m, k, n = size
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        multiplier = Multiplier(3)
        for _ in range(3):
            tensors = torch.randn(n), torch.randn(m, k), torch.randn(n, k).t(), torch.empty(m, n)
            assert multiplier.same(*tensors)
    finally:
        torch.set_num_threads(before)


@native
@blas
def test_a_large_product_is_the_operators() -> None:
    multiplier = Multiplier(2)
    assert not multiplier.same(torch.randn(128, 128), torch.randn(128, 128), torch.empty(128, 128))
    assert not multiplier.calls


# -- a trial -----------------------------------------------------------------------------------------------------


@native
@blas
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_blas_of_other_bits_is_not_called(dtype: torch.dtype) -> None:
    """It is tried once; the numbers are the operator's from the first call on."""
    multiplier = Multiplier(3, wrong=True)
    for _ in range(3):
        tensors = (torch.randn(size, dtype=dtype) for size in ((8,), (4, 6), (6, 8), (4, 8)))
        multiplier.same(*tensors)
    assert multiplier.calls == 1


@native
@blas
def test_a_trial_leaves_no_trace() -> None:
    """Torch's generator draws on; nothing is allocated by torch."""
    multiplier = Multiplier(2)
    tensors = torch.randn(4, 6), torch.randn(6, 8), torch.empty(4, 8)
    state = torch.get_rng_state()
    multiplier(*tensors)
    assert multiplier.calls == 2 and torch.equal(torch.get_rng_state(), state)


# -- what is not as at the first product --------------------------------------------------------------------------


def _linear() -> list[torch.Tensor]:
    return [torch.randn(8), torch.randn(4, 6), torch.randn(6, 8), torch.empty(4, 8)]


def _changed(how: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    bias, first, second, out = tensors
    match how:
        case "strides":
            return [bias, first.t().contiguous().t(), second, out]
        case "gaps":
            return [bias, LAYOUTS["every second"](4, 6, first.dtype), second, out]
        case "size":
            return [bias, torch.randn(5, 6), second, torch.empty(5, 8)]
        case "inner size":
            return [bias, torch.randn(4, 7), torch.randn(7, 8), out]
        case "bias":
            return [torch.randn(4, 8), first, second, out]
        case "out":
            return [bias, first, second, torch.empty(8, 4).t()]
        case "dtype":
            return [tensor.double() for tensor in tensors]
        case "complex":
            return [tensor.to(torch.complex64) for tensor in tensors]
        case "half":
            return [tensor.bfloat16() for tensor in tensors]
        case "negated":
            return [bias, torch.complex(first, first).conj().imag, second, out]
    raise AssertionError(how)


@native
@blas
@pytest.mark.parametrize(
    "how",
    ["strides", "gaps", "size", "inner size", "bias", "out", "dtype", "complex", "half", "negated"],
)
def test_another_layout_is_the_operators(how: str) -> None:
    """And the next call that is as the first is the BLAS's again."""
    multiplier = Multiplier(3)
    assert multiplier.same(*_linear())
    assert not multiplier.same(*_changed(how, _linear()))
    assert multiplier.same(*_linear())


@native
@blas
@pytest.mark.parametrize("rows", [slice(None), 0, slice(3, 4)])
def test_a_bias_in_the_result_is_the_operators(rows: Any) -> None:
    multiplier = Multiplier(3)
    assert multiplier.same(*_linear())
    bias, first, second, out = _linear()
    expected = bias.expand(4, 8).clone()
    ADDMM(expected[rows], first, second, out=expected)
    out.copy_(bias.expand(4, 8))
    before = multiplier.calls
    multiplier(out[rows], first, second, out)
    assert torch.equal(out, expected) and multiplier.calls == before


@native
@blas
@pytest.mark.parametrize("wrong", ["inner", "rows", "bias", "dtype"])
def test_wrong_operands_are_the_operators_error(wrong: str) -> None:
    bias, first, second, out = _linear()
    tensors = {
        "inner": [bias, first, torch.randn(5, 8), out],
        "rows": [bias, first[0], second, out],
        "bias": [torch.randn(7), first, second, out],
        "dtype": [bias, first.double(), second, out],
    }[wrong]
    with pytest.raises(RuntimeError) as expected:
        ADDMM(*tensors[:3], out=tensors[3].clone())
    for before in ([], [_linear()]):
        multiplier = Multiplier(3)
        for one in before:
            multiplier(*one)
        with pytest.raises(RuntimeError) as raised:
            multiplier(*tensors)
        assert str(raised.value).splitlines()[0] == str(expected.value).splitlines()[0]


@native
@blas
def test_a_result_of_another_size_is_resized() -> None:
    """As the operator resizes it, which warns of one that is not empty."""
    multiplier = Multiplier(3)
    multiplier(*_linear())
    *operands, _ = _linear()
    out = torch.empty(0)
    multiplier(*operands, out)
    assert torch.equal(out, torch.addmm(*operands))


# -- who wants to see operators -----------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@native
@blas
@pytest.mark.parametrize("first", [False, True], ids=["later", "at the first call"])
def test_a_profiler_and_a_mode_see_the_operator(first: bool) -> None:
    multiplier = Multiplier(3)
    if not first:
        multiplier(*_linear())
    before = multiplier.calls
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        multiplier(*_linear())
    assert "aten::addmm" in {event.name for event in profile.events() or ()}
    tensors = _linear()
    with Seen() as seen:
        multiplier(*tensors)
    assert seen.operators == [ADDMM]
    assert multiplier.calls == before
    assert multiplier.same(*_linear())


@native
@blas
def test_a_subclass_sees_the_operator() -> None:
    class Named(torch.Tensor):
        @staticmethod
        def __new__(cls, elem: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, elem.size(), strides=elem.stride(), dtype=elem.dtype)

        def __init__(self, elem: torch.Tensor) -> None:
            self.elem = elem

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = [one.elem if isinstance(one, Named) else one for one in args]
            called.append(func)
            return func(*plain, **(kwargs or {}))

    called = list[Any]()
    multiplier = Multiplier(3)
    multiplier(*_linear())
    bias, first, second, out = _linear()
    multiplier(bias, Named(first), second, out)
    assert called == [ADDMM] and torch.equal(out, torch.addmm(bias, first, second))


@native
@blas
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("where", ["matmul", "mkldnn", "everywhere", "old"])
def test_fewer_bits_are_the_operators(precision: str, where: str) -> None:
    """Where somebody asks for products of float32 with fewer bits, ATen chooses; not for float64."""
    backends: Any = torch.backends
    modules = {"matmul": backends.mkldnn.matmul, "mkldnn": backends.mkldnn, "everywhere": backends}
    multiplier, of_double = Multiplier(3), Multiplier(3)
    assert multiplier.same(*_linear())
    try:
        if where == "old":
            torch.set_float32_matmul_precision({"bf16": "medium", "tf32": "high"}[precision])
        else:
            backends.mkldnn.matmul.fp32_precision = "none"
            modules[where].fp32_precision = precision
        assert not multiplier.same(*_linear())
        assert of_double.same(*(tensor.double() for tensor in _linear()))
    finally:
        torch.set_float32_matmul_precision("highest")
        for module in modules.values():
            module.fp32_precision = "none"
    assert multiplier.same(*_linear())


@native
@blas
def test_autocast_and_inference_mode() -> None:
    multiplier = Multiplier(3)
    assert multiplier.same(*_linear())
    with torch.autocast("cpu", torch.bfloat16):
        assert not multiplier.same(*_linear())
    with torch.inference_mode():
        multiplier = Multiplier(3)
        bias, first, second, out = _linear()
        multiplier(bias, first, second, out)
        assert torch.equal(out, torch.addmm(bias, first, second)) and multiplier.calls == 2


@native
@blas
def test_autograd_refuses_a_result_that_requires_grad() -> None:
    """A step through autograd is the operator, which says so."""
    lines = [steps.Multiply(MM, (Register(0), Register(1)), {"out": Register(2)}, overload=MM)]
    unit = make_unit(_library(), [Part(as_python(lines, None)[0], lines)], 3, Description(3, False))
    tensors = [torch.randn(2, 2), torch.randn(2, 2), torch.empty(2, 2)]
    unit(list(tensors))
    assert torch.equal(tensors[2], tensors[0] @ tensors[1])
    tensors[0].requires_grad_()
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        unit(list(tensors))


# -- programs ----------------------------------------------------------------------------------------------------


@native
@blas
def test_the_listing_says_where_the_blas_is_called(compiled: Any) -> None:
    weight, bias = torch.randn(6, 4), torch.randn(4)
    f: Compiled = compiled(lambda x: torch.relu(torch.addmm(bias, x, weight).sin() @ weight.t()) + 1)
    recording = recorded(f, lambda: torch.randn(5, 6))
    products = [line for line in recording.listing if "mm(" in line]
    assert len(products) == 2 and all(line.endswith(BLAS) for line in products)
    assert BLAS not in listing(recording)
    x = torch.randn(5, 6)
    with natively(f.program):
        got = f(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, natively(f.program):
        assert torch.equal(f(x), got)
    assert {"aten::addmm", "aten::mm"} <= {event.name for event in profile.events() or ()}


@native
def test_a_build_without_a_blas_calls_operators() -> None:
    library = dataclasses.replace(_library(), gemms=None)
    lines = [steps.Multiply(MM, (Register(0), Register(1)), {"out": Register(2)}, overload=MM)]
    description = Description(3, False)
    unit = make_unit(library, [Part(as_python(lines, None)[0], lines, below_autograd=True)], 3, description)
    assert "aten.mm.out(r[0], r[1], out=r[2])" in description.listing
    tensors = [torch.randn(2, 2), torch.randn(2, 2), torch.empty(2, 2)]
    unit(list(tensors))
    assert torch.equal(tensors[2], tensors[0] @ tensors[1])


@native
@blas
@pytest.mark.parametrize("wrong", ["another overload", "a factor", "a tensor"])
def test_what_is_not_known_to_be_a_product_is_the_operator(wrong: str) -> None:
    library: Any = _library().library
    slot, gemms = [library.slot(i) for i in range(4)], _library().gemms
    overload, args, kwargs = {
        "another overload": (torch.ops.aten.mm.default, slot[:2], {}),
        "a factor": (ADDMM, slot[:3], {"beta": slot[3], "out": slot[3]}),
        "a tensor": (MM, slot[:2], {"out": library.constant(None)}),
    }[wrong]
    given = library.tuple(args), library.dict(list(kwargs.values()), list(kwargs))
    assert library.product([None], overload, *given, gemms).note == ""
