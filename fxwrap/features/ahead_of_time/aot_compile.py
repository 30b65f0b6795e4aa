"""``fxwrap.aot_compile``: compiles methods ahead of time, for calls in this process or for a file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...backend import parsed
from ...errors import OptionError, StorageError
from ...hooks import AROUND_GRAPHS
from .aot_program import AotMethod, AotProgram, CompiledMethods
from .codegen.export import CompiledMethod, TracedMethod, compile_method, is_constant, traced_method
from .signature import NumberInput, Signature, TensorInput, size_of, solution
from .structure import structure_of
from .tensors.entries import TensorEntries


def aot_compile(
    methods: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> AotProgram:
    """Compile methods and keep them in memory, to be called in this process. ``fxwrap.save`` writes them to a file.

    ::

        program = fxwrap.aot_compile({
            "prefill": torch.export.export(model, (tokens,), dynamic_shapes=...),
            "decode": (model, (token,)),
        })
        program.decode(token)
        fxwrap.save("model.fxw", program)

    No gradients are computed. Parameters and buffers are the module's own memory, not copies: a method sees what is
    written to them in place (by ``load_state_dict``, by an optimizer), and the module and the other methods see what
    it writes to a buffer. If a parameter is replaced by another tensor (``model.to(...)``, ``assign=True``), methods
    keep using the old one. Other tensors of the module, and weights whose values Inductor's freezing has compiled in,
    are constants, which must not be written.

    Args:
        methods: exported programs by name (``torch.export.export``), or the arguments of an export as a tuple: a
            module, example inputs, and, if any, keyword inputs and dynamic shapes.
        options: as for ``torch.compile(..., backend="fxwrap", options=...)``.
        progress: called with a line of text before each step.

    Raises:
        StorageError: a method does not compile to one program, or writes to a weight that another has frozen, or has
            a weight whose memory cannot be shared (a conjugate).
        OptionError: an option, a method or its name is wrong.
    """
    return program_of(compile_methods(methods, options, progress))


def compile_methods(
    methods: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    progress: Callable[[str], object],
    check: Callable[[TracedMethod], object] = lambda method: None,
) -> CompiledMethods:
    """Compile methods, for ``aot_compile`` and ``save``.

    Args:
        check: called with each method before it is compiled; may raise.

    Raises:
        OptionError: there are no methods, a name is none, or an option is unknown, wrong, or needs Dynamo.
    """
    if not isinstance(methods, Mapping) or not methods:
        expected = "a dictionary of names and exported programs"
        raise OptionError("methods to compile", expected=expected, got=repr(methods))
    fxwrap_options, patches = parsed(options)
    for option, value in fxwrap_options.added:
        if option in AROUND_GRAPHS:
            raise OptionError(
                f"option {option!r} for a method that is compiled ahead of time",
                expected=f'torch.compile(fn, backend="fxwrap", options={{{option!r}: ...}})',
                got=repr(value),
                remedy="leave it out: it changes calls of functions that torch.compile returns",
            )
    compiled: dict[str, CompiledMethod] = {}
    for name, method in methods.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise OptionError("the name of a method", expected="a Python name", got=repr(name))
        if hasattr(AotProgram, name):
            expected = "one that the compiled program has no other use for, as in program.decode(x)"
            raise OptionError("the name of a method", expected=expected, got=repr(name))
        progress(f"{name}: tracing")
        traced = traced_method(name, _exported(name, method))
        _check_sizes(traced)
        check(traced)
        progress(f"{name}: compiling")
        compiled[name] = compile_method(traced, fxwrap_options, patches)
        _warn_of_narrower_sizes(compiled[name])
    return CompiledMethods(compiled, fxwrap_options)


def _exported(name: str, method: Any) -> torch.export.ExportedProgram:
    if isinstance(method, torch.export.ExportedProgram):
        return method
    if isinstance(method, tuple) and method and isinstance(method[0], torch.nn.Module):
        rest: Any = (*method[1:], *((), None, None)[len(method) - 1 :])
        return torch.export.export(method[0], rest[0], rest[1], dynamic_shapes=rest[2])
    raise OptionError(
        f"method {name!r}",
        expected="what torch.export.export returned, or a tuple of a module and example inputs",
        got=f"{type(method).__name__}",
    )


def _check_sizes(method: TracedMethod) -> None:
    """Check that the sizes of a call determine all symbols.

    Raises:
        StorageError: a size depends on a symbol that the inputs do not determine.
    """
    values = [value for _, value in method.passed]
    sizes = [size for value in values for size in _expressions(_sizes(value))]
    strides = [size for value in values if isinstance(value, torch.Tensor) for size in _expressions(value.stride())]
    determined = {solved[0] for size in sizes if (solved := solution(size)) is not None}
    for condition in (*sizes, *strides, *method.guards):
        unknown: set[Any] = condition.free_symbols - determined
        if unknown:
            raise StorageError(
                f"method {method.name!r}: {condition}",
                expected="sizes that can be told from those of the inputs",
                got=", ".join(sorted(map(str, unknown))),
                remedy="export it with such a size as a dimension of an input, or as a constant",
            )


def _sizes(value: Any) -> Sequence[Any]:
    return value.size() if isinstance(value, torch.Tensor) else (value,)


def _expressions(numbers: Sequence[Any]) -> list[Any]:
    return [number.node.expr for number in numbers if isinstance(number, torch.SymInt)]


def _warn_of_narrower_sizes(method: CompiledMethod) -> None:
    """Warn if calls refuse sizes that the export has declared: Inductor has decided by the example's sizes."""
    if not method.narrowing:
        return
    ranges = {size: bounds for size, bounds in method.traced.ranges.items() if bounds != (None, None)}
    conditions = ", ".join(map(str, method.narrowing))
    symbols = sorted({str(size) for guard in method.narrowing for size in guard.free_symbols})
    where = [
        f"{size} is size {dim} of {name!r}"
        for size in symbols
        for name, value in method.traced.passed
        for dim, expression in enumerate(map(str, _sizes(value)))
        if expression == size
    ]
    declared = [f"{low} <= {size} <= {high}" for size, (low, high) in ranges.items() if str(size) in symbols]
    warnings.warn(
        f"fxwrap: method {method.traced.name!r} accepts fewer sizes than were exported\n"
        f"  expected: {', '.join(declared)} ({', '.join(where)})\n"
        f"  got: code for {conditions} alone, which Inductor has chosen by the size of the example (a convolution's "
        "layout, for example); calls with other sizes raise InputError\n"
        "  what to do: export one method for each side of the condition, with a Dim of these bounds and an example "
        "within them",
        stacklevel=4,
    )


