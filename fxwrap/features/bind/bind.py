"""``fxwrap.bind``: a compiled function that is called without Dynamo's frame evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .codegen.bound import bound_function


def bind(compiled: Callable[..., Any], *args: Any, strict: bool = True, **kwargs: Any) -> Callable[..., Any]:
    """Make a function that does what ``compiled`` does, and whose calls cost less on the host.

    ::

        model = torch.compile(module, backend="fxwrap")
        call = fxwrap.bind(model, x)
        y = call(x)  # what model(x) returns

    A call evaluates the guards that Dynamo made, and runs the code that Dynamo made; it leaves out the frame
    evaluation around both. So it sees all that a call of ``compiled`` sees: parameters and attributes that change,
    globals, closures, other shapes, gradient modes, hooks. Where guards do not pass, a hook is there, or a stance of
    ``torch.compile`` or a profiler is on, the call goes through ``compiled``, which may compile anew; from then on
    the new code is called without it, too. ``ordinary_calls`` of the function counts such calls by reason.

    The example is called if no code has been compiled for it: once, or up to four times if its calls change what
    guards look at. Backward, threads, and compiled code in which the function is called in turn work as for
    ``compiled``. What ``fxwrap.report``, ``stats``, ``record`` and ``release`` say of ``compiled``, they say of it.

    Args:
        compiled: a function, method or module that ``torch.compile`` returned (any backend), or a module that was
            compiled in place with ``module.compile``.
        args: of the example call.
        strict: raise an error if the example cannot be called so. If False, the function is returned nevertheless;
            its calls go through ``compiled`` as long as they have to.
        kwargs: of the example call.

    Raises:
        BindError: ``compiled`` is no result of ``torch.compile``; or Dynamo compiled it in pieces, around a graph
            break, and ``strict`` is True.
    """
    return bound_function(compiled, args, kwargs, strict)  # type: ignore[no-any-return]
