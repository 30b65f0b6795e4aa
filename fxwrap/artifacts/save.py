"""``fxwrap.save``: methods of modules in one file that runs without Inductor, Dynamo and a compiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..backend import parsed
from ..codegen.export import CompiledMethod, compile_method
from ..codegen.export_triton import triton_to_data
from ..codegen.kernels import object_file
from ..codegen.stored_program import functions
from ..codegen.stored_triton import triton_version
from ..errors import OptionError, StorageError
from ..host_graph.graph_json import Functions, expression_to_data, graph_to_data
from ..host_graph.nodes import Kernel
from ..plan_json import to_data
from . import package
from .machine import versions
from .structure import structure_of

COMPILED = ("object", "source")


def save(
    path: str | Path,
    methods: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    weights: bool = True,
    compile: str = "object",
    progress: Callable[[str], object] = lambda what: None,
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
        methods: by name, what ``torch.export.export`` returned, or its arguments as a tuple: a module, example
            inputs, and, if any, keyword inputs and dynamic shapes.
        options: as for ``torch.compile(..., backend="fxwrap", options=...)``.
        weights: False leaves them out: they are given to ``fxwrap.load``.
        compile: "object" saves compiled kernels, for machines like this one; "source" their source alone, which is
            compiled where it is loaded.
        progress: told what is under way.

    Raises:
        StorageError: a method does not become one program, or something in it cannot be saved.
        OptionError: an option is wrong.
    """
    if compile not in COMPILED:
        raise OptionError(
            "wrong value for compile", expected=f"one of {', '.join(map(repr, COMPILED))}", got=repr(compile)
        )
    if not methods:
        raise OptionError(
            "no methods to save", expected="a dictionary of names and exported programs", got=repr(methods)
        )
    own, patches = parsed(options)
    members: dict[str, bytes] = {}
    described: dict[str, Any] = {}
    tensors, kernels = _Tensors(), _Kernels(compile == "object", members)
    for name, method in methods.items():
        if not name.isidentifier() or name.startswith("_"):
            raise OptionError("the name of a method", expected="a Python name", got=repr(name))
        progress(f"{name}: tracing")
        exported = _exported(name, method)
        progress(f"{name}: compiling")
        compiled = compile_method(name, exported, own, patches)
        described[name] = _describe(name, compiled, tensors, kernels.of(compiled.plan.graph), members)
    progress("writing")
    inputs = (one for method in described.values() for one in method["inputs"])
    devices = {one["device"] for one in (*inputs, *tensors.described.values()) if "device" in one}
    where = {
        **versions(),
        "compile": compile,
        "devices": sorted(devices | kernels.devices),
        "triton": {"version": triton_version() if kernels.triton else "", "targets": kernels.targets},
    }
    members["constants.safetensors"] = tensors.serialized("constants")
    if weights:
        members["weights.safetensors"] = tensors.serialized("weights")
    found = {**where, "options": own.at_run(), "methods": described, "tensors": tensors.described}
    target = Path(path)
    package.write(target, found, members)
    return target


def _exported(name: str, method: Any) -> torch.export.ExportedProgram:
    if isinstance(method, torch.export.ExportedProgram):
        return method
    if isinstance(method, tuple) and method and isinstance(method[0], torch.nn.Module):
        rest: Any = (*method[1:], *((), None, None)[len(method) - 1 :])
        return torch.export.export(method[0], rest[0], rest[1], dynamic_shapes=rest[2])
    raise OptionError(
        f"method {name!r}",
        expected="what torch.export.export returned, or a tuple of a module and example inputs",
        got=f"{type(method).__name__}",
    )


def _describe(
    name: str, method: CompiledMethod, tensors: _Tensors, kernels: Mapping[str, Any], members: dict[str, bytes]
) -> dict[str, Any]:
    plan, table = method.plan, functions()
    # Where the program wants its inputs: that is where it was compiled for.
    devices: list[Any] = [getattr(node.meta.get("val"), "device", None) for node in plan.placeholders]
    constants = {
        str(node.target): tensors.add("constants", str(node.target), value, value.device, name)
        for node in plan.graph.graph.nodes
        if node.op == "get_attr" and isinstance(value := getattr(plan.graph, str(node.target)), torch.Tensor)
    }
    member = f"programs/{name}.json"
    data = {"graph": graph_to_data(plan.graph, table), "plan": to_data(plan), **kernels}
    members[member] = json.dumps(data, separators=(",", ":")).encode()
    return {
        "program": member,
        "weights": [
            [weight, tensors.add("weights", weight, tensor, device, name)]
            for (weight, tensor), device in zip(method.weights.items(), devices, strict=False)
        ],
        "constants": constants,
        "inputs": [
            _input(known, value, device, table)
            for (known, value), device in zip(method.inputs, devices[len(method.weights) :], strict=True)
        ],
        "ranges": {symbol.name: list(bounds) for symbol, bounds in method.ranges.items()},
        "guards": [expression_to_data(guard, table) for guard in method.guards],
        "arguments": structure_of(method.arguments),
        "results": structure_of(method.results),
    }


