"""``fxwrap.save``: compiles methods and writes one file, which runs without Inductor, Dynamo and a compiler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..backend import parsed
from ..codegen.emit.kernels import object_file
from ..codegen.store.export import CompiledMethod, TracedMethod, compile_method, is_constant, traced_method
from ..codegen.store.export_triton import triton_to_data
from ..codegen.store.packed_weights import is_packed
from ..codegen.store.stored_program import functions
from ..codegen.store.stored_triton import triton_version
from ..errors import OptionError, StorageError
from ..host_graph.graph_json import Functions, expression_to_data, graph_to_data
from ..host_graph.nodes import Kernel
from ..host_graph.typed_json import to_data
from . import package
from .machine import versions
from .signature import solution
from .structure import structure_of
from .tensors import content, identity, overlapping, to_stored

COMPILED = ("object", "source")


def save(
    path: str | Path,
    methods: Mapping[str, Any],
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
            module, example inputs, and, if any, keyword inputs and dynamic shapes.
        options: as for ``torch.compile(..., backend="fxwrap", options=...)``.
        weights: whether the file holds weights; if not, ``fxwrap.load`` has to be given them.
        compile: "object" saves compiled kernels, for machines like this one; "source" saves their source only, which
            is compiled where it is loaded.
        progress: called with a line of text before each step.

    Returns:
        The path of the file.

    Raises:
        StorageError: a method does not compile to one program, or something in it cannot be saved.
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
    fxwrap_options, patches = parsed(options)
    members: dict[str, bytes] = {}
    described: dict[str, Any] = {}
    tensors, kernels = _Tensors(), _Kernels(compile == "object", members)
    for name, method in methods.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise OptionError("the name of a method", expected="a Python name", got=repr(name))
        progress(f"{name}: tracing")
        traced = traced_method(name, _exported(name, method))
        call = _describe_call(traced)
        progress(f"{name}: compiling")
        compiled = compile_method(traced, fxwrap_options, patches)
        if compiled.frozen and not weights:
            raise StorageError(
                f"method {name!r} with its weights frozen",
                expected="weights that are left out (weights=False), or frozen ones, which are compiled in",
                got=", ".join(compiled.frozen),
                remedy="leave out weights=False, or freezing",
            )
        described[name] = {**call, **_describe(compiled, tensors, kernels.of(compiled.plan.graph), members)}
    progress("writing")
    tensors.check_apart()
    names = tensors.names()
    for entry in described.values():
        entry["weights"] = [[weight, names[number]] for weight, number in entry["weights"]]
        entry["constants"] = {attribute: names[number] for attribute, number in entry["constants"].items()}
    inputs = (data for entry in described.values() for data in entry["inputs"])
    devices = {data["device"] for data in (*inputs, *tensors.described().values()) if "device" in data}
    machine = {
        **versions(),
        "compile": compile,
        "devices": sorted(devices | kernels.devices),
        "triton": {"version": triton_version() if kernels.triton else "", "targets": kernels.targets},
    }
    members["constants.safetensors"] = tensors.serialized("constants")
    if weights:
        members["weights.safetensors"] = tensors.serialized("weights")
    run_options = fxwrap_options.at_run()
    manifest = {**machine, "options": run_options, "methods": described, "tensors": tensors.described()}
    target = Path(path)
    package.write(target, manifest, members)
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


def _describe_call(method: TracedMethod) -> dict[str, Any]:
    """The manifest's entries about calls of a method that are known after tracing.

    Raises:
        StorageError: a size depends on a symbol that the inputs do not determine.
    """
    table = functions()
    values = [value for _, value in method.passed]
    sizes = [size for value in values for size in _expressions(_sizes(value))]
    strides = [size for value in values if isinstance(value, torch.Tensor) for size in _expressions(value.stride())]
    determined = {solved[0] for size in sizes if (solved := solution(size)) is not None}
    for condition in (*sizes, *strides, *method.guards):
        unknown: set[Any] = condition.free_symbols - determined
        if unknown:
            raise StorageError(
                f"method {method.name!r}: {condition}",
                expected="sizes that can be told from those of the inputs",
                got=", ".join(sorted(map(str, unknown))),
                remedy="export it with such a size as a dimension of an input, or as a constant",
            )
    for guard in method.guards:
        expression_to_data(guard, table)  # a guard that cannot be stored is refused before anything is compiled
    return {
        "ranges": {symbol.name: list(bounds) for symbol, bounds in method.ranges.items()},
        "arguments": structure_of(method.arguments),
        "results": structure_of(method.results, method.constants),
    }


def _sizes(value: Any) -> Sequence[Any]:
    return value.size() if isinstance(value, torch.Tensor) else (value,)


def _expressions(numbers: Sequence[Any]) -> list[Any]:
    return [number.node.expr for number in numbers if isinstance(number, torch.SymInt)]


def _describe(
    method: CompiledMethod, tensors: _Tensors, kernels: Mapping[str, Any], members: dict[str, bytes]
) -> dict[str, Any]:
    """The manifest's entries about a compiled method. A tensor is the number of its entry."""
    plan, table, traced = method.plan, functions(), method.traced
    name, written = traced.name, plan.facts.all_written()
    # The devices on which the program expects its inputs.
    devices: list[Any] = [getattr(node.meta.get("val"), "device", None) for node in plan.placeholders]
    writes = [bool(plan.facts.of(node) & written) for node in plan.placeholders]
    constants = _constants(method, tensors)
    for weight, tensor in method.frozen.items():
        tensors.add_frozen(name, weight, tensor)
    member = f"programs/{name}.json"
    data = {"graph": graph_to_data(plan.graph, table), "plan": to_data(plan), **kernels}
    members[member] = json.dumps(data, separators=(",", ":")).encode()
    passed = iter(devices[len(method.weights) :])
    return {
        "program": member,
        "weights": [
            [weight, tensors.add("weights", name, weight, tensor, device, writes_it)]
            for (weight, tensor), device, writes_it in zip(method.weights.items(), devices, writes, strict=False)
        ],
        "frozen": list(method.frozen),
        "constants": constants,
        "inputs": [
            _input(input_name, value, None if is_constant(value) else next(passed), table)
            for input_name, value in traced.inputs
        ],
        "guards": [expression_to_data(guard, table) for guard in method.guards],
    }


