"""Which weight a name stands for, and which names are those of frozen weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import StorageError


def names_of_weights(tensors: Mapping[str, Any]) -> dict[str, str]:
    """All names of weights, aliases included, with the name of the entry that each stands for."""
    aliases_of = {name: entry["aliases"] for name, entry in tensors.items() if entry["kind"] == "weights"}
    entry_names = {name: name for name in aliases_of}  # last: an entry's name precedes an alias of another
    return {**{alias: name for name, aliases in aliases_of.items() for alias in aliases}, **entry_names}


@dataclass(frozen=True)
class FrozenWeights:
    """Weights whose values are compiled into methods, and cannot be replaced.

    Attributes:
        names: the methods that have frozen a weight, by the weight's name.
        entries: the methods that have frozen a weight which other methods take as an input, by its entry's name.
    """

    names: Mapping[str, Sequence[str]]
    entries: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, by_method: Mapping[str, Iterable[str]], tensors: Mapping[str, Any]) -> FrozenWeights:
        """Those of a program.

        Args:
            by_method: the names of the weights that each method has frozen.
            tensors: the entries of all tensors, as in a manifest.
        """
        names: dict[str, list[str]] = {}
        for method, weights in by_method.items():
            for name in weights:
                names.setdefault(name, []).append(method)
        return cls(names, {name: entry["frozen"] for name, entry in tensors.items() if entry.get("frozen")})

    def check(self, name: str, entry: str | None) -> None:
        """Check that a weight may get another value.

        Args:
            entry: the entry that the name stands for; None if there is none.

        Raises:
            StorageError: a method has the weight's value compiled in.
        """
        methods = self.names.get(name) if entry is None else self.entries.get(entry)
        if methods:
            raise StorageError(
                f"weight {name!r}",
                expected="a weight that is not frozen",
                got=f"one whose value was compiled into {', '.join(methods)}",
                remedy="compile the program again, with the other value, or without freezing",
            )
