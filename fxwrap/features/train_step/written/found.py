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
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..refusals import hooks_of_all_modules, hooks_of_steps

# Values that a trace reads once, and that are compared with what they are at each call.
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})
# What a GradScaler notes between its calls in one step; it begins anew at each step.
_KEPT_APART = ("_per_optimizer_states",)
# A container with more elements is data, and no part of a program.
_LONGEST = 1000


@dataclass(eq=False)
class Found:
    """What the code of a step can reach.

    Attributes:
        modules, optimizers: by name.
        tensors: each tensor once, with a name.
        tables: dictionaries and lists whose values a program is made for, by name.
        cells: variables of closures, by name.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    tensors: dict[torch.Tensor, str] = field(default_factory=dict)
    tables: list[tuple[str, Any, tuple[Any, ...] | None]] = field(default_factory=list)
    cells: list[tuple[str, types.CellType]] = field(default_factory=list)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Tensors that may have a gradient, in the order in which they were found."""
        return (tensor for tensor in self.tensors if tensor.is_leaf and isinstance(tensor, torch.nn.Parameter))


def found_in(
    step: Callable[..., Any], modules: Iterable[torch.nn.Module] = (), optimizers: Iterable[Optimizer] = ()
) -> Found:
    """Search a function, and what is given beside it."""
    search = _Search()
    for number, module in enumerate(modules):
        search.visit(f"modules[{number}]", module)
    for number, optimizer in enumerate(optimizers):
        search.visit(f"optimizers[{number}]", optimizer)
    search.visit("", step)
    search.found.tables += [("hooks of all modules", table, None) for table in hooks_of_all_modules()]
    return search.finish()


class _Search:
    def __init__(self) -> None:
        self.found = Found()
        self._names = set[str]()
        self._seen = set[int]()
        self._objects: list[tuple[str, Any]] = []
        self._kept: list[Any] = []  # so that no id is given to another object meanwhile

    def finish(self) -> Found:
        """Visit attributes of objects that code names, until no object has others."""
        done = -1
        while done != len(self._seen):
            done = len(self._seen)
            for name, value in list(self._objects):
                self._attributes(name, value)
        for name, value in self._objects:
            table = vars(value)
            named = (key for key in table if key in self._names or _is_whole(value))
            keys = tuple(key for key in named if key not in _KEPT_APART)
            if keys:
                self.found.tables.append((f"{name}.", table, keys))
        return self.found

    def visit(self, name: str, value: Any) -> None:
        """Search a value that code reaches by ``name``."""
        if isinstance(value, (*PLAIN, type)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            self.found.tensors.setdefault(value, name)
        elif isinstance(value, torch.nn.Module):
            self._module(name, value)
        elif isinstance(value, Optimizer):
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
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            self._container(name, value)
        elif not isinstance(value, (types.ModuleType, types.BuiltinFunctionType)) and hasattr(value, "__dict__"):
            self._objects.append((name, value))
            if isinstance(call := inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
                self._function(call)

    def _function(self, function: types.FunctionType) -> None:
        function = inspect.unwrap(function)
        code = function.__code__
        if code.co_filename.startswith(_LIBRARIES) or str(function.__module__).split(".")[0] in ("torch", "fxwrap"):
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.found.cells.append((name, cell))
            self.visit(name, _content(cell))
        names = dict.fromkeys(_names_of(code))
        self._names.update(names)
        scope = function.__globals__
        keys = tuple(name for name in names if name in scope and not _is_code(scope[name]))
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
        for key in list(self._names):
            method = inspect.getattr_static(type(value), key, None)
            if isinstance(method, (types.FunctionType, property)):
                self.visit(f"{name}.{key}", method if isinstance(method, types.FunctionType) else method.fget)

    def _container(self, name: str, value: Any) -> None:
        if len(value) > _LONGEST:
            return
        if isinstance(value, (dict, list)):
            self.found.tables.append((name, value, None))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            self.visit(f"{name}[{key!r}]", part)

    def _module(self, name: str, module: torch.nn.Module) -> None:
        self.found.modules[name] = module
        for path, part in module.named_modules():
            self._seen.add(id(part))
            where = f"{name}.{path}" if path else name
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    self.found.tensors.setdefault(tensor, f"{where}.{key}")
            # Tables of a module stay; what is in them is watched.
            keys = tuple(key for key, value in vars(part).items() if not isinstance(value, (dict, set)))
            self.found.tables += [(f"{where}.", vars(part), keys), (f"{where}.", part._parameters, None)]
            self.found.tables += [(f"{where}.", part._buffers, None), (f"{where}.", part._modules, None)]
            for key, value in list(vars(part).items()):
                if isinstance(value, dict) and "hooks" in key:
                    self.found.tables.append((f"{where}.{key}", value, None))
                elif isinstance(value, torch.Tensor) or (
                    isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value)
                ):
                    self.visit(f"{where}.{key}", value)
            forward = type(part).forward
            if isinstance(forward, types.FunctionType):
                self._function(forward)

    def _optimizer(self, name: str, optimizer: Optimizer) -> None:
        self.found.optimizers[name] = optimizer
        tables = self.found.tables
        # ``load_state_dict`` gives it others of both.
        tables.append((f"{name}.", vars(optimizer), ("param_groups", "state")))
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


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # no value yet
        return None


def _is_library(module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is None or path.startswith(_LIBRARIES)


def _is_code(value: Any) -> bool:
    return isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type))


def _is_whole(value: Any) -> bool:
    """Whether a step that uses an object uses all of it: code of torch's is not searched for names."""
    return isinstance(value, (torch.amp.GradScaler, LRScheduler))