def _constants(method: CompiledMethod, tensors: _Tensors) -> dict[str, int]:
    """The entry numbers of the tensors that a program has as attributes, by attribute."""
    gm, facts, name = method.plan.graph, method.plan.facts, method.traced.name
    entries: dict[str, int] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        attribute = str(node.target)
        value = getattr(gm, attribute)
        if is_packed(value):
            packing = method.packed.graph_of(f"constant {attribute!r} of method {name!r}", value)
            entries[attribute] = tensors.add_packed(name, attribute, packing)
        elif isinstance(value, torch.Tensor):
            writes = bool(facts.of(node) & facts.all_written())
            entries[attribute] = tensors.add("constants", name, attribute, value, value.device, writes)
    return entries


def _input(name: str, value: Any, device: torch.device | None, table: Functions) -> dict[str, Any]:
    def size(number: Any) -> Any:
        return number if isinstance(number, int) else expression_to_data(number.node.expr, table)

    if isinstance(value, torch.Tensor):
        sizes = {"size": list(map(size, value.size())), "stride": list(map(size, value.stride()))}
        dtype = str(value.dtype).removeprefix("torch.")
        return {"name": name, "dtype": dtype, "device": str(device), **sizes}
    if isinstance(value, torch.SymInt):
        return {"name": name, "number": "int", "value": expression_to_data(value.node.expr, table)}
    return {"name": name, "number": type(value).__name__, "value": value}


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
                data = object_file(kernel.definitions, kernel.name).read_bytes()
                objects[kernel.name] = self._member(data, "so")
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


def _kernels(gm: torch.fx.GraphModule) -> Sequence[tuple[torch.fx.Node, Kernel]]:
    """The kernels of a graph and of its subgraphs, with their nodes."""
    kernels: list[tuple[torch.fx.Node, Kernel]] = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = getattr(gm, str(node.target))
            if isinstance(value, Kernel):
                kernels.append((node, value))
            elif isinstance(value, torch.fx.GraphModule):
                kernels.extend(_kernels(value))
    return kernels


@dataclass
class _Entry:
    """A tensor to save.

    Attributes:
        kind: "weights", "constants" or "frozen".
        names: its names, each with the method that it has the name in.
        written: whether a method writes to it.
        frozen: methods that have its value compiled in.
    """

    kind: str
    tensor: torch.Tensor
    device: torch.device
    names: list[tuple[str, str]]
    written: bool = False
    frozen: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return " and ".join(f"{name!r} of {method!r}" for method, name in self.names)


@dataclass
class _Packed:
    """A tensor in a library's packed form, which is packed again when it is loaded.

    Attributes:
        graph: the graph that packs it, as data.
        constants: the entry numbers of the tensors that are packed, by attribute of the graph.
    """

    graph: Any
    constants: Mapping[str, int]
    names: list[tuple[str, str]]


