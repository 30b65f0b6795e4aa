"""The commands of ``python -m fxwrap``. Modules that need Inductor are imported by the commands that use them."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import sys
import time
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from typer.core import TyperCommand

from ...errors import FxwrapError
from ...host_graph.user_code import described
from .doctor import doctor as examine

if TYPE_CHECKING:
    from ...inspection.explanation import Explanation
    from ..ahead_of_time.signature import Signature

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="See what fxwrap makes of a function, and whether all is there for it; save programs, and run them.",
)


@app.callback()
def _begin() -> None:
    """Before every command: have the output escape characters that the terminal's encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


_File = Annotated[Path, typer.Argument(help="a file that fxwrap.save has written", exists=True, dir_okay=False)]


@contextlib.contextmanager
def _errors_as_text(code: int = 1) -> Iterator[None]:
    """Print an error without a traceback, and exit with a code."""
    try:
        yield
    except (FxwrapError, OSError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(code) from None


def _named(source: str, default: str = "") -> tuple[Any, dict[str, Any]]:
    """The value of the expression behind the colon, and the names that it can use.

    Raises:
        FxwrapError: the module cannot be imported, or the expression raises.
    """
    module, _, expression = source.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        names = {"torch": torch, **vars(importlib.import_module(module))}
        return eval(expression or default, names), names
    except Exception as error:
        expected = "package.module:function, or package.module:Model(size=8)"
        raise FxwrapError(f"{source} cannot be imported", expected=expected, got=described(error)) from error


def _to_be_written(*paths: Path | None) -> list[Path]:
    """The paths that are given, each in a folder that is there from now on: errors come before the work.

    Raises:
        FxwrapError, OSError: no file can have such a path.
    """
    given = [path for path in paths if path is not None]
    for path in given:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise FxwrapError(f"{path} cannot be written", expected="the name of a file", got="a folder")
    return given


class _ScriptCommand(TyperCommand):
    """A command that passes all arguments behind a script on to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        script = next((position for position, arg in enumerate(args) if arg.endswith(".py")), len(args))
        return super().parse_args(ctx, [*args[:script], "--", *args[script:]] if script < len(args) else args)


@app.command(cls=_ScriptCommand)
def explain(
    what: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION|SCRIPT.py", help="what to compile, or to run")],
    rest: Annotated[list[str], typer.Argument(metavar="ARGUMENT", help="what a script is given")] = [],  # noqa: B006
    args: Annotated[str, typer.Option(help="what the function is given, as between the brackets of a call")] = "",
    option: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="of the compilation")] = [],  # noqa: B006
    calls: Annotated[int, typer.Option(help="how often it is called; the third replays", min=1)] = 1,
    target: Annotated[str, typer.Option(help="a device that need not be here, such as cuda:90")] = "",
    no_grad: Annotated[bool, typer.Option("--no-grad", help="inference, under torch.no_grad()")] = False,
    html: Annotated[Path | None, typer.Option(help="write a page, and no text")] = None,
    json: Annotated[Path | None, typer.Option(help="write data, and no text; diff compares them")] = None,
    picture: Annotated[Path | None, typer.Option(help="draw the memory of the first graph: .svg or .png")] = None,
) -> None:
    """Show what is made of a function, or of all that a script compiles: graphs, partitions, memory, kernels.

    FUNCTION may be an expression. It and --args know torch and all names of the module. A script runs to its end,
    with the arguments behind it; what it compiles with backend="fxwrap" is shown, and its exit code is passed on.

    Examples:

        python -m fxwrap explain "torch.nn:Linear(8, 4)" --args "torch.randn(3, 8)" --no-grad
        python -m fxwrap explain decoder:step --args "*example(), scale=2" --option capture=always
        python -m fxwrap explain --html page.html --json before.json train.py --epochs 1
        python -m fxwrap explain "torch.nn:Linear(8, 4)" --args "torch.randn(3, 8)" --picture memory.svg
    """
    ended = None
    with _errors_as_text():
        written = _to_be_written(html, json, picture)
        if not what.endswith(".py"):
            explanation = _explained(what, args, _options(option), calls, target, no_grad)
        elif args or option or calls > 1 or target or no_grad:
            wrong = "--args, --option, --calls, --target and --no-grad are for functions"
            raise FxwrapError(f"{what} is a script", got=wrong, remedy="write them into the script")
        elif not Path(what).is_file():
            raise FxwrapError(f"no script {what}")
        else:
            from .scripts import explain_script

            explanation, ended = explain_script(what, rest)
            if not explanation.graphs and not explanation.fallbacks:
                typer.echo('the script compiles nothing with torch.compile(..., backend="fxwrap")', err=True)
        for path, write in ((html, "to_html"), (json, "save"), (picture, "memory_picture")):
            if path is not None:
                getattr(explanation, write)(str(path))
    for path in written:
        typer.echo(f"{path}: {path.stat().st_size:,} bytes", err=True)
    if not written or not explanation.graphs:
        print(explanation, file=sys.stderr if written else sys.stdout)
    if ended is not None:
        raise ended


def _explained(what: str, args: str, options: dict[str, Any], calls: int, target: str, no_grad: bool) -> Explanation:
    from ...api.explain import explain
    from ...backend import parsed

    parsed(options)
    function, names = _named(what)
    remedy = "--args is what stands between the brackets of a call: torch.randn(3, 8), scale=2"
    try:
        given, by_name = eval(f"_({args})", {**names, "_": lambda *given, **by_name: (given, by_name)})
        asked: dict[str, Any] = {"fxwrap_options": options or None, "calls": calls, "target": target or None}
        with torch.set_grad_enabled(not no_grad):
            return explain(function, *given, **asked, **by_name)
    except FxwrapError:
        raise
    except Exception as error:
        raise FxwrapError(f"{what} cannot run with ({args})", got=described(error), remedy=remedy) from error


def _options(texts: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise FxwrapError(f"--option {text}", expected="a name and a value, as in capture=always")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="what explain --json has written", exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(help="another such file", exists=True, dir_okay=False)],
    as_json: Annotated[bool, typer.Option("--json", help="as data")] = False,
) -> None:
    """Show what changed between two reports: graphs, partitions, memory, kernels, counters, versions.

    The exit code is 0 if nothing changed, 1 if something did, 2 if a file cannot be read. Times do not count.

    Examples:

        python -m fxwrap diff before.json after.json
        python -m fxwrap diff before.json after.json --json
    """
    with _errors_as_text(2):
        from ...inspection.explanation import Explanation

        changes = Explanation.load(before).diff(Explanation.load(after))
    print(dumps(changes.to_dict(), indent=1) if as_json else changes)
    raise typer.Exit(bool(changes))


@app.command()
def doctor() -> None:
    """Look at torch, compilers, caches, devices and optional packages, and say what is missing and what to do.

    The exit code is 0 if all that is needed is there, else 1.

    Example:

        python -m fxwrap doctor
    """
    print(diagnosis := examine())
    raise typer.Exit(not diagnosis.ok)


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

    Example:

        python -m fxwrap save examples.decoder:methods -o decoder.fxw
    """
    with _errors_as_text():
        _to_be_written(output)
        function, _ = _named(source, "methods")
        from ..ahead_of_time.save import save as write

        path = write(output, function(), weights=weights, compile=compile)
    print(f"{path}: {path.stat().st_size:,} bytes")


@app.command()
def inspect(file: _File) -> None:
    """Show methods, signatures, memory, partitions, kernels and versions of a file. Nothing in it runs.

    Example:

        python -m fxwrap inspect decoder.fxw
    """
    from ..ahead_of_time.contents import Contents

    with _errors_as_text():
        contents = Contents.of(file)
    lines = [f"{name}: {value}" for name, value in [*contents.versions.items(), ("weights", contents.weights)]]
    for method in contents.methods:
        conditions = f" with {method.signature.conditions}" if method.signature.conditions else ""
        lines += [
            f"{method.name}({', '.join(map(str, method.signature.inputs))}){conditions}",
            f"  {method.captured} captured partitions, {method.eager} eager ones",
            f"  {method.launches} launches, {method.library_calls} library calls",
        ]
        for one in method.kernels:
            where = f"{one.language} on {one.device}, {', '.join(one.members) or 'its source is in the program'}"
            lines.append(f"  kernel {one.name}: {', '.join(filter(None, (where, one.target, one.configuration)))}")
    for line in lines:  # of a file that anybody may have made: it says nothing to the terminal
        print("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line))


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

    Example:

        python -m fxwrap run decoder.fxw decode --random --trust
    """
    from ..ahead_of_time import load as loading

    with _errors_as_text():
        if not random:
            raise FxwrapError("no inputs", expected="--random", got="nothing")
        if not trust:
            remedy = f"--trust runs it: give it if you made {file}, or know who did"
            raise FxwrapError(f"{file} holds native code", expected="--trust", got="nothing", remedy=remedy)
        target = loading.load(file, trust=trust)[method]
        inputs = _random_inputs(target.signature, _sizes(target.signature, size))
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            results = target.call_flat(inputs)
            times.append(time.perf_counter() - begin)
    print(f"{method}: {_looks(results)}")
    print(f"first call {times[0] * 1e3:.2f} ms, last {times[-1] * 1e6:.0f} us")


def _sizes(signature: Signature, texts: list[str]) -> dict[str, int]:
    sizes = {name: 1 if low is None else low for name, (low, _) in signature.ranges.items()}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in sizes or not value.isdigit():
            expected = f"one of {', '.join(sizes) or 'none'}, and a number"
            raise FxwrapError(f"--size {text}", expected=expected, got=text)
        sizes[name] = int(value)
    return sizes


def _random_inputs(signature: Signature, sizes: dict[str, int]) -> list[Any]:
    from ..ahead_of_time.signature import NumberInput, TensorInput

    def number(size: Any) -> int:
        return int(size if isinstance(size, int) else size.subs({s: sizes[s.name] for s in size.free_symbols}))

    values: list[Any] = []
    for spec in signature.inputs:
        if isinstance(spec, NumberInput):
            constant = isinstance(spec.value, (str, float, type(None)))
            values.append(spec.value if constant else spec.kind(number(spec.value)))
            continue
        assert isinstance(spec, TensorInput)
        value = torch.empty_strided(tuple(map(number, spec.size)), tuple(map(number, spec.stride)), dtype=spec.dtype)
        values.append((value.normal_() if spec.dtype.is_floating_point else value.fill_(1)).to(spec.device))
    return values


def _looks(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.size())}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_looks(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_looks, value)) + ")"
    return repr(value)
