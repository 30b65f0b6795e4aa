"""From what ``torch.compile`` returned to the function that Dynamo compiles, and what must hold for it to stay so."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import OptimizedModule
from torch.autograd import profiler
from torch.nn.modules import module as nn_module

from ....codegen.dynamo.collection import WRAPPER
from ....codegen.dynamo.search import cache_entries, closure_of
from ....errors import BindError

# ``Module.__call__`` calls what ``module.compile()`` has set, if anything; else ``_call_impl``: hooks, ``forward``.
_MODULE_CALL, _MODULE_FORWARD = torch.nn.Module.__call__, torch.nn.Module._call_impl
_GLOBAL_HOOKS = tuple(
    getattr(nn_module, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)


@dataclass(frozen=True)
class Condition:
    """What has to hold for a call without the wrapper, apart from guards.

    Attributes:
        holds: a Python expression over the names of its target.
        reason: why the call goes through the wrapper where it does not hold.
    """

    holds: str
    reason: str


@dataclass(frozen=True)
class Target:
    """The function whose frame Dynamo compiles when what ``torch.compile`` returned is called.

    Attributes:
        function: its frame is the one that guards read.
        owner: the object of a method: the first argument of ``function``; empty for others.
        context: the object behind ``torch.compile``'s wrapper.
        conditions: what has to hold for a call to end at ``function`` still.
        names: the objects that conditions name.
    """

    function: types.FunctionType
    owner: tuple[Any, ...]
    context: Any
    conditions: tuple[Condition, ...]
    names: Mapping[str, Any]

    def code_entries(self) -> Iterator[Any]:
        """Dynamo's cache entries that calls consider, the most recently used first."""
        return cache_entries(self.function.__code__, self.context)


class Path:
    """Follows what ``torch.compile`` returned to the function that Dynamo compiles, and notes the conditions."""

    def __init__(self) -> None:
        self.conditions: list[Condition] = []
        self.names: dict[str, Any] = {}

    def require(self, reason: str, *expressions: str, **objects: Any) -> None:
        """Add conditions. ``{name}`` in an expression is an object."""
        unique = {name: f"_fxw_{name}_{len(self.names) + place}" for place, name in enumerate(objects)}
        self.names.update({unique[name]: value for name, value in objects.items()})
        self.conditions += [Condition(expression.format(**unique), reason) for expression in expressions]

    def target(self, compiled: Any) -> Target:
        """Raises BindError if a call does not end at a plain function that ``torch.compile`` wraps."""
        target: Any = compiled
        context: Any = None
        while True:
            if isinstance(target, OptimizedModule):
                target = self._optimized(target)
            elif isinstance(target, torch.nn.Module):
                target = self._module(target)
            owner: tuple[Any, ...] = ()
            if isinstance(target, types.MethodType):
                target, owner = target.__func__, (target.__self__,)
            if not isinstance(target, types.FunctionType):
                raise not_compiled(compiled, f"{type(target).__name__}, which has no code that Dynamo compiles")
            if target.__code__ is WRAPPER:
                variables = closure_of(target)
                context, target = variables["self"], variables["fn"]
                if owner:  # a method that is decorated
                    target = types.MethodType(target, *owner)
            elif owner and target is _MODULE_CALL:
                target = owner[0]
            elif owner and target is _MODULE_FORWARD:
                target = self._forward(owner[0])
            else:
                break
        if context is None or not callable(context.callback):
            raise not_compiled(compiled, f"{getattr(compiled, '__qualname__', type(compiled).__name__)}")
        if target.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise not_compiled(compiled, "a generator or a coroutine, which Dynamo does not compile")
        self.require("the code of the function is another", "{f}.__code__ is {c}", f=target, c=target.__code__)
        self._torch_state()
        return Target(target, owner, context, tuple(self.conditions), self.names)

    def _torch_state(self) -> None:
        self.require("a stance of torch.compile", "{m}._stance is {s}", m=eval_frame, s=eval_frame._stance)
        # Under a profiler the wrapper is used, so that the profile has Dynamo's range.
        self.require("a profiler is on", "not {p}._is_profiler_enabled", p=profiler)
        self.require("another frame evaluation is on", "{get}() is None", get=get_eval_frame_callback)

    def _optimized(self, module: OptimizedModule) -> Any:
        """The callable that a module which ``torch.compile`` returned calls."""
        forward = module.__dict__["forward"]
        self._no_hooks(module)
        self.require("forward is another", "{m}.__dict__['forward'] is {f}", m=module, f=forward)
        if forward == module._call_lazy_check and not hasattr(module._orig_mod, "_initialize_hook"):
            return module.__dict__["_forward"]  # a lazy module that has its parameters
        return forward

    def _module(self, module: torch.nn.Module) -> Any:
        """The callable that a call of a module ends at."""
        self.require("the class of the module is another", "type({m}) is {c}", m=module, c=type(module))
        if type(module).__call__ is not _MODULE_CALL:
            return types.MethodType(type(module).__call__, module)
        self.require("Module.__call__ is another", "{c}.__call__ is {f}", c=type(module), f=_MODULE_CALL)
        own = module._compiled_call_impl
        self.require("compiled in place", "{m}._compiled_call_impl is {f}", m=module, f=own)
        return own if own is not None else self._forward(module)

    def _forward(self, module: torch.nn.Module) -> Any:
        """The callable that ``_call_impl`` ends at, on condition that there are no hooks."""
        self._no_hooks(module)
        if "forward" in module.__dict__:
            self.require("forward is another", "{m}.forward == {f}", m=module, f=module.forward)
        else:
            self.require("forward is another", "'forward' not in {m}.__dict__", m=module)
            method = type(module).forward
            self.require("forward is another", "{c}.forward is {f}", c=type(module), f=method)
        forward: Any = module.forward
        return forward

    def _no_hooks(self, module: torch.nn.Module) -> None:
        own = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        hooks = [f"{{m}}.{name}" for name in own] + [f"{{g{place}}}" for place in range(len(_GLOBAL_HOOKS))]
        shared = {f"g{place}": table for place, table in enumerate(_GLOBAL_HOOKS)}
        self.require("hooks", f"not ({' or '.join(hooks)})", m=module, **shared)


def not_compiled(compiled: Any, got: str) -> BindError:
    return BindError(
        f"bind of {compiled!r:.200}",
        expected="a function, a method or a module that torch.compile has returned",
        got=got,
        remedy='fxwrap.bind(torch.compile(fn, backend="fxwrap"), *example_args)',
    )
