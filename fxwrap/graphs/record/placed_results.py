"""Copies an operator's result to its planned storage.

An operator without an ``out=`` form allocates its result. Graphs with frozen addresses need it at a planned one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from ...host_graph.tensors import reach, tensor_like
from ..memory.static_buffers import copy_tensors, safe_source


class PlacedResults:
    """The planned storages for results of operators.

    Attributes:
        places: the storages by node and element; the element is None for an operator with one result.
        addresses: the addresses of all places.
    """

    def __init__(self) -> None:
        self.places: dict[Node, dict[int | None, torch.UntypedStorage]] = {}
        self.addresses: set[int] = set()

    def add(self, node: Node, element: int | None, place: torch.UntypedStorage) -> None:
        self.places.setdefault(node, {})[element] = place
        self.addresses.add(place.data_ptr())

    def result_copies(self, nodes: Iterable[Node], others: set[int]) -> dict[Node, ResultCopy]:
        """The copies to planned storages, by the node that makes the results.

        Args:
            others: addresses of other storages that do not move.
        """
        return {node: ResultCopy(self.places[node], self.addresses, others) for node in nodes if node in self.places}


class ResultCopy:
    """Copies the results of one operator to their places.

    Args:
        taken: addresses of all places.
        others: addresses of other storages that do not move.

    Attributes:
        places: by element.
    """

    def __init__(self, places: Mapping[int | None, torch.UntypedStorage], taken: set[int], others: set[int]) -> None:
        self.places, self._taken = places, taken
        self._others = others.difference(place.data_ptr() for place in places.values())
        self._tensors: dict[int | None, torch.Tensor] | None = None

    def __call__(self, made: list[Any]) -> Any:
        """Return the results in their places. ``made`` is emptied, so that the operator's results are freed."""
        value = made.pop()
        several = isinstance(value, (tuple, list))
        results: dict[int | None, Any] = dict(enumerate(value)) if several else {None: value}  # type: ignore[arg-type]
        del value
        if self._tensors is None:
            self._tensors = self._lay_out(results)
        # A result of another size stays where it is: the program's assert on its layout is to see it.
        fitting = {e: place for e, place in self._tensors.items() if results[e].size() == place.size()}
        # First all sources, then the copies: a result may lie in the place of another.
        for element, place in fitting.items():
            results[element] = safe_source(results[element], place, self._taken)
        for element, place in fitting.items():
            copy_tensors(results[element], place)
            results[element] = place
        return tuple(results.values()) if several else results[None]

    def _lay_out(self, results: Mapping[int | None, Any]) -> dict[int | None, torch.Tensor]:
        tensors = {}
        for element, place in self.places.items():
            value = results.get(element)
            if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() in self._others:
                continue  # the result is a view of existing memory, which its schema does not say
            if value.untyped_storage().nbytes() == place.nbytes():
                offset = int(value.storage_offset()) * value.dtype.itemsize
                tensors[element] = tensor_like(value, place, offset)
            elif reach(value) <= place.nbytes():
                tensors[element] = tensor_like(value, place)
        return tensors
