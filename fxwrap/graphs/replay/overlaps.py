"""Finds calls in which a mutated input overlaps another input. They are not replayed where inputs are copied.

A replay copies inputs to their static buffers first, so that a write to one input does not show in another. Dynamo
and AOTAutograd guard only the overlaps that existed when the program was compiled.

::

    def f(x, y): x.mul_(2); return y @ w          f(a, b) is recorded; f(base[:3], base[1:]) must not be replayed

The rule: a mutated input shares no element with another input (``MutatedInputs.are_apart``). A unit has a quick form
of it (``Guards::apart`` in native/guards.h): the span of bytes of a mutated input overlaps no other span. If
that does not hold, the unit misses, and the rule itself is checked here.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...host_graph.tensors import has_address, reach
from ...packing import joined
from ...plan import ProgramPlan
from ...torch_private.functions import overlap

# Addresses [begin, end).
Span = tuple[int, int]


@dataclass(frozen=True)
class MutatedInputs:
    """Tells whether the mutated inputs of a call lie apart from all others.

    Attributes:
        moving: (position, whether it is mutated) of inputs that may lie elsewhere at every call.
        static_spans: addresses of static inputs: spans in order, adjacent ones joined.
        written_static_spans: the same for mutated static inputs.
    """

    moving: Sequence[tuple[int, bool]]
    static_spans: Sequence[Span]
    written_static_spans: Sequence[Span]

    @classmethod
    def of(cls, plan: ProgramPlan) -> MutatedInputs | None:
        """The inputs of a program, none of them static; None if it has no mutated input, or only one input."""
        written = plan.facts.all_written()
        moving = [
            (p, bool(plan.facts.of(node) & written))
            for p, node in enumerate(plan.placeholders)
            if _lies_on(plan.device, node.meta.get("val"))
        ]
        return cls(moving, (), ()) if len(moving) > 1 and any(writes for _, writes in moving) else None

    def with_static(self, inputs: Sequence[Any], static: Sequence[int]) -> MutatedInputs | None:
        """The same with static inputs, at their present addresses. None if all are static: these are not copied."""
        stay = frozenset(static)
        static_spans = [(_span(inputs[p]), writes) for p, writes in self.moving if p in stay]
        moving = [(p, writes) for p, writes in self.moving if p not in stay]
        if not moving:
            return None
        spans = joined(span for span, _ in static_spans), joined(span for span, writes in static_spans if writes)
        return MutatedInputs(moving, *spans)

    def are_apart(self, inputs: Sequence[Any]) -> bool:
        """Whether no mutated input shares bytes with another input."""
        spans = sorted((*_span(inputs[p]), p, writes) for p, writes in self.moving)
        earlier: list[tuple[int, int, bool]] = []  # (end, position, whether it is mutated) of spans that began before
        for begin, end, position, writes in spans:
            if begin == end:
                continue
            if _touches(self.static_spans if writes else self.written_static_spans, begin, end):
                return False
            earlier = [span for span in earlier if span[0] > begin]
            for _, other, other_writes in earlier:
                if (writes or other_writes) and self._share(inputs[position], inputs[other]):
                    return False
            earlier.append((end, position, writes))
        return True

    def _share(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether two tensors whose spans overlap share an element. Two columns of a matrix do not."""
        same = first.untyped_storage()._cdata == second.untyped_storage()._cdata
        return not same or first.dtype != second.dtype or overlap(first, second)


class RememberedCalls:
    """``MutatedInputs.are_apart``, which remembers calls for which it holds, by layouts and addresses."""

    def __init__(self, mutated: MutatedInputs) -> None:
        self._mutated = mutated
        self._apart = set[tuple[Hashable, ...]]()

    def are_apart(self, inputs: Sequence[Any], layouts: Hashable | None) -> bool:
        """Args: layouts: stands for the layouts of all inputs; None: the call is not remembered."""
        call = (layouts, *[inputs[place].data_ptr() for place, _ in self._mutated.moving])
        if layouts is not None and call in self._apart:
            return True
        if not self._mutated.are_apart(inputs):
            return False
        if layouts is not None:
            if len(self._apart) >= _MAX_CALLS:
                self._apart.clear()
            self._apart.add(call)
        return True


# How many calls are remembered. Allocators return the same few addresses repeatedly.
_MAX_CALLS = 64


def _lies_on(device: torch.device, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and has_address(value) and value.device.type == device.type


def _span(tensor: torch.Tensor) -> Span:
    begin = tensor.data_ptr()
    return begin, begin + reach(tensor)


def _touches(spans: Sequence[Span], begin: int, end: int) -> bool:
    """Whether ``[begin, end)`` overlaps one of the spans."""
    after = bisect.bisect_left(spans, (end, 0))
    return after > 0 and spans[after - 1][1] > begin
