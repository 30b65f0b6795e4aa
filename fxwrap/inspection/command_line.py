"""The commands of ``python -m fxwrap``."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..artifacts import load as loading
from ..artifacts.contents import Contents
from ..artifacts.signature import NumberInput, Signature, TensorInput
from ..errors import FxwrapError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Save, look into and run programs.",
)
_console, _errors = Console(), Console(stderr=True)

_File = Annotated[Path, typer.Argument(help="a file that fxwrap.save has written", exists=True, dir_okay=False)]


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What is wrong is said without a traceback, and the exit code is 1."""
    try:
        yield
    except (FxwrapError, OSError) as error:
        _errors.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None


@app.command()
def save(
    source: Annotated[str, typer.Argument(help="package.module:function, which returns methods by name")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the file to write")],
    weights: Annotated[bool, typer.Option(help="save weights, too")] = True,
    compile: Annotated[
        str, typer.Option(help="object: compiled kernels; source: compiled where it is loaded")
    ] = "object",
) -> None:
    """Compile methods and save them in one file.

    Example: python -m fxwrap save examples.decoder:methods -o decoder.fxw
    """
    with _told():
        function = _function(source)
        from ..artifacts.save import save as write

        with _errors.status("importing") as status:
            path = write(output, function(), weights=weights, compile=compile, progress=status.update)
    _console.print(f"{path}: {path.stat().st_size:,} bytes", highlight=False)


def _function(source: str) -> Any:
    module, _, name = source.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name or "methods")
    except (ImportError, AttributeError) as error:
        raise FxwrapError(
            f"{source} cannot be imported", expected="package.module:function", got=f"{type(error).__name__}: {error}"
        ) from error


@app.command()
def inspect(file: _File) -> None:
    """Show methods, signatures, memory, partitions, kernels and versions of a file. Nothing in it runs.

    Example: python -m fxwrap inspect decoder.fxw
    """
    with _told():
        contents = Contents.of(file)
    for name, value in contents.versions.items():
        _console.print(f"{name}: {value}", highlight=False)
    _console.print(f"weights: {contents.weights}", highlight=False)
    table = Table("method", "takes", "partitions", "launches", "library calls", title=str(file))
    for method in contents.methods:
        conditions = method.signature.conditions
        takes = [*map(str, method.signature.inputs), *([f"with {conditions}"] if conditions else [])]
        table.add_row(
            method.name,
            Text("\n".join(takes)),
            f"{method.captured} captured, {method.eager} eager",
            str(method.launches),
            str(method.library_calls),
        )
    _console.print(table, highlight=False)
    kernels = Table("method", "kernel", "language", "device", "in the file", "made for", "configuration")
    for kernel in (kernel for method in contents.methods for kernel in method.kernels):
        where = kernel.language, kernel.device, "\n".join(kernel.members) or "source, in the program"
        kernels.add_row(kernel.method, kernel.name, *where, kernel.target, kernel.configuration)
    _console.print(kernels, highlight=False)


@app.command()
def run(
    file: _File,
    method: Annotated[str, typer.Argument(help="which method")],
    random: Annotated[bool, typer.Option("--random", help="on random inputs")] = False,
    size: Annotated[list[str], typer.Option(help="a symbolic size, as in s0=8; its lowest otherwise")] = [],  # noqa: B006
    calls: Annotated[int, typer.Option(help="how often", min=1)] = 10,
    trust: Annotated[bool, typer.Option("--trust", help="run the native code in the file")] = False,
) -> None:
    """Load a file and call a method.

    Example: python -m fxwrap run decoder.fxw decode --random --trust
    """
    with _told():
        if not random:
            raise FxwrapError("no inputs", expected="--random", got="nothing")
        program = loading.load(file, trust=trust)
        target = program[method]
        inputs = _random_inputs(target.signature, _sizes(target.signature, size))
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            found = target.call_flat(inputs)
            times.append(time.perf_counter() - begin)
    _console.print(f"{method}: {_looks(found)}", highlight=False, markup=False)
    _console.print(f"first call {times[0] * 1e3:.2f} ms, last {times[-1] * 1e6:.0f} us", highlight=False)


def _sizes(signature: Signature, given: list[str]) -> dict[str, int]:
    found = {name: low for name, (low, _) in signature.ranges.items()}
    for one in given:
        name, _, value = one.partition("=")
        if name not in found or not value.isdigit():
            raise FxwrapError(f"--size {one}", expected=f"one of {', '.join(found) or 'none'}, and a number", got=one)
        found[name] = int(value)
    return found


def _random_inputs(signature: Signature, sizes: dict[str, int]) -> list[Any]:
    def number(size: Any) -> int:
        return int(size if isinstance(size, int) else size.subs({s: sizes[s.name] for s in size.free_symbols}))

    found: list[Any] = []
    for one in signature.inputs:
        if isinstance(one, NumberInput):
            found.append(
                one.value if isinstance(one.value, (str, float, type(None))) else one.kind(number(one.value))
            )
            continue
        assert isinstance(one, TensorInput)
        value = torch.empty_strided(tuple(map(number, one.size)), tuple(map(number, one.stride)), dtype=one.dtype)
        found.append((value.normal_() if one.dtype.is_floating_point else value.fill_(1)).to(one.device))
    return found


def _looks(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.size())}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_looks(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_looks, value)) + ")"
    return repr(value)
