"""Buckets: calls with few rows are padded to the next of a few sizes, so that each size needs one recording.

``BucketedGraph`` stands around a compiled graph::

    inputs (5 rows) --copied--> buffers (8 rows) --> compiled graph --> outputs (8 rows) --cut--> outputs (5 rows)

Rows of padding are copies of the caller's last row: whatever is valid for that row (an index that it computes, a
divisor) is valid for them. The compiled graph only ever sees the bucket's size. That rows of padding change no other
row is proved before (``passes/analysis/rows.py``).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...graphs.devices.runtime import capture_check, current_stream, freezes_addresses
from ...graphs.memory.static_buffers import copy_tensors
from ...graphs.policy.counters import Counters
from ...host_graph.tensors import unexpanded

# Layouts that one graph keeps, and with them buffers: one for each bucket, and each value of other sizes that vary.
_LAYOUTS = 64
# Sizes of calls for which is remembered what they do.
_CALLS = 1024


@dataclass(frozen=True)
class BucketedSize:
    """A size of inputs that is padded.

    Attributes:
        name: as in the option ``buckets``.
        buckets: the sizes that it is padded to, in ascending order.
        position, dim: the input, and its dimension, that have the size in a call.
    """

    name: str
    buckets: tuple[int, ...]
    position: int
    dim: int

    def bucket_of(self, rows: int) -> int | None:
        """The smallest bucket with room for so many rows; None if there is none."""
        place = bisect.bisect_left(self.buckets, rows)
        return self.buckets[place] if place < len(self.buckets) else None


@dataclass(frozen=True)
class BucketedDim:
    """A bucketed dimension of an input or an output.

    Attributes:
        position: the position among inputs or outputs.
        dim: the dimension; None for an output that is a number.
        size: the index of its ``BucketedSize``.
    """

    position: int
    dim: int | None
    size: int


@dataclass
class PaddedBuffer:
    """A static buffer of one padded input.

    Attributes:
        tensor: the buffer, of the bucket's size.
        repeats: whether it has one element along a dimension that repeats it.
        rows: what the views below are for: the rows that the caller has, of each bucketed size.
        part: the part of the buffer that holds the caller's rows.
        padding: rows of padding, and the row that is copied there, along one dimension after the other.
    """

    tensor: torch.Tensor
    repeats: bool
    rows: Sequence[int] = ()
    part: torch.Tensor = field(init=False)
    padding: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)

    def view(self, places: Sequence[BucketedDim], rows: Sequence[int]) -> None:
        """Make the views for so many rows; calls in a row mostly have the same."""
        padding = []
        with torch.inference_mode(False):
            self.part = _true_part(self.tensor, places, rows)
            for done, place in enumerate(places, 1):
                # Along later dimensions there is no padding yet.
                whole, true, dim = _true_part(self.tensor, places[done:], rows), rows[place.size], dim_of(place)
                rest = whole.narrow(dim, true, whole.size(dim) - true)
                if rest.size(dim) and rest.stride(dim):
                    padding.append((unexpanded(rest), unexpanded(whole.narrow(dim, true - 1, 1))))
        self.rows, self.padding = rows, padding


@dataclass
class BucketLayout:
    """What buffers and outputs look like for one bucket.

    Attributes:
        shapes: the size and the stride of each padded input, in the order of ``GraphPlaces.padded``.
        per_row: how many elements of an output's dimension belong to one row, in the order of ``GraphPlaces.cut``.
        free: sets of buffers that no call uses, by the stream on which they were used.
    """

    shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    per_row: Sequence[int]
    free: dict[Any, list[list[PaddedBuffer]]] = field(default_factory=dict)


@dataclass(frozen=True)
class CallSizes:
    """What calls of one set of sizes do.

    Attributes:
        padded: the bucket of each size; the size itself if there is none.
        layout: the layout for these buckets; None if the call runs without a bucket.
        reason: then why, as an event.
        events: otherwise what is counted, and how much.
    """

    padded: list[int]
    layout: BucketLayout | None
    reason: str
    events: tuple[tuple[str, int], ...]


class Layouts(Protocol):
    """Evaluates the symbolic sizes of a graph (``codegen/buckets.py``)."""

    def layout(self, padded: Sequence[int], inputs: Sequence[Any]) -> BucketLayout | str:
        """The layout for these buckets; or why the graph cannot run with them."""


@dataclass(frozen=True)
class GraphPlaces:
    """Where a graph has bucketed sizes.

    Attributes:
        sizes: the bucketed sizes.
        numbers: inputs that are a bucketed size itself.
        others: positions of inputs that are other sizes.
        padded: for each padded input its bucketed dimensions.
        cut: the bucketed dimensions of outputs, and outputs that are numbers of rows.
        written: positions of inputs that the graph writes to.
    """

    sizes: tuple[BucketedSize, ...]
    numbers: tuple[BucketedDim, ...]
    others: tuple[int, ...]
    padded: tuple[tuple[BucketedDim, ...], ...]
    cut: tuple[BucketedDim, ...]
    written: frozenset[int]


class BucketedGraph:
    """A compiled graph of Dynamo's, called with padded inputs. Thread-safe.

    Args:
        compiled: the graph; it is called with Dynamo's inputs, in order, and returns a sequence.
        counters: where buckets and rows of padding are counted; None if fxwrap made no program.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        places: GraphPlaces,
        layouts: Layouts,
        device: torch.device,
        counters: Counters | None,
    ) -> None:
        self.compiled, self.places, self.device = compiled, places, device
        self._evaluated, self._counters = layouts, counters
        self._layouts: dict[Any, BucketLayout | str] = {}
        self._calls: dict[Any, CallSizes] = {}
        self._fixed = freezes_addresses(device)
        self._on_accelerator = device.type != "cpu"
        self._caller_captures = capture_check(device)
        self._copied_back = [p for p in (dims[0].position for dims in places.padded) if p in places.written]

    def __call__(self, *inputs: Any) -> Any:
        rows = [inputs[size.position].size(size.dim) for size in self.places.sizes]
        key = (*rows, *(inputs[position] for position in self.places.others))
        sizes = self._calls.get(key) or self._prepare(key, rows, inputs)
        layout, reason = sizes.layout, sizes.reason
        if self._on_accelerator and self._caller_captures():
            reason = "without a bucket: the caller captures"
        elif self._copied_back and self._written_memory_is_shared(inputs):
            reason = "without a bucket: an input that is written shares memory with another input"
        if layout is None or reason:
            self._count(reason)
            return self.compiled(*inputs)
        for event, number in sizes.events:
            self._count(event, number)
        if sizes.padded == rows and not self._fixed:
            return self.compiled(*inputs)  # the CPU's programs take inputs where they are
        stream = current_stream(self.device) if self._on_accelerator else None
        free = layout.free.setdefault(stream, [])
        try:
            buffers = free.pop()
        except IndexError:
            buffers = self._new_buffers(layout, inputs)
        try:
            return self._run(inputs, rows, sizes.padded, layout, buffers)
        finally:
            free.append(buffers)

    def _count(self, event: str, number: int = 1) -> None:
        if self._counters is None:
            return
        if number == 1:
            self._counters.count("events", event)
        else:
            self._counters.add("events", event, number)

    def _prepare(self, key: Any, rows: Sequence[int], inputs: Sequence[Any]) -> CallSizes:
        """What calls of these sizes do, which is kept."""
        padded, layout, reason = list[int](), None, ""
        for size, true in zip(self.places.sizes, rows, strict=True):
            bucket = size.bucket_of(true)
            if not bucket:
                reason = reason or f"without a bucket: {size.name!r} is larger than {size.buckets[-1]}"
            elif not true:
                reason = reason or f"without a bucket: {size.name!r} is 0, and no row can be copied"
            padded.append(bucket or true)
        if not reason:
            found = self._layout_of(padded, inputs)
            layout, reason = (None, f"without a bucket: {found}") if isinstance(found, str) else (found, "")
        events = []
        for size, bucket, true in zip(self.places.sizes, padded, rows, strict=True):
            events.append((f"bucket {bucket} of {size.name!r}", 1))
            if bucket > true:
                events.append((f"rows of padding of {size.name!r}", bucket - true))
        if len(self._calls) >= _CALLS:
            self._calls.clear()
        self._calls[key] = sizes = CallSizes(padded, layout, reason, tuple(events))
        return sizes

    def _layout_of(self, padded: Sequence[int], inputs: Sequence[Any]) -> BucketLayout | str:
        key = (*padded, *(inputs[position] for position in self.places.others))
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)), None)
                self._calls.clear()  # they hold layouts
            self._layouts[key] = layout = self._evaluated.layout(padded, inputs)
        return layout

    def _written_memory_is_shared(self, inputs: Sequence[Any]) -> bool:
        """Whether another input shares memory with one that is copied back: buffers would share none."""
        addresses = [value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)]
        return any(addresses.count(inputs[p].untyped_storage().data_ptr()) > 1 for p in self._copied_back)

    def _new_buffers(self, layout: BucketLayout, inputs: Sequence[Any]) -> list[PaddedBuffer]:
        buffers = []
        # Memory that is written outside of inference mode later must not be made inside of it.
        with torch.inference_mode(False):
            for places, (size, stride) in zip(self.places.padded, layout.shapes, strict=True):
                like = inputs[places[0].position]
                tensor = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
                buffers.append(PaddedBuffer(tensor, 0 in stride))
        return buffers

    def _run(
        self,
        inputs: Sequence[Any],
        rows: list[int],
        padded: list[int],
        layout: BucketLayout,
        buffers: list[PaddedBuffer],
    ) -> Any:
        outputs = self._cut(self.compiled(*self._padded(inputs, rows, padded, buffers)), rows, layout)
        self._copy_back(inputs, buffers)
        return outputs

    def _padded(
        self, inputs: Sequence[Any], rows: Sequence[int], padded: Sequence[int], buffers: Sequence[PaddedBuffer]
    ) -> list[Any]:
        """The inputs of the compiled graph: buffers filled with the caller's rows, and copies of the last one."""
        arguments = list(inputs)
        for place in self.places.numbers:
            arguments[place.position] = padded[place.size]
        for places, buffer in zip(self.places.padded, buffers, strict=True):
            position = places[0].position
            if buffer.rows != rows:
                buffer.view(places, rows)
            if buffer.repeats:
                copy_tensors(inputs[position], buffer.part)
            else:
                buffer.part.copy_(inputs[position])
            for padding, last in buffer.padding:
                padding.copy_(last)
            arguments[position] = buffer.tensor
        return arguments

    def _cut(self, outputs: Any, rows: Sequence[int], layout: BucketLayout) -> list[Any]:
        """The outputs without rows of padding, in the order and layout in which the caller gets them."""
        cut = list(outputs)
        for place, per_row in zip(self.places.cut, layout.per_row, strict=True):
            length = per_row * rows[place.size]
            if place.dim is None:
                cut[place.position] = length
                continue
            whole = cut[place.position]
            part = whole.narrow(place.dim, 0, length)
            # Of a later dimension a part is not contiguous; the caller expects what an unpadded call returns.
            cut[place.position] = part.contiguous() if whole.is_contiguous() else part
        return cut

    def _copy_back(self, inputs: Sequence[Any], buffers: Sequence[PaddedBuffer]) -> None:
        for places, buffer in zip(self.places.padded, buffers, strict=True):
            if (position := places[0].position) in self.places.written:
                inputs[position].copy_(buffer.part)


def dim_of(place: BucketedDim) -> int:
    assert place.dim is not None  # an input is a tensor
    return place.dim


def _true_part(tensor: torch.Tensor, places: Sequence[BucketedDim], rows: Sequence[int]) -> torch.Tensor:
    """The part of a padded tensor that holds the caller's rows."""
    for place in places:
        tensor = tensor.narrow(dim_of(place), 0, rows[place.size])
    return tensor
