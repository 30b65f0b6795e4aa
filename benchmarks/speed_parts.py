"""Where the time of a call goes: the layers of ``torch.compile`` called one by one, each with what it was given."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import CompiledFxGraph

Function = Callable[[], Any]
# What one part is made of: operators and kernels, with their operands.
Calls = list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


@dataclass
class Watched:
    """A namespace of operators, or one of them, that notes how it was called."""

    of: Any
    calls: Calls

    def __getattr__(self, name: str) -> Any:
        return Watched(getattr(self.of, name), self.calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.of(*args, **kwargs)
        self.calls.append((self.of, args, kwargs))
        return result


@dataclass
class TorchWatched:
    """The module torch, of which only operators are watched."""

    calls: Calls

    def __getattr__(self, name: str) -> Any:
        return Watched(torch.ops, self.calls) if name == "ops" else getattr(torch, name)


@dataclass
class Layers:
    """The layers that one call went through, by name, outermost first."""

    functions: dict[str, Function] = field(default_factory=dict)
    kernels: Calls = field(default_factory=list)
    operators: Calls = field(default_factory=list)


def layers_of(step: Function, function: Any) -> Layers:
    """Call a compiled function once, and note what its layers were given.

    Args:
        step: calls the function.
        function: what torch.compile returned.

    Raises:
        ValueError: the call went another way than through one compiled graph.
    """
    entries, graphs, call = list[Any](), list[Any](), CompiledFxGraph.__call__

    def entry(given: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            entries.append((given, args))
            return given(*args)

        return noted

    def graph_called(self: Any, inputs: Any) -> Any:
        graphs.append((self, list(inputs)))
        return call(self, inputs)

    # Dynamo's code finds what the backend returned among the globals of the function that it was made of.
    names = function._torchdynamo_orig_callable.__globals__
    compiled = {name: entry(value) for name, value in names.items() if name.startswith("__compiled_fn")}
    with mock.patch.dict(names, compiled), mock.patch.object(CompiledFxGraph, "__call__", graph_called):
        step()
    if len(entries) != 1 or len(graphs) != 1:
        raise ValueError(f"expected one compiled graph, got {len(entries)} at Dynamo's layer and {len(graphs)} below")
    (entered, args), (graph, inputs) = entries[0], graphs[0]
    layers = Layers({"call": step, "aot": lambda: entered(*args), "wrapper": lambda: graph(list(inputs))})
    with watched(getattr(graph.current_callable, "__globals__", {}), layers):
        graph(list(inputs))
    return layers


@contextlib.contextmanager
def watched(names: dict[str, Any], layers: Layers) -> Iterator[None]:
    """Note what the module of Inductor's Python wrapper with these globals calls."""
    instead: dict[str, Any] = {
        name: Watched(value, layers.kernels) for name, value in names.items() if name.startswith("cpp_fused")
    }
    instead |= {name: Watched(names[name], layers.operators) for name in ("extern_kernels", "aten") if name in names}
    if "extern_kernels" in names:
        instead["torch"] = TorchWatched(layers.operators)
    with mock.patch.dict(names, instead):
        yield


def one_after_the_other(calls: Calls) -> Function:
    """What makes these calls, with nothing around them; operators below autograd."""

    def run() -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for function, args, kwargs in calls:
                function(*args, **kwargs)

    return run


def parts_of(steps: dict[str, tuple[Function, Any]], reference: str, timed: Callable[..., Any]) -> dict[str, Any]:
    """Microseconds of the parts of a call, medians of the differences within a turn.

    Args:
        steps: by alternative, what calls it and what torch.compile returned for it.
        reference: the one that runs Inductor's Python wrapper.
        timed: times functions in turn; gives back microseconds by name and turn.

    Returns:
        By alternative ``call``, ``dynamo``, ``aot`` and ``wrapper``; and, of the Python wrapper, ``kernels`` and
        ``operators``, with how many there are.
    """
    found = {name: layers_of(step, function) for name, (step, function) in steps.items()}
    functions = {
        (name, layer): function for name, layers in found.items() for layer, function in layers.functions.items()
    }
    if reference in found:
        functions["kernels", ""] = one_after_the_other(found[reference].kernels)
        functions["operators", ""] = one_after_the_other(found[reference].operators)
        functions["nothing", ""] = one_after_the_other([])
    us = timed(functions)

    def less(inner: Any, outer: Any) -> float:
        return round(statistics.median(a - b for a, b in zip(us[outer], us[inner], strict=True)), 3)

    result: dict[str, Any] = {
        name: {
            "call": round(statistics.median(us[name, "call"]), 3),
            "dynamo": less((name, "aot"), (name, "call")),
            "aot": less((name, "wrapper"), (name, "aot")),
            "wrapper": round(statistics.median(us[name, "wrapper"]), 3),
        }
        for name in found
    }
    if reference in found:
        for part, calls in (("kernels", found[reference].kernels), ("operators", found[reference].operators)):
            result[part] = {"us": less(("nothing", ""), (part, "")), "calls": len(calls)}
    return result
