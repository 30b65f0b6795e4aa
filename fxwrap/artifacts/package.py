"""The file of a saved program: a zip of JSON, tensors and kernels, each with its digest in a manifest.

Nothing in it is pickled, nothing is unpacked under a name that the file chooses, and no member is used before its
digest is found to be right. The manifest has no digest, and is read first.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import threading
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import StorageError

FORMAT = 3
MANIFEST = "manifest.json"
# Bytes. What is not weights is small; a manifest that says otherwise is no manifest of ours.
_LARGEST_MANIFEST = 64 << 20
_UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def write(path: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Write a file in one step: whoever reads ``path`` finds the old one or the new one, whoever else writes it."""
    known = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in members.items()}
    text = json.dumps({"format": FORMAT, **manifest, "members": known}, indent=1)
    _remove_left(path)
    unfinished = path.with_name(f"{_unfinished(path)}.{os.getpid()}.{threading.get_ident()}.unfinished")
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
            file.writestr(MANIFEST, text, zipfile.ZIP_DEFLATED)
            for name, data in members.items():
                file.writestr(name, data, zipfile.ZIP_DEFLATED if name.endswith(".json") else zipfile.ZIP_STORED)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _unfinished(path: Path) -> str:
    """How the names of files begin that processes of this machine write."""
    return f".{path.name}.{platform.node()}"


def _remove_left(path: Path) -> None:
    """Remove what processes have left that were killed while they wrote the same file."""
    name = re.compile(re.escape(_unfinished(path)) + r"\.(\d+)\.\d+\.unfinished")
    for left in path.parent.iterdir() if os.name == "posix" else ():
        if (found := name.fullmatch(left.name)) is not None:
            try:
                os.kill(int(found[1]), 0)  # no signal: asks whether it is there
            except ProcessLookupError:
                left.unlink(missing_ok=True)
            except (PermissionError, OverflowError):
                continue


class Package:
    """A saved program, opened.

    Raises:
        StorageError: the file is no such thing, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = zipfile.ZipFile(path)
            info = self._file.getinfo(MANIFEST)
            if info.file_size > _LARGEST_MANIFEST:
                raise self.error(f"a manifest of {info.file_size:,} bytes", f"at most {_LARGEST_MANIFEST:,}")
            self.manifest: dict[str, Any] = json.loads(self._file.read(info))
            self._members: dict[str, Any] = dict(self.manifest["members"])
        except FileNotFoundError:
            raise
        except (*_UNREADABLE, KeyError, TypeError) as error:
            raise self.error(f"{type(error).__name__}: {error}", "a file that fxwrap.save has written") from error
        if self.manifest.get("format") != FORMAT:
            raise self.error(f"format {self.manifest.get('format')!r}", f"format {FORMAT}")
        listed = {info.filename for info in self._file.infolist()} - {MANIFEST}
        if listed != set(self._members):
            odd = ", ".join(sorted(listed ^ set(self._members)))
            raise self.error(f"members that differ: {odd}", "the members that its manifest lists")

    def error(self, got: str, expected: str, remedy: str = "save the program again") -> StorageError:
        return StorageError(f"{self.path} cannot be loaded", expected=expected, got=got, remedy=remedy)

    def read(self, name: str) -> bytes:
        """A member, whose digest is the manifest's."""
        known = self._members.get(name)
        if known is None:
            raise self.error(f"no member {name!r}", "one of " + ", ".join(self._members))
        try:
            with self._file.open(name) as member:
                # Never more than was promised, whatever the archive says it unpacks to.
                data = member.read(int(known["bytes"]) + 1)
        except (*_UNREADABLE, KeyError, TypeError) as error:
            raise self.error(f"{name}: {error}", "a member that can be read") from error
        if hashlib.sha256(data).hexdigest() != known.get("sha256"):
            raise self.error(f"{name} with another digest", "the member that was saved")
        return data

    def check_all(self) -> None:
        """Read every member once.

        Raises:
            StorageError: one is damaged.
        """
        for name in self._members:
            self.read(name)

    def json(self, name: str) -> Any:
        try:
            return json.loads(self.read(name))
        except ValueError as error:
            raise self.error(f"{name}: {error}", "JSON") from error

    def close(self) -> None:
        self._file.close()
