"""Captures calls so that all they allocate lies where the plan has it: results, temporaries, workspace.

::

    plan       conv at 0x600, its workspace at 0x2000
    capture    allocate 24,576 -> 0x600, 65,536 -> 0x2000, 12,288 -> 0x2000      as in the rehearsal
    then       later work reads a view of the arena at 0x600; what the call has returned is dropped

All allocations are compared with those of the rehearsal, by address and bytes. A call that allocates otherwise is
captured once more, and allocates in the pool of the graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from ...devices import Placements
from ...host_graph.tensors import tensor_like
from ...plan import OperatorMemory
from ...torch_private.functions import free_workspaces
from ..devices.runtime import DeviceRuntime, current_stream
from .layout import Layout


class CallsDifferError(Exception):
    """Calls have not allocated as it was planned. The capture is made once more without them."""


class PlacedCalls:
    """The calls of one recording whose memory is planned.

    Attributes:
        refused: why calls allocate in the pool of the graphs instead, by node.
    """

    def __init__(self, runtime: DeviceRuntime, operators: Mapping[Node, OperatorMemory]) -> None:
        self._runtime, self.device, self._operators = runtime, runtime.device, operators
        self._calls: dict[Node, _PlacedCall] = {}
        self.refused: dict[Node, str] = {}
        self.placements: Placements | None = None  # during a capture
        self.captured: list[_PlacedCall] = []  # in the present capture

    def lay_out(self, layout: Layout) -> None:
        """Take the addresses from the plan."""
        self._calls = {node: _PlacedCall(self, node, memory, layout) for node, memory in self._operators.items()}

    def new_placements(self) -> contextlib.AbstractContextManager[Placements]:
        assert self._runtime.placements is not None
        return self._runtime.placements(self.device)

    def of(self, nodes: Iterable[Node]) -> dict[Node, Callable[..., Any]]:
        """The functions to call in place of these nodes' own."""
        return {node: self._calls[node] for node in nodes if node in self._calls and node not in self.refused}

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """A context around one capture.

        Raises:
            CallsDifferError: calls have allocated otherwise than it was planned. ``refused`` has them.
        """
        if not self._calls:
            yield
            return
        self.captured, before = [], len(self.refused)
        try:
            with self.new_placements() as self.placements:
                yield
                made = self.placements.made()
        except Exception as error:
            if len(self.refused) > before:
                raise CallsDifferError from error
            raise
        finally:
            self.placements = None
        for call, allocations in zip(self.captured, made, strict=True):
            if allocations is None or list(allocations) != call.planned:
                self.refused[call.node] = "allocations that are not those of its rehearsal"
        if len(self.refused) > before:
            raise CallsDifferError


class _PlacedCall:
    """A call with planned memory. It returns its results as tensors over planned storages.

    Attributes:
        planned: the address and the bytes of each allocation, in order.
    """

    def __init__(self, calls: PlacedCalls, node: Node, memory: OperatorMemory, layout: Layout) -> None:
        self._calls, self.node = calls, node
        self._function = node.meta.get("call", node.target)
        self._storages = {position: layout.result(node, position) for position in memory.results.values()}
        begin = layout.workspace_of(node) if memory.workspace else 0
        addresses = {block: begin + offset for block, offset in memory.workspace.items()}
        addresses.update((block, self._storages[at].data_ptr()) for block, at in memory.results.items())
        self._addresses = [addresses[block] for block in range(len(memory.blocks))]
        self.planned = [(addresses[block], nbytes) for block, nbytes in memory.allocations]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (placements := self._calls.placements) is not None:
            self._calls.captured.append(self)
            return self._placed(placements, args, kwargs)
        # A graph that issues its work again: docs/checked.md, ``through_capture``.
        with self._calls.new_placements() as placements:
            return self._placed(placements, args, kwargs)

    def _placed(self, placements: Placements, args: Any, kwargs: Any) -> Any:
        stream = current_stream(self._calls.device)
        free_workspaces(stream)
        try:
            with placements.at(self._addresses):
                results = self._in_place(self._function(*args, **kwargs))
                free_workspaces(stream)
        except Exception as error:
            self._calls.refused[self.node] = f"{type(error).__name__}: {error}"
            raise
        return results

    def _in_place(self, result: Any) -> Any:
        several = isinstance(result, (tuple, list))
        values = list(result) if several else [result]
        for position, storage in self._storages.items():
            value: torch.Tensor = values[position]
            if value.untyped_storage().data_ptr() != storage.data_ptr():
                raise RuntimeError(f"result {position} does not lie where it was planned")
            values[position] = tensor_like(value, storage, int(value.storage_offset()) * value.itemsize)
        return tuple(values) if several else values[0]
