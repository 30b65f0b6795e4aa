"""Finds the compilations that belong to a compiled function: in Dynamo's caches, for it and for what it calls.

Nothing is noted at a call. The search asks Dynamo's guards which cache entries they would serve for the values that
are known now: a function's closure, the object of a method, and, after a graph break, what its instructions name.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import re
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo import config, convert_frame
from torch._dynamo.eval_frame import OptimizedModule, _debug_get_cache_entry_list, innermost_backend
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...graphs.compilation import Compilation, live_compilations
from .collection import RESUME_CALL, RESUMED, WRAPPER

# The attribute of a function that calls a compiled one: what torch.compile returned.
BOUND = "_fxwrap_compiled"
# Modules that call their children without naming them.
_CONTAINERS = torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict
# The limit of objects whose attributes are searched: chains of objects may be endless.
_MOST_OBJECTS = 1000


class Search:
    """A search of Dynamo's caches for a function, and for the functions that it calls at graph breaks.

    Attributes:
        compilations: the compilations that belong to the function, the oldest first.
        codes: code of the functions that Dynamo has seen, callers first.
        callers: the wrappers that ``torch.compile`` returned.
        is_compiled: whether any of these functions is compiled, by any backend, for this caller or for another.
        full: code that Dynamo does not compile again, with the setting that says so, and the number of times it was.
    """

    def __init__(self, compiled: Any) -> None:
        self.callers: set[Any] = set()
        self.codes: dict[types.CodeType, None] = {}
        self.is_compiled = False
        self.full: dict[types.CodeType, tuple[str, int]] = {}
        self._ids: list[Any] = []
        self._seen: set[Any] = set()
        compiled = getattr(compiled, BOUND, compiled)
        self._visit(compiled, None, asked=True)
        if isinstance(compiled, torch.nn.Module) and not self.callers:
            for part in compiled.modules():
                if part._compiled_call_impl is not None or isinstance(part, OptimizedModule):
                    self._visit(part, None)
        ids = set(map(id, self._ids))  # by identity: Dynamo counts from zero again after a reset
        self.compilations = [
            compilation
            for compilation in live_compilations()
            if (self.asked_for(compilation) and _in_use(compilation))
            or any(id(i) in ids for i, _ in compilation.pieces)
        ]

    def asked_for(self, compilation: Compilation) -> bool:
        """Whether a compilation was made while the function was running.

        Its callers are looked up, not iterated over: another thread may be adding to them.
        """
        return any(caller in compilation.callers for caller in self.callers)

    def _visit(self, target: Any, caller: Any, asked: bool = False) -> None:
        """Search a function or a module.

        Args:
            caller: the wrapper of ``torch.compile`` that calls it; None for any.
            asked: search it even if Dynamo has not seen it.
        """
        if isinstance(target, OptimizedModule):
            target = target.__dict__.get("_forward") or target.forward
        if isinstance(target, torch.nn.Module):
            target = target._compiled_call_impl or types.MethodType(type(target).__call__, target)
        if isinstance(target, functools.partial):
            target = target.func
        if not hasattr(target, "__code__") and isinstance(type(target).__call__, types.FunctionType):
            target = types.MethodType(type(target).__call__, target)
        function = target.__func__ if isinstance(target, types.MethodType) else target
        if not isinstance(function, types.FunctionType):
            return
        variables = closure_of(function)
        if function.__code__ is WRAPPER:
            self.callers.add(variables["self"])
            self._visit(variables["fn"], variables["self"])
            return
        if function is not target and function.__code__.co_varnames:
            variables[function.__code__.co_varnames[0]] = target.__self__
        self._follow(function.__code__, function.__globals__, variables, caller, asked)

    def _follow(
        self, code: types.CodeType, scope: dict[str, Any], variables: dict[str, Any], caller: Any, asked: bool = False
    ) -> None:
        """Search code, and what it calls.

        Args:
            scope: its globals.
            variables: values of its variables, as far as they are known.
        """
        key = code, id(caller), *sorted((name, id(value)) for name, value in variables.items())
        if key in self._seen:
            return
        self._seen.add(key)
        if code in convert_frame.input_codes:
            self.codes[code] = None
        elif not asked:
            return
        entries = _debug_get_cache_entry_list(code)
        serving = [entry for entry in cache_entries(code, caller) if not _is_refused(entry, variables)]
        self._ids += [entry.compile_id for entry in serving]
        self.is_compiled |= bool(entries)
        if reached := _limit_reached(entries, caller, variables):
            self.full[code] = reached
        for runs in [entry.code for entry in serving] if entries else [code]:
            names = [name for name in names_of(runs) if not name.startswith("__compiled_fn")]
            for nested in _nested(runs):
                shared = {*nested.co_freevars, *(nested.co_varnames if nested.co_name.startswith(RESUMED) else ())}
                self._follow(nested, scope, {name: variables[name] for name in shared & variables.keys()}, caller)
            for name in names:
                if name.startswith(RESUME_CALL) and name in scope:
                    self._follow(scope[name].__code__, scope, variables, caller)
            for value in _values(names, scope, variables):
                self._visit(value, caller)


def _in_use(compilation: Compilation) -> bool:
    """Whether Dynamo still has a compilation: a reset drops all."""
    pieces = [(piece, code()) for piece, code in compilation.pieces]
    return any(entry.compile_id is i for i, code in pieces if code for entry in _debug_get_cache_entry_list(code))


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """The variables of a function's closure that have a value."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            values[name] = cell.cell_contents
    return values


