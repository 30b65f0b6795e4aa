"""Methods whose results are written to tensors of the caller: ``method.run(x, out=y)``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..compilation import Compilation
from ..errors import InputError
from ..graphs.program import Program
from ..host_graph.nodes import output_values
from ..passes.rewrites.caller_outputs import caller_outputs, with_caller_outputs
from ..pipeline import HostGraphPlanner, compile_host_graph
from .signature import NumberInput, Signature, Size, TensorInput, size_of


def program_with_outputs(
    program: Program, positions: Collection[int], compilation: Compilation | None = None
) -> Program:
    """A variant of a program: it takes a tensor for each of these results after its inputs, and returns the others.

    Args:
        compilation: where reports find it; by default that of ``program``.
    """
    planner = program.planner
    assert isinstance(planner, HostGraphPlanner)
    emitted = planner.emitted
    graph = with_caller_outputs(emitted.graph, caller_outputs(emitted.graph, positions))
    count = len(program.plan.placeholders)
    request = dataclasses.replace(
        emitted.request,
        write_only=frozenset(range(count, count + len(positions))),
        compilation=compilation or emitted.request.compilation,
    )
    return compile_host_graph(graph, request, dataclasses.replace(planner.stages, rewrites=()))


def signature_with_outputs(signature: Signature, program: Program, names: Mapping[int, str]) -> Signature:
    """The signature of a method that takes tensors for its results, too.

    Args:
        program: the program of the method.
        names: how errors call the tensors, by position of the result.

    Raises:
        InputError: a result is no tensor, or its size does not follow from those of the inputs.
    """
    values = output_values(program.plan.graph)
    symbols = {symbol.name: symbol for symbol in _symbols(signature.inputs)}
    given = []
    for position, name in names.items():
        value = values[position].meta.get("val") if isinstance(values[position], Node) else None
        subject = f"{name} of {signature.method}"
        if not isinstance(value, torch.Tensor):
            raise InputError(subject, expected="None, because this result is no tensor", got="a value")
        sizes = [_in_symbols(size_of(number), symbols) for number in (*value.size(), *value.stride())]
        if value.layout is not torch.strided or None in sizes:
            expected = "a dense result whose size is known before the call"
            raise InputError(
                subject, expected=expected, got=f"one that only the call can make: {tuple(value.size())}"
            )
        size, stride = sizes[: value.dim()], sizes[value.dim() :]
        given.append(TensorInput(name, value.dtype, value.device, tuple(size), tuple(stride)))
    return dataclasses.replace(signature, inputs=(*signature.inputs, *given))


def _symbols(inputs: Sequence[TensorInput | NumberInput]) -> set[Any]:
    sizes = [size for known in inputs for size in (known.size if isinstance(known, TensorInput) else (known.value,))]
    return set().union(*(getattr(size, "free_symbols", ()) for size in sizes))


def _in_symbols(size: Size, symbols: Mapping[str, Any]) -> Size | None:
    """The size with a signature's symbols in place of the graph's, by name. None if one is missing."""
    if isinstance(size, int):
        return size
    if not all(symbol.name in symbols for symbol in size.free_symbols):
        return None
    return size.xreplace({symbol: symbols[symbol.name] for symbol in size.free_symbols})


def check_writable(tensors: Sequence[Any], subject: str) -> None:
    """Check that the caller may write to its tensors now.

    Raises:
        InputError: one was made in inference mode, which is off now.
    """
    if not torch.is_inference_mode_enabled():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_inference():
                raise InputError(
                    subject,
                    expected="tensors that may be written outside of torch.inference_mode()",
                    got="a tensor that was made in it",
                    remedy="make it outside of the mode, or call inside of it",
                )


Call = Callable[[list[Any]], Any]


class CallerOutputs:
    """The variants of one method that write to tensors of the caller, made when they are first asked for.

    Args:
        make: makes, of a variant's program and signature, the function that calls it with a flat list of inputs.

    Attributes:
        compilation: where reports find the programs of the variants.
    """

    def __init__(self, signature: Signature, program: Program, make: Callable[[Program, Signature], Call]) -> None:
        self._signature, self._program, self._make = signature, program, make
        self._calls = dict[tuple[int, ...], Call]()
        self.compilation: Compilation | None = None

    def call(self, inputs: list[Any], given: Sequence[torch.Tensor | None]) -> list[Any]:
        """Call the method. Returns its results: the given tensors, and new ones where None is given.

        Raises:
            InputError: a given tensor does not fit, may not be written, or shares memory with an input.
        """
        positions = tuple(position for position, tensor in enumerate(given) if tensor is not None)
        if (call := self._calls.get(positions)) is None:
            call = self._calls[positions] = self._variant(positions, len(given))
        tensors: Any = [given[position] for position in positions]
        check_writable(tensors, f"out of {self._signature.method}")
        others = iter(call([*inputs, *tensors]))
        torch.autograd.graph.increment_version(tensors)
        return [next(others) if tensor is None else tensor for tensor in given]

    def _variant(self, positions: tuple[int, ...], results: int) -> Call:
        names = {position: "out" if results == 1 else f"out[{position}]" for position in positions}
        signature = signature_with_outputs(self._signature, self._program, names)
        return self._make(program_with_outputs(self._program, positions, self.compilation), signature)
