"""Calls the code that Dynamo compiled for a function without frame evaluation: it checks guards, then runs the code.

The wrapper that ``torch.compile`` returns switches frame evaluation on. Dynamo then evaluates the guards of the cache
entries of the function's code, and runs the code of the first entry whose guards pass. A bound function does these
two things by itself: it makes the dictionary of the frame's variables that guards read, calls the guards (Dynamo's
own objects, in C++), and calls the code. A call that it cannot serve this way goes through the wrapper.

The bound function is made as text, with the parameters of the original one, as a call through ``*args`` would cost
more than it saves. For ``def forward(self, x, scale=2)`` of a compiled module it is::

    def _bound(x=_fxw_missing, scale=_fxw_missing):
        try:                                    # the variables of forward's frame, for the guards
            _fxw_values = {'self': _fxw_owner, 'x': x, 'scale': scale or its default}
        except (TypeError, ...):                # an argument is missing: the wrapper raises what it raises
            return _fxw_otherwise(...)
        if <a call would end at forward> and <no hooks> and <no profiler> ...:      # ``path.py``
            for _fxw_code in _fxw_served:       # what Dynamo compiled, the most recently used first
                if _fxw_code.check(_fxw_values):                                    # its guards
                    return _fxw_code.run(self, x, scale)
        return _fxw_otherwise(...)              # through the wrapper, which may compile
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....codegen.dynamo.autograd import tracing_autograd
from ....codegen.dynamo.collection import RESUME_CALL
from ....codegen.dynamo.report import compilations_of
from ....codegen.dynamo.search import BOUND, names_of
from ....errors import BindError
from .path import Condition, Path, Target

# Older versions of torch have none.
set_guard_complete_hook = getattr(torch._C._dynamo.eval_frame, "set_guard_complete_hook", None)

# Reasons for calls that go through the wrapper.
NOT_COMPILED = "no compiled code has guards that pass"
GRAPH_BREAK = "the compiled code has a graph break"
DEFAULTS = "a default or a variable of the function's closure is missing"

# At most how often bind calls the example: a call may change what guards read, such as a counter.
_CALLS = 4


class _LeftOut:
    """An argument that the caller leaves out."""


@dataclass(frozen=True, eq=False)
class CompiledCode:
    """The code of one cache entry of Dynamo's, callable.

    Attributes:
        manager: Dynamo's guard manager. Its ``cache_entry`` becomes None when the entry is invalidated: an object
            that guards compare by identity was freed, or Dynamo was reset.
        check: the guards, called with the variables of a frame, by name.
        run: the code, called with the arguments of the function.
    """

    manager: Any
    check: Callable[[dict[str, Any]], bool]
    run: Callable[..., Any]


@dataclass(eq=False)
class Binding:
    """What a bound function knows, and what it does where no known code serves a call.

    Attributes:
        ordinary_calls: calls that went through ``torch.compile``'s wrapper, by reason.
    """

    compiled: Callable[..., Any]
    target: Target
    ordinary_calls: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.names: dict[str, Any] = {
            **self.target.names,
            "_fxw_function": self.target.function,
            "_fxw_owner": self.target.owner[0] if self.target.owner else None,
            "_fxw_cells": self.target.function.__closure__ or (),
            "_fxw_missing": _LeftOut,
            "_fxw_served": (),
            "_fxw_promote": self.promote,
            "_fxw_otherwise": self.otherwise,
        }
        self.parameters = _Parameters(self.target.function.__code__, len(self.target.owner))
        exec(self.parameters.text(self.target.conditions), self.names)
        self.function: Any = self.names["_bound"]
        self.variables: Any = self.names["_variables"]

    @property
    def served(self) -> tuple[CompiledCode, ...]:
        """Code that has served calls, the most recently used first.

        Dynamo has the same order: if the guards of two entries pass, it runs the one that the bound function runs.
        """
        served: tuple[CompiledCode, ...] = self.names["_fxw_served"]
        return served

    def promote(self, code: CompiledCode) -> None:
        """Make code the most recently used."""
        with self._lock:
            others = (other for other in self.served if other is not code and other.manager.cache_entry is not None)
            self.names["_fxw_served"] = (code, *others)

    def otherwise(
        self,
        positional: Sequence[Any],
        rest: Sequence[Any],
        keywords: Mapping[str, Any],
        more: Mapping[str, Any],
        variables: dict[str, Any] | None,
    ) -> Any:
        """A call that no code in ``served`` serves.

        Args:
            positional: values of the parameters that can be given by position; ``_LeftOut`` where none was given.
            keywords: arguments that can be given by name only.
            rest, more: what the caller gave for ``*args`` and ``**kwargs``.
            variables: the frame's, for the guards; None if a default or a variable of the closure has no value.
        """
        reason = DEFAULTS if variables is None else self.why_not()
        args, kwargs = self.parameters.given(positional, rest, keywords, more)
        if variables is not None and not reason:
            code = self.code_for(variables)
            if isinstance(code, CompiledCode):
                self.promote(code)
                complete, by_name = self.parameters.complete(variables)
                return code.run(*complete, **by_name)
            reason = code
        self.ordinary_calls[reason] += 1
        # Around a graph break every call comes here, and the context takes 27 microseconds.
        with tracing_autograd() if reason != GRAPH_BREAK else contextlib.nullcontext():
            result = self.compiled(*args, **kwargs)
        if reason == NOT_COMPILED:
            self._add_newest()
        return result

    def why_not(self) -> str:
        """The reason why calls go through the wrapper at this moment, whatever guards say; empty if there is none."""
        return next((c.reason for c in self.target.conditions if not eval(c.holds, self.names)), "")

    def code_for(self, variables: dict[str, Any]) -> CompiledCode | str:
        """The code that Dynamo has for a frame, or why none of it can be called."""
        known = {code.manager: code for code in self.served}
        for entry in self.target.code_entries():
            if entry.guard_manager.root.check(variables):
                return known.get(entry.guard_manager) or self._callable(entry)
        return NOT_COMPILED

    def _add_newest(self) -> None:
        """Add the code that has just been compiled, or used through the wrapper: Dynamo has it in front."""
        entry = next(self.target.code_entries(), None)
        code = self._callable(entry) if entry is not None else NOT_COMPILED
        if isinstance(code, CompiledCode) and all(code.manager is not other.manager for other in self.served):
            self.promote(code)

    def _callable(self, entry: Any) -> CompiledCode | str:
        """The code of a cache entry, or why it cannot be called without frame evaluation."""
        code, function = entry.code, self.target.function
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if not all(name in cells for name in code.co_freevars):
            return "the compiled code needs a variable that the function does not have"
        # Dynamo runs the rest of a function after a graph break as a function that frame evaluation may compile.
        if any(name.startswith(RESUME_CALL) for name in names_of(code)):
            return GRAPH_BREAK
        closure = tuple(cells[name] for name in code.co_freevars)
        run = types.FunctionType(code, function.__globals__, function.__name__, None, closure)
        return CompiledCode(entry.guard_manager, entry.guard_manager.root.check, run)


class _Parameters:
    """The parameters of a function, and the source of a bound function with the same ones.

    Args:
        code: of the function.
        owned: 1 if the first argument is the object of a method, else 0.
    """

    def __init__(self, code: types.CodeType, owned: int) -> None:
        count = code.co_argcount
        names = list(code.co_varnames)
        self.first = names[:owned] if count >= owned else []
        self.in_rest = owned and not self.first  # the object is in *args
        self.positional = names[len(self.first) : count]
        self.only_positional = max(code.co_posonlyargcount - len(self.first), 0)
        self.keywords = names[count : count + code.co_kwonlyargcount]
        starred = names[count + code.co_kwonlyargcount :]
        self.rest = starred.pop(0) if code.co_flags & inspect.CO_VARARGS else ""
        self.more = starred.pop(0) if code.co_flags & inspect.CO_VARKEYWORDS else ""
        self.free = code.co_freevars

    def text(self, conditions: Sequence[Condition]) -> str:
        """The source of two functions: ``_bound``, and ``_variables``, which returns the variables of the frame.

        Defaults are read from the function at each call, because the caller may replace ``__defaults__``. The text's
        own names begin with ``_fxw_``, so that they do not clash with parameters.
        """
        count = len(self.positional)
        parameters = [f"{name}=_fxw_missing" for name in self.positional]
        if self.only_positional:
            parameters.insert(self.only_positional, "/")
        if self.rest or self.keywords:
            parameters.append(f"*{self.rest}")
        parameters += [f"{name}=_fxw_missing" for name in self.keywords] + ([f"**{self.more}"] if self.more else [])
        rest = f"(_fxw_owner, *{self.rest})" if self.in_rest else self.rest
        values = dict.fromkeys(self.first, "_fxw_owner")
        values |= {n: _or_default(n, f"__defaults__[{p - count}]") for p, n in enumerate(self.positional)}
        values |= {n: _or_default(n, f"__kwdefaults__[{n!r}]") for n in self.keywords}
        values |= {self.rest: rest} if self.rest else {}
        values |= {self.more: self.more} if self.more else {}
        values |= {n: f"_fxw_cells[{p}].cell_contents" for p, n in enumerate(self.free)}
        variables = "{" + ", ".join(f"{name!r}: {value}" for name, value in values.items()) + "}"
        arguments = [f"_fxw_values[{name!r}]" for name in (*self.first, *self.positional)]
        arguments += [f"*{rest}"] if self.rest else []
        arguments += [f"{name}=_fxw_values[{name!r}]" for name in self.keywords]
        arguments += [f"**{self.more}"] if self.more else []
        positional = "".join(f"{name}, " for name in self.positional)
        keywords = ", ".join(f"{name!r}: {name}" for name in self.keywords)
        given = f"({positional}), {self.rest or '()'}, {{{keywords}}}, {self.more or '{}'}"
        signature = ", ".join(parameters)
        return f"""
