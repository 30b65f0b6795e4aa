"""``fxwrap.load``: the methods of a saved program, run without Inductor, Dynamo and a compiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import sympy
import torch

from ..codegen.store.stored_kernels import stored_kernel
from ..codegen.store.stored_triton import stored_launcher
from ..codegen.torch_runtime import (
    autocast_enabled,
    empty_graph,
    is_plain_memory,
    library_functions,
    load_object,
    size_functions,
    torch_functions,
    without_autocast,
    wrapper_functions,
)
from ..errors import InputError, StorageError
from ..graphs.program import Program
from ..graphs.replay.overlaps import MutatedInputs
from ..host_graph.graph_json import Functions, expression_from_data, graph_from_data
from ..host_graph.nodes import Kernel, output_values
from ..host_graph.stand_ins import StandIns
from ..host_graph.typed_json import from_data
from ..options import Options
from ..pipeline import CompileRequest, restore_program
from ..plan import ProgramPlan
from .machine import check_machine
from .package import Package
from .signature import Checker, Look, NumberInput, Signature, TensorInput
from .structure import LEAF, flatten, unflatten, with_classes
from .tensors import from_stored, overlapping, same_memory, without_repeats

if TYPE_CHECKING:
    from ..api.report import Explanation


def load(
    path: str | Path, *, weights: Mapping[str, torch.Tensor] | None = None, trust: bool = False
) -> LoadedProgram:
    """Load what ``fxwrap.save`` has written.

    The file holds no pickled objects, and no member is used before its digest is found to be right. Compiled kernels
    are native code all the same, which may do anything, and digests say nothing of who wrote the file.

    Args:
        weights: parameters and buffers by name, instead of those in the file; those that it lacks have to be there.
            They are used as they are: what is written to them later counts.
        trust: whether native code and source in the file may run.

    Raises:
        StorageError: the file is damaged, or for another torch, Python, processor or device; or ``trust`` is
            missing, or weights are, or they do not fit.
    """
    package = Package(Path(path))
    try:
        try:
            check_machine(package)
            if not trust:
                raise package.error(
                    "trust=False",
                    "leave to run the kernels in the file, which are native code or are compiled to it",
                    "pass trust=True if you made the file, or know who did",
                )
            package.check_all()
            return _loaded(package, dict(weights or {}))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ImportError) as error:
            raise package.error(f"{type(error).__name__}: {error}", "what fxwrap.save has written") from error
    finally:
        package.close()


def _loaded(package: Package, given: dict[str, torch.Tensor]) -> LoadedProgram:
    manifest = package.manifest
    functions = Functions({**wrapper_functions(), **library_functions()}, size_functions())
    tensors = _Tensors(package, _by_entry(package, given), functions)
    options = Options(**manifest["options"])
    methods = {}
    with tempfile.TemporaryDirectory(prefix="fxwrap-") as folder:
        kernels = _Kernels(package, Path(folder))
        for name, known in manifest["methods"].items():
            data = package.json(known["program"])
            constants = {attribute: tensors[tensor] for attribute, tensor in known["constants"].items()}
            graph = graph_from_data(data["graph"], functions, StandIns(), constants, kernels.of(data), empty_graph)
            plan = from_data(ProgramPlan, data["plan"], graph=graph)
            program = restore_program(plan, CompileRequest(torch_functions(), options))
            weights = {weight: tensors[tensor] for weight, tensor in known["weights"]}
            methods[name] = LoadedMethod(signature_of(name, known, functions), program, weights)
    names = _names_of_weights(manifest["tensors"])
    weights = {entry: tensors[entry] for entry in dict.fromkeys(names.values())}
    if given and (found := overlapping([(weights[n], manifest["tensors"][n]["written"]) for n in weights])):
        one, other = (list(weights)[place] for place in found)
        got = f"weights {one!r} and {other!r} that share memory"
        raise package.error(got, "weights with memory of their own, as far as they are written", "give a clone")
    return LoadedProgram(methods, weights, names, _Frozen.of(manifest))


def _names_of_weights(tensors: Mapping[str, Any]) -> dict[str, str]:
    """What weights are called, their own names first, and which they are."""
    weights = {name: known["aliases"] for name, known in tensors.items() if known["kind"] == "weights"}
    own = {name: name for name in weights}
    return {**{alias: name for name, aliases in weights.items() for alias in aliases}, **own}


@dataclass(frozen=True)
class _Frozen:
    """Weights whose values are compiled in: they cannot be others.

    Attributes:
        names: methods where they are, by name.
        entries: methods that have frozen what other methods take as a weight, by its name in the file.
    """

    names: Mapping[str, Sequence[str]]
    entries: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> _Frozen:
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


def _by_entry(package: Package, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights that were given, by the names in the file."""
    names = _names_of_weights(package.manifest["tensors"])
    frozen = _Frozen.of(package.manifest)
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


