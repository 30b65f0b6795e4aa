"""``fxwrap.doctor``: checks that everything is present which compiling and replaying needs, and says what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import importlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ... import __version__
from ...errors import FxwrapError
from ...graphs.devices.runtime import runtime_for
from ...limit import binary
from ...native_build import cache_folder, find_compiler

SCHEMA = "fxwrap.doctor/1"
State = Literal["ok", "warning", "error"]

# As in pyproject.toml: from this version on, and below that one.
_TORCH = (2, 11), (2, 16)
_PATIENCE = 60  # seconds that a compiler may take for a file of two lines
_LITTLE_SPACE = 2**30
_PROBE = '#include <cmath>\nextern "C" double probe(double x) { return std::sqrt(x); }\n'
# What each extra is for, and the modules that are imported then, by the packages that have them.
_EXTRAS = {
    "cli": ("the commands of python -m fxwrap", {"typer": "typer"}),
    "save": ("weights in a file", {"safetensors": "safetensors.torch", "numpy": "numpy"}),
    "page": ("pages and pictures", {"vl-convert-python": "vl_convert", "jinja2": "jinja2", "pygments": "pygments"}),
}
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: what was checked: "torch", "device cuda", ...
        state: "error" if nothing can be compiled, "warning" if something is slower or missing.
        what: the result in words.
        remedy: what to do; empty if nothing is to be done.
    """

    subject: str
    state: State
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The result of ``fxwrap.doctor()``. Print it, or read ``findings``."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether everything that is needed is present; warnings are allowed."""
        return all(finding.state != "error" for finding in self.findings)

    def about(self, subject: str) -> Finding:
        """The finding about a subject. Raises KeyError if there is none."""
        for finding in self.findings:
            if finding.subject == subject:
                return finding
        raise KeyError(subject)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {"schema": SCHEMA, "ok": self.ok, "findings": list(map(dataclasses.asdict, self.findings))}

    def __rich__(self) -> Table:
        table = Table("", "subject", Column("found", overflow="fold"), box=None, pad_edge=False)
        for finding in self.findings:
            text = Text(finding.what)
            if finding.remedy:
                text.append(f"\n-> {finding.remedy}", style="bold" if finding.state == "error" else "")
            table.add_row(Text(finding.state, style=_STYLES[finding.state]), Text(finding.subject), text)
        return table

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=118, color_system=None, highlight=False).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def doctor() -> Diagnosis:
    """Check Python, torch, compilers, Triton, devices and caches. Only a file of two lines is compiled.

    It takes as long as importing Inductor (seconds), and initializes the accelerators of this machine.
    """
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    findings = [Finding("python", "ok", python), _torch()]
    for subject, check in _CHECKS.items():
        try:
            for finding in check(subject):
                findings.append(finding)
        except _NoInductor:
            findings.append(Finding(subject, "warning", "not known: Inductor cannot be imported"))
        except Exception as error:  # also a result: the next check may succeed
            findings.append(Finding(subject, "error", f"cannot be told: {_first_line(error)}"))
    return Diagnosis(tuple(findings))


class _NoInductor(Exception):
    """Inductor, or fxwrap's part that uses it, cannot be imported; the finding about torch.compile says why."""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _torch() -> Finding:
    version = torch.__version__
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    oldest, newest = (".".join(map(str, bound)) for bound in _TORCH)
    what = f"{version}, for {_built_for()}"
    if numbers < _TORCH[0]:
        return Finding("torch", "error", f"{what}: too old", f"pip install 'torch>={oldest},<{newest}'")
    if numbers >= _TORCH[1]:
        remedy = f"where something fails: pip install 'torch<{newest}'"
        return Finding("torch", "warning", f"{what}: newer than what fxwrap was tried with", remedy)
    return Finding("torch", "ok", what)


def _built_for() -> str:
    kinds = {"CUDA": "cuda", "ROCm": "hip", "XPU": "xpu"}
    fields = {name: getattr(torch.version, field, None) for name, field in kinds.items()}
    return " and ".join(f"{name} {number}" for name, number in fields.items() if number) or "CPU only"


