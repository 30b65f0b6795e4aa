"""Stores programs in Inductor's caches: a host graph, its decisions and its kernels, as the text of a module.

Inductor caches the text of a wrapper, and loads it as a module with a function ``call``. fxwrap's text contains data,
from which this file restores the program. The process that compiled a program gets the compiled object itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from ...errors import StorageError
from ...graphs.compilation import Compilation
from ...graphs.program import Program
from ...host_graph.graph_json import Functions, graph_from_data, graph_to_data
from ...host_graph.listing import list_graph
from ...host_graph.nodes import Kernel, output_node
from ...host_graph.stand_ins import StandIns
from ...host_graph.typed_json import from_data, to_data
from ...pipeline import CompileRequest, restore_program
from ...plan import ProgramPlan
from ...torch_private.functions import empty_graph, size_functions, wrapper_functions
from .. import torch_versions as versions
from ..emit.kernels import load_kernels, loaded_kernel
from ..garbage import no_garbage_collection
from ..request import current_request, handed_over
from .stored_kernels import stored_kernel
from .user_lines import UserLines

log = logging.getLogger(__name__)

_HEAD = '''\
"""A program of fxwrap: its host graph is

{listing}

Below are that graph, the decisions about it and its kernels, as data.
"""
from fxwrap.codegen.store.stored_program import loader

__getattr__ = loader(globals(), {digest!r}, {text!r})
'''


def as_module(compiled: Callable[..., Any], gm: GraphModule) -> str:
    """The text of a module whose ``call`` runs the compiled form of a host graph.

    A program that cannot be stored is noted in the request. For another process its text is a cache miss.
    """
    handover = handed_over()
    try:
        text = json.dumps(_data_of(compiled), separators=(",", ":"))
    except StorageError as error:
        handover.not_stored.append(error.subject)
        text = json.dumps({"not stored": error.subject, "number": next(_numbers)})
    digest = hashlib.sha256(text.encode()).hexdigest()
    handover.compiled[digest] = compiled
    listing = textwrap.indent(list_graph(gm), "    ").replace("\\", "/").replace('"', "'")
    return _HEAD.format(listing=listing, digest=digest, text=text)


_numbers = itertools.count()


def _data_of(compiled: Callable[..., Any]) -> Any:
    if not isinstance(compiled, Program):
        raise StorageError("what compile_graph returned", expected="a program of fxwrap's")
    plan = compiled.plan
    if plan.compiled:
        raise StorageError("a partition that compile_partition compiled", expected="a program of fxwrap's alone")
    data = {"graph": graph_to_data(plan.graph, functions()), "plan": to_data(plan)}
    compilation = current_request().compilation
    if compilation is not None and compilation.lines is not None:
        data["traced"] = compilation.lines.to_data()
    return data


def loader(scope: Mapping[str, Any], digest: str, text: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of such a module. Each access of ``call`` restores the program, and the caller owns it.

    The module does not own it, because Inductor never unloads modules. Inductor sets constants as attributes of the
    module after it has run, so that the program is restored on access and not before.

    Raises:
        OSError: the text is damaged. Inductor treats this error as a cache miss.
    """
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise OSError("fxwrap: a stored program is damaged, and is compiled again")

    def attribute(name: str) -> Any:
        if name != "call":
            raise AttributeError(name)
        compiled = handed_over().compiled.pop(digest, None)
        request = current_request()
        if request.compilation is None:  # loaded without a compilation: torch.compiler.load_compiled_function
            request = replace(request, compilation=Compilation())
        if compiled is None:
            try:
                compiled = _restored(json.loads(text), scope, request)
            except Exception as error:
                log.warning("a stored program cannot be used, and is compiled again: %s", error, exc_info=True)
                raise OSError("fxwrap: a stored program cannot be used") from error
        return boxed(compiled, request.compilation)

    return attribute


def boxed(compiled: Any, compilation: Compilation | None = None) -> Callable[[list[Any]], Any]:
    """A compiled program with the calling convention of Inductor's wrapper.

    It takes its arguments as a list, which it empties so that the caller does not keep inputs alive while the program
    runs. It returns a sequence, also for one output.

    Args:
        compilation: is kept alive with the returned function; reports find the program in it.
    """

    def run(args: list[Any], of: Any = compilation) -> Any:
        return compiled.run(args)

    def run_for_one(args: list[Any], of: Any = compilation) -> Any:
        return (compiled.run(args),)

    def call(args: list[Any], of: Any = compilation) -> Any:
        inputs = list(args)
        args.clear()
        outputs = compiled(*inputs)
        return outputs if isinstance(outputs, (list, tuple)) else (outputs,)

    if not isinstance(compiled, Program):
        return call
    return run if isinstance(output_node(compiled.plan.graph).args[0], (list, tuple)) else run_for_one


def _restored(data: Mapping[str, Any], scope: Mapping[str, Any], request: CompileRequest) -> Program:
    if (reason := data.get("not stored")) is not None:
        raise StorageError(reason)
    now = request.compilation.lines if request.compilation is not None else None
    if "traced" in data and now is not None:
        stored = [{**data["graph"], "modules": []}, data["plan"]]
        graph, plan = UserLines.from_data(data["traced"]).renamed(stored, now)
        data = {"graph": {**graph, "modules": data["graph"]["modules"]}, "plan": plan}
    texts: list[str] = data["graph"]["modules"]
    modules = list(map(load_kernels, texts))

    def kernel(entry: Mapping[str, Any]) -> Kernel:
        definition = loaded_kernel(modules[entry["module"]], entry["kernel"])
        if (stored := stored_kernel(entry, texts, definition)) is None:
            expected = f"{entry['device']} runs {entry['language']} kernels"
            raise StorageError(f"kernel {entry['kernel']}", expected=expected)
        return stored

    with no_garbage_collection():
        host_graph = graph_from_data(data["graph"], functions(), StandIns(), scope, kernel, empty_graph)
        return restore_program(from_data(ProgramPlan, data["plan"], graph=host_graph), request)


def functions() -> Functions:
    """The table of functions that host graphs of Inductor's wrappers may call."""
    return Functions({**wrapper_functions(), **versions.library_functions()}, size_functions())
