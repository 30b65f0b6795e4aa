"""``fxwrap.load``: reads a saved program, whose methods then run without Inductor, Dynamo and a compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...codegen.store.stored_kernels import stored_kernel
from ...errors import OptionError, StorageError
from ...host_graph.graph_json import Functions, graph_from_data
from ...host_graph.nodes import Kernel
from ...host_graph.stand_ins import StandIns
from ...host_graph.typed_json import from_data
from ...options import Options
from ...pipeline import CompileRequest, restore_program
from ...plan import ProgramPlan
from ...torch_private.functions import (
    empty_graph,
    library_functions,
    size_functions,
    wrapper_functions,
)
from .aot_program import AotMethod, AotProgram
from .codegen.kernel_libraries import close_unused, kernel_in
from .codegen.stored_triton import stored_launcher
from .machine import check_machine
from .package import Package
from .stored_signature import signature_from_data
from .tensors.memory import overlapping
from .tensors.stored import StoredTensors, given_by_entry


def load(path: str | Path, *, weights: Mapping[str, torch.Tensor] | None = None, trust: bool = False) -> AotProgram:
    """Load a file that ``fxwrap.save`` has written.

    The file holds no pickled objects, and a member is used only after its digest was checked. Compiled kernels are
    native code, which may do anything, and a digest does not tell who wrote the file: hence ``trust``.

    Args:
        weights: parameters and buffers by name, used instead of those in the file; weights that the file lacks are
            required. The tensors are not copied: the program sees later writes to them.
        trust: whether native code and source in the file may run.

    Raises:
        StorageError: the file is damaged, or was saved for another torch, Python, processor or device; or ``trust``
            is False; or weights are missing or do not fit.
        OptionError: ``trust`` is no bool, or ``weights`` no dictionary.
    """
    if type(trust) is not bool:
        raise OptionError("wrong value for trust", expected="True or False", got=repr(trust))
    if not isinstance(weights, (Mapping, type(None))):
        raise OptionError("wrong value for weights", expected="a dictionary of names and tensors", got=repr(weights))
    package = Package(Path(path))
    with contextlib.closing(package), package.refusing():
        check_machine(package)
        if not trust:
            raise package.error(
                "trust=False",
                "leave to run the kernels in the file, which are native code or are compiled to it",
                "pass trust=True if you made the file, or know who did",
            )
        package.check_all()
        return _loaded(package, dict(weights or {}))


def _loaded(package: Package, given_weights: dict[str, torch.Tensor]) -> AotProgram:
    manifest = package.manifest
    functions = Functions({**wrapper_functions(), **library_functions()}, size_functions())
    tensors = StoredTensors(package, given_by_entry(package, given_weights), functions)
    options = Options.from_run(manifest["options"])
    methods = {}
    kernels = _KernelLoader(package)
    for name, entry in manifest["methods"].items():
        data = package.json(entry["program"])
        constants = {attribute: tensors[tensor] for attribute, tensor in entry["constants"].items()}
        graph = graph_from_data(data["graph"], functions, StandIns(), constants, kernels.of(data), empty_graph)
        plan = from_data(ProgramPlan, data["plan"], graph=graph)
        program = restore_program(plan, CompileRequest(options))
        weights = {weight: tensors[tensor] for weight, tensor in entry["weights"]}
        signature = signature_from_data(name, entry, functions)
        methods[name] = AotMethod(signature, program, weights, entry["frozen"])
    close_unused()  # only now: of the same file there are kernels, if a program of it was here before
    loaded = AotProgram(methods, tensors, manifest["tensors"])
    weights = loaded.weights
    if given_weights and (pair := overlapping([(weights[n], manifest["tensors"][n]["written"]) for n in weights])):
        first, second = (list(weights)[place] for place in pair)
        got = f"weights {first!r} and {second!r} that share memory"
        raise package.error(got, "weights with memory of their own, as far as they are written", "give a clone")
    return loaded


class _KernelLoader:
    """Loads kernels: compiled ones from the file, C++ source by Inductor, Triton kernels by Triton."""

    def __init__(self, package: Package) -> None:
        self._package = package

    def of(self, data: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Kernel]:
        texts, objects, triton = data["graph"]["modules"], data["objects"], data["triton"]

        def kernel(known: Mapping[str, Any]) -> Kernel:
            name, definition, run = known["kernel"], None, None
            if known["language"] == "triton":
                run = self._triton(name, triton[name], torch.device(known["device"]))
            elif (member := objects.get(name)) is not None:
                definition = kernel_in(self._package.read(member))
            else:
                from ...codegen.emit.kernels import load_kernels, loaded_kernel

                definition = loaded_kernel(load_kernels(texts[known["module"]]), name)
            if (loaded := stored_kernel(known, texts, definition, run)) is None:
                got = f"no {known['language']} kernels on {known['device']}"
                raise self._package.error(got, "a device that runs them")
            return loaded

        return kernel

    def _triton(self, name: str, known: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
        source = self._package.read(known["source"]).decode()
        binary = self._package.read(known["binary"]) if known["binary"] is not None else None
        try:
            return stored_launcher(known, source, binary, device)
        except StorageError:
            raise
        except Exception as error:  # Triton's own, of any type
            raise self._package.error(
                f"{name}: {type(error).__name__}: {error}", f"a kernel that Triton loads on {device}"
            ) from error