def _compile(subject: str) -> Iterator[Finding]:
    """The first steps of torch.compile: find the backend, and import it and Inductor."""
    for variable in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(variable) == "1":
            yield Finding(subject, "warning", f"{variable}=1: functions run uncompiled", f"unset {variable}")
    backends = metadata.entry_points(group="torch_dynamo_backends")
    entries = [entry.value for entry in backends if entry.name == "fxwrap"]
    where = f"fxwrap {__version__} in {Path(__file__).parents[2]}"
    if not entries:
        remedy = "pip install fxwrap, or pip install -e . in its checkout"
        yield Finding(subject, "error", f'{where}: not installed, so that backend="fxwrap" is not found', remedy)
        return
    if set(entries) != {"fxwrap.backend:fxwrap"}:
        yield Finding(subject, "error", f"other packages have a backend of that name: {', '.join(entries)}")
        return
    try:
        torch.compile(lambda: None, backend="fxwrap")
    except Exception as error:
        remedy = "the installation is damaged: pip install --force-reinstall" if _torch().state == "ok" else ""
        if isinstance(error, OSError):  # Dynamo makes the folder when it is imported
            remedy = "see Inductor's caches"
        yield Finding(subject, "error", f'backend="fxwrap" cannot be imported: {_first_line(error)}', remedy)
        return
    yield Finding(subject, "ok", f'{where}: backend="fxwrap" is found')


def _codegen(name: str) -> Any:
    """A module of ``fxwrap.codegen``. Raises _NoInductor if it cannot be imported."""
    try:
        return importlib.import_module(f"fxwrap.codegen.{name}")
    except Exception as error:
        raise _NoInductor from error


# -- compilers ------------------------------------------------------------------------------------------------------


def _cpp(subject: str) -> Iterator[Finding]:
    named = os.environ.get("CXX")
    remedy = "install g++ (apt-get install g++, dnf install gcc-c++), or have CXX name a compiler"
    if named:
        remedy = f"CXX={named}: unset it, or have it name a compiler, without arguments"
    try:
        compiler = _codegen("devices.machine").cpp_compiler()
    except _NoInductor:
        raise
    except Exception as error:
        yield Finding(subject, "error", f"none answers: {_first_line(error)}", remedy)
        return
    why = _cannot_compile(compiler)
    version = _version(compiler)
    yield Finding(subject, "error", f"{version}: {why}", remedy) if why else Finding(subject, "ok", version)
    if not _header().exists():
        remedy = "install them (apt-get install python3-dev, dnf install python3-devel)"
        yield Finding("Python's headers", "error", f"no {_header()}", remedy)


def _header() -> Path:
    return Path(sysconfig.get_path("include"), "Python.h")


def _version(compiler: str) -> str:
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_PATIENCE, check=False)
    return f"{compiler}: {(answer.stdout.splitlines() or ['says no version'])[0]}"


