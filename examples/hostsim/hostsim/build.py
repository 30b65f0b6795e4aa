"""Finds the C++ part: in the package, if installed as a wheel, or in a cache, where it is built on first use."""

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from .name import ENVIRONMENT_PREFIX, NAME, library_name

PACKAGE = Path(__file__).parent
SOURCES = sorted(PACKAGE.glob("csrc/*.cpp"))
HEADERS = sorted(PACKAGE.glob("csrc/*.h"))
COMPILE_FLAGS = ["-O2", "-Wall"]


def load() -> ModuleType:
    name = library_name(torch.__version__)
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (PACKAGE / f"{name}{suffix}").exists():
            return _import(name, PACKAGE / f"{name}{suffix}")
    folder = _cache_folder()
    library = folder / f"{name}.so"
    if not library.exists():
        _build(name, folder, library)
    return _import(name, library)


def _cache_folder() -> Path:
    base = os.environ.get(f"{ENVIRONMENT_PREFIX}CACHE")
    if base is None:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / NAME
    digest = hashlib.sha256(" ".join(COMPILE_FLAGS).encode())
    for path in (*SOURCES, *HEADERS):
        digest.update(path.name.encode() + path.read_bytes())
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return Path(base) / f"torch{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


def _build(name: str, folder: Path, library: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"{NAME} has a part in C++ that is built on first use, and there is no C++ compiler ('{compiler}') here. "
            "Install one (Debian and Ubuntu: apt install g++), set CXX to the one to use, or install a wheel of "
            f"{NAME} that was built for torch {torch.__version__}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Processes that start at once wait for the one that builds; the lock goes with its process, however that ends.
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        print(f"{NAME}: building for torch {torch.__version__}, once (about a minute) ...", file=sys.stderr)
        _compile(name, folder / "work")
        # In one step, so that nobody finds half of it.
        os.replace(folder / "work" / f"{name}.so", library)


def _compile(name: str, folder: Path) -> None:
    # Imported here: it takes longer than everything else, and is only needed once.
    from torch.utils import cpp_extension

    folder.mkdir(exist_ok=True)
    (folder / "lock").unlink(missing_ok=True)  # torch's own, which a process that was killed leaves behind
    with _ninja_on_path():
        cpp_extension.load(
            name,
            [str(path) for path in SOURCES],
            extra_cflags=COMPILE_FLAGS,
            build_directory=str(folder),
            with_cuda=False,
        )


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """torch looks for the command; the package from PyPI may lie in an environment that is not activated."""
    before = os.environ["PATH"]
    try:
        import ninja

        os.environ["PATH"] = before + os.pathsep + ninja.BIN_DIR
    except ImportError:
        if shutil.which("ninja") is None:
            raise RuntimeError(
                f"{NAME} has a part in C++ that is built on first use, which needs ninja: pip install ninja"
            ) from None
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _import(name: str, library: Path) -> ModuleType:
    full_name = f"{__package__}.{name}"
    spec = importlib.util.spec_from_file_location(full_name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    return module
