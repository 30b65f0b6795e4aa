"""Scripts in processes of their own: what the environment says is read when a process starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import hostcuda

ROOT = Path(hostcuda.__file__).parents[1]
TESTS = Path(__file__).parent


def environment(**settings: str) -> dict[str, str]:
    """This process's environment with no setting of the device's but those that are given, and where it is built."""
    kept = ("HOSTCUDA_CACHE", "HOSTCUDA_LIB")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HOSTCUDA") or name in kept}
    return {**plain, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}", **settings}


def start(script: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on the device. What is in its first lines: hostcuda is on, cuda.py's functions are there."""
    source = "import hostcuda\nhostcuda.install()\nfrom cuda import *\n" + textwrap.dedent(script)
    return _python("-c", source, **settings)


def run(script: str, **settings: str) -> list[str]:
    """The lines that a script prints; it has to end well."""
    return _lines(start(script, **settings))


def run_file(file: Path, **settings: str) -> list[str]:
    """The lines that a program prints, which processes that it starts by spawning can import."""
    return _lines(_python("-m", "hostcuda", str(file), **settings))


def _python(*args: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], env=environment(**settings), capture_output=True, text=True, timeout=100, check=False
    )


def _lines(ended: subprocess.CompletedProcess[str]) -> list[str]:
    assert ended.returncode == 0, f"exit status {ended.returncode}\n{ended.stdout}\n{ended.stderr[-4000:]}"
    return ended.stdout.splitlines()
