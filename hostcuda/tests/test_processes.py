"""Which processes have the device: the launcher's, its children, and none with HOSTCUDA=0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts import ROOT, environment, run

WHICH = "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_name())"
OURS = "Host-memory CUDA device (no GPU)"
HOST = {name: value for name, value in environment().items() if name != "PYTHONPATH"}


def python(*args: str, where: Path = ROOT, **settings: str) -> Any:
    ended = subprocess.run(
        [sys.executable, *args],
        cwd=where,
        env={**HOST, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return ended.returncode, ended.stdout.split("\n")[:-1], ended.stderr


def test_the_launcher_and_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(WHICH)
    script = tmp_path / "script.py"
    script.write_text(
        f"import subprocess, sys\nprint(sys.argv[1:], __name__, flush=True)\n"
        f"subprocess.run([sys.executable, {str(child)!r}], check=True)\n"
        f"import torch\nprint(torch.ones(2, device='cuda').sum().item())\nsys.exit(3)\n"
    )
    code, lines, errors = python("-m", "hostcuda", str(script), "-x", "7")
    assert (code, lines) == (3, ["['-x', '7'] __main__", OURS, "2.0"]), errors


def test_a_program_or_a_module() -> None:
    assert python("-m", "hostcuda", "-c", WHICH)[:2] == (0, [OURS])
    code, lines, errors = python("-m", "hostcuda", "-m", "hostcuda", "--help")
    assert code == 0, errors
    assert "python -m hostcuda" in "\n".join(lines)


def test_switched_off() -> None:
    """PLANTED: HOSTCUDA=0. torch finds no device (or the machine's own)."""
    code, lines, errors = python("-m", "hostcuda", "-c", WHICH, HOSTCUDA="0")
    assert code == 0, errors
    assert lines != [OURS]
    assert run("print(hostcuda.is_on())", HOSTCUDA="0") == ["False"]


def test_a_process_that_was_not_told_has_no_device() -> None:
    code, lines, errors = python("-c", f"import hostcuda; print(hostcuda.is_on()); {WHICH}", FAKECUDA="0")
    assert code == 0, errors
    assert lines[0] == "False"
    assert lines[1] != OURS


def test_torch_was_there_before() -> None:
    """PLANTED: too late, and it says so."""
    code, _, errors = python("-c", "import torch, hostcuda; hostcuda.install()", FAKECUDA="0")
    assert code == 1
    assert "before torch" in errors


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 'ran'\n")
    code, lines, errors = python(
        "-m", "hostcuda", "-c", "import builtins, hostcuda; print(builtins.theirs, hostcuda.is_on())",
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
    )  # fmt: skip
    assert (code, lines) == (0, ["ran True"]), errors


def test_workers_of_multiprocessing() -> None:
    script = """
        import torch, torch.multiprocessing as mp
        context = mp.get_context("spawn")
        with context.Pool(1) as pool:
            print(pool.apply(torch.cuda.get_device_name))
    """
    assert run(script) == [OURS]
