"""Processes of their own for tests, forked from one that has imported torch: importing takes seconds each time.

What is to be seen from the very beginning, as what an import does, needs a new interpreter and does not belong here.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["warm_torch"])


def _serve() -> None:
    """Have the process that others are forked from; its path is this one's, so that it finds the same modules."""
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()


def start(
    arguments: tuple[str, ...], stdout: Path, stderr: Path, cwd: Path | None = None, **environment: str
) -> BaseProcess:
    """Begin what ``python *arguments`` does: ``script.py ...``, ``-c program`` or ``-m module ...``.

    Args:
        stdout, stderr: files for what it prints; may be the same.
        environment: beside that of this process.
    """
    variables = {**os.environ, **environment}
    there = (arguments, str(stdout), str(stderr), variables, str(cwd or Path.cwd()))
    _serve()
    process = _CONTEXT.Process(target=_python, args=there, daemon=True)
    process.start()
    return process


def run(
    *arguments: str, cwd: Path | None = None, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` does with ``python *arguments``.

    Raises:
        subprocess.TimeoutExpired: after so many seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = start(arguments, stdout, stderr, cwd, **environment)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout, stdout.read_text(), stderr.read_text())
        return subprocess.CompletedProcess(arguments, process.exitcode, stdout.read_text(), stderr.read_text())


def _python(arguments: tuple[str, ...], stdout: str, stderr: str, variables: Mapping[str, str], cwd: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    with mock.patch.object(subprocess, "Popen", _Forked):
        _execute(arguments)


def _execute(arguments: tuple[str, ...]) -> None:
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif first == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


class _Forked(subprocess.Popen[Any]):
    """Where these processes begin a script in another Python, that is forked as well, with all that is imported."""

    def _execute_child(self, command: Any, *how: Any) -> None:
        variables, shell, pipes = how[5], how[8], how[9:15]
        if shell or not isinstance(command, list) or command[0] != sys.executable or not command[1].endswith(".py"):
            super()._execute_child(command, *how)  # type: ignore[misc]
            return
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command[1:], pipes, variables)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _become(command: list[str], pipes: tuple[int, ...], variables: Mapping[str, str] | None) -> None:
    """In a process that was just forked: run what ``python *command`` does, and end."""
    stdin, to_stdin, from_stdout, stdout, from_stderr, stderr = pipes
    code: Any = 1
    try:
        for end in (to_stdin, from_stdout, from_stderr):
            if end >= 0:
                os.close(end)
        for number, end in enumerate((stdin, stdout, stderr)):
            if end >= 0:
                os.dup2(end, number)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        if variables is not None:
            os.environ.clear()
            os.environ.update(variables)
        _execute(tuple(command))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
