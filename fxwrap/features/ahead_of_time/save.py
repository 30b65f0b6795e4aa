"""``fxwrap.save``: compiles methods and writes one file, which runs without Inductor, Dynamo and a compiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...codegen.emit.kernels import object_file
from ...codegen.store.stored_program import functions
from ...errors import OptionError, StorageError
from ...host_graph.graph_json import expression_to_data, graph_to_data
from ...host_graph.nodes import Kernel, constants
from ...host_graph.typed_json import to_data
from . import package
from .aot_compile import compile_methods, signature_of
from .aot_program import AotProgram, CompiledMethods, compiled_methods_of
from .codegen.export import CompiledMethod, TracedMethod
from .codegen.export_triton import triton_to_data
from .codegen.stored_triton import triton_version
from .machine import versions
from .stored_signature import signature_to_data
from .structure import structure_of, structure_to_data
from .tensors.entries import TensorEntries

COMPILED = ("object", "source")


def save(
    path: str | Path,
    methods: Mapping[str, Any] | AotProgram,
    *,
    options: Mapping[str, Any] | None = None,
    weights: bool = True,
    compile: str = "object",
    progress: Callable[[str], object] = lambda text: None,
) -> Path:
    """Compile methods and save them as one file, for ``fxwrap.load``.

    ::

        fxwrap.save("model.fxw", {
            "prefill": torch.export.export(model, (tokens,), dynamic_shapes=...),
            "decode": (model, (token,)),
        })

    Parameters and buffers that methods share are saved once, and shared again when they are loaded: what one method
    writes to a buffer, the others read. No gradients are computed.

    Args:
        methods: exported programs by name (``torch.export.export``), or the arguments of an export as a tuple: a
            module, example inputs, and, if any, keyword inputs and dynamic shapes. Or what ``fxwrap.aot_compile``
            returned: it is saved with its weights as they are now.
        options: as for ``torch.compile(..., backend="fxwrap", options=...)``.
        weights: whether the file holds weights; if not, ``fxwrap.load`` has to be given them.
        compile: "object" saves compiled kernels, for machines like this one; "source" saves their source only, which
            is compiled where it is loaded.
        progress: called with a line of text before each step.

    Returns:
        The path of the file.

    Raises:
        StorageError: a method does not compile to one program, something in it cannot be saved, or the program was
            loaded from a file.
        OptionError: an option is wrong, or is given for a program that is compiled.
    """
    if compile not in COMPILED:
        raise OptionError(
            "wrong value for compile", expected=f"one of {', '.join(map(repr, COMPILED))}", got=repr(compile)
        )
    if type(weights) is not bool:
        raise OptionError("wrong value for weights", expected="True or False", got=repr(weights))
    if isinstance(methods, AotProgram):
        compiled = _compiled_before(methods, options)
    else:
        compiled = compile_methods(methods, options, progress, _check_storable)
    members: dict[str, bytes] = {}
    described: dict[str, Any] = {}
    tensors, kernels = TensorEntries(), _Kernels(compile == "object", members)
    progress("writing")
    for name, method in compiled.methods.items():
        if method.frozen and not weights:
            raise StorageError(
                f"method {name!r} with its weights frozen",
                expected="weights that are left out (weights=False), or frozen ones, which are compiled in",
                got=", ".join(method.frozen),
                remedy="leave out weights=False, or freezing",
            )
        described[name] = _describe(method, tensors, kernels, members)
    tensors.check_frozen()
    tensors.check_apart()
    names = tensors.names()
    for entry in described.values():
        entry["weights"] = [[weight, names[number]] for weight, number in entry["weights"].items()]
        entry["constants"] = {attribute: names[number] for attribute, number in entry["constants"].items()}
    members["constants.safetensors"] = tensors.serialized("constants")
    if weights:
        members["weights.safetensors"] = tensors.serialized("weights")
    inputs = (data for entry in described.values() for data in entry["inputs"])
    devices = {data["device"] for data in (*inputs, *tensors.described().values()) if "device" in data}
    manifest = {
        **versions(),
        "compile": compile,
        "devices": sorted(devices | kernels.devices),
        "triton": {"version": triton_version() if kernels.triton else "", "targets": kernels.targets},
        "options": compiled.options.at_run(),
        "methods": described,
        "tensors": tensors.described(),
    }
    target = Path(path)
    package.write(target, manifest, members)
    return target


def _compiled_before(program: AotProgram, options: Mapping[str, Any] | None) -> CompiledMethods:
    if options is not None:
        raise OptionError(
            "options for a program that is compiled",
            expected="no options, or methods to compile with them",
            got=repr(options),
            remedy="give them to fxwrap.aot_compile",
        )
    return compiled_methods_of(program)


def _check_storable(method: TracedMethod) -> None:
    """Check what is known of a method before it is compiled.

    Raises:
        StorageError: a guard, or the structure of arguments or results, has no form in a file.
    """
    for guard in method.guards:
        expression_to_data(guard, functions())
    for value in (method.arguments, method.results):
        structure_to_data(structure_of(value))


def _describe(
    method: CompiledMethod, tensors: TensorEntries, kernels: _Kernels, members: dict[str, bytes]
) -> dict[str, Any]:
    """The manifest's entries about a compiled method. A tensor is the number of its entry.

    Raises:
        StorageError: something in it has no form in a file.
    """
    plan, table, member = method.plan, functions(), f"programs/{method.traced.name}.json"
    if plan.compiled:
        raise StorageError(
            f"method {method.traced.name!r}, of which compile_partition has compiled a part",
            expected="a program of fxwrap's alone",
            remedy="fxwrap.aot_compile keeps such a program in memory",
        )
    outside = method.program.recorder.prepared.provider.whole_storage
    for position, (weight, tensor) in enumerate(method.weights.items()):
        user = outside.get(plan.placeholders[position], "")
        if position in plan.inputs.used_outside or (user and tensor.storage_offset()):
            raise StorageError(
                f"weight {weight!r} of method {method.traced.name!r} is a part of a larger tensor",
                expected="weights of which a method uses nothing outside of the tensor: a file has the tensor alone",
                got=f"{user} counts from the start of its storage",
                remedy="register the larger tensor, and take the part of it in forward",
            )
    call = signature_to_data(signature_of(method), table)
    data = {"graph": graph_to_data(plan.graph, table), "plan": to_data(plan), **kernels.of(plan.graph)}
    members[member] = json.dumps(data, separators=(",", ":")).encode()
    return {
        "program": member,
        "weights": tensors.add_weights(method),
        "frozen": list(method.frozen),
        "constants": tensors.add_constants(method),
        **call,
    }


class _Kernels:
    """The kernels to save, each as members of the file.

    Attributes:
        devices: the devices on which they run.
        targets: the target of Triton's machine code, by device.
        triton: whether there are Triton kernels.
    """

    def __init__(self, compiled: bool, members: dict[str, bytes]) -> None:
        self.devices: set[str] = set()
        self.targets: dict[str, Any] = {}
        self.triton = False
        self._compiled, self._members = compiled, members

    def of(self, gm: torch.fx.GraphModule) -> dict[str, Any]:
        """The members with a graph's compiled C++ kernels, and the launch data of its Triton kernels, by kernel."""
        objects: dict[str, str] = {}
        triton: dict[str, Any] = {}
        for node, kernel in _kernels(gm):
            self.devices.add(str(kernel.device))
            if kernel.language == "triton":
                args = next((user.args[1:] for user in node.users), ())
                triton[kernel.name] = self._triton(kernel, args)
            elif kernel.language == "cpp" and self._compiled:
                objects[kernel.name] = self._member(_library(kernel), "so")
        return {"objects": objects, "triton": triton}

    def _triton(self, kernel: Kernel, args: Sequence[Any]) -> dict[str, Any]:
        stored = triton_to_data(kernel, args)
        self.triton = True
        source = self._member(stored.source.encode(), "py")
        if stored.binary is None or not self._compiled:
            return {**stored.data, "source": source, "binary": None, "metadata": None}
        self.targets[str(kernel.device)] = stored.data["target"]
        return {**stored.data, "source": source, "binary": self._member(*stored.binary)}

    def _member(self, data: bytes, ending: str) -> str:
        """The name of the member with this content; it is added if there is none."""
        for name, content_of_member in self._members.items():
            if content_of_member == data:
                return name
        name = f"kernels/{len(self._members)}.{ending}"
        self._members[name] = data
        return name


def _library(kernel: Kernel) -> bytes:
    """The shared library of a C++ kernel."""
    path = object_file(kernel.definitions, kernel.name)
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise StorageError(
            f"kernel {kernel.name} cannot be saved as an object",
            expected=f"its library where Inductor has put it, {path}",
            got="a cache that was removed after the program was compiled",
            remedy='compile the program again, or save it with compile="source"',
        ) from error


def _kernels(gm: torch.fx.GraphModule) -> Sequence[tuple[torch.fx.Node, Kernel]]:
    """The kernels of a graph and of its subgraphs, with their nodes."""
    kernels: list[tuple[torch.fx.Node, Kernel]] = []
    for node, value in constants(gm).items():
        if isinstance(value, Kernel):
            kernels.append((node, value))
        elif isinstance(value, torch.fx.GraphModule):
            kernels.extend(_kernels(value))
    return kernels