def signature_of(name: str, known: Mapping[str, Any], functions: Functions) -> Signature:
    """The signature of a method, from its entry in the manifest."""

    def size(data: Any) -> Any:
        return data if isinstance(data, int) else expression_from_data(data, functions)

    inputs: list[TensorInput | NumberInput] = []
    for one in known["inputs"]:
        if "number" in one:
            kinds = {"int": int, "float": float, "bool": bool, "str": str, "NoneType": type(None)}
            value = one["value"] if isinstance(one["value"], (str, float, type(None))) else size(one["value"])
            inputs.append(NumberInput(one["name"], kinds[one["number"]], value))
        else:
            sizes = tuple(map(size, one["size"])), tuple(map(size, one["stride"]))
            inputs.append(TensorInput(one["name"], _dtype(one["dtype"]), torch.device(one["device"]), *sizes))
    ranges = {symbol: (low, high) for symbol, (low, high) in known["ranges"].items()}
    guards = tuple(expression_from_data(guard, functions) for guard in known["guards"])
    return Signature(name, tuple(inputs), ranges, guards, known["arguments"], known["results"])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


class _Tensors:
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
        look = _dtype(known["dtype"]), torch.device(known["device"]), tuple(known["size"]), tuple(known["stride"])
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


class _Kernels:
    """Loads kernels: compiled ones out of the file, C++ source through Inductor and Triton's through Triton."""

    def __init__(self, package: Package, folder: Path) -> None:
        self._package, self._folder = package, folder
        self._objects: dict[str, Callable[..., Any]] = {}

    def of(self, data: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Kernel]:
        texts, objects, triton = data["graph"]["modules"], data["objects"], data["triton"]

        def kernel(known: Mapping[str, Any]) -> Kernel:
            name, definition, run = known["kernel"], None, None
            if known["language"] == "triton":
                run = self._triton(name, triton[name], torch.device(known["device"]))
            elif (member := objects.get(name)) is not None:
                definition = self._object(member)
            else:
                from ..codegen.emit.kernels import load_kernels, loaded_kernel

                definition = loaded_kernel(load_kernels(texts[known["module"]]), name)
            if (found := stored_kernel(known, texts, definition, run)) is None:
                got = f"no {known['language']} kernels on {known['device']}"
                raise self._package.error(got, "a device that runs them")
            return found

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

    def _object(self, member: str) -> Callable[..., Any]:
        if member not in self._objects:
            # The file's own names are used for nothing on the disk.
            path = self._folder / f"{len(self._objects)}.so"
            path.write_bytes(self._package.read(member))
            self._objects[member] = load_object(str(path))
        return self._objects[member]


class _Loaded:
    """What a file was loaded as: kernels and recordings, which exist in this process alone."""

    def __reduce__(self) -> NoReturn:
        raise StorageError(
            "a loaded program cannot be copied or pickled",
            expected="the file itself, which any process can load",
            remedy="load the file again: fxwrap.load(path, trust=True)",
        )


