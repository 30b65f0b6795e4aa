"""``fxwrap.doctor``: checks that everything is present which compiling and replaying needs, and says what to do."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from ... import __version__
from ...graphs.devices.runtime import runtime_for
from ...limit import binary
from ...native_build import cache_folder

# As in pyproject.toml: from this version on, and below that one.
_TORCH = (2, 11), (2, 16)
_PATIENCE = 60  # seconds that a compiler may take for three lines
_PROBE = '#include <Python.h>\n#include <cmath>\nextern "C" double probe(double x) { return std::sqrt(x); }\n'
# The modules that each extra brings, by the packages that have them.
_EXTRAS = {
    "cli": {"typer": "typer"},
    "save": {"safetensors": "safetensors.torch", "numpy": "numpy"},
    "triton": {"triton": "triton"},
    "page": {"vl-convert-python": "vl_convert", "jinja2": "jinja2", "pygments": "pygments"},
}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: what was checked: "torch", "device cuda", ...
        state: "ok", or "missing".
        what: the result in words.
        remedy: what to do if something is missing.
        needed: whether nothing compiles without it.
    """

    subject: str
    state: Literal["ok", "missing"]
    what: str
    remedy: str
    needed: bool


@dataclass(frozen=True)
class Diagnosis:
    """The result of ``fxwrap.doctor()``. Print it, or read ``findings``."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether everything that is needed is present."""
        return not any(finding.needed and finding.state == "missing" for finding in self.findings)

    def about(self, subject: str) -> Finding:
        """The finding about a subject. Raises KeyError if there is none."""
        return {finding.subject: finding for finding in self.findings}[subject]

    def __str__(self) -> str:
        lines = ((f"{one.state:8} {one.subject:17} {one.what}", one.remedy) for one in self.findings)
        return "\n".join(f"{line}\n{'':27}-> {remedy}" if remedy else line for line, remedy in lines)


class _Missing(Exception):
    """What a check does not find. Its remedy, if there is one, takes the place of the check's."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


def doctor() -> Diagnosis:
    """Check versions, caches, compiler, devices and optional packages.

    It takes as long as importing Inductor (seconds), or as building the library of native replay where that is not
    built (a quarter of a minute), and initializes the accelerators of this machine.
    """
    findings = []
    for subject, check, remedy, needed in _checks():
        try:
            findings.append(Finding(subject, "ok", check(), "", needed))
        except Exception as error:  # also a result: the next check may succeed
            kind = "" if isinstance(error, _Missing) else f"{type(error).__name__}: "
            what = f"{kind}{error}".splitlines()[0]
            findings.append(Finding(subject, "missing", what, getattr(error, "remedy", "") or remedy, needed))
    return Diagnosis(tuple(findings))


def _checks() -> Iterator[tuple[str, Callable[[], str], str, bool]]:
    """Subjects, checks (an error means that it is missing), remedies, and whether nothing compiles without it."""
    oldest, end = (".".join(map(str, bound)) for bound in _TORCH)
    folder = "have {} name a folder that can be written, and from which libraries are loaded"
    yield "torch", _torch, f"pip install 'torch>={oldest},<{end}'", True
    yield "Inductor's cache", _inductors_cache, folder.format("TORCHINDUCTOR_CACHE_DIR"), True
    yield "fxwrap's cache", lambda: _writable(cache_folder()), folder.format("FXWRAP_CACHE_DIR"), False
    yield "torch.compile", _backend, "pip install fxwrap, or pip install -e . in its checkout", True
    yield "C++ compiler", _compiler, "install g++ and Python's headers (python3-dev); CXX may name a compiler", True
    yield "native replay", _native_replay, "see C++ compiler; a damaged library can be removed", False
    for kind in ("cpu", *_accelerators()):
        yield f"device {kind}", partial(_device, kind), "it runs eagerly", kind == "cpu"
    gpu = torch.cuda.is_available() or torch.xpu.is_available()
    for extra, modules in _EXTRAS.items():
        needed = extra == "triton" and gpu  # it writes the kernels of GPUs
        yield f"extra {extra}", partial(_packages, modules), f"pip install 'fxwrap[{extra}]'", needed


def _torch() -> str:
    python = f"Python {platform.python_version()}, {platform.platform()}"
    what = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {python}"
    numbers = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if numbers < _TORCH[0]:
        raise _Missing(f"{what}: too old")
    return what if numbers < _TORCH[1] else f"{what}: newer than what fxwrap was tried with"


def _inductors_cache() -> str:
    from ...codegen.devices.machine import inductors_cache

    return _writable(Path(inductors_cache()))


def _writable(folder: Path) -> str:
    """Where libraries can be kept. The folder need not exist, and is not made."""
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    with tempfile.TemporaryDirectory(dir=existing):
        pass
    if hasattr(os, "ST_NOEXEC") and os.statvfs(existing).f_flag & os.ST_NOEXEC:
        raise _Missing(f"{existing} is mounted noexec")
    return f"{folder}, {binary(shutil.disk_usage(existing).free)} free"


def _backend() -> str:
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        raise _Missing("functions run uncompiled", "unset TORCH_COMPILE_DISABLE")
    torch.compile(lambda: None, backend="fxwrap")
    return f'fxwrap {__version__} in {Path(__file__).parents[2]}: backend="fxwrap" is found'


def _compiler() -> str:
    from ...codegen.devices.machine import cpp_compiler

    compiler = cpp_compiler()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE)
        command = [compiler, str(source), f"-I{sysconfig.get_path('include')}", "-shared", "-fPIC"]
        command += ["-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        if done.returncode or not library.exists():
            said = [line for line in done.stderr.splitlines() if "error" in line] or ["it writes no file"]
            raise _Missing(f"{compiler} cannot compile three lines: {said[0]}")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_PATIENCE, check=False)
    return f"{compiler} works: {version.stdout.partition(chr(10))[0]}"


def _native_replay() -> str:
    from ...torch_private.native_library import native_replay

    loaded = native_replay()
    if isinstance(loaded, str):
        raise _Missing(loaded or "switched off with FXWRAP_NATIVE_REPLAY=0")
    return "its library is built, and works"


def _accelerators() -> list[str]:
    """What torch finds; a GPU's driver is enough to look for the GPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [found.type] if found is not None else ["cuda"] if Path("/dev/nvidiactl").exists() else []


def _device(kind: str) -> str:
    from ...codegen.devices.machine import has_kernels

    module = torch.get_device_module(kind)
    if not module.is_available():
        remedy = "a build of torch for it (https://pytorch.org/get-started); see nvidia-smi, CUDA_VISIBLE_DEVICES"
        raise _Missing("its driver is here, and torch finds no device", remedy)
    if not has_kernels(kind):
        remedy = "fxwrap.register_device in your program, before it compiles (docs/devices.md)"
        raise _Missing("Inductor is not told how to compile for it here", remedy)
    if kind in ("cuda", "xpu"):  # it raises where Triton cannot reach the device
        importlib.import_module("triton").runtime.driver.active.get_current_target()
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else kind
    return f"{name}, captured with {runtime_for(torch.device(kind, 0)).implementation}"


def _packages(modules: dict[str, str]) -> str:
    for module in modules.values():
        importlib.import_module(module)
    return ", ".join(f"{package} {metadata.version(package)}" for package in modules)