def _input(name: str, value: Any, device: torch.device, table: Functions) -> dict[str, Any]:
    def size(number: Any) -> Any:
        return number if isinstance(number, int) else expression_to_data(number.node.expr, table)

    if isinstance(value, torch.Tensor):
        sizes = {"size": list(map(size, value.size())), "stride": list(map(size, value.stride()))}
        dtype = str(value.dtype).removeprefix("torch.")
        return {"name": name, "dtype": dtype, "device": str(device), **sizes}
    if isinstance(value, torch.SymInt):
        return {"name": name, "number": "int", "value": expression_to_data(value.node.expr, table)}
    if value is None or type(value) in (int, float, bool, str):
        return {"name": name, "number": type(value).__name__, "value": value}
    raise StorageError(f"input {name!r} of type {type(value).__name__}", expected="a tensor or a number")


class _Kernels:
    """Kernels to save, each as members of the file.

    Attributes:
        devices: what they run on.
        targets: by device, what the machine code of Triton's is for.
        triton: whether there are any of Triton's.
    """

    def __init__(self, compiled: bool, members: dict[str, bytes]) -> None:
        self.devices: set[str] = set()
        self.targets: dict[str, Any] = {}
        self.triton = False
        self._compiled, self._members = compiled, members

    def of(self, gm: torch.fx.GraphModule) -> dict[str, Any]:
        """The compiled files of a graph's C++ kernels, and what launches its Triton kernels, by kernel."""
        objects: dict[str, str] = {}
        triton: dict[str, Any] = {}
        for node, kernel in _kernels(gm):
            self.devices.add(str(kernel.device))
            if kernel.language == "triton":
                args = next((user.args[1:] for user in node.users), ())
                triton[kernel.name] = self._triton(kernel, args)
            elif kernel.language == "cpp" and self._compiled:
                data = object_file(kernel.definitions, kernel.name).read_bytes()
                objects[kernel.name] = self._member(data, "so")
        return {"objects": objects, "triton": triton}

    def _triton(self, kernel: Kernel, args: Sequence[Any]) -> dict[str, Any]:
        found = triton_to_data(kernel, args)
        self.triton = True
        source = self._member(found.source.encode(), "py")
        if found.binary is None or not self._compiled:
            return {**found.data, "source": source, "binary": None, "metadata": None}
        self.targets[str(kernel.device)] = found.data["target"]
        return {**found.data, "source": source, "binary": self._member(*found.binary)}

    def _member(self, data: bytes, ending: str) -> str:
        """The name of a member with this content."""
        for name, known in self._members.items():
            if known == data:
                return name
        name = f"kernels/{len(self._members)}.{ending}"
        self._members[name] = data
        return name


def _kernels(gm: torch.fx.GraphModule) -> Sequence[tuple[torch.fx.Node, Kernel]]:
    """Kernels of a graph and of its subgraphs, with the nodes that hold them."""
    found: list[tuple[torch.fx.Node, Kernel]] = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = getattr(gm, str(node.target))
            if isinstance(value, Kernel):
                found.append((node, value))
            elif isinstance(value, torch.fx.GraphModule):
                found.extend(_kernels(value))
    return found


class _Tensors:
    """Tensors to save, each once: those with the same memory and layout are one.

    Attributes:
        described: by name, in which file it is, and its layout.
    """

    def __init__(self) -> None:
        self.described: dict[str, Any] = {}
        self._values: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "constants": {}}
        self._names: dict[Any, str] = {}

    def add(self, kind: str, name: str, tensor: torch.Tensor, device: torch.device, method: str) -> str:
        """The name under which a tensor is saved: its own, or its method's and its own where another has that."""
        tensor = tensor.detach()
        look = tuple(tensor.size()), tuple(tensor.stride())
        same = kind, tensor.device, tensor.dtype, tensor.data_ptr(), *look
        if tensor.numel() and same in self._names:
            return self._names[same]
        name = f"{method}.{name}" if name in self.described else name
        self._names[same] = name
        self._values[kind][name] = tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes = {"size": list(look[0]), "stride": list(look[1])}
        self.described[name] = {"kind": kind, "dtype": dtype, "device": str(device), **sizes}
        return name

    def serialized(self, kind: str) -> bytes:
        try:
            from safetensors.torch import save as serialize
        except ImportError as error:
            raise StorageError(
                "tensors cannot be saved", expected="the package safetensors", remedy="pip install safetensors"
            ) from error
        plain = {name: tensor.cpu().contiguous() for name, tensor in self._values[kind].items()}
        # Parts of one storage are saved one by one.
        whole = {name: t.untyped_storage().nbytes() == t.numel() * t.itemsize for name, t in plain.items()}
        return serialize({name: tensor if whole[name] else tensor.clone() for name, tensor in plain.items()})