class LoadedMethod(_Loaded):
    """One method of a saved program: ``method(*args, **kwargs)``. No gradients are computed.

    Attributes:
        signature: what it takes; print it.
        weights: parameters and buffers by the names that they have in its module.
    """

    def __init__(self, signature: Signature, program: Program, weights: Mapping[str, torch.Tensor]) -> None:
        self.signature, self.program, self.weights = signature, program, dict(weights)
        self._weights = list(self.weights.values())
        functions = torch_functions()
        self._check = Checker(signature, functions.layout_check)
        passed = [place for place, one in enumerate(signature.inputs) if not _compiled_in(one)]
        self._passed = passed if len(passed) < len(signature.inputs) else None
        mutated = MutatedInputs.of(program.plan, functions.overlap)
        self._mutated = mutated.with_static(self._weights, range(len(self._weights))) if mutated else None
        self._apart = set[tuple[Any, ...]]()  # layouts and addresses of inputs that were found apart
        args, kwargs = signature.arguments["tuple"]
        # Plain positional tensors are a list already.
        self._plain = len(args["tuple"]) if all(a == LEAF for a in args["tuple"]) and not kwargs["dict"] else -1
        self._single = signature.results == LEAF
        self._results = with_classes(signature.results)
        self._constant = _constant_results(program.plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == self._plain and not kwargs:
            inputs = list(args)
        else:
            inputs = list(flatten(self.signature.arguments, (args, kwargs)))
        return self.call_flat(inputs)

    def call_flat(self, inputs: list[Any]) -> Any:
        """Call it with its inputs in the order of the signature."""
        look = self._check(inputs)
        if self._passed is not None:
            inputs = [inputs[place] for place in self._passed]
        values = self._weights + inputs
        if self._mutated is not None:
            self._check_apart(self._mutated, values, look)
        if autocast_enabled():
            # Operators would take and return other dtypes than those that memory is planned for.
            with without_autocast():
                found = self.program.run(values)
        else:
            found = self.program.run(values)
        if self._constant:
            found = _with_copies(found, self._constant)
        if self._single:
            return found
        return unflatten(self._results, iter(found if isinstance(found, (list, tuple)) else [found]))

    def _check_apart(self, mutated: MutatedInputs, values: list[Any], look: Look | None) -> None:
        """Raise where a tensor that is written shares memory with an input: AOTAutograd has taken for granted that
        none does."""
        where = (look, *[values[place].data_ptr() for place, _ in mutated.moving])
        if look is not None and where in self._apart:
            return
        if mutated.are_apart(values):
            if len(self._apart) >= _PLACES:
                self._apart.clear()
            if look is not None:
                self._apart.add(where)
            return
        facts, nodes = self.program.plan.facts, self.program.plan.placeholders
        names = [*self.weights, *(one.name for one in self.signature.inputs if not _compiled_in(one))]
        written = facts.all_written()
        of_written = [name for name, node in zip(names, nodes, strict=True) if facts.of(node) & written]
        raise InputError(
            f"call of {self.signature.method}, which writes to {', '.join(of_written)}",
            expected="other inputs with other memory",
            got="an input that shares memory with one that is written",
            remedy="pass a clone of one of them",
        )


# Allocators give the same few addresses again and again.
_PLACES = 64


def _compiled_in(known: TensorInput | NumberInput) -> bool:
    return isinstance(known, NumberInput) and not isinstance(known.value, sympy.Basic)


def _constant_results(plan: ProgramPlan) -> list[int]:
    """Results that lie in the memory of constants, by position: freezing has computed them."""
    gm, facts = plan.graph, plan.facts
    held = [n for n in gm.graph.find_nodes(op="get_attr") if isinstance(getattr(gm, str(n.target)), torch.Tensor)]
    constants, results = facts.behind(held), output_values(gm)
    return [n for n, value in enumerate(results) if isinstance(value, torch.fx.Node) and facts.of(value) & constants]


def _with_copies(results: Any, places: Sequence[int]) -> Any:
    """Results that the caller may write to: the next call would return what was written."""
    if not isinstance(results, (list, tuple)):
        return results.clone()
    copied = list(results)
    for place in places:
        copied[place] = copied[place].clone()
    return copied


class LoadedProgram(_Loaded):
    """The methods of a saved program: ``program["decode"](x)``, or ``program.decode(x)``.

    Attributes:
        methods: their signatures by name.
    """

    def __init__(
        self,
        methods: Mapping[str, LoadedMethod],
        weights: Mapping[str, torch.Tensor],
        names: Mapping[str, str],
        frozen: _Frozen,
    ) -> None:
        self._methods, self._weights, self._names = dict(methods), dict(weights), dict(names)
        self._frozen = frozen

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of all methods, each once: by the name that it has in its module, or ``method.name``
        where another weight of an earlier method has that."""
        return dict(self._weights)

    @property
    def methods(self) -> Mapping[str, Signature]:
        return {name: method.signature for name, method in self._methods.items()}

    def __getitem__(self, name: str) -> LoadedMethod:
        try:
            return self._methods[name]
        except KeyError:
            raise InputError("no such method", expected=", ".join(self._methods), got=repr(name)) from None

    def __getattr__(self, name: str) -> LoadedMethod:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]  # type: ignore[no-any-return]
        raise AttributeError(f"a saved program has no method {name!r}: it has {', '.join(methods)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy other values to weights. What was recorded goes on to be replayed.

        Args:
            weights: by their names, or by any other that a module has for them (tied weights have several).

        Raises:
            StorageError: a name is unknown, a shape is another one, or one weight gets two values; then nothing was
                copied.
        """
        values: dict[str, torch.Tensor] = {}
        for name, value in weights.items():
            self._frozen.check(name, self._names.get(name))
            if name not in self._names:
                raise StorageError(
                    f"weight {name!r}", expected=f"one of {', '.join(self._weights)}", got="a name of none"
                )
            if not isinstance(value, torch.Tensor):
                raise StorageError(f"weight {name!r}", expected="a tensor", got=type(value).__name__)
            own = self._weights[self._names[name]]
            sizes = str(tuple(own.size())), str(tuple(value.size()))
            if sizes[0] != sizes[1]:
                raise StorageError(f"weight {name!r}", expected=sizes[0], got=sizes[1])
            once = without_repeats(value, own.stride())
            if once.size() != value.size() and not torch.equal(once.expand_as(value), value):
                raise StorageError(
                    f"weight {name!r}", expected=f"values that repeat: strides are {own.stride()}", got="others"
                )
            if not same_memory(values.setdefault(self._names[name], value), value):
                raise StorageError(
                    f"weight {self._names[name]!r}", expected="one tensor", got=f"another one as {name!r}"
                )
        with torch.no_grad():
            for name, value in values.items():
                own = self._weights[name]
                without_repeats(own).copy_(without_repeats(value, own.stride()))

    def explain(self) -> Explanation:
        """What is decided about all methods, as ``fxwrap.explain`` shows it."""
        from ..api.report import Explanation

        return Explanation([method.program for method in self._methods.values()])
