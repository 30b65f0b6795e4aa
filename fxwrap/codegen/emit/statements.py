"""Turns the Python text of Inductor's wrapper lines into host-graph nodes.

Every wrapper line prints as Python, which is the code that Inductor would run. Reading the text, and not the objects
behind it, keeps the meaning of a line where objects differ between torch versions, and covers the lines that Inductor
writes as plain strings.

Only straight-line code is read: assignments, calls, ``del``, ``assert`` and expressions. Any other code is an
EmissionError that quotes the line.
"""

from __future__ import annotations

import ast
import functools
import operator
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.fx import Graph, Node

from ...errors import EmissionError
from ...host_graph.arithmetic import BUILTINS, is_arithmetic, select
from ...host_graph.nodes import Kind, check, format_text, nodes_in, reinterpret

_BINARY: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARE: dict[type, Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: dict[type, Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_BUILTINS: dict[str, Any] = {**BUILTINS, "slice": slice, "print": print}

# Methods that Inductor's wrapper calls on tensors and on sizes, and the functions that nodes call instead.
_METHODS: dict[str, Callable[..., Any]] = {
    "copy_": torch.ops.aten.copy_.default,
    "zero_": torch.ops.aten.zero_.default,
    "isnan": torch.ops.aten.isnan.default,
    "isinf": torch.ops.aten.isinf.default,
    "any": torch.ops.aten.any.default,
    "item": torch.ops.aten.item.default,
    "size": torch.ops.aten.sym_size.int,
    "stride": torch.ops.aten.sym_stride.int,
    "storage_offset": torch.ops.aten.sym_storage_offset.default,
    "__floordiv__": operator.floordiv,
    # They combine partial results in a workspace.
    "sum": torch.ops.aten.sum.dim_IntList,
    "prod": torch.ops.aten.prod.dim_int,
}


class StatementReader:
    """Reads statements into ``graph``, resolving names first in ``names``, then in ``namespace``.

    Args:
        graph: receives the nodes.
        names: the wrapper's local variables so far; updated by assignments and ``del``.
        namespace: the wrapper module's globals (``torch``, ``aten``, ``extern_kernels``, ...).
        rewrites: functions of the namespace, and what is called in their place to emit a node.
        on_call: called with every node made for a call and with the function that the text names; returns the value
            that stands for the call's result.
        on_assign: called with the name and the node of each assignment.
    """

    def __init__(
        self,
        graph: Graph,
        names: dict[str, Any],
        namespace: Mapping[str, Any],
        rewrites: Mapping[Any, Callable[..., Any]],
        on_call: Callable[[Node, Any], Any],
        on_assign: Callable[[str, Node], None],
    ) -> None:
        self.graph, self.names, self.namespace = graph, names, namespace
        self._rewrites, self._on_call, self._on_assign = rewrites, on_call, on_assign
        self._arithmetic: dict[tuple[Any, ...], Node] = {}
        self._text = ""

    def run(self, text: str) -> None:
        """Read the statements in ``text``."""
        self._text = text = textwrap.dedent(text)
        try:
            body = ast.parse(text).body
        except SyntaxError:
            self._refuse("a statement that can stand alone")
        for statement in body:
            self._statement(statement)

    def value(self, text: str) -> Any:
        """Read one expression. Returns its value: a node, or a plain Python value."""
        statement, self._text = self._text, text
        try:
            return self._expression(ast.parse(text.strip(), mode="eval").body)
        except SyntaxError:
            self._refuse("an expression")
        finally:
            self._text = statement

    def _refuse(self, expected: str) -> NoReturn:
        raise EmissionError(
            f"cannot emit the wrapper line {self._text.strip()!r}",
            expected=expected,
            got=self._text.strip(),
            remedy="the graph runs through Inductor's own wrapper unless strict=True; please report the line",
        )

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.assign(name, self._expression(value))
            case ast.Expr(value=value):
                self._expression(value)
            case ast.Delete(targets=targets):
                for target in targets:
                    if not isinstance(target, ast.Name):
                        self._refuse("del of plain names")
                    self.names.pop(target.id, None)
            case ast.Assert(test=test, msg=message):
                self._emit(check, (self._expression(test), ast.unparse(message or test)), {})
            case ast.Pass():
                pass
            case _:
                self._refuse("an assignment, a call, del or assert")

    def assign(self, name: str, value: Any) -> None:
        """Define a local variable of the wrapper. A new node gets its name."""
        self.names[name] = value
        if isinstance(value, Node) and value.op == "call_function" and not value.meta.get("named"):
            value._rename(name)
            value.meta["named"] = True
            self._on_assign(name, value)

    def _expression(self, expression: ast.expr) -> Any:
        read = self._expression
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._name(name)
            case ast.Tuple(elts=items):
                return tuple(read(item) for item in items)
            case ast.List(elts=items):
                return [read(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                return {read(k): read(v) for k, v in zip(keys, values, strict=True) if k is not None}
            case ast.Attribute(value=base, attr=attribute):
                return self._attribute(read(base), attribute)
            case ast.Subscript(value=base, slice=ast.Slice(lower=first, upper=end, step=None)) if first and end:
                return self._part(read(base), read(first), read(end))
            case ast.Subscript(value=base, slice=index):
                return self._element(read(base), read(index))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return self._emit_or_evaluate(_UNARY[type(op)], (read(operand),), {})
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._emit_or_evaluate(torch.sym_not, (read(operand),), {})
            case ast.BinOp(left=left, op=op, right=right):
                return self._emit_or_evaluate(_BINARY[type(op)], (read(left), read(right)), {})
            case ast.BoolOp(op=op, values=values):
                both = operator.and_ if isinstance(op, ast.And) else operator.or_
                return functools.reduce(lambda a, b: self._emit_or_evaluate(both, (a, b), {}), map(read, values))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                return self._emit_or_evaluate(_COMPARE[type(op)], (read(left), read(right)), {})
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._emit_or_evaluate(select, (read(test), read(body), read(orelse)), {})
            case ast.Call(func=func, args=args, keywords=keywords):
                if any(keyword.arg is None for keyword in keywords):
                    self._refuse("a call without **")
                return self._call(
                    read(func),
                    tuple(read(arg) for arg in args),
                    {str(keyword.arg): read(keyword.value) for keyword in keywords},
                )
            case _:
                self._refuse("an expression of names, calls and arithmetic")

    def _element(self, base: Any, index: Any) -> Any:
        if isinstance(base, (list, tuple)) and isinstance(index, int):
            return base[index]
        return self._emit_or_evaluate(operator.getitem, (base, index), {})

    def _part(self, base: Any, first: Any, end: Any) -> Any:
        if not isinstance(base, Node) or not isinstance(base.meta.get("val"), torch.Tensor):
            self._refuse("a part of a tensor")
        return self._emit(torch.ops.aten.slice.Tensor, (base, 0, first, end), {})

    def _name(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if name in self.namespace:
            return self.namespace[name]
        if name in _BUILTINS:
            return _BUILTINS[name]
        raise UndefinedName(name, self._text)

    def _attribute(self, base: Any, attribute: str) -> Any:
        if isinstance(base, Node):
            return _Method(base, attribute)
        try:
            return getattr(base, attribute)
        except AttributeError:
            self._refuse(f"{base!r} to have an attribute {attribute!r}")

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, _Method):
            return self._method(function, args, kwargs)
        if isinstance(owner := getattr(function, "__self__", None), str):
            if function.__name__ != "format":
                self._refuse("format() of strings")
            function, args = format_text, (owner, *args)
        rewrite = self._rewrites.get(function) if _hashable(function) else None
        if rewrite is not None:
            return rewrite(*args, **kwargs)
        if not callable(function):
            self._refuse("a call of a function")
        if is_arithmetic(function) or (not nodes_in((args, kwargs)) and _is_plain(function)):
            return self._emit_or_evaluate(function, args, kwargs)
        return self._emit(function, args, kwargs)

    def _method(self, method: _Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, owner = method.name, method.owner
        if name == "as_strided" and len(args) == 2 and not kwargs:
            # Without an offset the method keeps the tensor's own offset, from which reinterpret counts.
            return self._emit(reinterpret, (owner, *args, 0), {})
        if name == "view" and args and not kwargs and not isinstance(args[0], torch.dtype):
            size = args[0] if isinstance(args[0], list) else list(args)
            return self._emit(torch.ops.aten.view.default, (owner, size), {})
        if name == "to" and len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
            return self._emit(torch.ops.aten._to_copy.default, (owner,), {"dtype": args[0]})
        function = _METHODS.get(name)
        if function is None:
            methods = sorted([*_METHODS, "as_strided", "view", "to"])
            self._refuse(f"one of the tensor methods {', '.join(methods)}")
        if name in ("size", "stride") and len(args) != 1:
            self._refuse(f"{name}() of one dimension")
        return self._emit_or_evaluate(function, (owner, *args), kwargs)

    def _emit_or_evaluate(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not nodes_in((args, kwargs)):
            return function(*args, **kwargs)
        if is_arithmetic(function) and not kwargs:
            key = (function, args, tuple(map(type, args)))  # 1 and 1.0 are equal
            if _hashable(key):
                if key not in self._arithmetic:
                    self._arithmetic[key] = self._emit(function, args, kwargs)
                return self._arithmetic[key]
        return self._emit(function, args, kwargs)

    def _emit(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = self.graph.call_function(function, args, kwargs)
        if function is check:
            node.meta["kind"] = Kind.CHECK
        return self._on_call(node, function)


class UndefinedName(EmissionError):
    """A line uses a name that no line before it has defined."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(
            f"cannot emit the wrapper line {text.strip()!r}",
            expected=f"{name!r} to be defined before it is used",
            got=text.strip(),
        )
        self.name = name


def assigned_names(text: str) -> set[str]:
    """The names that a line defines; empty where it does not parse."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return set()
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


class _Method:
    """A method of a node's value."""

    def __init__(self, owner: Node, name: str) -> None:
        self.owner, self.name = owner, name


def _is_plain(function: Any) -> bool:
    """Whether a call without nodes is evaluated at once (``torch.device("cpu")``, ``float("inf")``)."""
    if function is print:
        return False
    if function is format_text:
        return True
    return isinstance(function, type) or getattr(function, "__module__", None) in ("math", "builtins", "cmath")


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
