"""``bound.run(x, out=y)``: the results of a bound function are written to tensors of the caller.

A bound function calls Dynamo's code, that calls AOTAutograd's, and that calls a program. None of them has a parameter
for results: so a runner brings the tensors to the program (``graphs/program_runs.py``). The first call matches the
results of the function with those of its program, by the memory that they lie in.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import InputError
from ...graphs.program import Program
from ...graphs.program_runs import programs_run_by
from ...host_graph.nodes import output_node
from ...host_graph.tensors import has_address
from ..caller_outputs.variant import Variants, check_given, layout_of, layout_text

_SUBJECT = "out= of a bound function"


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
        check_given(given, _SUBJECT)
        ordinary, request = sum(self.ordinary_calls.values()), _Request(self.ways, given)
        with programs_run_by(request):
            result = self.function(*args, **kwargs)
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
    if layout_of(result) != layout_of(tensor):
        raise _refused(*map(layout_text, (layout_of(result), layout_of(tensor))))
    if result.data_ptr() != tensor.data_ptr():
        tensor.copy_(result)


def _refused(expected: str, got: str) -> InputError:
    return InputError(_SUBJECT, expected=expected, got=got)


@dataclass(eq=False)
class _Request:
    """What a call asks of the program that it comes to.

    Attributes:
        given: the caller's tensors, or None, in the order of the function's results.
        program: the one that ran without them, because it has no ``Way`` yet.
        outputs: its results.
        asked: whether the call has come to a program.
    """

    ways: weakref.WeakKeyDictionary[Program, Way]
    given: Sequence[torch.Tensor | None]
    program: Program | None = None
    outputs: Sequence[Any] = ()
    asked: bool = False

    def __call__(self, program: Program, inputs: list[Any]) -> Any:
        with programs_run_by(None):
            # Only the first program that a call comes to can be the one that makes its results.
            asked, self.asked = self.asked, True
            return program.run(inputs) if asked or program.is_wrapped else self._ask(program, inputs)

    def _ask(self, program: Program, inputs: list[Any]) -> Any:
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
        self._variants = Variants(program, _SUBJECT)
        self._returns_several = isinstance(output_node(program.plan.graph).args[0], (list, tuple))

    @classmethod
    def of(cls, program: Program, outputs: Sequence[Any], results: Sequence[Any]) -> Way:
        """Match the results of a function with those of its program, by their memory."""

        def at(value: Any) -> Any:
            if type(value) is not torch.Tensor or not has_address(value) or not value.numel():
                return None
            return value.data_ptr(), layout_of(value)

        made = {at(value): position for position, value in enumerate(outputs)}
        places = {place: made[at(value)] for place, value in enumerate(results) if at(value) in made}
        return cls(program, {place: position for place, position in places.items() if at(results[place]) is not None})

    def run(self, inputs: list[Any], given: Sequence[torch.Tensor | None]) -> Any:
        """Run the program with the caller's tensors. ``inputs`` is emptied."""
        expected = self._variants.layouts(inputs)
        wanted = {
            position: tensor
            for n, tensor in enumerate(given)
            if tensor is not None and (position := self._places.get(n)) in expected
        }
        if not wanted:
            program = self._program()
            assert program is not None
            return program.run(inputs)
        outputs = self._variants.run(inputs, wanted)
        return tuple(outputs) if self._returns_several else outputs[0]
