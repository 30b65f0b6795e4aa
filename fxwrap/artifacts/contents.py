"""What a saved program is made of, read without running anything in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..codegen.torch_runtime import size_functions
from ..host_graph.graph_json import Functions
from .load import signature_of
from .package import Package
from .signature import Signature


@dataclass(frozen=True)
class MethodContents:
    """
    Attributes:
        captured, eager: partitions.
        kernels: launches of compiled kernels.
    """

    name: str
    signature: Signature
    captured: int
    eager: int
    kernels: int
    library_calls: int


@dataclass(frozen=True)
class Contents:
    """
    Attributes:
        weights: how many there are, and their bytes.
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
            versions = ("fxwrap", "torch", "python", "machine", "system", "cpu_capability", "compile")
            methods = [_method(package, name, known) for name, known in manifest["methods"].items()]
            count = sum(known["kind"] == "weights" for known in manifest["tensors"].values())
            file = manifest["members"].get("weights.safetensors")
            weights = f"{count} tensors, " + (f"{file['bytes']:,} bytes" if file else "not in the file")
            return cls({name: str(manifest[name]) for name in versions}, weights, methods)
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
    return MethodContents(name, signature, verdicts["captured"], verdicts["eager"], launches, externs)