def signature_of(method: CompiledMethod) -> Signature:
    """What a compiled method takes and returns."""
    traced, devices = method.traced, iter(method.devices[len(method.weights) :])

    def input_of(name: str, value: Any) -> TensorInput | NumberInput:
        if is_constant(value):
            return NumberInput(name, type(value), value)
        device: Any = next(devices)
        if isinstance(value, torch.Tensor):
            sizes = tuple(map(size_of, value.size())), tuple(map(size_of, value.stride()))
            return TensorInput(name, value.dtype, device, *sizes)
        return NumberInput(name, int, size_of(value))

    inputs = tuple(input_of(name, value) for name, value in traced.inputs)
    ranges = {symbol.name: bounds for symbol, bounds in traced.ranges.items()}
    arguments, results = structure_of(traced.arguments), structure_of(traced.results, traced.constants)
    return Signature(traced.name, inputs, ranges, tuple(method.guards), arguments, results)


def program_of(compiled: CompiledMethods) -> AotProgram:
    """The program that runs compiled methods in this process.

    Raises:
        StorageError: a method writes to a weight that another has frozen, or a weight is a conjugated or
            negated view, whose memory cannot be shared.
    """
    tensors, methods = TensorEntries(), {}
    for name, method in compiled.methods.items():
        for weight, tensor in method.weights.items():
            for bit, view in (("neg", tensor.is_neg()), ("conj", tensor.is_conj())):
                if view:
                    raise StorageError(
                        f"weight {weight!r} of {name!r}",
                        expected="numbers as they lie in memory, which the program shares",
                        got=f"a view, with the {bit} bit",
                        remedy=f"register what resolve_{bit}() returns",
                    )
        weights = {weight: tensors.tensor(number) for weight, number in tensors.add_weights(method).items()}
        methods[name] = AotMethod(signature_of(method), method.program, weights, method.frozen)
    tensors.check_frozen()
    by_name = {name: tensors.tensor(number) for number, name in enumerate(tensors.names())}
    return AotProgram(methods, by_name, tensors.described(), compiled)
