"""Libraries of C++ that are compiled when they are first needed, and kept for the next process.

The compiler is called directly: that needs no ninja, can be interrupted, and leaves no lock behind if it is. The
result is moved into place at once, so that processes that compile at the same time do not disturb each other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)


def built_library(
    name: str, source: Path, flags: Sequence[str], *, key: Sequence[str] = (), patience_s: float, suffix: str = ".so"
) -> Path:
    """The shared library that is compiled from ``source``.

    Args:
        key: what it depends on beside the source, the flags and the machine.
        patience_s: for how many seconds the compiler may run.
        suffix: of the file's name.

    Raises:
        OSError: there is no compiler, or nowhere to keep the library.
        subprocess.SubprocessError: the compiler fails, or takes too long.
    """
    path = library_path(name, source, flags, key=key, suffix=suffix)
    if not path.exists():
        _compile(path, source, flags, patience_s)
    return path


def library_path(
    name: str, source: Path, flags: Sequence[str], *, key: Sequence[str] = (), suffix: str = ".so"
) -> Path:
    """Where ``built_library`` keeps what it compiles."""
    texts = (*flags, *key, os.environ.get("CXX", ""), platform.system(), platform.machine())
    digest = hashlib.sha256(b"\0".join((source.read_bytes(), *(text.encode() for text in texts)))).hexdigest()[:16]
    return cache_folder() / f"{name}-{digest}{suffix}"


def cache_folder() -> Path:
    """Where libraries are kept; it need not exist. Raises OSError where nobody tells: the user has no home."""
    named = os.environ.get("FXWRAP_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path.home() / ".cache") / "fxwrap"
    except RuntimeError as error:
        raise OSError(f"{error} FXWRAP_CACHE_DIR can name a folder") from error


def find_compiler() -> list[str]:
    """The command that compiles C++. Raises OSError where there is none."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise OSError("no C++ compiler is found; CXX can name one")


def _compile(path: Path, source: Path, flags: Sequence[str], patience_s: float) -> None:
    compiler = find_compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [*compiler, str(source), "-shared", "-fPIC", *flags, "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=patience_s)
        os.replace(made, path)
    log.info("compiled %s: %s", source.name, path)
