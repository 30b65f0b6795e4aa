"""``bound.run(x, out=y)``: the results of a bound function are written to tensors of the caller.

A bound function calls Dynamo's code, that calls AOTAutograd's, and that calls a program. None of them has a parameter
for results: so the tensors are left in ``REQUESTS`` (``graphs/program.py``), where the program takes them from. The
first call matches the results of the function with those of its program, by the memory that they lie in.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..artifacts.caller_outputs import check_writable, program_with_outputs
from ..errors import InputError
from ..graphs.prepared import DynamicSizes
from ..graphs.program import REQUESTS, Program
from ..graphs.replay.overlaps import MutatedInputs, RememberedCalls
from ..host_graph.nodes import output_node, output_values
from ..host_graph.sizes import evaluate_sizes, layout_at, symbols_at
from ..host_graph.tensors import has_address

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
# Sizes for which the layouts of results are remembered.
_MOST = 64


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


@dataclass(eq=False)
class BoundOutputs:
    """The ``run`` of one bound function.

    Attributes:
        function: the bound function.
        ordinary_calls: its calls through ``torch.compile``'s wrapper, by reason.
        ways: how results get to the caller's tensors, by the program that makes them.
    """

    function: Callable[..., Any]
    ordinary_calls: Counter[str]
    ways: weakref.WeakKeyDictionary[Program, Way] = field(default_factory=weakref.WeakKeyDictionary)

    def run(self, *args: Any, out: Any, **kwargs: Any) -> Any:
        """Call the function, and write results to tensors of the caller. See ``fxwrap.bind``.

        Args:
            out: a tensor for each result, in the structure of what the function returns; None for each result that
                is to be a new tensor.

        Returns:
            What a call returns, with the given tensors in it.

        Raises:
            InputError: a tensor does not fit, shares memory with an input, or gradients are on. Nothing has run then;
                except that the first call of a program runs, to learn how results are made.
        """
        given, structure = pytree.tree_flatten(out)
        for tensor in given:
            if tensor is not None and (type(tensor) is not torch.Tensor or tensor.layout is not torch.strided):
                raise _refused("dense tensors, or None", type(tensor).__name__)
            if tensor is not None and tensor.requires_grad:
                raise _refused("no gradient to be asked for", "a tensor with requires_grad=True")
        check_writable(given, "out= of a bound function")
        ordinary, request = sum(self.ordinary_calls.values()), _Request(self.ways, given)
        thread = threading.get_ident()
        REQUESTS[thread] = request
        try:
            result = self.function(*args, **kwargs)
        finally:
            REQUESTS.pop(thread, None)
        leaves, made = pytree.tree_flatten(result)
        if made != structure:
            raise _refused(f"the structure of the results, {made}", str(structure))
        if request.program is not None and sum(self.ordinary_calls.values()) == ordinary:
            # No call went through torch.compile's wrapper: the code has no graph break, and one program made all.
            self.ways[request.program] = Way.of(request.program, request.outputs, leaves)
        for place, tensor in enumerate(given):
            if tensor is not None and leaves[place] is not tensor:
                _copy(leaves[place], tensor)
                leaves[place] = tensor
        return pytree.tree_unflatten(leaves, made)


def _copy(result: Any, tensor: torch.Tensor) -> None:
    if type(result) is not torch.Tensor or not has_address(result):
        raise _refused(f"None for a result of type {type(result).__name__}", "a tensor")
    if result.requires_grad:
        raise _refused("no gradients: torch.no_grad() or torch.inference_mode()", "a result with requires_grad=True")
    if _layout(result) != _layout(tensor):
        raise _refused(*map(_text, (_layout(result), _layout(tensor))))
    if result.data_ptr() != tensor.data_ptr():
        tensor.copy_(result)


def _text(layout: Layout) -> str:
    size, stride, dtype, device = layout
    return f"a tensor of size {tuple(size)}, stride {tuple(stride)}, {dtype} on {device}"


def _refused(expected: str, got: str) -> InputError:
    return InputError("out= of a bound function", expected=expected, got=got)


@dataclass(eq=False)
class _Request:
    """What a call asks of the program that it comes to.

    Attributes:
        given: the caller's tensors, or None, in the order of the function's results.
        program: the one that ran without them, because it has no ``Way`` yet.
        outputs: its results.
    """

    ways: weakref.WeakKeyDictionary[Program, Way]
    given: Sequence[torch.Tensor | None]
    program: Program | None = None
    outputs: Sequence[Any] = ()

    def __call__(self, program: Program, inputs: list[Any]) -> Any:
        if program.plan.phase != "inference":
            raise _refused("no gradients: torch.no_grad() or torch.inference_mode()", "a call that records gradients")
        way = self.ways.get(program)
        if way is not None:
            return way.run(inputs, self.given)
        outputs = program.run(inputs)
        self.program, self.outputs = program, list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        return outputs


class Way:
    """How the results of one program get to the caller's tensors.

    Args:
        places: the position of a result in the program's, by its position in the function's. Others are copied.
    """

    def __init__(self, program: Program, places: dict[int, int]) -> None:
        self._program, self._places = weakref.ref(program), places
        self._sizes = DynamicSizes.of(program.plan.placeholders)
        self._expected = dict[Any, dict[int, Layout]]()
        self._variants = dict[tuple[int, ...], tuple[Program, RememberedCalls | None]]()

    @classmethod
    def of(cls, program: Program, outputs: Sequence[Any], results: Sequence[Any]) -> Way:
        """Match the results of a function with those of its program, by their memory."""

        def at(value: Any) -> Any:
            if type(value) is not torch.Tensor or not has_address(value) or not value.numel():
                return None
            return value.data_ptr(), _layout(value)

        made = {at(value): position for position, value in enumerate(outputs)}
        places = {place: made[at(value)] for place, value in enumerate(results) if at(value) in made}
        return cls(program, {place: position for place, position in places.items() if at(results[place]) is not None})

    def run(self, inputs: list[Any], given: Sequence[torch.Tensor | None]) -> Any:
        """Run the program with the caller's tensors. ``inputs`` is emptied."""
        program = self._program()
        assert program is not None
        key = self._sizes.key(inputs)
        expected = self._layouts_at(key, program, inputs)
        wanted = {
            position: tensor
            for n, tensor in enumerate(given)
            if tensor is not None and (position := self._places.get(n)) in expected
        }
        if not wanted:
            return program.run(inputs)
        positions = tuple(sorted(wanted))
        if (known := self._variants.get(positions)) is None:
            known = self._variants[positions] = _variant(program, positions)
        variant, mutated = known
        for position, tensor in wanted.items():
            if expected[position] != (got := _layout(tensor)):
                raise _refused(_text(expected[position]), _text(got))
        values = [*inputs, *(wanted[position] for position in positions)]
        inputs.clear()
        # Where no size varies, the key is None.
        if mutated is not None and not mutated.are_apart(values, (key,)):
            raise _refused("tensors with memory of their own", "one that shares memory with an input or another")
        others = iter(variant.run(values))
        torch.autograd.graph.increment_version(list(wanted.values()))
        count = len(output_values(program.plan.graph))
        outputs = tuple(wanted[p] if p in wanted else next(others) for p in range(count))
        returns_several = isinstance(output_node(program.plan.graph).args[0], (list, tuple))
        return outputs if returns_several else outputs[0]

    def _layouts_at(self, key: Any, program: Program, inputs: Sequence[Any]) -> dict[int, Layout]:
        """The layouts of results at these sizes. Those whose size the data decides are missing: they are copied."""
        expected = self._expected.get(key)
        if expected is None:
            if len(self._expected) >= _MOST:
                self._expected.clear()
            expected = self._expected[key] = _layouts(program, inputs)
        return expected


def _variant(program: Program, positions: tuple[int, ...]) -> tuple[Program, RememberedCalls | None]:
    variant = program_with_outputs(program, positions)
    mutated = MutatedInputs.of(variant.plan, variant.functions.overlap)
    return variant, RememberedCalls(mutated) if mutated else None


def _layouts(program: Program, inputs: Sequence[Any]) -> dict[int, Layout]:
    """The layouts of a program's results at the sizes of its inputs, by position."""
    plan = program.plan
    symbols = symbols_at(evaluate_sizes(plan.graph, dict(zip(plan.placeholders, inputs, strict=True))))
    layouts: dict[int, Layout] = {}
    for position, node in enumerate(output_values(plan.graph)):
        value: Any = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if (layout := layout_at(value, symbols)) is not None:
            layouts[position] = torch.Size(layout[0]), layout[1], value.dtype, value.device
    return layouts
