"""The tensors of a saved file: weights and constants, read from it or given by the caller of ``fxwrap.load``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from ....errors import StorageError
from ....host_graph.graph_json import Functions, graph_from_data
from ....host_graph.stand_ins import StandIns
from ....torch_private.functions import empty_graph, is_plain_memory
from ..package import Package
from ..stored_signature import dtype_named
from .memory import from_stored, same_memory
from .names import FrozenWeights, names_of_weights


def given_by_entry(package: Package, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that were given to ``load``, by the name of their entry in the file.

    Raises:
        StorageError: a name is unknown or frozen, or a value is no plain tensor, or one weight gets two tensors.
    """
    methods, tensors = package.manifest["methods"], package.manifest["tensors"]
    names = names_of_weights(tensors)
    frozen = FrozenWeights.of({name: methods[name]["frozen"] for name in methods}, tensors)
    for name in given:
        frozen.check(name, names.get(name))
    if unknown := sorted(given.keys() - names.keys()):
        raise package.error(f"weights {', '.join(unknown)}", "the names of weights that its methods have")
    by_entry: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor) or not is_plain_memory(tensor):
            raise package.error(
                f"weight {name!r}: {type(tensor).__name__}", "a tensor that is plain memory", "give one"
            )
        if not same_memory(by_entry.setdefault(names[name], tensor), tensor):
            raise package.error(
                f"two tensors for weight {names[name]!r}, the other one as {name!r}",
                "one tensor: its methods share it",
                "leave one of them out",
            )
    return by_entry


class StoredTensors:
    """The tensors of a file by name, each made at its first use. A given weight replaces the one in the file."""

    def __init__(self, package: Package, given: Mapping[str, torch.Tensor], functions: Functions) -> None:
        self._package, self._given, self._functions = package, given, functions
        self._known: dict[str, Any] = package.manifest["tensors"]
        self._files: dict[str, Mapping[str, torch.Tensor]] = {}
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            entry = self._known[name]
            self._made[name] = self._packed(name, entry) if entry["kind"] == "packed" else self._tensor(name, entry)
        return self._made[name]

    def _packed(self, name: str, entry: Mapping[str, Any]) -> torch.Tensor:
        """A weight in a library's packed form, which only that library's operators can read: it is packed again."""
        constants = {attribute: self[tensor] for attribute, tensor in entry["constants"].items()}
        gm = graph_from_data(entry["graph"], self._functions, StandIns(), constants, _no_kernel, empty_graph)
        try:
            with torch.no_grad():
                packed = torch.fx.Interpreter(gm).run()
        except Exception as error:  # an operator's own, of any type
            got = f"{type(error).__name__}: {error}"
            expected = "a machine whose torch packs it, as that of its saving did"
            raise self._package.error(f"tensor {name!r}: {got}", expected, "save it without freezing") from error
        if not isinstance(packed, torch.Tensor):
            raise TypeError(f"tensor {name!r} is packed to a {type(packed).__name__}")
        return packed

    def _tensor(self, name: str, known: Mapping[str, Any]) -> torch.Tensor:
        layout = (
            dtype_named(known["dtype"]),
            torch.device(known["device"]),
            tuple(known["size"]),
            tuple(known["stride"]),
        )
        dtype, device, size, stride = layout
        given = self._given.get(name) if known["kind"] == "weights" else None
        if given is not None:
            got = given.dtype, given.device, tuple(given.size()), tuple(given.stride())
            if got != layout or given.is_conj() or given.is_neg():
                raise self._package.error(
                    f"weight {name!r}: {_describe(*got)}",
                    _describe(*layout),
                    "give one like it",
                )
            return given.detach()
        saved = self._file(known["kind"]).get(name)
        if saved is None:
            expected = "a weight in the file, or in load(..., weights=)"
            raise self._package.error(f"no weight {name!r}", expected, "give it by that name")
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if not from_stored(saved, tensor):
            raise self._package.error(f"tensor {name!r} of another look", _describe(*layout))
        return tensor

    def _file(self, kind: str) -> Mapping[str, torch.Tensor]:
        member = f"{kind}.safetensors"
        if kind not in self._files:
            if member not in self._package.manifest["members"]:
                self._files[kind] = {}
                return {}
            try:
                from safetensors.torch import load as deserialize
            except ImportError as error:
                raise self._package.error(
                    "no package safetensors", "it, to read weights", "pip install 'fxwrap[save]'"
                ) from error
            try:
                self._files[kind] = deserialize(self._package.read(member))
            except StorageError:
                raise
            except Exception as error:
                raise self._package.error(f"{member}: {error}", "tensors in the form of safetensors") from error
        return self._files[kind]


def _no_kernel(entry: Mapping[str, Any]) -> NoReturn:
    raise TypeError("a kernel among the calls that pack a tensor")


def _describe(dtype: torch.dtype, device: torch.device, size: Any, stride: Any) -> str:
    return f"{dtype} {tuple(size)} with strides {tuple(stride)} on {device}"
