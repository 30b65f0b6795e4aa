"""Whose a program is: what Dynamo has in its caches for a function, and for what that calls at graph breaks.

Nothing is noted at a call. Programs are found by what Dynamo's own guards would serve for what is known of a function
now: its closure, the object of a method, and, where its graph is broken, what its instructions name.
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
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import OptimizedModule, _debug_get_cache_entry_list, innermost_backend
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...compilation import Compilation, live_compilations
from .collection import RESUMED, WRAPPER

# Modules that call what is in them without a name for it.
_CONTAINERS = torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict
# Attributes are looked for in so many objects, for there are chains without an end.
_MOST_OBJECTS = 1000


class Search:
    """What Dynamo has in its caches for a function, and for what that calls where its graph is broken.

    Attributes:
        compilations: what was found, the oldest first.
        codes: the code of the functions that Dynamo has looked at, callers first.
        callers: what ``torch.compile`` made.
        is_compiled: whether a function that was looked at is compiled, by fxwrap or not, for this one or for others.
    """

    def __init__(self, compiled: Any) -> None:
        self.callers: set[Any] = set()
        self.codes: dict[types.CodeType, None] = {}
        self.is_compiled = False
        self._ids: list[Any] = []
        self._seen: set[Any] = set()
        self._visit(compiled, None, asked=True)
        if isinstance(compiled, torch.nn.Module) and not self.callers:
            for part in compiled.modules():
                if part._compiled_call_impl is not None or isinstance(part, OptimizedModule):
                    self._visit(part, None)
        ids = set(map(id, self._ids))  # by identity: Dynamo counts from zero again after a reset
        self.compilations = [
            one
            for one in live_compilations()
            if (self.asked_for(one) and _in_use(one)) or any(id(i) in ids for i, _ in one.pieces)
        ]

    def asked_for(self, compilation: Compilation) -> bool:
        """Whether a compilation was made while the function was running.

        Its callers are looked up, not iterated over: another thread may be adding to them.
        """
        return any(caller in compilation.callers for caller in self.callers)

    def _visit(self, target: Any, caller: Any, asked: bool = False) -> None:
        """
        Args:
            caller: what ``torch.compile`` made and calls it; None for any.
            asked: Dynamo need not have looked at it.
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
        known = _closure(function)
        if function.__code__ is WRAPPER:
            self.callers.add(known["self"])
            self._visit(known["fn"], known["self"])
            return
        if function is not target and function.__code__.co_varnames:
            known[function.__code__.co_varnames[0]] = target.__self__
        self._follow(function.__code__, function.__globals__, known, caller, asked)

    def _follow(
        self, code: types.CodeType, scope: dict[str, Any], known: dict[str, Any], caller: Any, asked: bool = False
    ) -> None:
        """
        Args:
            known: those of its variables whose values are known.
        """
        key = code, id(caller), *sorted((name, id(value)) for name, value in known.items())
        if key in self._seen:
            return
        self._seen.add(key)
        if code in convert_frame.input_codes:
            self.codes[code] = None
        elif not asked:
            return
        entries = _debug_get_cache_entry_list(code)
        serving = [one for one in entries if _is_for(one, caller) and not _is_refused(one, known)]
        self._ids += [entry.compile_id for entry in serving]
        self.is_compiled |= bool(entries)
        for runs in [entry.code for entry in serving] if entries else [code]:
            names = [name for name in _names(runs) if not name.startswith("__compiled_fn")]
            for nested in _nested(runs):
                shared = {*nested.co_freevars, *(nested.co_varnames if nested.co_name.startswith(RESUMED) else ())}
                self._follow(nested, scope, {name: known[name] for name in shared & known.keys()}, caller)
            for name in names:
                if name.startswith("__resume_at") and name in scope:
                    self._follow(scope[name].__code__, scope, known, caller)
            for value in _values(names, scope, known):
                self._visit(value, caller)


def _in_use(compilation: Compilation) -> bool:
    """Whether Dynamo has not forgotten it, as it does at a reset."""
    pieces = [(piece, code()) for piece, code in compilation.pieces]
    return any(entry.compile_id is i for i, code in pieces if code for entry in _debug_get_cache_entry_list(code))


def _closure(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            found[name] = cell.cell_contents
    return found


def _nested(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _names(code: types.CodeType) -> list[str]:
    """Names of globals, attributes and variables that code reads. Dynamo leaves the table of names as it was, so
    that the instructions are looked at. What it only hands on to a nested function is none of them."""
    loads = [one for one in dis.get_instructions(code) if one.opname.startswith("LOAD_")]
    found = [one.argval for one in loads if one.opname not in ("LOAD_CONST", "LOAD_CLOSURE")]
    names = (name for one in found for name in (one if isinstance(one, tuple) else (one,)))  # two in one instruction
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _values(names: list[str], scope: dict[str, Any], known: dict[str, Any]) -> Iterator[Any]:
    """What may be behind names in code: globals, variables, their attributes, and the attributes of these."""
    named = [known.get(name, scope.get(name)) for name in names]
    owners = [value for value in named if value is not None]
    yield from owners
    seen = set(map(id, owners))
    for owner in itertools.islice(owners, _MOST_OBJECTS):  # more come while it runs
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
    """An attribute that is there without running anybody's code."""
    own = getattr(owner, "__dict__", {})
    for table in (own, own.get("_modules", {}) if isinstance(owner, torch.nn.Module) else {}):
        if name in table:
            return table[name]
    value = inspect.getattr_static(type(owner), name, None)
    return types.MethodType(value, owner) if isinstance(value, types.FunctionType) else None


def _is_for(entry: Any, caller: Any) -> bool:
    """Whether Dynamo looks at what was compiled when it compiles for a caller."""
    if caller is None:
        return True
    regions = (-1, getattr(caller, "_isolate_recompiles_id", -1))
    return (
        entry.backend == innermost_backend(caller.callback) and getattr(entry, "isolate_recompiles_id", -1) in regions
    )


def _is_refused(entry: Any, known: dict[str, Any]) -> bool:
    """Whether Dynamo's guards say that what was compiled is nothing for these values.

    A module that is in training now may have been called in evaluation, and a parameter that is sharded now was
    whole when it was used: that alone refuses nothing.
    """
    todo = list(entry.guard_manager.root.get_child_managers())
    while todo:
        guards = todo.pop()
        source = guards.get_source()
        variable = re.match(r"L\['(\w+)'\]", source)
        if variable is None or variable[1] not in known or re.search(r"\btraining\b", source):
            continue
        try:
            value = eval(source, {"L": known})
        except NameError:  # a helper of Dynamo's
            continue
        except Exception:
            return True
        if is_traceable_wrapper_subclass(value):
            continue
        # Guards that compare values with each other cannot be asked.
        if not all(guard(value) for guard in guards.get_leaf_guards() if callable(guard)):
            return True
        todo += guards.get_child_managers()
        if hasattr(guards, "get_key_value_managers"):  # of a dictionary
            todo += filter(None, itertools.chain.from_iterable(guards.get_key_value_managers().values()))
    return False
