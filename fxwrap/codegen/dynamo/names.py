"""What the user's code calls the inputs of a graph of Dynamo's: ``layers.0.weight``, ``x``, ``batch['mask']``."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import GraphModule
from torch.nn import Module

from ...host_graph.user_code import owner_of
from .. import torch_versions as versions

# Nobody would read longer names; an optimizer's state has some. (``___stack0`` is a value between two graphs.)
_LONGEST = 80


def input_names(gm: GraphModule) -> dict[str, str]:
    """The name of each input of a graph, by position, and of each attribute that is an input for AOTAutograd.

    A parameter's name is its path in the module. A name may be empty.
    """
    arguments = _arguments()
    return {key: _readable(source, arguments) for key, source in versions.input_sources(gm).items()}


def _arguments() -> dict[str, str]:
    """Dynamo's expressions for what is called behind a wrapper: those in the wrapper, and those without it.

    ``collection.with_own_code`` and ``torch._dynamo.external_utils`` wrap a function (a module, a method) in another
    one that calls ``fn(*args, **kwargs)``. An expression stands before those that it begins with.
    """
    try:
        frame = InstructionTranslator.current_tx()
        code, known = frame.f_code, frame.f_locals
    except AttributeError:  # the caller is not Dynamo
        return {}
    if owner_of(code.co_filename) == "user" or not {"fn", "args", "kwargs"} <= known.keys():
        return {}
    fn: Callable[..., Any] = known["fn"]
    names = {f"L['kwargs']['{name}']": f"L['{name}']" for name in known["kwargs"]}
    with contextlib.suppress(TypeError, ValueError):  # a function of C
        parameters = inspect.signature(fn.forward if isinstance(fn, Module) else fn).parameters.values()
        for position, name in zip(range(len(known["args"])), _positional(parameters), strict=False):
            names[f"L['args'][{position}]"] = name
    for number, name in enumerate(getattr(getattr(fn, "__code__", None), "co_freevars", ())):
        names[f"L['fn'].__closure__[{number}].cell_contents"] = f"L['{name}']"
    return {**names, "L['fn'].__self__": "L['self']", "L['fn']": "L['self']"}


def _positional(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            yield from (f"L['{parameter.name}'][{number}]" for number in itertools.count())
        yield f"L['{parameter.name}']"


def _readable(source: str, arguments: Mapping[str, str]) -> str:
    """An expression of Dynamo's in the user's words: ``L['self']._parameters['bias']`` is ``bias``."""
    for expression, name in arguments.items():
        if source.startswith(expression):
            source = name + source.removeprefix(expression)
            break
    source = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    source = re.sub(r"\bG\['__import_\w+'\]\.", "", source)  # globals of another file
    source = re.sub(r"\b[LG]\['([^']*)'\]", r"\1", source)
    source = source.removeprefix("self.")
    return source if len(source) <= _LONGEST and not source.startswith("___stack") else ""
