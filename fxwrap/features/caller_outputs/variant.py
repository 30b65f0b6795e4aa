"""Variants of a program whose results are written to tensors of the caller."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ...errors import InputError
from ...graphs.compilation import Compilation, compilation_of
from ...graphs.prepared import DynamicSizes
from ...graphs.program import Program
from ...graphs.replay.overlaps import MutatedInputs, RememberedCalls
from ...host_graph.nodes import output_values
from ...host_graph.sizes import evaluate_sizes, layout_at, symbols_at
from ...pipeline import compile_variant
from .rewrite import caller_outputs, with_caller_outputs

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
# Sizes for which the layouts of results are remembered.
_MOST = 64


def layout_of(tensor: torch.Tensor) -> Layout:
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


def layout_text(layout: Layout) -> str:
    size, stride, dtype, device = layout
    return f"a tensor of size {tuple(size)}, stride {tuple(stride)}, {dtype} on {device}"


class Variants:
    """The variants of one program, made when they are first asked for.

    Args:
        subject: of errors: what the caller has called.
        static: positions of inputs that stay where they are at the first call.
        compilation: where reports find the variants; by default that of the program.
    """

    def __init__(
        self,
        program: Program,
        subject: str,
        static: Sequence[int] = (),
        compilation: Compilation | None = None,
    ) -> None:
        self._program, self._subject, self._static = weakref.ref(program), subject, static
        self.compilation = compilation
        self._results = len(output_values(program.plan.graph))
        self._sizes = DynamicSizes.of(program.plan.placeholders)
        self._layouts = dict[Any, dict[int, Layout]]()
        self._variants = dict[tuple[int, ...], tuple[Program, RememberedCalls | None]]()

    def run(self, inputs: list[Any], given: Mapping[int, torch.Tensor]) -> list[Any]:
        """Run the program, which writes to the given tensors.

        Args:
            inputs: of the program; the list is emptied.
            given: tensors by position of the program's results. ``layouts`` has each of these positions.

        Returns:
            The results of the program, with the given tensors in their places.

        Raises:
            InputError: a tensor has another layout than the result, or shares memory with an input or another one.
        """
        key = self._sizes.key(inputs)
        expected = self._layouts_at(key, inputs)
        for position, tensor in given.items():
            if expected[position] != (got := layout_of(tensor)):
                raise self.refused(layout_text(expected[position]), layout_text(got))
        positions = tuple(sorted(given))
        values = [*inputs, *(given[position] for position in positions)]
        inputs.clear()
        if (known := self._variants.get(positions)) is None:
            known = self._variants[positions] = self._made(positions, values)
        variant, mutated = known
        # Where no size varies, the key is None.
        if mutated is not None and not mutated.are_apart(values, (key,)):
            raise self.refused("tensors with memory of their own", "one that shares memory with an input or another")
        others = iter(variant.run(values))
        torch.autograd.graph.increment_version(list(given.values()))
        return [given[p] if p in given else next(others) for p in range(self._results)]

    def layouts(self, inputs: Sequence[Any]) -> dict[int, Layout]:
        """The layouts of results at the sizes of these inputs, by position.

        Those that are no tensors are missing, and those whose size the data decides.
        """
        return self._layouts_at(self._sizes.key(inputs), inputs)

    def _layouts_at(self, key: Any, inputs: Sequence[Any]) -> dict[int, Layout]:
        layouts = self._layouts.get(key)
        if layouts is None:
            if len(self._layouts) >= _MOST:
                self._layouts.clear()
            layouts = self._layouts[key] = _layouts(self._whole(), inputs)
        return layouts

    def refused(self, expected: str, got: str) -> InputError:
        return InputError(self._subject, expected=expected, got=got)

    def _whole(self) -> Program:
        program = self._program()
        assert program is not None  # who calls has it
        return program

    def _made(self, positions: tuple[int, ...], values: Sequence[Any]) -> tuple[Program, RememberedCalls | None]:
        variant = program_with_outputs(self._whole(), positions, self.compilation)
        mutated = MutatedInputs.of(variant.plan)
        mutated = mutated.with_static(values, self._static) if mutated and self._static else mutated
        return variant, RememberedCalls(mutated) if mutated else None


def _layouts(program: Program, inputs: Sequence[Any]) -> dict[int, Layout]:
    plan = program.plan
    symbols = symbols_at(evaluate_sizes(plan.graph, dict(zip(plan.placeholders, inputs, strict=True))))
    layouts: dict[int, Layout] = {}
    for position, node in enumerate(output_values(plan.graph)):
        value: Any = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if (layout := layout_at(value, symbols)) is not None:
            layouts[position] = torch.Size(layout[0]), layout[1], value.dtype, value.device
    return layouts


def program_with_outputs(
    program: Program, positions: Collection[int], compilation: Compilation | None = None
) -> Program:
    """A variant of a program: it takes a tensor for each of these results after its inputs, and returns the others.

    Args:
        compilation: where reports find it; by default that of ``program``.
    """
    plan = program.plan
    graph = with_caller_outputs(plan.graph, caller_outputs(plan.graph, positions))
    count = len(plan.placeholders)
    inputs = dataclasses.replace(plan.inputs, write_only=frozenset(range(count, count + len(positions))))
    return compile_variant(program, graph, inputs, compilation or compilation_of(program))


def check_given(tensors: Sequence[Any], subject: str) -> None:
    """Check that the caller may write to its tensors now. None stands for a new tensor.

    Raises:
        InputError: one is no dense tensor, is conjugated or negated when it is read, asks for gradients, or was made
            in inference mode, which is off now.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            raise InputError(subject, expected="dense tensors, or None", got=type(tensor).__name__)
        if tensor.is_conj() or tensor.is_neg():
            expected = "numbers as they lie in memory"
            raise InputError(subject, expected=expected, got="a tensor that is conjugated or negated when it is read")
        if tensor.requires_grad:
            expected = "no gradient to be asked for"
            raise InputError(subject, expected=expected, got="a tensor with requires_grad=True")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise InputError(
                subject,
                expected="tensors that may be written outside of torch.inference_mode()",
                got="a tensor that was made in it",
                remedy="make it outside of the mode, or call inside of it",
            )
