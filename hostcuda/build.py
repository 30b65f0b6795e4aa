"""Builds the device's libraries when they are needed: what has changed, several files at once, one process at a time.

``libraries()`` returns the folder of them. It must not import torch: the libraries have to be loaded before torch is.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).absolute().parent / "src"
# Libraries are found by these names, torch's and Triton's among them: who comes first has them.
RUNTIME, DRIVER, NVML = "libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"
LIBRARIES, OPERATORS = "libhostlibraries.so", "libhostoperators.so"
_CUDA = 13
_WARNINGS = ("-Wno-attributes",)
_OWN = ("-std=c++17", "-O1", "-g1", "-fPIC", *_WARNINGS)
_TORCHS = ("-std=c++20", "-O1", "-fPIC", "-w")


class BuildError(RuntimeError):
    """The libraries cannot be built here; the text says what is missing."""


@dataclass(frozen=True)
class Torch:
    """The torch that ``import torch`` would find."""

    folder: Path
    version: str

    @property
    def packages(self) -> Path:
        return self.folder.parent


@dataclass(frozen=True)
class Library:
    """One shared library: the files of a folder, and what it is linked with."""

    name: str
    sources: tuple[Path, ...]
    compile: tuple[str, ...]
    link: tuple[str, ...]


def cache() -> Path:
    """Where libraries and the list of Triton's kernels are kept."""
    named = os.environ.get("HOSTCUDA_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hostcuda"


def torch_here() -> Torch:
    """Raises BuildError where torch is not there, or is no build for the device's CUDA."""
    # PathFinder, and not find_spec: the hook that has called this would be asked again.
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("hostcuda runs torch's CUDA build, and no torch is installed: pip install torch==2.14.1")
    folder = Path(next(iter(spec.submodule_search_locations)))
    text = (folder / "version.py").read_text()
    version = re.search(r"^__version__ = '(.*)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda[^=]* = '(\d+)", text, re.MULTILINE)
    name = version[1] if version else "unknown"
    if cuda is None or int(cuda[1]) != _CUDA:
        found = f"for CUDA {cuda[1]}" if cuda else "without CUDA"
        raise BuildError(
            f"hostcuda runs torch's build for CUDA {_CUDA}, and torch {name} ({folder}) is one {found}: "
            "pip install torch==2.14.1, or `make test-cuda`, which makes an environment of its own"
        )
    return Torch(folder, name)


def include_folders(torch: Torch) -> list[Path]:
    """CUDA's headers. Those of torch's own packages lack crt/, which Triton's have."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [
        *(Path(name) / "include" for name in named),
        torch.packages / "nvidia" / f"cu{_CUDA}" / "include",
        torch.packages / "triton" / "backends" / "nvidia" / "include",
        Path("/usr/local/cuda/include"),
    ]
    found = [folder for folder in candidates if _cuda_version(folder) // 1000 == _CUDA]
    for needed in ("cuda_runtime_api.h", "crt/host_defines.h", "cublas_v2.h"):
        if not any((folder / needed).exists() for folder in found):
            looked = ", ".join(map(str, candidates))
            raise BuildError(f"hostcuda needs {needed} of CUDA {_CUDA}; looked in {looked}; CUDA_HOME names another")
    return found


def _cuda_version(folder: Path) -> int:
    header = folder / "cuda.h"
    found = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace")) if header.exists() else None
    return int(found[1]) if found else 0


def compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("hostcuda is compiled when it is first used, and there is no C++ compiler; CXX can name one")


def _libraries(torch: Torch) -> list[Library]:
    """In the order in which they are linked."""
    cuda = tuple(f"-I{folder}" for folder in include_folders(torch))
    headers = tuple(f"-I{SOURCES / name}" for name in (".", "runtime"))
    of_torch = (f"-I{torch.folder}/include", f"-I{torch.folder}/include/torch/csrc/api/include")
    beside = (f"-l:{RUNTIME}", "-Wl,-rpath,$ORIGIN")
    shared = tuple(f"-l{name}" for name in ("torch_cuda", "c10_cuda", "torch_cpu", "c10"))
    version_script = next(SOURCES.rglob("libcudart.map"), None)
    return [
        Library(
            RUNTIME,
            _files("runtime/*.cpp"),
            (*_OWN, *headers, *cuda),
            ("-ldl", "-lpthread", f"-Wl,--version-script={version_script}"),
        ),
        # Empty: what it needs has the driver's functions.
        Library(DRIVER, (), (), ("-Wl,--no-as-needed", *beside)),
        Library(NVML, _files("nvml/*.c"), ("-O1", "-fPIC"), ()),
        Library(LIBRARIES, _files("libraries/*.cpp"), (*_OWN, *headers, *cuda), beside),
        Library(
            OPERATORS,
            _files("operators/*.cpp"),
            (*_TORCHS, *headers, *of_torch, *cuda),
            (f"-L{torch.folder}/lib", *shared, *beside, "-Wl,--allow-shlib-undefined"),
        ),
    ]


def _files(pattern: str) -> tuple[Path, ...]:
    found = tuple(sorted(SOURCES.glob(pattern)))
    if not found:
        raise BuildError(f"hostcuda's sources are not here: {SOURCES / pattern}")
    return found


def libraries() -> Path:
    """The folder of the libraries, built where they are not there yet.

    Raises:
        BuildError: no torch, headers or compiler; or the compiler refuses.
    """
    if named := os.environ.get("HOSTCUDA_LIB"):
        return Path(named)
    torch, command = torch_here(), compiler()
    wanted = _libraries(torch)
    headers = [path for pattern in ("*.h", "*.map") for path in sorted(SOURCES.rglob(pattern))]
    common = _digest([torch.version, _version(command), *(path.read_text() for path in headers)])
    flags = {source: _portable(library.compile, torch) for library in wanted for source in library.sources}
    objects = {source: _object(source, text, common) for source, text in flags.items()}
    links = [text for library in wanted for text in (library.name, *_portable(library.link, torch))]
    folder = cache() / f"lib-{_digest([*(path.name for path in objects.values()), *links])}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system opens it when the process ends, however it does
            if not folder.exists():
                _build(folder, command, wanted, objects)
    return folder


def _object(source: Path, flags: Sequence[str], common: str) -> Path:
    return cache() / "objects" / f"{source.stem}-{_digest([common, source.read_text(), *flags])}.o"


def _portable(flags: Sequence[str], torch: Torch) -> list[str]:
    """Flags that say nothing of where a checkout and an environment lie: all of these share what was built."""
    return [flag.replace(str(SOURCES), "src").replace(str(torch.packages), "packages") for flag in flags]


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _version(command: Sequence[str]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout


def _build(folder: Path, command: list[str], wanted: list[Library], objects: dict[Path, Path]) -> None:
    missing = [(library, source) for library in wanted for source in library.sources if not objects[source].exists()]
    print(f"hostcuda: building its libraries ({len(missing)} files to compile)", file=sys.stderr, flush=True)
    folder.parent.joinpath("objects").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        here = Path(temporary)

        def compile_one(job: tuple[Library, Path]) -> None:
            library, source = job
            made = here / objects[source].name
            language = ("-x", "c") if source.suffix == ".c" else ()
            _run([*command, *language, "-c", str(source), *library.compile, "-o", str(made)], str(source))
            os.replace(made, objects[source])

        # The largest first: they take longest.
        missing.sort(key=lambda job: (job[0].name != OPERATORS, -job[1].stat().st_size))
        with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
            list(pool.map(compile_one, missing))
        output = here / "lib"
        output.mkdir()
        for library in wanted:
            made = [str(objects[source]) for source in library.sources]
            name = f"-Wl,-soname,{library.name}"
            link = ["-shared", f"-L{output}", "-o", str(output / library.name), *made, name, *library.link]
            _run([*command, *link], library.name)
        # Triton links its launchers with -lcuda.
        (output / "libcuda.so").symlink_to(DRIVER)
        output.rename(folder)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[:40])
        raise BuildError(f"hostcuda: {what} does not compile: {shlex.join(command)}\n{said}")
