"""``fxwrap.doctor()``: right about what is there, what is not, and what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from conftest import EXAMPLES
from torch._inductor import config

import fxwrap
from fxwrap.features.command_line import doctor as doctors
from fxwrap.graphs.devices.runtime import runtime_for

ROOT = Path(__file__).resolve().parents[3]


def _in_a_new_python(*arguments: str, **environment: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and by subject its state and all else: settings that torch reads when it is imported."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables, check=False)
    lines = re.findall(
        r"^(ok|missing) +((?:extra |device |\w+'s |C\+\+ |native )?[\w.]+)  +(.*(?:\n +->.*)?)", done.stdout, re.M
    )
    return done.returncode, {subject: (state, what) for state, subject, what in lines}


def test_all_is_there() -> None:
    found = fxwrap.doctor()
    assert found.ok, str(found)
    assert found.about("torch").what.startswith(torch.__version__)
    assert {finding.state for finding in found.findings} == {"ok"}, str(found)
    assert [finding.subject for finding in found.findings if finding.needed] == [
        "torch", "Inductor's cache", "torch.compile", "C++ compiler", "device cpu"
    ]  # fmt: skip
    for finding in found.findings:
        assert finding.subject in str(found) and finding.what in str(found) and not finding.remedy
    with pytest.raises(KeyError):
        found.about("a device that nobody has")


def test_versions_of_torch_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = re.search(r'"torch>=(.*),<(.*)"', (ROOT / "pyproject.toml").read_text())
    assert bounds is not None and bounds.groups() == tuple(".".join(map(str, one)) for one in doctors._TORCH)
    for version, state in (("2.10.1", "missing"), ("2.11.0+cpu", "ok"), ("2.16.0.dev20270101", "ok")):
        monkeypatch.setattr(torch, "__version__", version)
        finding = fxwrap.doctor().about("torch")
        assert finding.state == state and ("newer than" in finding.what) == version.startswith("2.16")
        assert state == "ok" or "pip install 'torch>=2.11" in finding.remedy


def test_a_torch_that_is_too_old() -> None:
    """It has no such module, and importing the backend fails."""
    program = """
import sys, torch
sys.modules["torch._inductor.codegen.wrapper_fxir"] = None
from fxwrap.torch_private.native_library import native_replay
native_replay()  # takes a minute to build for another torch
torch.__version__ = "2.6.0"
from fxwrap.features.command_line.command_line import app
app(["doctor"])
"""
    code, found = _in_a_new_python("-c", program)
    assert code == 1
    assert found["torch"][0] == "missing" and "too old" in found["torch"][1]
    assert found["torch.compile"][0] == "missing" and "wrapper_fxir" in found["torch.compile"][1]
    # What can be told is told.
    assert found["C++ compiler"][0] == found["fxwrap's cache"][0] == "ok"


def test_no_compiler_on_the_path(tmp_path: Path) -> None:
    code, found = _in_a_new_python("-m", "fxwrap", "doctor", PATH=str(tmp_path), FXWRAP_CACHE_DIR=str(tmp_path))
    assert code == 1
    assert found["C++ compiler"][0] == "missing" and "install g++" in found["C++ compiler"][1]
    assert found["native replay"][0] == "missing" and "no C++ compiler" in found["native replay"][1]
    assert found["torch.compile"][0] == "ok"


def _compiler(path: Path, does: str) -> str:
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo a compiler 1.0; exit; fi\n{does}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "does, said",
    [
        ("echo probe.cpp:1: fatal error: no cmath >&2; exit 1", "fatal error: no cmath"),
        ("exit 0", "it writes no file"),
    ],
)
def test_a_compiler_that_does_not_compile(does: str, said: str, tmp_path: Path) -> None:
    named = _compiler(tmp_path / "c++", does)
    with config.patch({"cpp.cxx": (None, named)}):
        found = fxwrap.doctor()
    finding = found.about("C++ compiler")
    assert finding.state == "missing" and said in finding.what and "CXX" in finding.remedy and not found.ok


def test_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    with config.patch({"cpp.cxx": (None, str(tmp_path / "nobody"))}):
        found = fxwrap.doctor()
    assert not found.ok and found.about("C++ compiler").what.startswith("InvalidCxxCompiler")


def test_a_gpu_that_triton_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available() or torch.xpu.is_available():
        pytest.skip("there is one that it reaches")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctors, "_accelerators", lambda: ["cuda"])
    found = fxwrap.doctor()
    assert found.about("device cuda").state == "missing" and found.about("extra triton").needed
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    assert not fxwrap.doctor().ok, "it writes the kernels of a GPU"


def test_a_driver_without_a_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("it is found")
    monkeypatch.setattr(doctors.torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(
        doctors.Path, "exists", lambda path, exists=Path.exists: "nvidiactl" in str(path) or exists(path)
    )
    found = fxwrap.doctor()
    finding = found.about("device cuda")
    assert found.ok and finding.state == "missing" and "a build of torch for it" in finding.remedy


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """Dynamo cannot even be imported."""
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "inductor")
    code, found = _in_a_new_python("-m", "fxwrap", "doctor", TORCHINDUCTOR_CACHE_DIR=folder)
    assert code == 1
    state, what = found["Inductor's cache"]
    assert state == "missing" and "Not a directory" in what and folder in what and "TORCHINDUCTOR_CACHE_DIR" in what
    assert found["torch"][0] == found["fxwrap's cache"][0] == "ok"


def test_an_own_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_CACHE_DIR", "/proc/nowhere")
    found = fxwrap.doctor()
    own = found.about("fxwrap's cache")
    assert found.ok and own.state == "missing", "without the helper library replays run in Python"
    assert "FXWRAP_CACHE_DIR" in own.remedy


def test_folders_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path / "c"))
    assert fxwrap.doctor().about("fxwrap's cache").what.startswith(str(tmp_path / "c" / "fxwrap"))
    assert not (tmp_path / "c").exists()


def test_what_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxwrap.torch_private.native_library import native_replay

    monkeypatch.setenv("FXWRAP_NATIVE_REPLAY", "0")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    native_replay.cache_clear()
    found = fxwrap.doctor()
    native_replay.cache_clear()
    assert "FXWRAP_NATIVE_REPLAY" in found.about("native replay").what
    assert found.about("torch.compile").remedy == "unset TORCH_COMPILE_DISABLE"


def test_the_helper_library_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fxwrap.torch_private.native_library import native_replay, replay_library

    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    path = replay_library()
    path.parent.mkdir()
    path.write_bytes(b"half")
    native_replay.cache_clear()
    found = fxwrap.doctor()
    native_replay.cache_clear()
    finding = found.about("native replay")
    assert found.ok and finding.state == "missing" and str(path) in finding.what and "remove" in finding.remedy


def test_a_backend_that_is_not_installed() -> None:
    program = """
