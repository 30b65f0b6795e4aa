"""The signature of a method: its inputs, their sizes and ranges. Every call is checked against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.autograd import forward_ad

from ...errors import InputError
from ...host_graph.sizes import expression
from ...torch_private.functions import call_check, is_plain_memory
from .structure import flatten

# A size: a number, or an expression of symbols.
Size = Any
# A function that tells whether tensors have the same layouts as those that it was made of.
Look = Callable[[list[Any]], bool]


@dataclass(frozen=True)
class TensorInput:
    """A tensor that a method takes.

    Attributes:
        size, stride: in elements; entries are numbers or expressions of symbols.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    size: tuple[Size, ...]
    stride: tuple[Size, ...]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.size))
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{sizes}] on {self.device}"


@dataclass(frozen=True)
class NumberInput:
    """A number that a method takes: a symbolic size, or a constant that was compiled in.

    Attributes:
        kind: its Python type.
        value: an expression of symbols, or the constant.
    """

    name: str
    kind: type
    value: Size

    def __str__(self) -> str:
        return f"{self.name}: {self.kind.__name__} {self.value}"


@dataclass(frozen=True)
class Signature:
    """What one method takes and returns. Print it.

    Attributes:
        ranges: the lowest and highest value of each symbol by name; None for no bound.
        guards: conditions on symbols that the compiled code relies on.
        arguments: the structure of ``(args, kwargs)`` (``structure.structure_of``).
        results: the structure of the results.
    """

    method: str
    inputs: tuple[TensorInput | NumberInput, ...]
    ranges: Mapping[str, tuple[int | None, int | None]]
    guards: tuple[sympy.Basic, ...]
    arguments: Any
    results: Any

    @property
    def conditions(self) -> str:
        """Ranges and guards as text; empty if there are none."""
        where = [
            ("" if low is None else f"{low} <= ") + name + ("" if high is None else f" <= {high}")
            for name, (low, high) in self.ranges.items()
            if (low, high) != (None, None)
        ]
        return ", ".join([*where, *map(str, self.guards)])

    def __str__(self) -> str:
        suffix = f" with {self.conditions}" if self.conditions else ""
        return f"{self.method}({', '.join(map(str, self.inputs))}){suffix}"

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The inputs of a call as a flat list.

        Raises:
            InputError: arguments are missing, too many, called otherwise than in the example, or nested otherwise.
        """
        positional, named = self.arguments["tuple"]
        names = [name for name, _ in named["dict"]]
        if len(args) != len(positional["tuple"]) or kwargs.keys() != set(names):
            raise InputError(
                f"call of {self}",
                expected=_called(len(positional["tuple"]), names),
                got=_called(len(args), kwargs),
                remedy="pass each argument by position or by name, as the example that the method was exported with",
            )
        return list(flatten(self.arguments, (args, kwargs)))

    def check(self, values: Sequence[Any]) -> None:
        """Check that the method may run on these inputs.

        Raises:
            InputError: an input has another type, device, rank, size or layout; or a size is out of range.
        """
        if len(values) != len(self.inputs):
            raise InputError(f"call of {self}", expected=f"{len(self.inputs)} inputs", got=str(len(values)))
        bound: dict[sympy.Symbol, int] = {}
        for known, value in zip(self.inputs, values, strict=True):
            if isinstance(known, NumberInput):
                self._check_number(known, value, bound)
            else:
                self._check_tensor(known, value, bound)
        # Sizes that are expressions of others, once all symbols are known.
        for known, value in zip(self.inputs, values, strict=True):
            if isinstance(known, TensorInput):
                _solve(known.size, value.size(), bound)
            elif isinstance(known.value, sympy.Basic):
                _solve((known.value,), (value,), bound)
        for known, value in zip(self.inputs, values, strict=True):
            if isinstance(known, TensorInput):
                self._check_sizes(known, "size", known.size, value.size(), bound)
                self._check_sizes(known, "stride", known.stride, value.stride(), bound, value.size())
            elif isinstance(known.value, sympy.Basic) and _at(known.value, bound) != value:
                raise self._error(known, f"{known.value}, {_at(known.value, bound)} here", str(value))
        for symbol, size in bound.items():
            low, high = self.ranges.get(symbol.name, (0, None))
            if (low is not None and size < low) or (high is not None and size > high):
                expected = " to ".join("any" if bound is None else str(bound) for bound in (low, high))
                raise self._range_error(symbol.name, expected, size)
        for guard in self.guards:
            if _at(guard, bound) != sympy.true:
                raise InputError(f"call of {self}", expected=str(guard), got=_values(bound))

    def _check_tensor(self, known: TensorInput, value: Any, bound: dict[sympy.Symbol, int]) -> None:
        if not isinstance(value, torch.Tensor):
            raise self._error(known, "a tensor", f"{value!r} of type {type(value).__name__}")
        if value.layout is not torch.strided:
            raise self._error(known, "a dense tensor", str(value.layout))
        # Kernels read the bytes of a tensor directly.
        if not is_plain_memory(value):
            raise self._error(known, "a tensor with memory of its own", f"a {type(value).__name__}")
        for bit, view in (("neg", value.is_neg()), ("conj", value.is_conj())):
            if view:
                remedy = f"pass {known.name}.resolve_{bit}()"
                raise self._error(known, "numbers as they lie in memory", f"a view, with the {bit} bit", remedy)
        for what, expected, got in (
            ("dtype", known.dtype, value.dtype),
            ("device", known.device, value.device),
            ("dimensions", len(known.size), value.dim()),
        ):
            if expected != got:
                raise self._error(known, f"{what} {expected}", f"{what} {got}")
        if value.requires_grad and torch.is_grad_enabled():
            raise self._error(known, "no gradient to be asked for", "requires_grad=True, outside of torch.no_grad()")
        if forward_ad.unpack_dual(value).tangent is not None:
            raise self._error(known, "no gradient to be asked for", "a tangent", "pass unpack_dual(...).primal")
        for expected, got in zip(known.size, value.size(), strict=True):
            if isinstance(expected, sympy.Symbol):
                bound.setdefault(expected, got)

    def _check_number(self, known: NumberInput, value: Any, bound: dict[sympy.Symbol, int]) -> None:
        if type(value) is not known.kind:
            raise self._error(known, known.kind.__name__, f"{value!r} of type {type(value).__name__}")
        number: Any = value
        if isinstance(known.value, sympy.Symbol):
            bound.setdefault(known.value, int(number))
        elif not isinstance(known.value, sympy.Basic) and not _same(known.value, value):
            raise self._error(known, f"{known.value!r}, which was compiled in", repr(value))

    def _check_sizes(
        self,
        known: TensorInput,
        what: str,
        expected: Sequence[Size],
        got: Sequence[int],
        bound: Mapping[sympy.Symbol, int],
        sizes: Sequence[int] | None = None,
    ) -> None:
        wanted = [_at(size, bound) for size in expected]
        # A stride has no meaning in a dimension of one element, or in an empty tensor.
        skipped = [sizes is not None and (size <= 1 or 0 in sizes) for size in sizes or got]
        if any(a != b for a, b, skip in zip(wanted, got, skipped, strict=True) if not skip):
            raise self._error(known, f"{what} {tuple(wanted)}", f"{what} {tuple(got)}")

    def _error(self, known: TensorInput | NumberInput, expected: str, got: str, remedy: str = "") -> InputError:
        subject = f"input {known.name!r} of {self.method}"
        return InputError(subject, expected=f"{expected} ({known})", got=got, remedy=remedy)

    def _range_error(self, name: str, expected: str, got: int) -> InputError:
        where = ", ".join(i.name for i in self.inputs if isinstance(i, TensorInput) and name in map(str, i.size))
        return InputError(f"size {name} of {where or self.method}", expected=expected, got=str(got))


def _called(count: int, names: Iterable[str]) -> str:
    return f"{count} by position" + "".join(f", {name}=" for name in names)


class Checker:
    """Checks the inputs of one method.

    Attributes:
        look: tells whether inputs have the layouts of some that passed, by one fast call of torch's; None before any.
    """

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self.look: Look | None = None
        is_tensor = [isinstance(expected, TensorInput) for expected in signature.inputs]
        self._tensors = [place for place, tensor in enumerate(is_tensor) if tensor]
        self._others = [place for place, tensor in enumerate(is_tensor) if not tensor]

    def __call__(self, values: list[Any]) -> None:
        """Check inputs that ``look`` does not know.

        Raises:
            InputError: the method may not run on these inputs.
        """
        self._signature.check(values)
        # Whether inputs that require gradients are allowed depends on the mode of autograd: checked at each call.
        if self._tensors and not any(values[place].requires_grad for place in self._tensors):
            look, others = call_check(values, self._tensors), self._of_others(values)
            self.look = (lambda now: look(now) and self._of_others(now) == others) if others else look

    def _of_others(self, values: Sequence[Any]) -> list[Any]:
        return [(type(values[place]), values[place]) for place in self._others]


def size_of(number: Any) -> Size:
    """A size of a fake tensor, as it stands in a signature."""
    size = expression(number)
    return int(size) if isinstance(size, sympy.Integer) else size


def solution(size: Size) -> tuple[sympy.Symbol, int, int] | None:
    """``(symbol, factor, rest)`` of a size ``factor * symbol + rest``; None for any other size.

    The value of such a size determines that of its symbol.
    """
    symbols: Any = getattr(size, "free_symbols", ())
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    if not size.is_polynomial(symbol):
        return None
    coefficients = sympy.Poly(size, symbol).all_coeffs()
    if len(coefficients) != 2 or not all(coefficient.is_Integer for coefficient in coefficients):
        return None
    factor, rest = map(int, coefficients)
    return symbol, factor, rest


def _solve(expected: Sequence[Size], got: Sequence[int], bound: dict[sympy.Symbol, int]) -> None:
    """Bind symbols that are no size themselves, from the values of sizes that are linear in them."""
    for size, value in zip(expected, got, strict=True):
        unknown = isinstance(size, sympy.Basic) and not size.free_symbols <= bound.keys()
        if unknown and (solved := solution(size)) is not None:
            symbol, factor, rest = solved
            bound[symbol] = (value - rest) // factor  # a remainder is found later: the size does not fit then


def _same(first: Any, second: Any) -> bool:
    return bool(first == second) or str(first) == str(second) == "nan"


def _at(size: Size, bound: Mapping[sympy.Symbol, int]) -> Any:
    if isinstance(size, (int, float, str)):
        return size
    value = sympy.sympify(size.xreplace({symbol: sympy.Integer(number) for symbol, number in bound.items()}))
    return int(value) if value.is_Integer else value


def _values(bound: Mapping[sympy.Symbol, int]) -> str:
    return ", ".join(f"{symbol} = {value}" for symbol, value in bound.items())