def _bound({signature}):
    try:
        _fxw_values = {variables}
    except (TypeError, IndexError, KeyError, ValueError):
        return _fxw_otherwise({given}, None)
    if {" and ".join(condition.holds for condition in conditions)}:
        for _fxw_code in _fxw_served:
            if _fxw_code.manager.cache_entry is not None and _fxw_code.check(_fxw_values):
                if _fxw_code is not _fxw_served[0]:
                    _fxw_promote(_fxw_code)
                return _fxw_code.run({", ".join(arguments)})
    return _fxw_otherwise({given}, _fxw_values)

def _variables({signature}):
    return {variables}
"""

    def complete(self, variables: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call of the code, defaults included."""
        positional = [variables[name] for name in (*self.first, *self.positional)]
        keywords = {name: variables[name] for name in self.keywords}
        return [*positional, *variables.get(self.rest, ())], {**keywords, **variables.get(self.more, {})}

    def given(
        self, positional: Sequence[Any], rest: Sequence[Any], keywords: Mapping[str, Any], more: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call as the caller gave them."""
        named = dict(zip(self.positional, positional, strict=True))
        missing = [place for place, value in enumerate(positional) if value is _LeftOut]
        count = missing[0] if missing else len(positional)
        by_name = {**dict(list(named.items())[count:]), **keywords}
        return [*positional[:count], *rest], {**{k: v for k, v in by_name.items() if v is not _LeftOut}, **more}


def _or_default(name: str, default: str) -> str:
    return f"{name} if {name} is not _fxw_missing else _fxw_function.{default}"


def _asks_other_ranks() -> bool:
    """Whether Dynamo calls a hook after its guards. Torch returns the hook only when another is set."""
    if set_guard_complete_hook is None:
        return False
    hook = set_guard_complete_hook(None)
    set_guard_complete_hook(hook)
    return hook is not None


def bound_function(compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], strict: bool) -> Any:
    """A function that calls what Dynamo compiled for ``compiled``; see ``fxwrap.bind``.

    Raises:
        BindError: ``torch.compile`` did not return ``compiled``; or, if ``strict``, its code for these
            arguments cannot be called without frame evaluation.
    """
    binding = Binding(compiled, Path().target(compiled))
    if _asks_other_ranks():
        raise BindError(
            f"bind of {compiled!r:.200}",
            expected="guards that this process evaluates by itself",
            got="torch.compiler.set_enable_guard_collectives is on",
            remedy="switch it off before bind, and leave it off",
        )
    function = binding.function
    for _ in range(_CALLS):
        try:
            code = binding.why_not() or binding.code_for(binding.variables(*args, **kwargs))
        except (TypeError, IndexError, KeyError, ValueError):
            compiled(*args, **kwargs)  # raises what wrong arguments raise
            code = DEFAULTS
        if code != NOT_COMPILED:
            break
        with tracing_autograd():
            compiled(*args, **kwargs)
    if isinstance(code, CompiledCode):
        binding.promote(code)
    elif strict:
        _, story = compilations_of(compiled)
        raise BindError(
            f"bind of {compiled!r:.200}",
            expected="code that Dynamo compiled for the whole function, and guards that pass for the example",
            got=code if code == GRAPH_BREAK or not story.full else f"{code}\n{story}",
            remedy=("" if code == GRAPH_BREAK else story.remedy)
            or "compile it with fullgraph=True to see where it breaks; or bind(..., strict=False), which calls "
            "torch.compile's wrapper where it must, and counts that",
        )
    function.__name__ = binding.target.function.__name__
    function.__qualname__ = binding.target.function.__qualname__
    function.__doc__ = binding.target.function.__doc__
    setattr(function, BOUND, compiled)
    function.ordinary_calls = binding.ordinary_calls

    def traced(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    function._torchdynamo_inline = traced  # what Dynamo traces where a caller is compiled
    return function