import importlib.metadata as metadata
entries = metadata.entry_points
metadata.entry_points = lambda **how: () if how == {"group": "torch_dynamo_backends"} else entries(**how)
import fxwrap
print(fxwrap.doctor())
"""
    _, found = _in_a_new_python("-c", program)
    state, what = found["torch.compile"]
    assert state == "missing" and "fxwrap" in what and "pip install -e ." in what


def test_every_extra_of_the_package_is_looked_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = re.search(r"optional-dependencies\]\n(.*?)\ntest = ", text, re.DOTALL)
    assert extras is not None
    lists = re.findall(r"^(\w+) = \[(.*)\]$", extras[1], re.MULTILINE)
    named = {extra: re.findall(r'"([\w-]+)>=', packages) for extra, packages in lists}
    assert named == {extra: list(modules) for extra, modules in doctors._EXTRAS.items()}


def test_a_package_that_another_one_imports_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that an extra imports is imported: safetensors is there, and cannot save without numpy."""
    finding = fxwrap.doctor().about("extra save")
    assert finding.state == "ok" and re.fullmatch(r"safetensors [\d.]+, numpy [\d.]+", finding.what)
    monkeypatch.setitem(sys.modules, "numpy", None)  # type: ignore[arg-type]
    finding = fxwrap.doctor().about("extra save")
    assert finding.state == "missing" and "numpy" in finding.what
    assert finding.remedy == "pip install 'fxwrap[save]'" and fxwrap.doctor().ok


def test_a_device_and_its_graph(device: torch.device) -> None:
    if device.type == "hostsim":
        found = fxwrap.doctor().about("device hostsim")
        program = "import hostsim, fxwrap; print(fxwrap.doctor())"
        _, printed = _in_a_new_python("-c", program, PYTHONPATH=f"{ROOT}{os.pathsep}{EXAMPLES / 'hostsim'}")
        state, what = printed["device hostsim"]
        assert state == "missing" and "fxwrap.register_device" in what
    else:
        found = fxwrap.doctor().about(f"device {device.type}")
    assert found.state == "ok" and runtime_for(device).implementation in found.what


def test_a_device_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes kernels for it, and nothing captures them."""
    monkeypatch.setattr(doctors, "_accelerators", lambda: ["mps"])
    monkeypatch.setattr(torch.mps, "is_available", lambda: True, raising=False)
    found = fxwrap.doctor()
    assert found.ok and found.about("device mps").state == "missing" and "run" in found.about("device mps").remedy


def test_without_typer() -> None:
    program = """
import runpy, sys
sys.modules["typer"], sys.argv = None, ["fxwrap", "doctor"]
runpy.run_module("fxwrap", run_name="__main__")
"""
    done = processes.run("-c", program)
    assert done.returncode == 0 and "device cpu" in done.stdout
