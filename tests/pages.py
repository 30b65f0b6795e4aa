"""Pages of the documents and examples, run: ``python pages.py FOLDER PAGE|"EXAMPLE.py ARGUMENT..." ...``.

A page's blocks are run in order:

    ```python             a program; those of a page share their names
    ```bash               commands
    ```text               what the block before it prints; "..." is anything, as in doctest
    <!-- python           a program, or commands, that readers do not see
    <!-- untested: why    the block behind it is not run

This needs Python and torch only: it runs in environments that have nothing else.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^<!-- (?P<hidden>python|bash)\n(?P<unseen>.*?)^-->$"
    r"|^(?:<!-- untested: (?P<why>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<seen>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LOOSELY = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A block of a page. ``line`` is that of its text; ``untested`` says why it is not run."""

    language: str
    text: str
    line: int
    untested: str = ""


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, hidden ones as well, in order."""
    for found in BLOCK.finditer(text):
        group = "unseen" if found["hidden"] else "seen"
        line = text.count("\n", 0, found.start(group)) + 1
        yield Block(found["hidden"] or found["language"], found[group], line, found["why"] or "")


def run(page: Path) -> None:
    """Run a page in the working folder.

    Raises:
        AssertionError: a block prints something else, or its commands fail. A program may raise anything.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(page.read_text()):
        where = f"{page}:{block.line}"
        if block.untested:
            continue
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                # On its lines of the page, where tracebacks and inspect.getsource find the text.
                exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
            printed = out.getvalue()
        elif block.language == "bash":
            done = subprocess.run(
                ["bash", "-ec", block.text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            assert done.returncode == 0, f"{where}: exit code {done.returncode}\n{done.stdout}"
            printed = done.stdout
        else:
            assert block.language == "text", f"{where}: nobody knows how to run {block.language!r}"
            as_shown = doctest.OutputChecker().check_output(block.text, printed, _LOOSELY)
            assert as_shown, f"{where}: the page shows\n{block.text}\nand this is printed:\n{printed}"


def _run_example(line: str) -> None:
    script, *arguments = shlex.split(line)
    sys.argv = [str(ROOT / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _forked(what: Callable[[str], Any], argument: str, folder: Path) -> bool:
    """Whether ``what(argument)`` ended well in a process of its own, in a new folder that has the examples."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        os.chdir(folder)
        what(argument)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main(folder: Path, names: list[str]) -> int:
    """How many pages and examples fail. What an example prints stands behind its name."""
    import warm_torch  # noqa: F401 (what takes seconds in a process)

    del sys.path[0]  # the tests are not there where pages are read
    failed = 0
    for number, name in enumerate(names):
        print(f"== {name}")
        page = name.endswith(".md")
        what = (lambda name: run(ROOT / name)) if page else _run_example
        failed += not _forked(what, name, folder / str(number))
    return failed


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2:]))
