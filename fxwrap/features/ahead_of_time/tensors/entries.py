"""The tensors of compiled methods: one entry for each, whichever methods share it, and the names of the entries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....codegen.store.stored_program import functions
from ....errors import StorageError
from ....host_graph.graph_json import graph_to_data
from ....host_graph.nodes import constants
from ..codegen.export import CompiledMethod
from ..codegen.packed_weights import is_packed
from .memory import content, identity, overlapping, to_stored


@dataclass
class Entry:
    """A tensor.

    Attributes:
        kind: "weights", "constants" or "frozen".
        device: where programs expect it.
        names: its names, each with the method that it has the name in.
        written: whether a method writes to it.
    """

    kind: str
    tensor: torch.Tensor
    device: torch.device
    names: list[tuple[str, str]]
    written: bool = False

    def __str__(self) -> str:
        return " and ".join(f"{name!r} of {method!r}" for method, name in self.names)


@dataclass
class PackedEntry:
    """A tensor in a library's packed form, which is packed again when a file is loaded.

    Attributes:
        graph: the graph that packs it, as data.
        constants: the entry numbers of the tensors that are packed, by attribute of the graph.
    """

    graph: Any
    constants: Mapping[str, int]
    names: list[tuple[str, str]]
    kind: str = "packed"


class TensorEntries:
    """The tensors of methods, without duplicates: one entry for tensors with the same memory and layout, and one for
    constants with the same values.

    A program in memory has entries for its weights. A file has them for constants as well.
    """

    def __init__(self) -> None:
        self._entries: list[Entry | PackedEntry] = []
        self._numbers: dict[Any, int] = {}
        self._frozen: list[Entry] = []
        # Constants equal to another, which has the entry.
        self._equal: list[Entry] = []

    def add_weights(self, method: CompiledMethod) -> dict[str, int]:
        """The entry numbers of a method's weights, by name. The weights that it has frozen are noted."""
        name = method.traced.name
        for weight, tensor in method.frozen.items():
            self._frozen.append(Entry("frozen", tensor.detach(), tensor.device, [(name, weight)]))
        taken = zip(method.weights.items(), method.devices, method.written, strict=False)
        return {
            weight: self._add(Entry("weights", tensor.detach(), device or tensor.device, [(name, weight)], written))
            for (weight, tensor), device, written in taken
        }

    def add_constants(self, method: CompiledMethod) -> dict[str, int]:
        """The entry numbers of the tensors that a program has as attributes, by attribute.

        Raises:
            StorageError: nobody knows how a constant was packed.
        """
        gm, facts, name = method.plan.graph, method.plan.facts, method.traced.name
        numbers: dict[str, int] = {}
        for node, value in constants(gm).items():
            attribute = str(node.target)
            if is_packed(value):
                packing = method.packed.graph_of(f"constant {attribute!r} of method {name!r}", value)
                numbers[attribute] = self._add_packed(name, attribute, packing)
            elif isinstance(value, torch.Tensor):
                written = bool(facts.of(node) & facts.all_written())
                numbers[attribute] = self._add_constant(name, attribute, value, written)
        return numbers

    def _add(self, new: Entry) -> int:
        """The number of a tensor's entry; it is added if there is none."""
        key = new.kind, new.device, *identity(new.tensor)
        number = self._numbers.setdefault(key, len(self._entries))
        if number == len(self._entries):
            if new.kind == "constants" and not new.written:
                # Freezing makes new tensors for each method, of the same weights.
                number = self._numbers.setdefault((new.kind, new.device, *content(new.tensor)), number)
                self._numbers[key] = number
            (self._entries if number == len(self._entries) else self._equal).append(new)
        entry: Any = self._entries[number]
        if entry is not new:
            entry.names += new.names
            entry.written |= new.written
        return number

    def _add_constant(self, method: str, name: str, tensor: torch.Tensor, written: bool) -> int:
        return self._add(Entry("constants", tensor.detach(), tensor.device, [(method, name)], written))

    def _add_packed(self, method: str, name: str, packing: torch.fx.GraphModule) -> int:
        """The number of the entry of a packed tensor.

        Args:
            packing: a graph without inputs that packs constants and returns the tensor.
        """
        data = graph_to_data(packing, functions())
        numbers = {
            str(node.target): self._add_constant(method, f"{name}.{node.target}", value, False)
            for node, value in constants(packing).items()
        }
        key = json.dumps([data, numbers])
        number = self._numbers.setdefault(key, len(self._entries))
        if number == len(self._entries):
            self._entries.append(PackedEntry(data, numbers, []))
        self._entries[number].names.append((method, name))
        return number

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor of an entry; it shares memory with the one that was added."""
        entry = self._entries[number]
        assert isinstance(entry, Entry)
        return entry.tensor

    @property
    def _plain(self) -> list[Entry]:
        return [entry for entry in self._entries if isinstance(entry, Entry)]

    def check_frozen(self) -> None:
        """Check that no method writes to a weight that another has frozen: the other would not read what is written.

        Raises:
            StorageError: one does.
        """
        for entry in self._plain:
            for frozen in self._frozen if entry.written else ():
                if overlapping([(entry.tensor, True), (frozen.tensor, False)]):
                    raise StorageError(
                        f"weight {entry} is written, and its value as {frozen} is frozen",
                        expected="weights that no method writes, where freezing compiles them in",
                        remedy="compile the methods without freezing, or each by itself",
                    )

    def check_apart(self) -> None:
        """Check that no method writes to memory that another tensor shares: in a file, each has memory of its own.

        Raises:
            StorageError: one does.
        """
        entries = [*self._equal, *self._plain]
        if pair := overlapping([(entry.tensor, entry.written) for entry in entries]):
            written, other = (entries[place] for place in pair)
            raise StorageError(
                f"weights {written} and {other} share memory in different layouts, and one is written",
                expected="one tensor for all methods, or memory of their own",
                remedy="register one of them, and make the others of it in forward",
            )

    def names(self) -> list[str]:
        """A unique name for each entry: its first name, prefixed by the method's if another entry has that name.

        Constants come last, so that weights are called the same where constants have no entries.
        """
        names: dict[int, str] = {}
        used, of_tensors = set[str](), set[str]()
        for group in self._groups():
            of_tensors |= {name for entry in group for _, name in entry.names}
            for entry in group:
                method, name = entry.names[0]
                while name in used or (name in of_tensors and name != entry.names[0][1]):
                    name = f"{method}.{name}"
                names[id(entry)] = name
                used.add(name)
        return [names[id(entry)] for entry in self._entries]

    def _groups(self) -> tuple[list[Entry | PackedEntry], list[Entry | PackedEntry]]:
        """The entries of weights, and all others."""
        weights = [entry for entry in self._entries if entry.kind == "weights"]
        return weights, [entry for entry in self._entries if entry.kind != "weights"]

    def described(self) -> dict[str, Any]:
        """The manifest's entries by name: member, layout and aliases of each tensor."""
        weights, _ = self._groups()
        claims = Counter(name for entry in weights for name in {name for _, name in entry.names})
        frozen_by: dict[Any, list[str]] = {}
        for frozen in self._frozen:
            frozen_by.setdefault(identity(frozen.tensor), []).append(frozen.names[0][0])
        names = self.names()

        def described(own_name: str, entry: Entry | PackedEntry) -> dict[str, Any]:
            if isinstance(entry, PackedEntry):
                constants = {attribute: names[number] for attribute, number in entry.constants.items()}
                return {"kind": entry.kind, "graph": entry.graph, "constants": constants}
            aliases = {alias for _, alias in entry.names if alias != own_name and claims[alias] == 1}
            return {
                "kind": entry.kind,
                "dtype": str(entry.tensor.dtype).removeprefix("torch."),
                "device": str(entry.device),
                "size": list(entry.tensor.size()),
                "stride": list(entry.tensor.stride()),
                "written": entry.written,
                "frozen": frozen_by.get(identity(entry.tensor), []) if entry.kind == "weights" else [],
                "aliases": sorted(aliases) if entry.kind == "weights" else [],
            }

        return {name: described(name, entry) for name, entry in zip(names, self._entries, strict=True)}

    def serialized(self, kind: str) -> bytes:
        """The tensors of one kind in the format of safetensors.

        Raises:
            StorageError: the package safetensors, or numpy, which it imports when it saves, is not there.
        """
        plain: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for name, entry in zip(self.names(), self._entries, strict=True):
            if isinstance(entry, Entry) and entry.kind == kind:
                tensor = to_stored(entry.tensor)
                storage = tensor.untyped_storage()
                # Safetensors refuses tensors that share a storage: a part of one is copied.
                unshared = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
                plain[name] = tensor if unshared else tensor.clone()
                storages.add(storage.data_ptr())
        try:
            from safetensors.torch import save as serialize

            return serialize(plain)
        except ImportError as error:
            raise StorageError(
                "tensors cannot be saved",
                expected="the packages safetensors and numpy",
                got=str(error),
                remedy="pip install 'fxwrap[save]'",
            ) from error