def _nested(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def names_of(code: types.CodeType) -> list[str]:
    """Names of globals, attributes and variables that code reads.

    They come from its instructions: Dynamo does not update the code's table of names. Variables that it only passes
    on to a nested function are not among them.
    """
    loads = [i for i in dis.get_instructions(code) if i.opname.startswith("LOAD_")]
    operands = [i.argval for i in loads if i.opname not in ("LOAD_CONST", "LOAD_CLOSURE")]
    # One instruction may load two.
    names = (name for operand in operands for name in (operand if isinstance(operand, tuple) else (operand,)))
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _values(names: list[str], scope: dict[str, Any], variables: dict[str, Any]) -> Iterator[Any]:
    """The values that names in code may refer to: globals, variables, their attributes, and so on."""
    named = [variables.get(name, scope.get(name)) for name in names]
    owners = [value for value in named if value is not None]
    yield from owners
    seen = set(map(id, owners))
    for owner in itertools.islice(owners, _MOST_OBJECTS):  # the list grows meanwhile
        if isinstance(owner, _CONTAINERS):
            yield from owner.children()
        for name in names:
            value = _attribute(owner, name)
            if isinstance(value, types.MethodType):
                yield value
            elif value is not None and id(value) not in seen:
                seen.add(id(value))
                owners.append(value)
                yield value


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that can be read without running user code; None for others."""
    attributes = getattr(owner, "__dict__", {})
    for table in (attributes, attributes.get("_modules", {}) if isinstance(owner, torch.nn.Module) else {}):
        if name in table:
            return table[name]
    value = inspect.getattr_static(type(owner), name, None)
    return types.MethodType(value, owner) if isinstance(value, types.FunctionType) else None


def cache_entries(code: types.CodeType, caller: Any) -> Iterator[Any]:
    """The cache entries that Dynamo considers in calls by a wrapper of ``torch.compile``; None for any.

    The most recently used come first.
    """
    for entry in _debug_get_cache_entry_list(code):
        regions = (-1, getattr(caller, "_isolate_recompiles_id", -1))
        if caller is None or (
            entry.backend == innermost_backend(caller.callback)
            and getattr(entry, "isolate_recompiles_id", -1) in regions
        ):
            yield entry


def _limit_reached(entries: list[Any], caller: Any, variables: dict[str, Any]) -> tuple[str, int] | None:
    """The setting for which Dynamo does not compile code again for a caller, and how often it has; None if it does.

    As in Dynamo, code for another object that guards compare by identity does not count.
    """

    def counts(entry: Any) -> bool:
        objects = ((name, ref()) for name, ref in entry.guard_manager.id_matched_objs.items())
        return all(variables.get(name, value) is value for name, value in objects if value is not None)

    region = getattr(caller, "_isolate_recompiles_id", -1)
    own = [entry for entry in entries if getattr(entry, "isolate_recompiles_id", -1) == region and counts(entry)]
    if len(own) >= config.recompile_limit:
        return "recompile_limit", len(own)
    if len(entries) >= config.accumulated_recompile_limit:
        return "accumulated_recompile_limit", len(entries)
    return None


def _is_refused(entry: Any, variables: dict[str, Any]) -> bool:
    """Whether the guards of a cache entry fail for the known values.

    A module that is in training now may have been called in evaluation, and a parameter that is sharded now may have
    been whole: guards on these are ignored.
    """
    todo = list(entry.guard_manager.root.get_child_managers())
    while todo:
        guards = todo.pop()
        source = guards.get_source()
        variable = re.match(r"L\['(\w+)'\]", source)
        if variable is None or variable[1] not in variables or re.search(r"\btraining\b", source):
            continue
        try:
            value = eval(source, {"L": variables})
        except NameError:  # a helper of Dynamo's
            continue
        except Exception:
            return True
        if is_traceable_wrapper_subclass(value):
            continue
        # Guards that compare values with one another cannot be evaluated here.
        if not all(guard(value) for guard in guards.get_leaf_guards() if callable(guard)):
            return True
        todo += guards.get_child_managers()
        if hasattr(guards, "get_key_value_managers"):  # of a dictionary
            todo += filter(None, itertools.chain.from_iterable(guards.get_key_value_managers().values()))
    return False
