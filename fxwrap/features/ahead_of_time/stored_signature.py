"""Signatures as data: what the manifest of a saved file says about calls of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...host_graph.graph_json import Functions, expression_from_data, expression_to_data
from .signature import NumberInput, Signature, Size, TensorInput
from .structure import structure_to_data

_KINDS: dict[str, type] = {kind.__name__: kind for kind in (int, float, bool, str, type(None))}


def signature_to_data(signature: Signature, functions: Functions) -> dict[str, Any]:
    """A signature as entries of the manifest.

    Raises:
        StorageError: a size, a guard or a structure has no form in a file.
    """

    def size(number: Size) -> Any:
        return number if isinstance(number, int) else expression_to_data(number, functions)

    inputs: list[dict[str, Any]] = []
    for known in signature.inputs:
        if isinstance(known, NumberInput):
            value = known.value if isinstance(known.value, (str, float, type(None))) else size(known.value)
            inputs.append({"name": known.name, "number": known.kind.__name__, "value": value})
        else:
            sizes = {"size": list(map(size, known.size)), "stride": list(map(size, known.stride))}
            dtype = str(known.dtype).removeprefix("torch.")
            inputs.append({"name": known.name, "dtype": dtype, "device": str(known.device), **sizes})
    return {
        "inputs": inputs,
        "ranges": {symbol: list(bounds) for symbol, bounds in signature.ranges.items()},
        "guards": [expression_to_data(guard, functions) for guard in signature.guards],
        "arguments": structure_to_data(signature.arguments),
        "results": structure_to_data(signature.results),
    }


def signature_from_data(name: str, data: Mapping[str, Any], functions: Functions) -> Signature:
    """The signature that ``signature_to_data`` has written."""

    def size(number: Any) -> Size:
        return number if isinstance(number, int) else expression_from_data(number, functions)

    inputs: list[TensorInput | NumberInput] = []
    for known in data["inputs"]:
        if "number" in known:
            value = known["value"] if isinstance(known["value"], (str, float, type(None))) else size(known["value"])
            inputs.append(NumberInput(known["name"], _KINDS[known["number"]], value))
        else:
            sizes = tuple(map(size, known["size"])), tuple(map(size, known["stride"]))
            dtype, device = dtype_named(known["dtype"]), torch.device(known["device"])
            inputs.append(TensorInput(known["name"], dtype, device, *sizes))
    ranges = {symbol: (low, high) for symbol, (low, high) in data["ranges"].items()}
    guards = tuple(expression_from_data(guard, functions) for guard in data["guards"])
    return Signature(name, tuple(inputs), ranges, guards, data["arguments"], data["results"])


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name in a file. Raises TypeError for any other name of torch's."""
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype
