"""``fxwrap.doctor()``: right about what is there, what is not, and what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from conftest import EXAMPLES
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

import fxwrap
from fxwrap.features.command_line import doctor as doctors
from fxwrap.graphs.devices.runtime import runtime_for

ROOT = Path(__file__).resolve().parents[3]


def _in_a_new_python(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by subject: settings that torch reads when it is imported."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables, check=False)
    return done.returncode, {one["subject"]: one for one in json.loads(done.stdout)["findings"]}


def test_all_is_there() -> None:
    found = fxwrap.doctor()
    assert found.ok, str(found)
    assert found.about("torch").what.startswith(torch.__version__)
    assert found.about("torch.compile").state == found.about("C++ compiler").state == "ok"
    assert found.about("device cpu").what.startswith("captured as a flat list of calls")
    for finding in found.findings:
        assert finding.subject in str(found) and (finding.state == "ok" or finding.what)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["schema"] == "fxwrap.doctor/1" and data["ok"] is True
    assert [doctors.Finding(**one) for one in data["findings"]] == list(found.findings)
    with pytest.raises(KeyError):
        found.about("a device that nobody has")


def test_versions_of_torch_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = re.search(r'"torch>=(.*),<(.*)"', (ROOT / "pyproject.toml").read_text())
    assert bounds is not None and bounds.groups() == tuple(".".join(map(str, one)) for one in doctors._TORCH)
    for version, state in (("2.10.1", "error"), ("2.11.0+cpu", "ok"), ("2.16.0.dev20270101", "warning")):
        monkeypatch.setattr(torch, "__version__", version)
        finding = fxwrap.doctor().about("torch")
        assert finding.state == state and (state == "ok" or "pip install 'torch" in finding.remedy)


def test_a_torch_that_is_too_old() -> None:
    """It has no such module, and importing the backend fails."""
    program = """
import sys, torch
torch.__version__ = "2.6.0"
sys.modules["torch._inductor.codegen.wrapper_fxir"] = None
from fxwrap.features.command_line.command_line import app
app(["doctor", "--json"])
"""
    code, found = _in_a_new_python("-c", program)
    assert code == 1
    assert found["torch"]["state"] == "error" and "too old" in found["torch"]["what"]
    assert found["torch.compile"]["state"] == "error" and "wrapper_fxir" in found["torch.compile"]["what"]
    # What can be told is told.
    assert found["C++ compiler"]["state"] == found["device cpu"]["state"] == found["fxwrap's cache"]["state"] == "ok"


def test_what_inductor_would_say_where_it_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fxwrap.codegen.devices.machine", None)  # type: ignore[arg-type]
    found = fxwrap.doctor()
    for subject in ("C++ compiler", "caching"):
        assert found.about(subject) == doctors.Finding(subject, "warning", "not known: Inductor cannot be imported")


def test_no_compiler_on_the_path(tmp_path: Path) -> None:
    code, found = _in_a_new_python(
        "-m", "fxwrap", "doctor", "--json", PATH=str(tmp_path), FXWRAP_CACHE_DIR=str(tmp_path)
    )
    assert code == 1
    assert found["C++ compiler"]["state"] == "error" and "install g++" in found["C++ compiler"]["remedy"]
    assert found["native replay"]["state"] == "warning" and "no C++ compiler" in found["native replay"]["what"]
    assert found["torch.compile"]["state"] == "ok" and not list(tmp_path.iterdir())


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
def test_a_compiler_that_does_not_compile(
    does: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = _compiler(tmp_path / "c++", does)
    monkeypatch.setenv("CXX", named)
    with config.patch({"cpp.cxx": (None, named)}):
        finding = fxwrap.doctor().about("C++ compiler")
    assert finding.state == "error" and "a compiler 1.0" in finding.what and said in finding.what
    assert f"CXX={named}" in finding.remedy


def test_a_compiler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = str(tmp_path / "nobody")
    monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    with config.patch({"cpp.cxx": (None, named)}):
        found = fxwrap.doctor()
    assert not found.ok and found.about("C++ compiler").what.startswith("none answers")
    assert found.about("native replay").what == f"cannot be built: no compiler {named}: replays run in Python"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU does not need it, and a GPU does."""
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    available = doctors._available
    monkeypatch.setattr(doctors, "_available", lambda kind: kind != "cuda" and available(kind))
    finding = fxwrap.doctor().about("triton")
    assert finding.state == "ok" and finding.what.startswith("not installed") and not finding.remedy
    monkeypatch.setattr(doctors, "_available", lambda kind: kind == "cuda")
    (finding,) = doctors._triton("triton")
    assert finding.state == "error" and "kernels on cuda need it" in finding.what
    assert finding.remedy.startswith("pip install 'triton")


def test_a_gpu_that_triton_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available() or torch.xpu.is_available():
        pytest.skip("there is one that it reaches")
    monkeypatch.setattr(doctors, "_available", lambda kind: kind == "cuda")
    (finding,) = doctors._triton("triton")
    assert finding.state == "error" and "its driver does not work" in finding.what


def test_a_driver_without_a_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctors, "_available", lambda kind: False)
    monkeypatch.setattr(doctors.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    (finding,) = doctors._no_gpu()
    assert finding.state == "warning" and "torch is not for CUDA" in finding.what and finding.remedy


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """Dynamo cannot even be imported."""
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "inductor")
    code, found = _in_a_new_python("-m", "fxwrap", "doctor", "--json", TORCHINDUCTOR_CACHE_DIR=folder)
    assert code == 1
    caches, compile = found["Inductor's caches"], found["torch.compile"]
    assert caches["state"] == "error" and caches["what"].startswith(f"{folder} cannot be written: Not a directory")
    assert "TORCHINDUCTOR_CACHE_DIR" in caches["remedy"]
    assert compile["state"] == "error" and compile["remedy"] == "see Inductor's caches"
    assert found["device cpu"]["state"] == "ok" and found["C++ compiler"]["what"].startswith("not known")


def test_an_own_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_CACHE_DIR", "/proc/nowhere")
    found = fxwrap.doctor()
    own, replay = map(found.about, ("fxwrap's cache", "native replay"))
    assert found.ok and own.state == replay.state == "warning", "without the helper library replays run in Python"
    assert "/proc/nowhere/fxwrap cannot be written" in own.what and own.what in replay.what
    assert "FXWRAP_CACHE_DIR" in own.remedy and "FXWRAP_CACHE_DIR" in replay.remedy


def test_caches_that_are_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a" / "b"))
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path / "c"))
    found = fxwrap.doctor()
    assert found.ok and "made when it is needed" in found.about("Inductor's caches").what
    assert "when a program is first recorded" in found.about("native replay").what
    assert not (tmp_path / "c").exists()


def test_inductors_folder_is_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(doctors._inductor_folder()) == cache_dir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    for user in ("someone", "corp\\some one"):
        monkeypatch.setenv("LOGNAME", user)
        assert str(doctors._inductor_folder()) == default_cache_dir()


def test_caches_that_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    with config.patch(fx_graph_cache=False):
        finding = fxwrap.doctor().about("caching")
    assert finding.state == "warning" and "off: Inductor's; every process" in finding.what
    assert finding.remedy == "unset TORCHINDUCTOR_FX_GRAPH_CACHE"
    assert fxwrap.doctor().about("caching").state == "ok"


def test_what_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_NATIVE_REPLAY", "0")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    found = fxwrap.doctor()
    assert found.ok and found.about("native replay").remedy == "unset FXWRAP_NATIVE_REPLAY"
    assert found.about("torch.compile").what == "TORCH_COMPILE_DISABLE=1: functions run uncompiled"


def test_the_helper_library_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fxwrap.torch_private.native_library import native_replay, replay_library

    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    path = replay_library()
    path.parent.mkdir()
    path.write_bytes(b"half")
    native_replay.cache_clear()
    finding = fxwrap.doctor().about("native replay")
    native_replay.cache_clear()
    assert finding.state == "warning" and str(path) in finding.remedy and "replays run in Python" in finding.what


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = doctors.metadata.entry_points
    monkeypatch.setattr(
        doctors.metadata,
        "entry_points",
        lambda group: () if group == "torch_dynamo_backends" else entries(group=group),
    )
    finding = fxwrap.doctor().about("torch.compile")
    assert finding.state == "error" and "not installed" in finding.what and "pip install -e ." in finding.remedy


def test_every_extra_of_the_package_is_looked_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = re.search(r"optional-dependencies\]\n(.*?)\ntest = ", text, re.DOTALL)
    assert extras is not None
    lists = re.findall(r"^(\w+) = \[(.*)\]$", extras[1], re.MULTILINE)
    named = {extra: re.findall(r'"([\w-]+)>=', packages) for extra, packages in lists}
    assert named.pop("triton") == ["triton"]  # which has a check of its own
    assert named == {extra: list(modules) for extra, (_, modules) in doctors._EXTRAS.items()}


def test_a_package_that_another_one_imports_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that an extra imports is imported: safetensors is there, and cannot save without numpy."""
    finding = fxwrap.doctor().about("extra save")
    assert finding.state == "ok" and re.fullmatch(r"safetensors [\d.]+, numpy [\d.]+, for weights .*", finding.what)
    monkeypatch.setitem(sys.modules, "numpy", None)  # type: ignore[arg-type]
    finding = fxwrap.doctor().about("extra save")
    assert finding.state == "warning" and "cannot be imported: numpy (ModuleNotFoundError" in finding.what
    assert "safetensors" not in finding.what and finding.remedy == "pip install 'fxwrap[save]'"


def test_a_device_and_its_graph(device: torch.device) -> None:
    finding = fxwrap.doctor().about(f"device {device.type}")
    name = runtime_for(device).implementation
    assert finding.state == "ok" and ("a flat list of calls" if name == "CPU graph" else name) in finding.what
    if device.type == "hostsim":
        program = "import json, hostsim, fxwrap; print(json.dumps(fxwrap.doctor().to_dict()))"
        done = processes.run("-c", program, PYTHONPATH=os.pathsep.join((str(ROOT), str(EXAMPLES / "hostsim"))))
        (found,) = (one for one in json.loads(done.stdout)["findings"] if one["subject"] == "device hostsim")
        assert found["state"] == "warning" and "fxwrap.register_device" in found["remedy"]


def test_a_device_whose_package_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "lazydev-1.0.dist-info"
    there.mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: lazydev\nVersion: 1.0\n")
    (there / "entry_points.txt").write_text("[torch.backends]\nlazydev = lazydev:_autoload\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = fxwrap.doctor().about("device lazydev")
    assert finding.state == "warning" and "import lazydev" in finding.remedy


def test_a_device_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes kernels for it, and nothing captures them."""
    monkeypatch.setattr(doctors, "_available", lambda kind: kind == "mps")
    finding = {one.subject: one for one in doctors._devices("devices")}["device mps"]
    assert finding.state == "warning" and "no device graph" in finding.what and "run eagerly" in finding.remedy


def test_without_typer() -> None:
    program = """
import runpy, sys
sys.modules["typer"], sys.argv = None, ["fxwrap", "doctor"]
runpy.run_module("fxwrap", run_name="__main__")
"""
    done = processes.run("-c", program)
    assert done.returncode == 0 and "device cpu" in done.stdout
