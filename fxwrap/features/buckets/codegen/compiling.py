"""The option ``buckets`` for one graph of Dynamo's: which sizes are padded, whether they may be, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ....errors import OptionError
from ....graphs.compilation import Compilation
from ....host_graph.sizes import expression
from ....options import Options
from .. import OPTION
from ..checked_padding import CheckedBuckets
from ..padding import BucketedDim, BucketedGraph, BucketedSize, BucketLayout, GraphPlaces
from ..row_calls import RowDimension
from ..rows import row_mixers
from .marks import Mark, marks_of

_DOCUMENT = "docs/buckets.md has what keeps rows apart; without the option 'buckets' the function compiles"


@dataclass(frozen=True)
class Buckets:
    """The bucketed sizes of a graph that is being compiled.

    Attributes:
        marks: the marked dimensions that vary.
        static: names of marked dimensions for whose size alone Dynamo compiles this graph.
        sizes: the option ``buckets``.
        inputs: the fake inputs of the graph.
        outputs: its fake outputs.
    """

    marks: Sequence[Mark]
    static: Sequence[str]
    sizes: dict[str, tuple[int, ...]]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    @classmethod
    def of(cls, gm: GraphModule, options: Options) -> Buckets:
        """The bucketed sizes of a graph.

        Raises:
            OptionError: a mark has a name that the option has not, or sizes of one name differ.
        """
        marks, sizes = marks_of(gm), dict(dict(options.added)[OPTION])
        if unknown := sorted({mark.name for mark in marks} - sizes.keys()):
            raise OptionError(
                f"a dimension is marked {unknown[0]!r}, and the option 'buckets' has no such name",
                expected=f"one of {', '.join(map(repr, sorted(sizes)))}",
                got=repr(unknown[0]),
                remedy=f"options={{'buckets': {{{unknown[0]!r}: (1, 2, 4, 8)}}}}",
            )
        inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        (output,) = gm.graph.find_nodes(op="output")
        values = torch.fx.map_arg(output.args[0], lambda node: node.meta.get("example_value"))
        varying = [mark for mark in marks if isinstance(mark.size, torch.SymInt)]
        _make_equal(marks)
        static = sorted({mark.name for mark in marks if not isinstance(mark.size, torch.SymInt)})
        return cls(varying, static, sizes, inputs, list(values))

    def names(self) -> dict[sympy.Symbol, str]:
        """The bucket's name of each symbol.

        Raises:
            OptionError: a size has two names, or is not that of one dimension alone.
        """
        names: dict[sympy.Symbol, str] = {}
        for mark in self.marks:
            symbol = expression(mark.size)
            if not isinstance(symbol, sympy.Symbol) or names.setdefault(symbol, mark.name) != mark.name:
                raise OptionError(
                    f"the size of the dimension marked {mark.name!r}",
                    expected="a size of its own",
                    got=f"{symbol}, which is also marked {names.get(symbol)!r}" if symbol in names else str(symbol),
                    remedy="mark dimensions that are always of one size with one name",
                )
        return names

    def check(self, gm: GraphModule, phase: str) -> None:
        """Check that rows do not see each other in the graph that Inductor gets.

        Raises:
            OptionError: naming every operator in which they do; or the graph is one for training.
        """
        if self.marks and phase != "inference":
            raise OptionError(
                "the option 'buckets' is for inference",
                expected="a call for which no gradients are recorded",
                got=f"a {phase} graph",
                remedy="call the function under torch.no_grad() or torch.inference_mode()",
            )
        for symbol, name in self.names().items():
            if mixers := row_mixers(gm, RowDimension(symbol, name)):
                raise OptionError(
                    f"the option 'buckets' cannot pad {name!r}: rows may see each other",
                    expected="operators that compute each row from the same row of their operands",
                    got="; ".join(map(str, mixers)),
                    remedy=_DOCUMENT,
                )

    def compiling(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which AOTAutograd's cache is off, so that there is a graph to check. Inductor's stays on."""
        patch: Any = functorch_config.patch
        context: contextlib.AbstractContextManager[Any] = patch(enable_autograd_cache=False)
        return context

    def wrapped(self, compiled: Callable[..., Any], compilation: Compilation, options: Options) -> Callable[..., Any]:
        """The compiled graph, called with padded inputs; the graph itself if no marked size varies.

        Raises:
            OptionError: an input cannot be padded, or an output not cut.
        """
        made = compilation.programs[0] if compilation.programs else None
        counters = made.counters if made is not None else None
        names = self.names()
        reasons = [f"Dynamo compiles {name!r} for its size alone" for name in self.static]
        if not self.marks and not self.static:
            reasons = ["no input of the graph is marked"]
        if counters is not None:
            for reason in reasons:
                counters.count("events", f"without a bucket: {reason}")
        if not names:
            return compiled
        symbols = _Symbols.of(self.inputs)
        places = self._places(names)
        layouts = _SymbolicLayouts(self, list(names), symbols, places)
        device = made.plan.device if made is not None else self.inputs[places.padded[0][0].position].device
        arguments = compiled, places, layouts, device, counters
        checked = options.value("checked")
        return CheckedBuckets(*arguments, checked=checked) if checked else BucketedGraph(*arguments)

    def _places(self, names: dict[sympy.Symbol, str]) -> GraphPlaces:
        order = list(names)
        sizes = []
        for symbol, name in names.items():
            mark = next(mark for mark in self.marks if expression(mark.size) == symbol)
            sizes.append(BucketedSize(name, self.sizes[name], mark.position, mark.dim))
        padded, numbers, others = [], [], []
        for position, value in enumerate(self.inputs):
            if isinstance(value, torch.Tensor):
                places = _places_in(value, position, order)
                if places:
                    self._check_padded(value, position)
                    padded.append(places)
            elif expression(value) in names:
                numbers.append(BucketedDim(position, None, order.index(expression(value))))
            elif isinstance(value, torch.SymInt):
                others.append(position)
        cut = [place for position, value in enumerate(self.outputs) for place in self._output(position, value, order)]
        return GraphPlaces(
            tuple(sizes),
            tuple(numbers),
            tuple(others),
            tuple(padded),
            tuple(cut),
            self._written([p[0] for p in padded]),
        )

    def _check_padded(self, value: torch.Tensor, position: int) -> None:
        kind = ""
        if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided:
            kind = f"a {type(value).__name__} of layout {value.layout}"
        elif value.is_conj() or value.is_neg():
            kind = "a tensor that is conjugated or negated when it is read"
        if kind:
            raise OptionError(
                f"the option 'buckets' cannot pad input {position} of the graph",
                expected="a tensor of numbers in memory",
                got=kind,
            )

    def _output(self, position: int, value: Any, order: list[sympy.Symbol]) -> Sequence[BucketedDim]:
        """The places at which an output is cut.

        Raises:
            OptionError: it cannot be cut.
        """
        if isinstance(value, torch.Tensor):
            places = _places_in(value, position, order)
            if places and any(_share(value, self.inputs[p[0].position]) for p in self._padded_inputs(order)):
                raise OptionError(
                    f"the option 'buckets' cannot cut output {position} of the graph",
                    expected="an output with memory of its own",
                    got="a view of a padded input",
                    remedy="return a clone of it",
                )
            return places
        if not (found := [s for s in order if RowDimension(s, "").in_size(value)]):
            return ()
        size = expression(value)
        if len(found) > 1 or found[0] in sympy.cancel(size / found[0]).free_symbols:
            raise OptionError(
                f"the option 'buckets' cannot correct output {position} of the graph",
                expected="a number that is a multiple of the number of rows",
                got=str(size),
                remedy="compute it outside of the compiled function",
            )
        return (BucketedDim(position, None, order.index(found[0])),)

    def _padded_inputs(self, order: list[sympy.Symbol]) -> Sequence[Sequence[BucketedDim]]:
        tensors = ((p, value) for p, value in enumerate(self.inputs) if isinstance(value, torch.Tensor))
        return [places for p, value in tensors if (places := _places_in(value, p, order))]

    def _written(self, padded: Sequence[BucketedDim]) -> frozenset[int]:
        """The inputs that the graph writes to, as AOTAutograd found.

        Raises:
            OptionError: a padded input gets another size or other memory.
        """
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        if metadata is None:
            raise OptionError(
                "the option 'buckets' needs to know which inputs are written",
                expected="a graph that Dynamo passes to AOTAutograd",
                got="another one",
            )
        facts = metadata.input_info
        for place in padded:
            if facts[place.position].mutates_metadata or facts[place.position].mutates_storage_metadata:
                raise OptionError(
                    f"the option 'buckets' cannot pad input {place.position} of the graph",
                    expected="an input whose size and memory stay as they are",
                    got="one that is resized, transposed in place, or given other memory",
                )
        return frozenset(position for position, fact in enumerate(facts) if fact.mutates_data)


