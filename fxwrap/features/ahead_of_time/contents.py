"""The contents of a saved file, for ``python -m fxwrap inspect``: nothing in the file runs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...host_graph.graph_json import Functions
from ...torch_private.functions import size_functions
from .machine import target_text, versions
from .package import Package
from .signature import Signature
from .stored_signature import signature_from_data


@dataclass(frozen=True)
class KernelContents:
    """One kernel of a method.

    Attributes:
        members: the members of the file with its source and machine code.
        target: the hardware that its machine code is for, in words; empty if there is none.
        configuration: block sizes, warps and stages of a Triton kernel; empty for any other.
    """

    method: str
    name: str
    language: str
    device: str
    members: Sequence[str]
    target: str
    configuration: str


@dataclass(frozen=True)
class MethodContents:
    """One method of a file.

    Attributes:
        captured, eager: numbers of partitions.
        launches: the number of launches of compiled kernels.
    """

    name: str
    signature: Signature
    captured: int
    eager: int
    launches: int
    library_calls: int
    kernels: Sequence[KernelContents]


@dataclass(frozen=True)
class Contents:
    """Everything that a file holds.

    Attributes:
        weights: their number, their bytes, and the number of frozen ones (compiled in), in words.
    """

    versions: Mapping[str, str]
    weights: str
    methods: Sequence[MethodContents]

    @classmethod
    def of(cls, path: Path) -> Contents:
        """Read a file.

        Raises:
            StorageError: the file is damaged, or is no saved program.
        """
        package = Package(path)
        with contextlib.closing(package), package.refusing():
            package.check_all()
            manifest = package.manifest
            shown = (*versions(), "compile")
            methods = [_method(package, name, entry) for name, entry in manifest["methods"].items()]
            count = sum(entry["kind"] == "weights" for entry in manifest["tensors"].values())
            file = manifest["members"].get("weights.safetensors")
            weights = f"{count} tensors, " + (f"{file['bytes']:,} bytes" if file else "not in the file")
            frozen = {weight for entry in manifest["methods"].values() for weight in entry["frozen"]}
            weights += f", and {len(frozen)} that are frozen" if frozen else ""
            return cls({name: str(manifest[name]) for name in shown}, weights, methods)


def _method(package: Package, name: str, entry: Mapping[str, Any]) -> MethodContents:
    data = package.json(entry["program"])
    partitions = data["plan"]["cut"]["partitions"]
    verdicts = Counter(partition["verdict"] for partition in partitions)
    launches, externs = (sum(partition[field] for partition in partitions) for field in ("launches", "extern_calls"))
    signature = signature_from_data(name, entry, Functions({}, size_functions()))
    kernels = list(_kernels(name, data, data["graph"]["attributes"]))
    return MethodContents(name, signature, verdicts["captured"], verdicts["eager"], launches, externs, kernels)


def _kernels(method: str, data: Mapping[str, Any], attributes: Mapping[str, Any]) -> Iterator[KernelContents]:
    for entry in attributes.values():
        if "graph" in entry:
            yield from _kernels(method, data, entry["graph"]["attributes"])
        elif "kernel" in entry:
            name = entry["kernel"]
            triton = data["triton"].get(name, {})
            members = [triton.get("source"), triton.get("binary"), data["objects"].get(name)]
            target = target_text(triton["target"]) if triton.get("binary") else ""
            config = ", ".join(f"{key} {value}" for key, value in triton.get("config", {}).items())
            present = [member for member in members if member is not None]
            yield KernelContents(method, name, entry["language"], entry["device"], present, target, config)
