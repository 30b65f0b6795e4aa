"""Saved files that anybody may have made: whatever is in them, a StorageError says so, and little memory is taken."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import resource
import struct
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fxwrap
from fxwrap.errors import StorageError
from fxwrap.features.ahead_of_time import limits, package
from fxwrap.features.ahead_of_time.contents import Contents
from fxwrap.features.command_line.command_line import app

MIB = 1 << 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods that share weights, one of them with sizes that vary."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, scale: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = torch.relu(self.first(x)) * scale["by"]
            return self.second(hidden), hidden.sum(0)

    model, path = Model().eval(), tmp_path_factory.mktemp("saved") / "model.fxw"
    x, scale = torch.randn(3, 4), {"by": torch.randn(3, 8)}
    rows = torch.export.Dim("rows", min=2, max=64)
    dynamic = torch.export.export(model, (x, scale), dynamic_shapes=({0: rows}, {"by": {0: rows}}))
    return fxwrap.save(path, {"plain": (model, (x, scale)), "rows": dynamic})


def contents(saved: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    with zipfile.ZipFile(saved) as file:
        members = {name: file.read(name) for name in file.namelist()}
    return json.loads(members.pop(package.MANIFEST)), members


def written(path: Path, manifest: Any, members: dict[str, bytes], text: bytes | None = None) -> Path:
    """A file as ``save`` writes it, with the right sizes and digests where the manifest has an entry for them."""
    known = manifest.get("members") if isinstance(manifest, dict) else None
    for name, data in members.items() if isinstance(known, dict) else ():
        if isinstance(known.get(name), dict):
            known[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), **known[name]}
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(package.MANIFEST, json.dumps(manifest) if text is None else text, zipfile.ZIP_DEFLATED)
        for name, data in members.items():
            file.writestr(name, data, zipfile.ZIP_DEFLATED if name.endswith(".json") else zipfile.ZIP_STORED)
    return path


def is_refused_or_right(path: Path) -> bool:
    """Whether one of the readers refuses a file. All other errors are raised."""
    refused = False
    for read in (Contents.of, fxwrap.load, lambda path: fxwrap.load(path, trust=True)):
        try:
            read(path)
        except StorageError:
            refused = True
    return refused


def in_little_memory(nbytes: int, work: Callable[[], object]) -> str:
    """What ``work`` raises in a child that may take so many bytes beside what this process has; empty if nothing."""
    gc.collect()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "it died"
        try:
            (pages,) = [int(line.split()[0]) for line in Path("/proc/self/statm").read_text().splitlines()]
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes,) * 2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                work()
            said = ""
        except BaseException:
            said = traceback.format_exc()
        finally:
            os.write(writer, said.encode()[-4000:])
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as end:
        said = end.read().decode()
    status = os.waitpid(child, 0)[1]
    return said or ("" if status == 0 else f"ended with {status}")


# -- one bomb each ------------------------------------------------------------------------------------------------


def bombs(saved: Path, path: Path) -> Iterator[tuple[str, Path]]:
    def changed(change: Callable[[dict[str, Any], dict[str, bytes]], object]) -> Path:
        manifest, members = contents(saved)
        manifest["members"] = {name: {} for name in members}
        change(manifest, members)
        return written(path, manifest, members)

    zeros, files = bytes(96 * MIB), dict[tuple[str, int], bytes]()
    digest = hashlib.sha256(zeros).hexdigest()

    def packed(size: Any, name: str, method: int) -> Path:
        manifest, members = contents(saved)
        if (name, method) not in files:
            with zipfile.ZipFile(path, "w") as file:
                file.writestr(name, zeros, method)
                for other, data in members.items():
                    file.writestr(other, data)
            files[name, method] = path.read_bytes()
        path.write_bytes(files[name, method])
        manifest["members"][name] = {"sha256": digest, "bytes": size}
        with zipfile.ZipFile(path, "a") as file:
            file.writestr(package.MANIFEST, json.dumps(manifest))
        return path

    for size in (-2, -1, 0, 100, len(zeros), float(len(zeros)), True, "all", None, [1]):
        yield f"a member of {size!r} bytes", packed(size, "bomb", zipfile.ZIP_DEFLATED)
    yield "packed by another method", packed(len(zeros), "bomb.json", zipfile.ZIP_BZIP2)
    yield "JSON of an honest size", packed(len(zeros), "bomb.json", zipfile.ZIP_DEFLATED)

    def hidden() -> Path:
        """The archive says 100 bytes, and unpacks to more."""
        content = bytearray(packed(100, "bomb.json", zipfile.ZIP_DEFLATED).read_bytes())
        place = content.rindex(b"PK\x01\x02", 0, content.rindex(b"bomb.json"))
        content[place + 24 : place + 28] = struct.pack("<I", 100)
        path.write_bytes(content)
        return path

    yield "a size that is none", hidden()
    for text in (b"[" + b"[]," * (8 * MIB) + b"[]]", b"[" * MIB, b"[" * 500_000 + b"]" * 500_000, b'{"":' * MIB):
        yield f"a manifest {text[:8]!r}", written(path, None, {}, text)
        yield (
            f"a program {text[:8]!r}",
            changed(lambda _, members, text=text: members.update({"programs/plain.json": text})),
        )
    yield "zeros in UTF-32", written(path, None, {}, "[[],[]]".encode("utf-32"))
    yield "digits", written(path, None, {}, b"[" + b"9" * 10_000 + b"]")

    def guard(expression: Any) -> Path:
        return changed(lambda manifest, _: manifest["methods"]["rows"].update(guards=[expression]))

    tower: Any = 9
    for _ in range(40):
        tower = ["Pow", 9, tower]
    yield "a power", guard(["Pow", 10, 10**18])
    yield "a tower of powers", guard(tower)
    yield "a shift", guard(["LShift", 1, 10**18])
    yield "a fraction", guard({"rational": [1, 0]})
    yield "a float of text", guard({"float": "1e999999999999"})
    yield "many operands", guard(["Max", *({"symbol": f"s{i}"} for i in range(5000))])

    def directory(count: int) -> Path:
        """One short member, listed so often."""
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a", b"")
        content = path.read_bytes()
        begin, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
        entry, length = content[begin:end] * count, (end - begin) * count
        last = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count & 0xFFFF, count & 0xFFFF, length, begin, 0)
        path.write_bytes(content[:begin] + entry + last)
        return path

    yield "one member twice", directory(2)
    yield "a long list of members", directory(2 * MIB)

    def shared() -> Path:
        """Every member is the same bytes of the file."""
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("same", bytes(MIB))
            for i in range(500):
                twin = zipfile.ZipInfo(f"same{i}")
                file.filelist.append(twin)
                for field in ("file_size", "compress_size", "header_offset", "CRC", "compress_type"):
                    setattr(twin, field, getattr(file.filelist[0], field))
        return path

    yield "members that share bytes", shared()

    def named(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        members["a\x1b[2J"], manifest["members"]["a\x1b[2J"] = b"", {}

    yield "an odd name", changed(named)


def test_bombs(saved: Path, tmp_path: Path) -> None:
    for name, path in bombs(saved, tmp_path / "bomb.fxw"):
        said = in_little_memory(64 * MIB, lambda path=path: _is_refused(path))
        assert not said, f"{name}: {said}"


def _is_refused(path: Path) -> None:
    assert is_refused_or_right(path)


def test_a_bomb_in_the_terminal(saved: Path, tmp_path: Path) -> None:
    """Text of the file is neither markup nor a command to the terminal."""
    manifest, members = contents(saved)
    manifest["fxwrap"] = "[/b] \x1b]0;title\x07"
    done = CliRunner().invoke(app, ["inspect", str(written(tmp_path / "odd.fxw", manifest, members))])
    assert done.exit_code == 0 and "[/b]" in done.output and "\x1b" not in done.output


# -- fuzz -----------------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, float("nan"), "", "x", "x" * 10_000, "../x", "\x1b[2J", "[/b]",
    [], {}, [[]], [None], {"": {}}, {"node": "x"}, {"symbol": 1}, ["Pow", 2, {"symbol": "s"}], "cuda:0",
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of JSON data with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutate(draw: random.Random, data: Any) -> None:
    container, key = draw.choice(list(places(data)))
    match draw.randrange(6):
        case 0 if isinstance(container, dict):
            container[draw.choice(("", "x", "kernel", "graph"))] = container.pop(key)
        case 1:
            del container[key]
        case 2:
            container[key] = [container[key]] * draw.choice((1, 2, 100))
        case 3:
            for _ in range(draw.choice((3, 150, 900))):
                container[key] = [container[key]]
        case 4:
            other, place = draw.choice(list(places(data)))
            container[key] = json.loads(json.dumps(other[place]))
        case _:
            container[key] = draw.choice(ODD)


def with_other_json(draw: random.Random, saved: Path, path: Path) -> Path:
    manifest, members = contents(saved)
    if draw.random() < 0.5:
        for _ in range(draw.choice((1, 1, 3))):
            mutate(draw, manifest)
        return written(path, manifest, members)
    name = draw.choice([name for name in members if name.endswith(".json")])
    program = json.loads(members[name])
    for _ in range(draw.choice((1, 1, 3))):
        mutate(draw, program)
    members[name] = json.dumps(program).encode()
    manifest["members"][name] = {}
    return written(path, manifest, members)


def with_other_bytes(draw: random.Random, saved: Path, path: Path) -> Path:
    content = bytearray(saved.read_bytes())
    headers = [at for mark in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06") for at in _found(content, mark)]
    for _ in range(draw.choice((1, 1, 4))):
        place = draw.choice(headers) + draw.randrange(50) if draw.random() < 0.7 else draw.randrange(len(content))
        match draw.randrange(5):
            case 0:
                content[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                content[place : place + 4] = draw.choice(
                    (bytes(4), b"\xff" * 4, b"\xfe\xff\xff\x7f", b"\x00\x00\x01\x00")
                )
            case 2:
                del content[place : place + draw.choice((1, 2, 100))]
            case 3:
                content[place:place] = draw.randbytes(draw.choice((1, 2, 100)))
            case _:
                del content[draw.choice((place, len(content) - 1)) :]
    path.write_bytes(content)
    return path


def _found(content: bytearray, mark: bytes) -> Iterator[int]:
    at = content.find(mark)
    while at >= 0:
        yield at
        at = content.find(mark, at + 1)


@pytest.mark.parametrize("made", [with_other_json, with_other_bytes], ids=["JSON", "bytes"])
@pytest.mark.parametrize(
    "seeds", [range(150), pytest.param(range(150, 2000), marks=pytest.mark.sweep)], ids=["few", "many"]
)
def test_a_thousand_files(saved: Path, tmp_path: Path, made: Any, seeds: range) -> None:
    refused = 0

    def work() -> None:
        nonlocal refused
        for seed in seeds:
            path = made(random.Random(seed), saved, tmp_path / "fuzzed.fxw")
            try:
                refused += is_refused_or_right(path)
            except BaseException as error:
                raise AssertionError(f"seed {seed}") from error
        assert refused > len(seeds) / 2

    said = in_little_memory(512 * MIB, work)
    assert not said, said


# -- what is honest -------------------------------------------------------------------------------------------------


def test_what_save_cannot_have_read_again_is_not_written(tmp_path: Path) -> None:
    path, deep = tmp_path / "one.fxw", b"[" * 300 + b"]" * 300
    package.write(path, {}, {"a": bytes(MIB), "b.json": b"[1]"})
    before = path.read_bytes()
    for members in (
        {"a.json": deep},
        {"a.json": b"1" * (80 * MIB)},
        {"n" * 400: b""},
        {"a.json": b"[" + b"[]," * MIB + b"1]"},
    ):
        with pytest.raises(StorageError, match="cannot be saved"):
            package.write(path, {}, members)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_large_weights_are_looked_at_a_part_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "large.fxw"
    package.write(path, {}, {"weights.safetensors": bytes(200 * MIB)})
    said = in_little_memory(64 * MIB, lambda: package.Package(path).check_all())
    assert not said, said


def test_strings_of_json_hide_no_brackets() -> None:
    for text in (r'["\\\"[[[", "\\", "]"]', r'{"a\"": ["{", "\\\\"]}', "[" * 150 + '"[]"' + "]" * 150):
        json.loads(text)
        limits.check_json(text.encode(), len(text))
    for text in ("[" * 201 + "]" * 201, r'["\\", [}'):
        with pytest.raises(ValueError, match="brackets"):
            limits.check_json(text.encode(), len(text))
