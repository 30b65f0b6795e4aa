"""The tensors of a saved file: weights and constants, read from it or given by the caller of ``fxwrap.load``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..codegen.torch_runtime import empty_graph, is_plain_memory
from ..errors import StorageError
from ..host_graph.graph_json import Functions, graph_from_data
from ..host_graph.stand_ins import StandIns
from .package import Package
from .signature import dtype_named
from .tensors import from_stored, same_memory


def names_of_weights(tensors: Mapping[str, Any]) -> dict[str, str]:
    """What weights are called, their own names first, and which they are."""
    weights = {name: known["aliases"] for name, known in tensors.items() if known["kind"] == "weights"}
    own = {name: name for name in weights}
    return {**{alias: name for name, aliases in weights.items() for alias in aliases}, **own}


@dataclass(frozen=True)
class FrozenWeights:
    """Weights whose values are compiled in: they cannot be others.

    Attributes:
        names: methods where they are, by name.
        entries: methods that have frozen what other methods take as a weight, by its name in the file.
    """

    names: Mapping[str, Sequence[str]]
    entries: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> FrozenWeights:
        names: dict[str, list[str]] = {}
        for method, known in manifest["methods"].items():
            for name in known["frozen"]:
                names.setdefault(name, []).append(method)
        entries = {name: one["frozen"] for name, one in manifest["tensors"].items() if one.get("frozen")}
        return cls(names, entries)

    def check(self, name: str, entry: str | None) -> None:
        """
        Args:
            entry: the weight that the name stands for; None for none.

        Raises:
            StorageError: another value would not reach all methods.
        """
        methods = self.names.get(name) if entry is None else self.entries.get(entry)
        if methods:
            raise StorageError(
                f"weight {name!r}",
                expected="a weight that is not frozen",
                got=f"one whose value was compiled into {', '.join(methods)}",
                remedy="save the program again, with the other value, or without freezing",
            )


def given_by_entry(package: Package, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights that were given, by the names in the file."""
    names = names_of_weights(package.manifest["tensors"])
    frozen = FrozenWeights.of(package.manifest)
    for name in given:
        frozen.check(name, names.get(name))
    if unknown := sorted(given.keys() - names.keys()):
        raise package.error(f"weights {', '.join(unknown)}", "the names of weights that its methods have")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor) or not is_plain_memory(tensor):
            raise package.error(
                f"weight {name!r}: {type(tensor).__name__}", "a tensor that is plain memory", "give one"
            )
        if not same_memory(found.setdefault(names[name], tensor), tensor):
            raise package.error(
                f"two tensors for weight {names[name]!r}, the other one as {name!r}",
                "one tensor: its methods share it",
                "leave one of them out",
            )
    return found


class StoredTensors:
    """The tensors of a file by name, each made once; what was given comes first."""

    def __init__(self, package: Package, given: Mapping[str, torch.Tensor], functions: Functions) -> None:
        self._package, self._given, self._functions = package, given, functions
        self._known: dict[str, Any] = package.manifest["tensors"]
        self._files: dict[str, Mapping[str, torch.Tensor]] = {}
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            known = self._known[name]
            self._made[name] = self._packed(name, known) if known["kind"] == "packed" else self._tensor(name, known)
        return self._made[name]

    def _packed(self, name: str, known: Mapping[str, Any]) -> torch.Tensor:
        """A tensor in the form of a library of this machine, which its operators alone can read."""
        constants = {attribute: self[tensor] for attribute, tensor in known["constants"].items()}
        gm = graph_from_data(known["graph"], self._functions, StandIns(), constants, _no_kernel, empty_graph)
        try:
            with torch.no_grad():
                found = torch.fx.Interpreter(gm).run()
        except Exception as error:  # an operator's own, of any type
            got = f"{type(error).__name__}: {error}"
            expected = "a machine whose torch packs it, as that of its saving did"
            raise self._package.error(f"tensor {name!r}: {got}", expected, "save it without freezing") from error
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"tensor {name!r} is packed to a {type(found).__name__}")
        return found

    def _tensor(self, name: str, known: Mapping[str, Any]) -> torch.Tensor:
        look = (
            dtype_named(known["dtype"]),
            torch.device(known["device"]),
            tuple(known["size"]),
            tuple(known["stride"]),
        )
        dtype, device, size, stride = look
        given = self._given.get(name) if known["kind"] == "weights" else None
        if given is not None:
            got = given.dtype, given.device, tuple(given.size()), tuple(given.stride())
            if got != look or given.is_conj() or given.is_neg():
                raise self._package.error(
                    f"weight {name!r}: {_describe(*got)}",
                    _describe(*look),
                    "give one like it",
                )
            return given.detach()
        saved = self._file(known["kind"]).get(name)
        if saved is None:
            expected = "a weight in the file, or in load(..., weights=)"
            raise self._package.error(f"no weight {name!r}", expected, "give it by that name")
        found = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if not from_stored(saved, found):
            raise self._package.error(f"tensor {name!r} of another look", _describe(*look))
        return found

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
                    "no package safetensors", "it, to read weights", "pip install safetensors"
                ) from error
            try:
                self._files[kind] = deserialize(self._package.read(member))
            except StorageError:
                raise
            except Exception as error:
                raise self._package.error(f"{member}: {error}", "tensors in the form of safetensors") from error
        return self._files[kind]


def _no_kernel(known: Mapping[str, Any]) -> NoReturn:
    raise TypeError("a kernel among the calls that pack a tensor")


def _describe(dtype: torch.dtype, device: torch.device, size: Any, stride: Any) -> str:
    return f"{dtype} {tuple(size)} with strides {tuple(stride)} on {device}"
