"""Converts host graphs to data for JSON, and back: nodes, the fake values of their results, kernels by name.

The data holds no code. A function is stored by its name in a table (``Functions``); a function that is not in the
table can be neither stored nor read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import sympy
import torch
from sympy.functions.elementary.piecewise import ExprCondPair
from torch.fx import GraphModule, Node

from ..errors import StorageError
from . import nodes as host
from .arithmetic import ARITHMETIC
from .nodes import Kernel, Kind, constants, is_symbolic_value
from .user_code import last_frame

Data = Any  # what JSON can hold


class Functions:
    """A table of the functions that a graph may call beside operators, by name.

    Args:
        others: functions that the caller adds, by name.
        of_sizes: classes of sympy expressions that the caller adds to sympy's own, by name.
    """

    def __init__(self, others: Mapping[str, Callable[..., Any]], of_sizes: Mapping[str, type]) -> None:
        of_sympy = {kind.__name__: kind for kind in (*(getattr(sympy, name) for name in _SYMPY), ExprCondPair)}
        self.of_sizes: Mapping[str, type] = {**of_sympy, **of_sizes}
        self._by_name: dict[str, Any] = {**_FUNCTIONS, **others}
        self._names = {id(function): name for name, function in reversed(self._by_name.items())}

    def name(self, function: Any) -> str:
        """The name under which a function is stored.

        Raises:
            StorageError: it has none.
        """
        if isinstance(function, torch._ops.OpOverload):
            return f"operator {function.name()}" + ("" if function._overloadname != "default" else ".default")
        if isinstance(function, torch._ops.OpOverloadPacket):
            return f"operators {function._qualified_op_name}"
        if (name := self._names.get(id(function))) is not None:
            return name
        raise StorageError(
            f"a call of {getattr(function, '__name__', function)!r}", expected="a function with a name"
        )

    def __getitem__(self, name: str) -> Any:
        kind, _, operator_name = name.partition(" ")
        if kind in ("operator", "operators") and operator_name:
            return _operator(operator_name, kind == "operators")
        if name in self._by_name:
            return self._by_name[name]
        raise StorageError(f"the function {name!r}", expected="an operator, or one of the functions of host graphs")


def _operator(name: str, packet: bool) -> Any:
    namespace, _, rest = name.partition("::")
    operators = getattr(torch.ops, namespace)
    try:
        base, _, overload = rest.partition(".")
        return getattr(operators, base) if packet else getattr(getattr(operators, base), overload or "default")
    except AttributeError:
        raise StorageError(
            f"the operator {name}", got="it is not registered", remedy="import the library that defines it"
        ) from None


_FUNCTIONS: dict[str, Any] = {
    # Functions alone: operator's classes (attrgetter, methodcaller) would fetch and call anything by name.
    **{f"operator.{f.__name__}": f for f in vars(operator).values() if isinstance(f, type(operator.add))},
    **{f"torch.{n}": f for n, f in vars(torch).items() if n.startswith("sym_") and callable(f)},
    **ARITHMETIC,
    "torch.empty_strided": torch.empty_strided,
    **{f"fxwrap.{function.__name__}": function for function in host.FUNCTIONS},
}
_RELATIONS = ("Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan")
_SYMPY = ("Add", "Mul", "Pow", "And", "Or", "Not", "Piecewise", "Abs", "Max", "Min", *_RELATIONS)
_NOTES = (
    "outside_plan",
    "effect",
    "of_data",
    "module",
    "uninitialised",
    "user_name",
)  # keys of ``meta`` that are stored as they are
_POWERS = ("Pow", "PowByNatural", "LShift", "RShift")
_CONSTANTS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


@dataclass(frozen=True)
class TensorLayout:
    """A fake tensor as data.

    Attributes:
        size, stride, offset: in elements; each may be symbolic.
        storage: number of the storage; tensors with the same number share memory.
        storage_bytes: bytes of the storage; may be symbolic.
        conjugation, negation: whether it is pending.
    """

    dtype: torch.dtype
    device: torch.device
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    storage: int
    storage_bytes: Any
    conjugation: bool = False
    negation: bool = False


class Values(Protocol):
    """Makes the values of ``meta["val"]`` when a graph is read: fake tensors and symbolic numbers, or stand-ins."""

    def tensor(self, layout: TensorLayout) -> Any: ...

    def number(self, expression: sympy.Expr, kind: str, hint: Any) -> Any: ...


@dataclass
class _Writer:
    functions: Functions
    storages: dict[int, int] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)

    def graph(self, gm: GraphModule) -> Data:
        attributes = {str(node.target): self.attribute(value) for node, value in constants(gm).items()}
        return {"nodes": [self.node(node) for node in gm.graph.nodes], "attributes": attributes}

    def attribute(self, value: Any) -> Data:
        if isinstance(value, Kernel):
            module = self.modules.setdefault(value.definitions, len(self.modules))
            call = {"language": value.language, "device": str(value.device), "writes": list(value.writes)}
            types = None if value.arg_types is None else list(map(str, value.arg_types))
            begin = value.definitions.find(value.source)
            source = [begin, begin + len(value.source)] if begin >= 0 else [0, 0]
            return {"kernel": value.name, "module": module, "source": source, **call, "arg_types": types}
        if isinstance(value, GraphModule):
            return {"graph": self.graph(value)}
        if isinstance(value, torch.Tensor):
            return {"constant": None}
        raise StorageError(f"a constant of type {type(value).__name__}", expected="a tensor, a kernel or a graph")

    def node(self, node: Node) -> Data:
        target = self.functions.name(node.target) if node.op == "call_function" else str(node.target)
        args, kwargs = self.value(node.args), self.value(dict(node.kwargs))
        return [node.name, node.op, target, args, kwargs, self.meta(node.meta)]

    def meta(self, meta: Mapping[str, Any]) -> Data:
        data: dict[str, Any] = {}
        if "val" in meta:
            data["val"] = self.value(meta["val"])
        for key in ("call", "op_overload"):
            if key in meta:
                data[key] = self.functions.name(meta[key])
        if "kind" in meta:
            data["kind"] = meta["kind"].value
        for key in _NOTES:
            if key in meta:
                data[key] = meta[key]
        if where := last_frame(meta.get("stack_trace") or ""):
            data["line"] = where
        if "origins" in meta:
            data["origins"] = list(map(str, meta["origins"]))
        return data

    def value(self, value: Any) -> Data:
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, sympy.Integer):
            return int(value)  # torch 2.11 has some in graphs that freezing has folded
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Node):
            return {"node": value.name}
        if isinstance(value, tuple):
            return {"tuple": list(map(self.value, value))}
        if isinstance(value, list):
            return list(map(self.value, value))
        if isinstance(value, dict):
            return {"dict": [[self.value(key), self.value(item)] for key, item in value.items()]}
        if isinstance(value, slice):
            return {"slice": [self.value(bound) for bound in (value.start, value.stop, value.step)]}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if type(value) in _CONSTANTS:
            return {_CONSTANTS[type(value)]: str(value).removeprefix("torch.")}
        if is_symbolic_value(value):
            kind = type(value).__name__
            return {"number": [kind, expression_to_data(value.node.expr, self.functions), _hint(value)]}
        if isinstance(value, torch.Tensor):
            pending, tensor = [value.is_conj(), value.is_neg()], self.tensor(value)
            return {"pending": [*pending, *tensor]} if any(pending) else {"tensor": tensor}
        raise StorageError(f"a value of type {type(value).__name__}", expected="tensors, numbers and names")

    def tensor(self, value: torch.Tensor) -> Data:
        if value.layout is not torch.strided or value.is_quantized:
            kind = "quantized tensor" if value.is_quantized else f"tensor with layout {value.layout}"
            raise StorageError(f"a {kind}", expected="plain memory")
        storage = value.untyped_storage()
        number = self.storages.setdefault(storage._cdata, len(self.storages))
        sizes = [list(map(self.value, sizes)) for sizes in (value.size(), value.stride())]
        where = [number, self.value(storage.nbytes()), self.value(value.storage_offset())]
        return [str(value.dtype).removeprefix("torch."), str(value.device), *sizes, *where]


@dataclass
class _Reader:
    functions: Functions
    values: Values
    constants: Mapping[str, Any]
    kernel: Callable[[Mapping[str, Any]], Kernel]
    empty: Callable[[], GraphModule]

    def graph(self, data: Data) -> GraphModule:
        gm = self.empty()
        for name, attribute in data["attributes"].items():
            setattr(gm, name, self.attribute(name, attribute))
        nodes: dict[str, Node] = {}
        for name, op, target, args, kwargs, meta in data["nodes"]:
            function = self.functions[target] if op == "call_function" else target
            node = gm.graph.create_node(op, function, self.value(args, nodes), self.value(kwargs, nodes))
            # Plans refer to nodes by name: the numbers that torch appends must be the stored ones.
            node.name = name
            node.meta = self.meta(meta)
            nodes[name] = node
        gm.recompile()
        return gm

    def attribute(self, name: str, data: Mapping[str, Any]) -> Any:
        if "kernel" in data:
            return self.kernel(data)
        if "graph" in data:
            return self.graph(data["graph"])
        return self.constants[name]

    def meta(self, data: Mapping[str, Any]) -> dict[str, Any]:
        meta = {key: data[key] for key in _NOTES if key in data}
        if "val" in data:
            meta["val"] = self.value(data["val"], {})
        for key in ("call", "op_overload"):
            if key in data:
                meta[key] = self.functions[data[key]]
        if "kind" in data:
            meta["kind"] = Kind(data["kind"])
        if data.get("line"):
            line, _, code = data["line"].partition(": ")
            meta["stack_trace"] = f"File {line}, in the user's code\n{code}"
        if "origins" in data:
            meta["origins"] = tuple(data["origins"])
        return meta

    def value(self, data: Data, nodes: Mapping[str, Node]) -> Any:
        if isinstance(data, list):
            return [self.value(item, nodes) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, inner),) = data.items()
        match kind:
            case "node":
                return nodes[inner]
            case "tuple":
                return tuple(self.value(item, nodes) for item in inner)
            case "dict":
                return {self.value(key, nodes): self.value(item, nodes) for key, item in inner}
            case "slice":
                return slice(*(self.value(item, nodes) for item in inner))
            case "float":
                return float(inner)
            case "complex":
                return complex(*inner)
            case "device":
                return torch.device(inner)
            case "dtype" | "layout" | "memory_format":
                return _torch_constant(kind, inner)
            case "number":
                number, expression, hint = inner
                return self.values.number(expression_from_data(expression, self.functions), number, hint)
            case "tensor" | "pending":
                conjugation, negation = inner[:2] if kind == "pending" else (False, False)
                dtype, device, size, stride, storage, nbytes, offset = inner[-7:]
                size, stride = (tuple(self.value(n, {}) for n in numbers) for numbers in (size, stride))
                dtype, device = _torch_constant("dtype", dtype), torch.device(device)
                offset, nbytes = self.value(offset, {}), self.value(nbytes, {})
                where = offset, storage, nbytes
                return self.values.tensor(TensorLayout(dtype, device, size, stride, *where, conjugation, negation))
        raise StorageError(f"a value of kind {kind!r}", expected="one that fxwrap has written")


def graph_to_data(gm: GraphModule, functions: Functions) -> Data:
    """A host graph as data that JSON can hold.

    Raises:
        StorageError: naming a function or a value that cannot be stored.
    """
    writer = _Writer(functions)
    return {**writer.graph(gm), "modules": list(writer.modules)}


def graph_from_data(
    data: Data,
    functions: Functions,
    values: Values,
    constants: Mapping[str, Any],
    kernel: Callable[[Mapping[str, Any]], Kernel],
    empty: Callable[[], GraphModule],
) -> GraphModule:
    """The host graph that ``graph_to_data`` has written.

    Args:
        values: makes the values of ``meta["val"]``.
        constants: tensors by the name of their attribute.
        kernel: loads a kernel, from its ``kernel`` (name), ``module`` (number in ``data["modules"]``), ``source``
            (begin and end in that text), ``language``, ``device``, ``writes`` and ``arg_types``.
        empty: makes a module whose graph has no nodes.

    Raises:
        StorageError, KeyError, TypeError, ValueError: the data is no host graph.
    """
    return _Reader(functions, values, constants, kernel, empty).graph(data)


def _torch_constant(kind: str, name: str) -> Any:
    constant = getattr(torch, name, None)
    if _CONSTANTS.get(type(constant)) != kind:
        raise StorageError(f"the {kind} {name!r}", expected=f"a {kind} of torch's")
    return constant


def _hint(value: Any) -> Any:
    try:
        hint = value.node.hint
        return hint if type(hint) in (int, float, bool) else None
    except Exception:
        return None


# -- expressions of sizes -----------------------------------------------------------------------------------------


def expression_to_data(expression: Any, functions: Functions) -> Data:
    """An expression as nested lists: ``["Add", 1, {"symbol": "s0"}]``. To read it, no code is evaluated."""
    if isinstance(expression, sympy.Symbol):
        assumed = {key: True for key in ("integer", "positive", "nonnegative") if getattr(expression, f"is_{key}")}
        return {"symbol": expression.name, **assumed}
    if expression.is_Integer:
        return int(expression)
    if expression.is_Rational:
        return {"rational": [int(expression.p), int(expression.q)]}
    if expression.is_Float:
        return {"float": float(expression)}
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    kind: Any = type(expression)
    name = kind.__name__
    if functions.of_sizes.get(name) is not kind:
        raise StorageError(f"the size {expression}", expected="an expression of torch's own functions")
    return [name, *(expression_to_data(arg, functions) for arg in expression.args)]


# No number of an expression is larger, and none has a power above the second; a function has no more operands.
_LARGEST, _LARGEST_POWER, _MOST_OPERANDS = 1 << 128, 64, 1000


def expression_from_data(data: Data, functions: Functions) -> Any:
    """The expression that ``expression_to_data`` has written. Sympy computes with its numbers while it is made.

    Raises:
        StorageError: it has an unknown function, or a number that no size has.
    """
    if isinstance(data, bool):
        return sympy.true if data else sympy.false
    if isinstance(data, int):
        return _checked(sympy.Integer(data))
    if isinstance(data, dict):
        if "symbol" in data:
            assumptions = {key: True for key in ("integer", "positive", "nonnegative") if data.get(key)}
            return sympy.Symbol(data["symbol"], **assumptions)
        if "rational" in data:
            return _checked(sympy.Rational(*map(operator.index, data["rational"])))
        return sympy.Float(float(data["float"]))
    name, *operands = data
    if (function := functions.of_sizes.get(name)) is None:
        raise StorageError(f"the function {name!r} of sizes", expected="one of torch's own")
    args = [expression_from_data(operand, functions) for operand in operands]
    raises = name in _POWERS and len(args) > 1 and args[1].is_number
    if len(args) > _MOST_OPERANDS or (raises and not abs(args[1]) <= _LARGEST_POWER):
        raise StorageError(f"{name} of {len(args)} operands in a size", expected="a size of a tensor")
    return _checked(function(*args))


def _checked(number: Any) -> Any:
    if number.is_Float or number.is_Rational:
        parts = (number,) if number.is_Float else (number.p, number.q)
        if any(abs(part) >= _LARGEST for part in parts):
            raise StorageError("a number in a size", expected="one that a tensor can have")
    return number