def _cannot_compile(compiler: str) -> str:
    """Why a file of two lines cannot be compiled to a library; empty if it can."""
    if platform.system() == "Windows":
        return ""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE)
        command = [compiler, str(source), "-shared", "-fPIC", "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return _first_line(error)
        if done.returncode == 0 and library.exists():
            return ""
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        return f"it cannot compile two lines: {(lines or ['it writes no file'])[0].strip()}"


def _triton(subject: str) -> Iterator[Finding]:
    users = [kind for kind in ("cuda", "xpu") if _available(kind)]
    needed: State = "error" if users else "ok"
    why = (
        f"kernels on {' and '.join(users)} need it" if users else "nothing here needs it: kernels of the CPU are C++"
    )
    wanted = _version_that_torch_wants()
    remedy = f"pip install 'triton{f'=={wanted}' if wanted else ''}'" if users else ""
    try:
        import triton
        from triton.backends import backends
    except Exception as error:
        what = "not installed" if isinstance(error, ModuleNotFoundError) else _first_line(error)
        yield Finding(subject, needed, f"{what}; {why}", remedy)
        return
    what = f"{triton.__version__}, with backends {', '.join(sorted(backends)) or 'of no kind'}"
    if not users:
        yield Finding(subject, "ok", f"{what}; {why}")
        return
    try:
        target = triton.runtime.driver.active.get_current_target()
    except Exception as error:
        yield Finding(subject, "error", f"{what}; its driver does not work: {_first_line(error)}", remedy)
        return
    what = f"{what}; works for {target.backend}:{target.arch}"
    if wanted and not triton.__version__.startswith(wanted):
        yield Finding(subject, "warning", f"{what}; torch asks for {wanted}", remedy)
        return
    yield Finding(subject, "ok", what)


def _version_that_torch_wants() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("torch") or ():
            if match := re.match(r"triton\s*==\s*([\w.]+)", line):
                return match[1]
    return ""


def _native_replay(subject: str) -> Iterator[Finding]:
    """The library of native replay: without it programs replay in Python."""
    if os.environ.get("FXWRAP_NATIVE_REPLAY") == "0":
        yield Finding(subject, "warning", "switched off: replays run in Python", "unset FXWRAP_NATIVE_REPLAY")
        return
    library = _codegen("native_library")

    def missing(why: str, remedy: str = "") -> Finding:
        return Finding(subject, "warning", f"{why}: replays run in Python", remedy)

    try:
        path = library.replay_library()
    except OSError as error:
        yield missing(str(error))
        return
    if path.exists():
        loaded = library.native_replay()
        remedy = f"remove it, and it is built again: {path}"
        yield missing(loaded, remedy) if isinstance(loaded, str) else Finding(subject, "ok", f"built: {path}")
        return
    try:
        compiler = find_compiler()[0]
    except OSError as error:
        yield missing(f"cannot be built: {error}", "install g++, or have CXX name a compiler")
        return
    if shutil.which(compiler) is None:
        yield missing(f"cannot be built: no compiler {compiler}", "install it, or have CXX name another")
    elif not _header().exists():
        yield missing(f"cannot be built: no {_header()}", "install Python's headers")
    elif why := _cannot_write(path.parent):
        yield missing(f"cannot be built: {why}", "have FXWRAP_CACHE_DIR name a folder that can be written")
    else:
        yield Finding(
            subject, "ok", f"built with {compiler} when a program is first recorded, in a quarter of a minute"
        )


# -- devices --------------------------------------------------------------------------------------------------------


def _available(device_type: str) -> bool:
    module = getattr(torch, device_type, None)
    return bool(getattr(module, "is_available", lambda: True)()) if module is not None else False


def _devices(_: str) -> Iterator[Finding]:
    graph = runtime_for(torch.device("cpu")).implementation
    how = "a flat list of calls" if graph == "CPU graph" else graph
    yield Finding("device cpu", "ok", f"captured as {how}; {torch.get_num_threads()} thread(s)")
    for kind in ("cuda", "xpu", "mtia", "mps"):
        if _available(kind):
            yield _accelerator(kind)
    if not _available("cuda"):
        yield from _no_gpu()
    out_of_tree = _codegen("devices.machine").device_out_of_the_tree()
    if out_of_tree is not None and _available(out_of_tree):
        yield _accelerator(out_of_tree)
    for entry in metadata.entry_points(group="torch.backends"):
        if entry.module.partition(".")[0] not in sys.modules:
            remedy = f"unset TORCH_DEVICE_BACKEND_AUTOLOAD, or import {entry.module}"
            yield Finding(f"device {entry.name}", "warning", "installed, and torch has not loaded it", remedy)


def _accelerator(kind: str) -> Finding:
    subject, device, module = f"device {kind}", torch.device(kind, 0), getattr(torch, kind)
    count = getattr(module, "device_count", lambda: 1)()
    with contextlib.suppress(Exception):
        count = f"{count} x {module.get_device_name(0)}"
    if not _codegen("devices.machine").has_kernels(kind):
        remedy = "fxwrap.register_device in your program, before it compiles (docs/devices.md)"
        return Finding(subject, "warning", f"{count}; Inductor is not told how to compile for it here", remedy)
    try:
        runtime = runtime_for(device)
    except FxwrapError as error:
        return Finding(subject, "warning", f"{count}; no device graph: {error.got}", error.remedy)
    return Finding(subject, "ok", f"{count}; captured with {runtime.implementation}")


def _no_gpu() -> Iterator[Finding]:
    """Why torch finds no GPU, if there seems to be one."""
    driver = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None:
        if driver:
            remedy = "install a build of torch for CUDA (https://pytorch.org/get-started)"
            yield Finding("device cuda", "warning", "the driver of a GPU is here, and torch is not for CUDA", remedy)
        return
    try:
        torch.cuda.init()
        why = "torch finds no GPU"
    except Exception as error:
        why = str(error).partition(".")[0]
    remedy = "see what nvidia-smi says, and CUDA_VISIBLE_DEVICES" if driver else ""
    yield Finding("device cuda", "warning" if driver else "ok", f"none: {why}", remedy)


# -- caches and packages --------------------------------------------------------------------------------------------


def _cannot_write(folder: Path) -> str:
    """Why libraries cannot be kept in a folder, which need not exist; empty if they can. Leaves nothing behind."""
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror} ({existing})"
    if hasattr(os, "ST_NOEXEC") and os.statvfs(existing).f_flag & os.ST_NOEXEC:
        return f"{folder} cannot be used: {existing} is mounted noexec, and libraries are loaded from it"
    return ""