class _Tensors:
    """The tensors to save, without duplicates: one entry for tensors with the same memory and layout, and one for
    constants with the same values."""

    def __init__(self) -> None:
        self._entries: list[_Entry | _Packed] = []
        self._numbers: dict[Any, int] = {}
        # Tensors without an entry of their own: weights that are compiled in, and constants equal to another.
        self._others: list[_Entry] = []

    def add(
        self, kind: str, method: str, name: str, tensor: torch.Tensor, device: torch.device, written: bool
    ) -> int:
        """The number of a tensor's entry; it is added if there is none."""
        new = _Entry(kind, tensor.detach(), device, [(method, name)], written)
        number = self._numbers.setdefault((kind, device, *identity(tensor)), len(self._entries))
        if number == len(self._entries):
            if kind == "constants" and not written:  # freezing makes new tensors for each method, of the same weights
                number = self._numbers.setdefault((kind, device, *content(tensor)), number)
                self._numbers[(kind, device, *identity(tensor))] = number
            (self._entries if number == len(self._entries) else self._others).append(new)
        entry: Any = self._entries[number]
        if entry is not new:
            entry.names.append((method, name))
            entry.written |= written
        return number

    def add_packed(self, method: str, name: str, packing: torch.fx.GraphModule) -> int:
        """The number of the entry of a packed tensor.

        Args:
            packing: a graph without inputs that packs constants and returns the tensor.
        """
        data = graph_to_data(packing, functions())
        constants = {
            str(node.target): self.add("constants", method, f"{name}.{node.target}", value, value.device, False)
            for node in packing.graph.find_nodes(op="get_attr")
            for value in [getattr(packing, str(node.target))]
        }
        key = json.dumps([data, constants])
        number = self._numbers.setdefault(key, len(self._entries))
        if number == len(self._entries):
            self._entries.append(_Packed(data, constants, []))
        self._entries[number].names.append((method, name))
        return number

    def add_frozen(self, method: str, name: str, tensor: torch.Tensor) -> None:
        """Note a weight whose value a method has compiled in."""
        self._others.append(_Entry("frozen", tensor.detach(), tensor.device, [(method, name)]))

    def check_apart(self) -> None:
        """Check that no method writes to memory that another tensor or a compiled-in value shares.

        Raises:
            StorageError: a written tensor overlaps another one (in the file each has memory of its own), or a frozen
                one (its method would not read what is written).
        """
        entries = [entry for entry in self._entries if isinstance(entry, _Entry)]
        weights = {identity(entry.tensor): entry for entry in entries if entry.kind == "weights"}
        for other in self._others:
            if other.kind == "frozen" and (entry := weights.get(identity(other.tensor))) is not None:
                entry.frozen.append(other.names[0][0])
        everything = [*self._others, *entries]
        if pair := overlapping([(entry.tensor, entry.written) for entry in everything]):
            written, other = (everything[place] for place in pair)
            if other.kind == "frozen":
                raise StorageError(
                    f"weight {written} is written, and its value as {other} is frozen",
                    expected="weights that no method writes, where freezing compiles them in",
                    remedy="save the methods without freezing, or in files of their own",
                )
            raise StorageError(
                f"weights {written} and {other} share memory in different layouts, and one is written",
                expected="one tensor for all methods, or memory of their own",
                remedy="register one of them, and make the others of it in forward",
            )

    def names(self) -> list[str]:
        """A unique name for each entry: its first name, prefixed by the method's if another entry has that name."""
        real = {name for entry in self._entries for _, name in entry.names}
        unique = dict[str, None]()
        for entry in self._entries:
            method, name = entry.names[0]
            while name in unique or (name in real and name != entry.names[0][1]):
                name = f"{method}.{name}"
            unique[name] = None
        return list(unique)

    def described(self) -> dict[str, Any]:
        """The manifest's entries by name: member, layout and aliases of each tensor."""
        claims = Counter(name for entry in self._entries for name in {name for _, name in entry.names})
        names = self.names()
        return {
            name: {
                "kind": entry.kind,
                "dtype": str(entry.tensor.dtype).removeprefix("torch."),
                "device": str(entry.device),
                "size": list(entry.tensor.size()),
                "stride": list(entry.tensor.stride()),
                "written": entry.written,
                "frozen": entry.frozen,
                "aliases": sorted({alias for _, alias in entry.names if alias != name and claims[alias] == 1}),
            }
            if isinstance(entry, _Entry)
            else {
                "kind": "packed",
                "graph": entry.graph,
                "constants": {attribute: names[number] for attribute, number in entry.constants.items()},
            }
            for name, entry in zip(names, self._entries, strict=True)
        }

    def serialized(self, kind: str) -> bytes:
        try:
            from safetensors.torch import save as serialize
        except ImportError as error:
            raise StorageError(
                "tensors cannot be saved", expected="the package safetensors", remedy="pip install safetensors"
            ) from error
        plain: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for name, entry in zip(self.names(), self._entries, strict=True):
            if isinstance(entry, _Entry) and entry.kind == kind:
                tensor = to_stored(entry.tensor)
                storage = tensor.untyped_storage()
                # Safetensors refuses tensors that share a storage: a part of one is copied.
                unshared = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
                plain[name] = tensor if unshared else tensor.clone()
                storages.add(storage.data_ptr())
        return serialize(plain)
