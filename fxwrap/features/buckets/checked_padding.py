"""Checks of padding: the rows of a call must be the same, whatever the rows of padding hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import CheckError
from ...graphs.copies import Generators, difference, without_gradients
from ...host_graph.tensors import unexpanded
from .padding import BucketedGraph, BucketLayout, PaddedBuffer, dim_of

# With ``checked=True``, every tenth call is checked.
_EVERY = 10


class CheckedBuckets(BucketedGraph):
    """Runs some calls a second time with other rows of padding, and compares the caller's rows bit for bit.

    The first call of each layout is checked, and every n-th one. The outputs of a checked call are copies. After a
    ``CheckError`` nothing is padded.
    """

    def __init__(self, *args: Any, checked: bool | int) -> None:
        super().__init__(*args)
        self._every = _EVERY if checked is True else int(checked)
        self._call_numbers = itertools.count(1)
        self._seen: set[int] = set()
        self._found = ""  # why nothing is padded any more

    def _run(
        self,
        inputs: Sequence[Any],
        rows: list[int],
        padded: list[int],
        layout: BucketLayout,
        buffers: list[PaddedBuffer],
    ) -> Any:
        if self._found:
            self._count(self._found)
            return self.compiled(*inputs)
        due = next(self._call_numbers) % self._every == 0 or id(layout) not in self._seen
        if not due or rows == padded:
            return super()._run(inputs, rows, padded, layout, buffers)
        self._seen.add(id(layout))
        with without_gradients():
            before, generators = self._written(inputs), Generators(self.device)
            # A second live output would change how outputs are handed out from then on: it is dropped first.
            outputs = _copied(super()._run(inputs, rows, padded, layout, buffers))
            after, random = self._written(inputs), Generators(self.device)
            _restore(inputs, before)
            generators.set()
            arguments = self._padded(inputs, rows, padded, buffers)
            self._pad_otherwise(rows, buffers)
            again = _copied(self._cut(self.compiled(*arguments), rows, layout))
            self._copy_back(inputs, buffers)
            written_again = self._written(inputs)
            _restore(inputs, after)
            random.set()
        for what, got, expected in (("output", outputs, again), ("input", after, written_again)):
            items = got.items() if isinstance(got, dict) else enumerate(got)
            for position, value in items:
                if text := difference(value, expected[position]):
                    self._found = "without a bucket: checked mode has found: rows see each other"
                    raise CheckError(
                        f"{what} {position} of a call with {self._describe(rows, padded)} depends on rows of padding",
                        fault="rows see each other",
                        expected="the same numbers for other rows of padding",
                        got=text,
                        remedy="leave the option 'buckets' out for this function, and report the operators in it",
                    )
        return outputs

    def _describe(self, rows: Sequence[int], padded: Sequence[int]) -> str:
        sizes = zip(self.places.sizes, rows, padded, strict=True)
        return ", ".join(f"{true} rows in bucket {bucket} of {size.name!r}" for size, true, bucket in sizes)

    def _written(self, inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Copies of the inputs that the graph writes to, by position."""
        return {position: inputs[position].clone() for position in sorted(self.places.written)}

    def _pad_otherwise(self, rows: Sequence[int], buffers: Sequence[PaddedBuffer]) -> None:
        """Fill rows of padding with all of the caller's rows, in every input with the same ones."""
        for places, buffer in zip(self.places.padded, buffers, strict=True):
            for place in places:
                true, dim = rows[place.size], dim_of(place)
                padding = buffer.tensor.narrow(dim, true, buffer.tensor.size(dim) - true)
                if padding.stride(dim):
                    numbers = torch.arange(padding.size(dim), device=padding.device) % true
                    unexpanded(padding).copy_(unexpanded(buffer.tensor).index_select(dim, numbers))


def _copied(outputs: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in outputs]


def _restore(inputs: Sequence[Any], values: dict[int, torch.Tensor]) -> None:
    for position, value in values.items():
        inputs[position].copy_(value)