def _make_equal(marks: Sequence[Mark]) -> None:
    """Let Dynamo's guards demand that dimensions with one name have one size.

    Raises:
        OptionError: in this call they differ.
    """
    firsts: dict[str, Mark] = {}
    for mark in marks:
        first = firsts.setdefault(mark.name, mark)
        if mark.size != first.size:
            raise OptionError(
                f"dimensions marked {mark.name!r}",
                expected="one size",
                got=f"different sizes of inputs {first.position} and {mark.position} of the graph",
                remedy="give them two names",
            )


def _places_in(value: torch.Tensor, position: int, order: list[sympy.Symbol]) -> tuple[BucketedDim, ...]:
    dims = ((symbol, RowDimension(symbol, "").of(value)) for symbol in order)
    return tuple(BucketedDim(position, dim, order.index(symbol)) for symbol, dim in dims if dim is not None)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


@dataclass(frozen=True)
class _Symbols:
    """Where a call's inputs have the values of symbols: the input, and its dimension or None for a number."""

    places: dict[sympy.Symbol, tuple[int, int | None]]
    shape_env: Any

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> _Symbols:
        places: dict[sympy.Symbol, tuple[int, int | None]] = {}
        environment = None
        for position, value in enumerate(inputs):
            sizes = list(enumerate(value.size())) if isinstance(value, torch.Tensor) else [(None, value)]
            for dim, size in sizes:
                if isinstance(size, torch.SymInt):
                    environment = size.node.shape_env
                    if isinstance(symbol := size.node.expr, sympy.Symbol):
                        places.setdefault(symbol, (position, dim))
        return cls(places, environment)

    def values(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        return {
            symbol: inputs[position] if dim is None else inputs[position].size(dim)
            for symbol, (position, dim) in self.places.items()
        }


class _SymbolicLayouts:
    """Evaluates a graph's symbolic sizes, once for each bucket. Implements ``padding.Layouts``."""

    def __init__(self, buckets: Buckets, order: list[sympy.Symbol], symbols: _Symbols, places: GraphPlaces) -> None:
        self._order, self._symbols = order, symbols
        padded = [buckets.inputs[dims[0].position] for dims in places.padded]
        self._shapes = [(_expressions(value.size()), _expressions(value.stride())) for value in padded]
        self._per_row = []
        for place in places.cut:
            value = buckets.outputs[place.position]
            size = expression(value if place.dim is None else value.size(place.dim))
            self._per_row.append(sympy.cancel(size / order[place.size]))
        environment = symbols.shape_env
        conditions = (environment.simplify(guard.expr) for guard in environment.guards)
        self._conditions = [condition for condition in conditions if condition.free_symbols & set(order)]
        self._ranges = [environment.bound_sympy(symbol) for symbol in order]

    def layout(self, padded: Sequence[int], inputs: Sequence[Any]) -> BucketLayout | str:
        values = {**self._symbols.values(inputs), **dict(zip(self._order, padded, strict=True))}
        for bucket, bounds in zip(padded, self._ranges, strict=True):
            if not bounds.lower <= bucket <= bounds.upper:
                return f"the graph is compiled for sizes from {bounds.lower} to {bounds.upper}, and not for {bucket}"
        for condition in self._conditions:
            # A branch in the user's code, or an assumption of Inductor's, that holds for the rows of this call.
            if condition.subs(values) != sympy.true:
                return f"the graph is compiled for {condition}, which does not hold for {padded}"
        shapes = [(_numbers(size, values), _numbers(stride, values)) for size, stride in self._shapes]
        return BucketLayout(shapes, _numbers(self._per_row, values))


def _expressions(sizes: Sequence[Any]) -> list[Any]:
    return list(map(expression, sizes))


def _numbers(expressions: Sequence[Any], values: dict[sympy.Symbol, int]) -> tuple[int, ...]:
    return tuple(int(e.subs(values)) if isinstance(e, sympy.Basic) else int(e) for e in expressions)
