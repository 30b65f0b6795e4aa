"""Lays out the memory of one recording: planned storages, static input buffers, static inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...host_graph.nodes import effective_users, only_computes
from ...host_graph.storages import Origin
from ...host_graph.tensors import reach, tensor_like, tensor_over, unexpanded
from ...plan import Home
from ...torch_private.functions import storage_at
from ..memory.regions import Regions
from ..memory.static_buffers import copy_tensors
from ..replay.flat_python import Part
from ..replay.operands import Bound, Register
from ..replay.ranges import copies_of_inputs
from ..replay.recording import RecordingRequest
from ..replay.steps import CallPython, Fill, Step
from .placed_results import PlacedResults


class Layout:
    """The memory of one recording.

    Attributes:
        tensors: tensors over planned memory and memory of the recording, by allocation node.
        regions: memory that exists during a part of each call.
        placed: planned memory of operators' results.
        in_arenas: (device, offset in bytes) of each storage in an arena, by its handle.
        input_buffers: static input buffers, by placeholder.
        input_tensors: the tensor that stands for a static or copied input, by position.
        copies_back: (position, static input buffer) of inputs whose buffer is copied back to the caller's tensor.
        static_addresses: the addresses of static inputs, by position.
    """

    def __init__(self, request: RecordingRequest) -> None:
        self._request, self._plan = request, request.sized.plan
        self._freezes_addresses = request.runtime.frozen_addresses
        self.tensors: dict[Node, torch.Tensor] = {}
        self.regions = Regions(self._plan, request.memory)
        self.placed = PlacedResults()
        self.in_arenas: dict[int, tuple[torch.device, int]] = {}
        self.input_buffers: dict[Node, torch.Tensor] = {}
        self.input_tensors: dict[int, torch.Tensor] = {}
        self.copies_back: list[tuple[int, torch.Tensor]] = []
        self.static_addresses: list[Any] = [None] * len(self._plan.placeholders)

    def make_tensors(self) -> None:
        """Make tensors over planned and per-recording memory.

        Static input buffers come later (``fill_input_buffers``).
        """
        for storage, place in zip(self._plan.facts.storages, self._request.memory.places, strict=True):
            if storage.origin is not Origin.ALLOCATION:
                continue
            node = self._plan.nodes[storage.node]
            options: Any = node.kwargs
            match place.home:
                case Home.REGION if storage.index in self.regions.places:
                    size, stride = self._layout(node)
                    with self.regions.filled(storage.index) as (space, offset):
                        self.tensors[node] = tensor_over(space, size, stride, options["dtype"], offset)
                case Home.REGION:
                    size, stride = self._layout(node)
                    self.tensors[node] = tensor_over(self.planned(storage.index), size, stride, options["dtype"])
                case Home.RECORDING:
                    self.tensors[node] = torch.empty_strided(*self._layout(node), **options)

    def place_results(self) -> None:
        """Give results of operators that the plan places their storages."""
        for storage, place in zip(self._plan.facts.storages, self._request.memory.places, strict=True):
            if storage.origin is Origin.EXTERN and place.home is Home.REGION:
                self.placed.add(self._plan.nodes[storage.node], storage.element, self.planned(storage.index))

    def result(self, node: Node, position: int) -> torch.UntypedStorage:
        """The planned storage of a result of an operator."""
        places = self.placed.places[node]
        return places[position] if position in places else places[None]

    def workspace_of(self, node: Node) -> int:
        """The address of the planned workspace of a call."""
        place = self._request.memory.workspaces[node.name]
        device = self._request.memory.regions[place.region].device
        return self._request.arenas[device].address(place.offset)

    def planned(self, index: int) -> torch.UntypedStorage:
        """A new storage object over a storage's bytes in its arena."""
        place, memory = self._request.memory.places[index], self._request.memory
        device = memory.regions[place.region].device
        storage = self._request.arenas[device].storage(place.offset, memory.sizes[index])
        self.in_arenas[storage._cdata] = device, place.offset
        return storage

    def _layout(self, node: Node) -> Any:
        return torch.fx.map_arg(node.args[:2], self._request.sized.symbol_values.__getitem__)

    def fill_input_buffers(self, inputs: Sequence[Any]) -> list[Part]:
        """Lay out static input buffers. Returns the parts that fill them at each call."""
        buffers: dict[torch.device, tuple[list[torch.Tensor], list[int]]] = {}
        steps: dict[torch.device, list[Step]] = {}
        for position, node in enumerate(self._plan.placeholders):
            if node.name not in self._request.sized.input_buffers:
                continue
            (index,) = self._plan.facts.of(node)
            value = inputs[position]
            buffer = tensor_like(value, self.planned(index))
            self.input_buffers[node] = self.input_tensors[position] = buffer
            if position in self._plan.inputs.write_only:
                pass  # nothing reads what the caller has there
            elif buffer.is_conj() or buffer.is_neg():  # torch refuses to write to such tensors in a list
                copy = CallPython(copy_tensors, (Register(position), Bound(buffer)))
                steps.setdefault(buffer.device, []).append(copy)
            else:
                tensors, positions = buffers.setdefault(buffer.device, ([], []))
                tensors.append(unexpanded(buffer))
                positions.append(position)
            if node.name in self._request.memory.copied_back:
                self.copies_back.append((position, buffer))
        name = copies_of_inputs(self._request.name)
        for device, (tensors, positions) in buffers.items():
            steps.setdefault(device, []).append(Fill(Bound(tensors), tuple(map(Register, positions))))
        return [Part.of(copies, name=name) for copies in steps.values()]

    def static_inputs(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        """Static inputs, without a reference to them: the caller may free them, or count references.

        A hardware graph keeps only addresses. A graph that repeats its calls keeps tensors, so these are made over
        the same memory without owning it. On the CPU a custom operator may keep its operands, so it gets the caller's
        own tensor.
        """
        may_keep = self._plan.replaced_work
        tensors: dict[Node, Any] = {}
        for position in self._request.static_inputs:
            value = inputs[position]
            self.static_addresses[position] = value.data_ptr()
            if value.device.type == "cpu" or self._request.runtime.repeats_calls:
                users = effective_users(self._plan.placeholders[position])
                if not self._freezes_addresses and any(
                    user in may_keep or not (user.op == "output" or only_computes(user)) for user in users
                ):
                    continue
                value = self._unowned(value)
            tensors[self._plan.placeholders[position]] = self.input_tensors[position] = value
        return tensors

    def _unowned(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor over the memory of ``value`` that does not keep it.

        It lies in the same place of a storage of the same size: an operator may look at the storage outside of it.
        """
        if not reach(value):
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
        whole = value.untyped_storage()
        storage = storage_at(whole.data_ptr(), value.device, whole.nbytes())
        return tensor_like(value, storage, int(value.storage_offset()) * value.itemsize)