def _folder(subject: str, folder: Path, state: State, variable: str) -> Iterator[Finding]:
    remedy = f"have {variable} name a folder that can be written"
    if why := _cannot_write(folder):
        yield Finding(subject, state, why, remedy)
        return
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free, what = shutil.disk_usage(existing).free, f"{folder}{'' if folder.exists() else ', made when it is needed'}"
    if free < _LITTLE_SPACE:
        yield Finding(subject, "warning", f"{what}; only {binary(free)} are free", remedy)
    else:
        yield Finding(subject, "ok", what)


def _inductor_folder() -> Path:
    """Inductor's cache folder. Torch's own function creates it, and cannot be imported if that fails."""
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(named).absolute()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _caching(subject: str) -> Iterator[Finding]:
    if off := _codegen("devices.machine").caches_switched_off():
        variables = ("FORCE_DISABLE_CACHES", "FX_GRAPH_CACHE", "AUTOGRAD_CACHE")
        names = [name for variable in variables if (name := f"TORCHINDUCTOR_{variable}") in os.environ]
        remedy = f"unset {', '.join(names)}" if names else ""
        yield Finding(subject, "warning", f"off: {', '.join(off)}; every process compiles again", remedy)
    else:
        yield Finding(subject, "ok", "on: a second process does not compile again")


def _packages(_: str) -> Iterator[Finding]:
    for extra, (purpose, modules) in _EXTRAS.items():
        subject, missing = f"extra {extra}", []
        for package, module in modules.items():
            try:
                importlib.import_module(module)
            except Exception as error:  # as one that was built for another Python, or another numpy
                missing.append(f"{package} ({_first_line(error)})")
        if missing:
            what = f"cannot be imported: {', '.join(missing)}; for {purpose}"
            yield Finding(subject, "warning", what, f"pip install 'fxwrap[{extra}]'")
        else:
            versions = (f"{package} {metadata.version(package)}" for package in modules)
            yield Finding(subject, "ok", f"{', '.join(versions)}, for {purpose}")


_CHECKS: dict[str, Callable[[str], Iterator[Finding]]] = {
    # Before Inductor is imported, which needs the folder.
    "Inductor's caches": lambda subject: _folder(subject, _inductor_folder(), "error", "TORCHINDUCTOR_CACHE_DIR"),
    "torch.compile": _compile,
    "C++ compiler": _cpp,
    "triton": _triton,
    "native replay": _native_replay,
    "devices": _devices,
    "caching": _caching,
    "fxwrap's cache": lambda subject: _folder(subject, cache_folder(), "warning", "FXWRAP_CACHE_DIR"),
    "packages": _packages,
}
