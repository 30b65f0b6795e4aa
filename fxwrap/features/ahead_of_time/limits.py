"""What a saved file may cost its reader, whoever has made it: members, sizes and names, and what JSON unpacks to.

Each limit is far above what ``fxwrap.save`` writes, and holds for it, too. Only JSON is compressed. The program of a
transformer with 24 layers is 0.7 MB of JSON, with 150,000 marks, and takes 46 KB of the file; with 200 equal layers a
manifest unpacks to 23 times as much, with 4 marks to a byte of the file. What is allowed takes less than a gigabyte.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

_MOST_MEMBERS, _LONGEST_NAME = 20_000, 300
# In bytes; of a member that is compressed, in bytes and to a byte in the file.
_LONGEST_LIST = 4 << 20
_LARGEST, _SMALL, _MOST_TO_A_BYTE = 64 << 20, 1 << 20, 64
# Commas, brackets and quotes. Three take 250 bytes at most: those of a dictionary of one dictionary.
_MOST_MARKS, _FEW_MARKS, _MARKS_TO_A_BYTE = 8 << 20, 1 << 17, 16
_DEEPEST = 200
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Archive(io.BufferedReader):
    """A zip archive's file. Until ``opened``, no more is read than a list of members takes, whatever it says."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.opened = False

    def read(self, size: int | None = -1, /) -> bytes:
        if self.opened:
            return super().read(size)
        data = super().read(_LONGEST_LIST + 1 if size is None or size < 0 else min(size, _LONGEST_LIST + 1))
        if len(data) > _LONGEST_LIST:
            raise ValueError(f"its list of members takes more than {_LONGEST_LIST:,} bytes")
        return data


def check_members(members: Sequence[zipfile.ZipInfo], nbytes: int) -> None:
    """Check what an archive says of its members, before any of them is read.

    Args:
        nbytes: the size of the file.

    Raises:
        ValueError: naming what is too much, or what fxwrap.save does not write.
    """
    names = {member.filename for member in members}
    if len(members) > _MOST_MEMBERS or len(names) < len(members):
        raise ValueError(f"{len(members):,} members with {len(names):,} names")
    if sum(member.compress_size for member in members) > nbytes:
        raise ValueError("members that share bytes")
    for member in members:
        name, size, packed = member.filename, member.file_size, member.compress_size
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            raise ValueError(f"a member with the name {name[:_LONGEST_NAME]!r}")
        if member.compress_type == zipfile.ZIP_STORED and size == packed:
            continue
        if member.compress_type != zipfile.ZIP_DEFLATED or not name.endswith(".json"):
            raise ValueError(f"{name} is compressed, and no JSON")
        if size > min(_LARGEST, _SMALL + _MOST_TO_A_BYTE * packed):
            raise ValueError(f"{name} unpacks from {packed:,} to {size:,} bytes")


def check_json(data: bytes, packed: int) -> None:
    """Check JSON before it is parsed.

    Args:
        packed: its bytes in the file.

    Raises:
        ValueError: it has more values than so many bytes may hold, or is nested too deeply.
    """
    marks = sum(map(data.count, (b",", b"[", b"{", b'"')))
    if marks > min(_MOST_MARKS, _FEW_MARKS + _MARKS_TO_A_BYTE * packed):
        raise ValueError(f"{marks:,} commas, brackets and quotes in {packed:,} bytes of the file")
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = re.sub(rb'"[^"]*"', b"", plain).translate(None, _NO_BRACKETS)
    for _ in range(_DEEPEST):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")  # innermost ones
    if brackets:
        raise ValueError(f"brackets without another, or nested more than {_DEEPEST} deep")
