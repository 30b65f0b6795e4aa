"""C++ libraries that are compiled when they are first needed, and cached on disk for later processes.

The compiler is called directly. That needs no ninja, can be interrupted, and leaves no lock behind if it is. The
library is moved into the cache atomically, so that processes may compile the same one at the same time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)


def built_library(
    name: str,
    source: Path,
    flags: Sequence[str],
    *,
    key: Sequence[str] = (),
    headers: Sequence[Path] = (),
    patience_s: float,
    suffix: str = ".so",
    notice: str = "",
) -> Path:
    """The path of the shared library that is compiled from ``source``; it is compiled if the cache does not have it.

    Args:
        key: what the library depends on beside its source, its headers, the flags and the machine.
        headers: the files of this package that the source includes.
        patience_s: how long the compiler may run, in seconds.
        suffix: the ending of the file's name.
        notice: a line for whoever waits, which goes to stderr if the library has to be compiled.

    Raises:
        OSError: there is no compiler, or the cache cannot be written.
        subprocess.SubprocessError: the compiler fails, or takes too long.
    """
    path = library_path(name, source, flags, key=key, headers=headers, suffix=suffix)
    if not path.exists():
        _compile(path, source, flags, patience_s, notice)
    return path


def library_path(
    name: str,
    source: Path,
    flags: Sequence[str],
    *,
    key: Sequence[str] = (),
    headers: Sequence[Path] = (),
    suffix: str = ".so",
) -> Path:
    """Where ``built_library`` keeps what it compiles."""
    files = (file.read_bytes() for file in (source, *headers))
    texts = (*flags, *key, os.environ.get("CXX", ""), platform.system(), platform.machine())
    digest = hashlib.sha256(b"\0".join((*files, *(text.encode() for text in texts)))).hexdigest()[:16]
    return cache_folder() / f"{name}-{digest}{suffix}"


def cache_folder() -> Path:
    """The folder of the cache; it need not exist. Raises OSError if no variable names it and the user has no home."""
    named = os.environ.get("FXWRAP_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path.home() / ".cache") / "fxwrap"
    except RuntimeError as error:
        raise OSError(f"{error} FXWRAP_CACHE_DIR can name a folder") from error


def find_compiler() -> list[str]:
    """The command that compiles C++. Raises OSError if there is none."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise OSError("no C++ compiler is found; CXX can name one")


def _compile(path: Path, source: Path, flags: Sequence[str], patience_s: float, notice: str) -> None:
    compiler = find_compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    if notice:
        print(notice, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library = Path(folder) / path.name
        command = [*compiler, str(source), "-shared", "-fPIC", *flags, "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=patience_s)
        os.replace(library, path)
    log.info("compiled %s: %s", source.name, path)
