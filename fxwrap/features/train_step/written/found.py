"""What a step's code can reach: modules, optimizers, tensors and Python values, found in the function itself.

::

    def step(x, y):                       closure: world, optimizer        -> modules, optimizers
        optimizer.zero_grad()             globals that the code names      -> numbers; functions are searched, too
        loss = self.scale * world(x, y)   attributes of self that it names -> numbers, tensors
        ...

What is found is watched (``watched.py``): a program is made for it. A tensor that a trace meets and the search has
not found is an error that names it, never a constant in the program.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..refusals import PARAMETER_HOOKS, hooks_of_all_modules, hooks_of_steps

# Values that a trace reads once, and that are compared with what they are at each call.
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})
# What a GradScaler notes between its calls in one step; it begins anew at each step.
_KEPT_APART = ("_per_optimizer_states",)
# An optimizer's note, made for its scheduler, that there was a step; it is for a warning.
STEPPED = "_opt_called"
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
# A container with more elements is data, and no part of a program.
_LONGEST = 1000


@dataclass(eq=False)
class Found:
    """What the code of a step can reach.

    Attributes:
        optimizers: by name.
        tensors: each tensor once, with a name.
        tables: dictionaries and lists whose values a program is made for, by name; of some only the values of keys.
        classes: classes and the attributes of theirs that code names, by the name of an object.
        cells: variables of closures, by name.
        modules: those that are no part of another, and their parts.
        dictionaries: those whose keys and order count.
        attributes: of objects and modules; the code may ask whether there is one.
    """

    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    tensors: dict[torch.Tensor, str] = field(default_factory=dict)
    tables: list[tuple[str, Any, tuple[Any, ...] | None]] = field(default_factory=list)
    classes: list[tuple[str, type, tuple[str, ...]]] = field(default_factory=list)
    cells: list[tuple[str, types.CellType]] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    dictionaries: list[dict[Any, Any]] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=list)

    def leaves(self) -> list[torch.Tensor]:
        """Tensors that may have a gradient, in the order in which they were found."""
        return [t for t in self.tensors if t.is_leaf and (t.requires_grad or isinstance(t, torch.nn.Parameter))]


def found_in(step: Callable[..., Any], given: Mapping[str, torch.nn.Module | Optimizer]) -> Found:
    """Search a function, and what is given beside it, by name."""
    search = _Search()
    for name, value in given.items():
        search.visit(name, value)
    search.visit("", step)
    search.found.tables += [("hooks of all modules", table, None) for table in hooks_of_all_modules()]
    return search.finish()


class _Search:
    def __init__(self) -> None:
        self.found = Found()
        self._names = set[str]()
        self._seen = set[int]()
        self._objects: list[tuple[str, Any]] = []
        self._parts: list[tuple[str, torch.nn.Module]] = []
        self._classes: list[tuple[str, type]] = []
        self._asked: dict[type, set[str]] = {}  # the names that were looked up in a class
        self._kept: list[Any] = []  # so that no id is given to another object meanwhile

    def finish(self) -> Found:
        """Visit what code names, of objects and of hooks, until there is nothing else."""
        done = -1
        while done != len(self._seen):
            done = len(self._seen)
            for name, value in list(self._objects):
                self._attributes(name, value)
            for name, part in list(self._parts):
                self._methods(name, part)
            for tensor, name in list(self.found.tensors.items()):
                for table in PARAMETER_HOOKS:
                    for hook in (getattr(tensor, table, None) or {}).values():
                        self.visit(f"a hook of {name}", hook)
        for name, value in self._objects:
            table = vars(value)
            named = (key for key in table if key in self._names or _is_whole(value))
            keys = tuple(key for key in named if key not in _KEPT_APART)
            if keys:
                self.found.tables.append((f"{name}.", table, keys))
        for name, value in (*self._objects, *self._parts):
            if not isinstance(value, types.ModuleType):
                self.found.attributes.append(vars(value))
                self._class(name, type(value))
        for name, kind in self._classes:
            self._class(name, kind)
        return self.found

    def _class(self, name: str, kind: type) -> None:
        for owner in kind.__mro__:
            if owner.__module__.split(".")[0] in ("torch", "builtins", "abc", "typing"):
                continue
            code = types.FunctionType, staticmethod, classmethod, property
            names = (key for key, value in vars(owner).items() if key in self._names and not isinstance(value, code))
            if keys := tuple(names):
                self.found.classes.append((name, owner, keys))

    def visit(self, name: str, value: Any) -> None:
        """Search a value that code reaches by ``name``."""
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, type):
            self._classes.append((name, value))
            return
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            self.found.tensors.setdefault(value, name)
        elif isinstance(value, torch.nn.Module):
            self._module(name, value)
        elif isinstance(value, Optimizer):
            if wrapped := _wrapped_in(value):
                self.found.tables.append((f"{name}.", vars(value), tuple(wrapped)))
                for one in wrapped.values():
                    self.visit(name, one)
            else:
                self._optimizer(name, value)
        elif isinstance(value, functools.partial):
            self.visit(name, value.func)
            for part in (*value.args, *value.keywords.values()):
                self.visit(name, part)
        elif isinstance(value, types.MethodType):
            self.visit("self" if not name else name.rpartition(".")[0], value.__self__)
            self.visit(name, value.__func__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
            if (inner := vars(value).get("__wrapped__")) is not None:
                self.visit(name, inner)
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            self._container(name, value)
        elif not isinstance(value, (types.ModuleType, types.BuiltinFunctionType)) and hasattr(value, "__dict__"):
            self._objects.append((name, value))
            if isinstance(call := inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
                self._function(call)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if code.co_filename.startswith(_LIBRARIES) or str(function.__module__).split(".")[0] in ("torch", "fxwrap"):
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.found.cells.append((name, cell))
            self.visit(name, content_of(cell))
        names = dict.fromkeys(_names_of(code))
        self._names.update(names)
        scope = function.__globals__
        keys = tuple(name for name in names if name in scope and not isinstance(scope[name], types.ModuleType))
        if keys:
            self.found.tables.append(("", scope, keys))
        for name in names:
            if name in scope:
                value = scope[name]
                if isinstance(value, types.ModuleType) and not _is_library(value):
                    self._objects.append((name, value))
                self.visit(name, value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(f"a default of {function.__name__}", value)

    def _attributes(self, name: str, value: Any) -> None:
        table = vars(value)
        for key in list(table):
            if key not in _KEPT_APART and (_is_whole(value) or key in self._names):
                self.visit(f"{name}.{key}", table[key])
        self._methods(name, value)

    def _methods(self, name: str, value: Any) -> None:
        kind = type(value)
        new = self._names - self._asked.setdefault(kind, set())
        self._asked[kind] |= new
        for key in new:
            method = inspect.getattr_static(kind, key, None)
            if isinstance(method, (staticmethod, classmethod)):
                method = method.__func__
            elif isinstance(method, property):
                method = method.fget
            if isinstance(method, types.FunctionType):
                self.visit(f"{name}.{key}", method)

    def _container(self, name: str, value: Any) -> None:
        if len(value) > _LONGEST:
            return
        if isinstance(value, (dict, list)):
            self.found.tables.append((name, value, None))
        if isinstance(value, dict):
            self.found.dictionaries.append(value)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            self.visit(f"{name}[{key!r}]", part)

    def _module(self, name: str, module: torch.nn.Module) -> None:
        for path, part in module.named_modules():
            self._seen.add(id(part))
            where = f"{name}.{path}" if path else name
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    self.found.tensors.setdefault(tensor, f"{where}.{key}")
            # Tables of a module stay; what is in them is watched.
            self._parts.append((where, part))
            self.found.modules.append(part)
            keys = tuple(key for key, value in vars(part).items() if not isinstance(value, (dict, set)))
            self.found.tables += [(f"{where}.", vars(part), keys), (f"{where}.", part._parameters, None)]
            self.found.tables += [(f"{where}.", part._buffers, None), (f"{where}.", part._modules, None)]
            for key, value in list(vars(part).items()):
                if isinstance(value, dict) and "hooks" in key:
                    self.found.tables.append((f"{where}.{key}", value, None))
                    for hook in value.values():
                        self.visit(f"a hook of {where}", hook)
                elif key not in _OF_EVERY_MODULE:
                    self.visit(f"{where}.{key}", value)
            forward = type(part).forward
            if isinstance(forward, types.FunctionType):
                self._function(forward)

    def _optimizer(self, name: str, optimizer: Optimizer) -> None:
        name = _free(name, self.found.optimizers)
        self.found.optimizers[name] = optimizer
        tables = self.found.tables
        # ``load_state_dict`` gives it others of both. Optimizers of others may keep numbers in attributes.
        kinds = (*PLAIN, torch.Tensor)
        own = (key for key, value in vars(optimizer).items() if isinstance(value, kinds) and key != STEPPED)
        tables.append((f"{name}.", vars(optimizer), ("param_groups", "state", *own)))
        for hooks in hooks_of_steps(optimizer):
            for hook in hooks.values():
                self.visit(f"a hook of {name}", hook)
        for key, value in vars(optimizer).items():
            if isinstance(value, torch.Tensor):
                self.visit(f"{name}.{key}", value)
        tables += [(f"{name}.param_groups", optimizer.param_groups, None), (f"{name}.state", optimizer.state, None)]
        tables += [(f"hooks of {name}", table, None) for table in hooks_of_steps(optimizer)]
        for number, group in enumerate(optimizer.param_groups):
            tables.append((f"{name}.param_groups[{number}]['params']", group["params"], None))
            for place, parameter in enumerate(group["params"]):
                self.found.tensors.setdefault(parameter, f"{name}.param_groups[{number}]['params'][{place}]")
                state = optimizer.state.get(parameter)
                if state:
                    where = f"{name}.state[{self.found.tensors[parameter]}]"
                    tables.append((where, state, None))
                    for key, value in state.items():
                        self.visit(f"{where}.{key}", value)


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def content_of(cell: types.CellType, default: Any = None) -> Any:
    """The value of a variable of a closure; the default if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def _wrapped_in(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that one hands its calls to, by attribute, as those of Accelerate and Lightning do.

    Such a wrapper has neither groups nor hooks of its own.
    """
    own = vars(optimizer)
    if "param_groups" in own:
        return {}
    return {key: value for key, value in own.items() if isinstance(value, Optimizer)}


def _is_library(module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is None or path.startswith(_LIBRARIES)


def _free(name: str, taken: dict[str, Any]) -> str:
    """The name, or with a number if another has it: two functions may call their optimizers alike."""
    numbered = (f"{name} ({number})" for number in itertools.count(2))
    return name if name not in taken else next(one for one in numbered if one not in taken)


def _is_whole(value: Any) -> bool:
    """Whether a step that uses an object uses all of it: code of torch's is not searched for names."""
    return isinstance(value, (torch.amp.GradScaler, LRScheduler))
