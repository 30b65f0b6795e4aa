"""The file format of a saved program: a zip archive of JSON, tensors and kernels, and a manifest with their digests.

Nothing in it is pickled, no name from the file is used as a path, and a member is used only after its digest was
checked. The manifest is read first, and has no digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import StorageError
from . import limits

FORMAT = 6
MANIFEST = "manifest.json"
_EXPECTED = "a file that fxwrap.save has written"
_PART = 1 << 20  # bytes
_LONGEST = 1000  # characters


def write(path: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Write a file atomically: a reader of ``path`` sees the old file or the new one, even with several writers.

    Raises:
        StorageError: it is beyond what a reader takes (``limits``).
    """
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
        _check_limits(path, unfinished, {**members, MANIFEST: text.encode()})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _check_limits(path: Path, written: Path, members: Mapping[str, bytes]) -> None:
    try:
        with zipfile.ZipFile(written) as file:
            limits.check_members(file.infolist(), written.stat().st_size)
            for info in file.infolist():
                if info.filename.endswith(".json"):
                    limits.check_json(members[info.filename], info.compress_size)
    except ValueError as error:
        raise StorageError(
            f"{path} cannot be saved", expected="no more than every reader takes", got=str(error)
        ) from error


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
    """A saved program's file, opened for reading. Anybody may have made it: what is too much for it is refused.

    Raises:
        StorageError: the file is no saved program, or is damaged.
        FileNotFoundError: there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = limits.Archive(path)
        except IsADirectoryError as error:
            raise self.error("a folder", _EXPECTED) from error
        try:
            with self.refusing():
                self._open()
        except BaseException:
            self._archive.close()
            raise

    def _open(self) -> None:
        self._file = zipfile.ZipFile(self._archive)
        self._archive.opened = True
        self._sizes = {info.filename: info.file_size for info in self._file.infolist()}
        limits.check_members(self._file.infolist(), self.path.stat().st_size)
        with self._file.open(MANIFEST) as member:
            text = member.read(self._sizes.pop(MANIFEST) + 1)
        self.manifest: dict[str, Any] = self._parsed(MANIFEST, text)
        if self.manifest.get("format") != FORMAT:
            raise self.error(f"format {self.manifest.get('format')!r}", f"format {FORMAT}")
        self._members: dict[str, Any] = dict(self.manifest["members"])
        if odd := self._sizes.keys() ^ self._members.keys():
            raise self.error(f"members that differ: {', '.join(sorted(odd))}", "the members that its manifest lists")
        for name, size in self._sizes.items():
            said = self._members[name]["bytes"]
            if type(said) is not int or said != size:
                raise self.error(f"{name} of {size:,} bytes", f"{said!r} bytes, as its manifest says")

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Inside the context, whatever reading the file raises is a StorageError; too little memory stays that."""
        try:
            yield
        except (StorageError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever is wrong in a file that somebody has made
            raise self.error(f"{type(error).__name__}: {error}", _EXPECTED) from error

    def error(self, got: str, expected: str, remedy: str = "save the program again") -> StorageError:
        got, expected = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..." for text in (got, expected))
        return StorageError(f"{self.path} cannot be loaded", expected=expected, got=got, remedy=remedy)

    def _parts(self, name: str, nbytes: int) -> Iterator[bytes]:
        """The bytes of a member, so many at a time. Its digest is checked in the end.

        Raises:
            StorageError: there is no such member, it cannot be read, or its digest is wrong.
        """
        if name not in self._members:
            raise self.error(f"no member {name!r}", "one of " + ", ".join(self._members))
        digest = hashlib.sha256()
        try:
            with self._file.open(name) as member:
                # Without a size it would be unpacked whole, whatever size the archive says.
                while part := member.read(nbytes):
                    digest.update(part)
                    yield part
        except Exception as error:
            raise self.error(f"{name}: {error}", "a member that can be read") from error
        if digest.hexdigest() != self._members[name].get("sha256"):
            raise self.error(f"{name} with another digest", "the member that was saved")

    def read(self, name: str) -> bytes:
        """The bytes of a member.

        Raises:
            StorageError: there is no such member, or its digest is wrong.
        """
        return b"".join(self._parts(name, self._sizes.get(name, 0) + 1))

    def check_all(self) -> None:
        """Read every member once.

        Raises:
            StorageError: one is damaged.
        """
        for name in self._members:
            for _ in self._parts(name, _PART):
                pass

    def json(self, name: str) -> Any:
        return self._parsed(name, self.read(name))

    def _parsed(self, name: str, data: bytes) -> Any:
        try:
            limits.check_json(data, self._file.getinfo(name).compress_size)
            return json.loads(data.decode())
        except ValueError as error:
            raise self.error(f"{name}: {error}", "JSON, as fxwrap.save writes it") from error

    def close(self) -> None:
        self._file.close()
        self._archive.close()
