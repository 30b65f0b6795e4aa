"""The file format of a saved program: a zip archive of JSON, tensors and kernels, and a manifest with their digests.

Nothing in it is pickled, no name from the file is used as a path, and a member is used only after its digest was
checked. The manifest is read first, and has no digest.
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
# In bytes: a limit that no manifest of fxwrap's reaches, against files that unpack to gigabytes.
_LARGEST_MANIFEST = 64 << 20
_UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def write(path: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Write a file atomically: a reader of ``path`` sees the old file or the new one, even with several writers."""
    digests = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in members.items()
    }
    text = json.dumps({"format": FORMAT, **manifest, "members": digests}, indent=1)
    _remove_unfinished(path)
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
    """The prefix of temporary files that processes of this machine write."""
    return f".{path.name}.{platform.node()}"


def _remove_unfinished(path: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote the same file."""
    name = re.compile(re.escape(_unfinished(path)) + r"\.(\d+)\.\d+\.unfinished")
    for left in path.parent.iterdir() if os.name == "posix" else ():
        if (match := name.fullmatch(left.name)) is not None:
            try:
                os.kill(int(match[1]), 0)  # signal 0 only asks whether the process exists
            except ProcessLookupError:
                left.unlink(missing_ok=True)
            except (PermissionError, OverflowError):
                continue


class Package:
    """A saved program's file, opened for reading.

    Raises:
        StorageError: the file is no saved program, or is damaged.
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
        """The bytes of a member.

        Raises:
            StorageError: there is no such member, or its digest is wrong.
        """
        entry = self._members.get(name)
        if entry is None:
            raise self.error(f"no member {name!r}", "one of " + ", ".join(self._members))
        try:
            with self._file.open(name) as member:
                # At most one byte more than the manifest says, whatever size the archive says.
                data = member.read(int(entry["bytes"]) + 1)
        except (*_UNREADABLE, KeyError, TypeError) as error:
            raise self.error(f"{name}: {error}", "a member that can be read") from error
        if hashlib.sha256(data).hexdigest() != entry.get("sha256"):
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
