"""What a saved program is made of, read without running anything in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..codegen.torch_runtime import size_functions
from ..host_graph.graph_json import Functions
from .machine import target_text, versions
from .package import Package
from .signature import Signature, signature_of


@dataclass(frozen=True)
class KernelContents:
    """
    Attributes:
        members: in the file: source, and machine code.
        target: what machine code is for, in words; empty if there is none.
        configuration: block sizes, warps and stages; empty if it is not Triton's.
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
    """
    Attributes:
        captured, eager: partitions.
        launches: of compiled kernels.
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
    """
    Attributes:
        weights: how many there are, their bytes, and how many are frozen, whose values are compiled in.
    """

    versions: Mapping[str, str]
    weights: str
    methods: Sequence[MethodContents]

    @classmethod
    def of(cls, path: Path) -> Contents:
        """Read a file.

        Raises:
            StorageError: it is damaged, or no saved program.
        """
        package = Package(path)
        try:
            package.check_all()
            manifest = package.manifest
            said = (*versions(), "compile")
            methods = [_method(package, name, known) for name, known in manifest["methods"].items()]
            count = sum(known["kind"] == "weights" for known in manifest["tensors"].values())
            file = manifest["members"].get("weights.safetensors")
            weights = f"{count} tensors, " + (f"{file['bytes']:,} bytes" if file else "not in the file")
            frozen = {weight for known in manifest["methods"].values() for weight in known["frozen"]}
            weights += f", and {len(frozen)} that are frozen" if frozen else ""
            return cls({name: str(manifest[name]) for name in said}, weights, methods)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise package.error(f"{type(error).__name__}: {error}", "what fxwrap.save has written") from error
        finally:
            package.close()


def _method(package: Package, name: str, known: Mapping[str, Any]) -> MethodContents:
    data = package.json(known["program"])
    partitions = data["plan"]["cut"]["partitions"]
    verdicts = Counter(partition["verdict"] for partition in partitions)
    launches, externs = (sum(partition[what] for partition in partitions) for what in ("launches", "externs"))
    signature = signature_of(name, known, Functions({}, size_functions()))
    kernels = list(_kernels(name, data, data["graph"]["attributes"]))
    return MethodContents(name, signature, verdicts["captured"], verdicts["eager"], launches, externs, kernels)


def _kernels(method: str, data: Mapping[str, Any], attributes: Mapping[str, Any]) -> Iterator[KernelContents]:
    for known in attributes.values():
        if "graph" in known:
            yield from _kernels(method, data, known["graph"]["attributes"])
        elif "kernel" in known:
            name = known["kernel"]
            triton = data["triton"].get(name, {})
            members = [triton.get("source"), triton.get("binary"), data["objects"].get(name)]
            target = target_text(triton["target"]) if triton.get("binary") else ""
            config = ", ".join(f"{key} {value}" for key, value in triton.get("config", {}).items())
            there = [member for member in members if member is not None]
            yield KernelContents(method, name, known["language"], known["device"], there, target, config)
