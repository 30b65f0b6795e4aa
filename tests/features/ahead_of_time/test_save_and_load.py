"""``fxwrap.save`` and ``fxwrap.load``: methods in one file, with what they share; and what is refused."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxwrap
from fxwrap.errors import InputError, OptionError, StorageError
from fxwrap.features.ahead_of_time import package

TOKENS, WIDTH, LONGEST = 32, 16, 24


class Decoder(nn.Module):
    """One layer of attention over what it has seen, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("keys", torch.zeros(1, LONGEST, WIDTH))
        self.register_buffer("values", torch.zeros(1, LONGEST, WIDTH))

    def forward(self, tokens: Tensor, at: Tensor) -> dict[str, Any]:
        query, key, value = self.qkv(self.embedding(tokens)).chunk(3, -1)
        self.keys[:, at], self.values[:, at] = key, value
        seen = torch.arange(LONGEST) <= at[:, None]
        scores = (query @ self.keys.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        hidden = torch.softmax(scores, -1) @ self.values
        return {"logits": self.out(hidden), "last": (hidden[:, -1], None)}


def generate(prefill: Callable[..., Any], decode: Callable[..., Any], prompt: Tensor, count: int) -> list[int]:
    """The most likely tokens after a prompt: the cache that ``prefill`` has filled, ``decode`` reads and extends."""
    found = list[int]()
    logits = prefill(prompt, torch.arange(prompt.size(1)))["logits"]
    for step in range(count):
        token = logits[:, -1].argmax(-1)
        found.append(int(token))
        logits = decode(token[:, None], torch.tensor([prompt.size(1) + step]))["logits"]
    return found


def prompts() -> list[Tensor]:
    return [torch.arange(length)[None] % TOKENS for length in (5, 9, 5, 3)]


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


def methods_of(model: nn.Module) -> dict[str, Any]:
    length = torch.export.Dim("length", min=2, max=LONGEST)
    shapes = {"tokens": {1: length}, "at": {0: length}}
    prefill = torch.export.export(
        model, (torch.zeros(1, 4, dtype=torch.long), torch.arange(4)), dynamic_shapes=shapes
    )
    return {"prefill": prefill, "decode": (model, (torch.zeros(1, 1, dtype=torch.long), torch.tensor([4])))}


@pytest.fixture(scope="module")
def saved(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    said = list[str]()
    path = tmp_path_factory.mktemp("saved") / "decoder.fxw"
    assert fxwrap.save(path, methods_of(copy.deepcopy(model)), progress=said.append) == path
    assert said == ["prefill: tracing", "prefill: compiling", "decode: tracing", "decode: compiling", "writing"]
    return path


# -- what is saved and loaded ----------------------------------------------------------------------------------


def test_tokens_are_those_of_eager(model: Decoder, saved: Path) -> None:
    eager, program = copy.deepcopy(model), fxwrap.load(saved, trust=True)
    with torch.no_grad():
        for prompt in prompts():
            assert generate(program.prefill, program.decode, prompt, 8) == generate(eager, eager, prompt, 8)
    torch.testing.assert_close(program.weights["keys"], eager.keys)
    assert program["decode"].program.counters.replays > 20


def test_another_process_needs_no_compiler_no_inductor_and_no_dynamo(model: Decoder, saved: Path) -> None:
    """The smallest environment: nothing on PATH, no cache."""
    script = f"""
import sys, torch, fxwrap
program = fxwrap.load({str(saved)!r}, trust=True)
logits = program.prefill(torch.arange(5)[None], torch.arange(5))["logits"]
for step in range(4):
    logits = program.decode(logits[:, -1:].argmax(-1), torch.tensor([5 + step]))["logits"]
    print(int(logits[:, -1].argmax(-1)))
assert "torch._inductor" not in sys.modules and "torch._dynamo" not in sys.modules
"""
    eager = copy.deepcopy(model)
    with torch.no_grad():
        expected = generate(eager, eager, torch.arange(5)[None], 5)[1:]
    there = {**os.environ, "PATH": "/nowhere", "TORCHINDUCTOR_CACHE_DIR": "/nowhere"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=there, stdout=subprocess.PIPE, check=True
    )
    assert list(map(int, found.stdout.split())) == expected


def test_weights_are_there_once_and_shared(saved: Path, model: Decoder) -> None:
    program = fxwrap.load(saved, trust=True)
    assert program.weights.keys() == dict(model.state_dict()).keys()
    for name, tensor in program["prefill"].weights.items():
        assert program["decode"].weights[name] is tensor
    with zipfile.ZipFile(saved) as file:
        size = file.getinfo("weights.safetensors").file_size
    assert size < 1.1 * sum(tensor.nbytes for tensor in model.state_dict().values()) + 1000


def test_signatures_say_names_types_sizes_and_ranges(saved: Path) -> None:
    methods = fxwrap.load(saved, trust=True).methods
    prefill = str(methods["prefill"])
    (symbol,) = methods["prefill"].ranges
    assert prefill == (
        f"prefill(tokens: int64[1, {symbol}] on cpu, at: int64[{symbol}] on cpu) with 2 <= {symbol} <= {LONGEST}"
    )
    assert str(methods["decode"]) == "decode(tokens: int64[1, 1] on cpu, at: int64[1] on cpu)"
    assert list(fxwrap.load(saved, trust=True)) == ["prefill", "decode"]


def test_other_weights_without_another_recording(model: Decoder, saved: Path) -> None:
    torch.manual_seed(1)
    other, program = Decoder().eval(), fxwrap.load(saved, trust=True)
    at = torch.tensor([0])
    for _ in range(3):
        program.decode(torch.zeros(1, 1, dtype=torch.long), at)
    before = program["decode"].program.counters.to_dict()
    program.load_weights(other.state_dict())
    with torch.no_grad():
        expected = other(torch.ones(1, 1, dtype=torch.long), at)["logits"]
    torch.testing.assert_close(program.decode(torch.ones(1, 1, dtype=torch.long), at)["logits"], expected)
    after = program["decode"].program.counters.to_dict()
    assert after == {**before, "replays": before["replays"] + 1}


def test_weights_may_be_left_out_and_given(model: Decoder, tmp_path: Path) -> None:
    path = fxwrap.save(tmp_path / "bare.fxw", {"decode": methods_of(model)["decode"]}, weights=False)
    with zipfile.ZipFile(path) as file:
        assert "weights.safetensors" not in file.namelist()
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    program = fxwrap.load(path, weights=own, trust=True)
    token, at = torch.ones(1, 1, dtype=torch.long), torch.tensor([0])
    with torch.no_grad():
        expected = copy.deepcopy(model)(token, at)["logits"]
    torch.testing.assert_close(program.decode(token, at)["logits"], expected)
    assert own["keys"][0, 0].abs().sum() > 0, "it works on what was given"
    with pytest.raises(StorageError, match=r"no weight 'embedding\.weight'"):
        fxwrap.load(path, trust=True)


def test_source_is_compiled_where_it_is_loaded(model: Decoder, tmp_path: Path) -> None:
    path = fxwrap.save(tmp_path / "source.fxw", {"decode": methods_of(model)["decode"]}, compile="source")
    with zipfile.ZipFile(path) as file:
        assert not [name for name in file.namelist() if name.endswith(".so")]
    token, at = torch.ones(1, 1, dtype=torch.long), torch.tensor([0])
    with torch.no_grad():
        expected = copy.deepcopy(model)(token, at)["logits"]
    torch.testing.assert_close(fxwrap.load(path, trust=True).decode(token, at)["logits"], expected)


def test_reports_are_those_of_compiled_code(saved: Path) -> None:
    program = fxwrap.load(saved, trust=True)
    program.decode(torch.ones(1, 1, dtype=torch.long), torch.tensor([0]))
    text = str(program.explain())
    assert "partition" in text and "cpp_fused" in json.dumps(program.explain().to_dict())


# -- calls that are refused ---------------------------------------------------------------------------------------

TOKEN, AT = torch.ones(1, 4, dtype=torch.long), torch.arange(4)
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "no inputs": ("prefill", (), {}, "2 by position"),
    "one too few": ("prefill", (TOKEN,), {}, "2 by position"),
    "one too many": ("prefill", (TOKEN, AT, AT), {}, "2 by position"),
    "a keyword": ("prefill", (TOKEN,), {"at": AT}, r"got: 1 by position, at="),
    "another keyword": ("prefill", (TOKEN, AT), {"more": AT}, "more="),
    "rank": ("prefill", (TOKEN[0], AT), {}, "dimensions 2"),
    "rank above": ("decode", (TOKEN[:, :1, None], AT[:1]), {}, "dimensions 2"),
    "a fixed size": ("prefill", (TOKEN.repeat(2, 1), AT), {}, r"size \(1, 4\)"),
    "two sizes that are one": ("prefill", (TOKEN, torch.arange(5)), {}, r"size \(4,\)"),
    "too small": ("prefill", (TOKEN[:, :1], AT[:1]), {}, "2 to 24"),
    "too large": ("prefill", (torch.ones(1, 25, dtype=torch.long), torch.arange(25)), {}, "2 to 24"),
    "a size that was compiled in": ("decode", (TOKEN, AT), {}, r"size \(1, 1\)"),
    "dtype": ("prefill", (TOKEN.int(), AT), {}, "dtype torch.int64"),
    "another dtype": ("prefill", (TOKEN, AT.float()), {}, "dtype torch.int64"),
    "device": ("prefill", (TOKEN.to("meta"), AT), {}, "device cpu"),
    "stride": ("prefill", (torch.ones(1, 8, dtype=torch.long)[:, ::2], AT), {}, "stride"),
    "a list": ("prefill", ([1, 2, 3], AT), {}, "a tensor"),
    "a number": ("decode", (1, AT[:1]), {}, "a tensor"),
    "None": ("decode", (None, AT[:1]), {}, "a tensor"),
    "sparse": ("prefill", (TOKEN.to_sparse(), AT), {}, "dense"),
}


@pytest.fixture(scope="module")
def program(saved: Path) -> Any:
    return fxwrap.load(saved, trust=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_before_anything_runs(program: Any, name: str) -> None:
    """Expected and got are said; the cache and the counters are what they were; the next call is right."""
    method, args, kwargs, expected = CALLS[name]
    program.prefill(TOKEN, AT)
    before = {name: tensor.clone() for name, tensor in program.weights.items()}
    counted = program[method].program.counters.to_dict()
    with pytest.raises(InputError, match=expected) as raised:
        program[method](*args, **kwargs)
    assert raised.value.got
    assert program[method].program.counters.to_dict() == counted
    torch.testing.assert_close(program.weights, before, rtol=0, atol=0)
    program.prefill(TOKEN, AT)


def test_what_a_call_asks_of_the_options_is_saved(tmp_path: Path) -> None:
    """Options that only compiling asks for are not: they need not be JSON."""
    asked = {"warmup": 3, "max_recordings": 5, "max_memory": 1 << 30, "copy_outputs": True}
    of_features = {"checked": 7, "suspendable": True}
    compiling = {"capture": "always", "eager_ops": ("aten::sin",), "codegen": fxwrap.FxwrapCodegen}
    double = nn.Linear(4, 4), (torch.ones(2, 4),)
    path = fxwrap.save(tmp_path / "double.fxw", {"double": double}, options={**asked, **of_features, **compiling})
    loaded = fxwrap.load(path, trust=True).double.program.options
    assert {name: loaded.value(name) for name in of_features} == of_features
    assert {name: getattr(loaded, name) for name in asked} == asked and loaded.codegen is None


def test_gradients_are_not_asked_for(tmp_path: Path) -> None:
    path = fxwrap.save(tmp_path / "linear.fxw", {"forward": (nn.Linear(4, 4), (torch.randn(2, 4),))})
    loaded = fxwrap.load(path, trust=True)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(InputError, match="no gradient"):
        loaded.forward(x)
    with torch.no_grad():
        loaded.forward(x)


def test_names_of_methods_that_are_none(program: Any) -> None:
    with pytest.raises(InputError, match="prefill, decode"):
        program["encode"]
    with pytest.raises(AttributeError, match="prefill, decode"):
        _ = program.encode


# -- files that are refused ---------------------------------------------------------------------------------------


def edited(saved: Path, target: Path, edit: Callable[[dict[str, Any], dict[str, bytes]], None]) -> Path:
    """A copy of a file with another manifest and other members."""
    with zipfile.ZipFile(saved) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members.pop("manifest.json"))
    edit(manifest, members)
    with zipfile.ZipFile(target, "w") as file:
        file.writestr("manifest.json", json.dumps(manifest))
        for name, data in members.items():
            file.writestr(name, data)
    return target


def in_manifest(**changes: Any) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    return lambda manifest, members: manifest.update(changes)


def signed(name: str, change: Callable[[bytes], bytes]) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    """Another member, with its right digest: whoever makes a file by hand can do that."""
    import hashlib

    def edit(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        members[name] = change(members[name])
        known = {"sha256": hashlib.sha256(members[name]).hexdigest(), "bytes": len(members[name])}
        manifest["members"][name] = known

    return edit


def in_program(old: str, new: str) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    return signed("programs/decode.json", lambda data: data.replace(old.encode(), new.encode()))


def a_bomb(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    manifest["members"]["programs/decode.json"]["bytes"] = 100
    members["programs/decode.json"] = b"0" * (1 << 24)


def a_change(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    members["programs/decode.json"] = members["programs/decode.json"].swapcase()


def a_slip(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    members["../../evil.so"] = b"code"


def a_slip_that_is_listed(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    """Its name is used for nothing: the file is written under one of ours."""
    (name, *_) = [name for name in members if name.endswith(".so")]
    members["../../../tmp/evil.so"] = members[name][:100]
    signed("../../../tmp/evil.so", lambda data: data)(manifest, members)


LOADS: dict[str, tuple[Callable[[dict[str, Any], dict[str, bytes]], None], str]] = {
    "another format": (in_manifest(format=99), f"format {package.FORMAT}"),
    "another torch": (in_manifest(torch="1.13.0"), "torch 1.13.0"),
    "another Python": (in_manifest(python="cpython-27"), "python cpython-27"),
    "another machine": (in_manifest(machine="vax"), "machine vax"),
    "another system": (in_manifest(system="Plan 9"), "system Plan 9"),
    "another processor": (in_manifest(cpu_capability="NEON"), "one with NEON"),
    "no members": (in_manifest(members={}), "members that differ"),
    "members that are no table": (in_manifest(members=7), "fxwrap.save"),
    "no methods": (lambda manifest, members: manifest.pop("methods"), "fxwrap.save"),
    "options that are none": (in_manifest(options={"speed": 11}), "fxwrap.save"),
    "a member is missing": (lambda manifest, members: members.pop("weights.safetensors"), "members that differ"),
    "a member more": (a_slip, "members that differ"),
    "a member changed": (a_change, "that was saved"),
    "a bomb": (a_bomb, "100 bytes, as its manifest says"),
    "weights that are none": (signed("weights.safetensors", lambda data: b"no tensors"), "safetensors"),
    "no JSON": (signed("programs/decode.json", lambda data: data[:-5]), "JSON"),
    "an unknown function": (in_program("fxwrap.launch", "os.system"), "one of the functions of host graphs"),
    "an unknown operator": (in_program("aten::addmm.out", "evil::run"), "import the library"),
    "an unknown kind of value": (in_program('{"tuple":', '{"pickle":'), "one that fxwrap has written"),
    "a kernel that is none": (signed("kernels/0.so", lambda data: b"\x7fELF"), "cannot be loaded"),
    "a weight of another shape": (
        lambda manifest, members: manifest["tensors"]["keys"].update(size=[1, LONGEST, 2 * WIDTH]),
        "keys",
    ),
    "a dtype that is none": (lambda m, members: m["tensors"]["keys"].update(dtype="load"), "fxwrap.save"),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_wrong_file_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    edit, expected = LOADS[name]
    before = set(Path("/tmp").glob("*.so"))
    with pytest.raises(StorageError, match=expected):
        fxwrap.load(edited(saved, tmp_path / "wrong.fxw", edit), trust=True)
    assert set(Path("/tmp").glob("*.so")) == before


def test_nothing_of_a_file_runs_without_trust(saved: Path) -> None:
    with pytest.raises(StorageError, match="trust=True"):
        fxwrap.load(saved)
    for trust in ("no", "yes", 1, None):
        with pytest.raises(OptionError, match="trust"):
            fxwrap.load(saved, trust=trust)  # type: ignore[arg-type]
    for weights in (3, [torch.ones(2)], "weights"):
        with pytest.raises(OptionError, match="weights"):
            fxwrap.load(saved, trust=True, weights=weights)  # type: ignore[arg-type]


def test_files_that_are_none(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fxwrap.load(tmp_path / "missing.fxw", trust=True)
    for content in (b"", b"PK\x03\x04", saved.read_bytes()[:1000]):
        (tmp_path / "none.fxw").write_bytes(content)
        with pytest.raises(StorageError, match="cannot be loaded"):
            fxwrap.load(tmp_path / "none.fxw", trust=True)


def test_weights_that_do_not_fit(saved: Path, model: Decoder, program: Any) -> None:
    for given, expected in (
        ({"nobody": torch.zeros(1)}, "nobody"),
        ({"keys": torch.zeros(1, LONGEST, 2)}, "keys"),
        ({"keys": torch.zeros(1, LONGEST, WIDTH, dtype=torch.float64)}, "float64"),
        ({"keys": torch.zeros(1, WIDTH, LONGEST).transpose(1, 2)}, "strides"),
    ):
        with pytest.raises(StorageError, match=expected):
            fxwrap.load(saved, weights=given, trust=True)
    before = program.weights["keys"].clone()
    for given in ({"nobody": torch.zeros(1)}, {"values": torch.zeros(1), "keys": torch.ones_like(before)}):
        with pytest.raises(StorageError):
            program.load_weights(given)
    torch.testing.assert_close(program.weights["keys"], before)


def test_what_cannot_be_saved_is_refused_and_leaves_the_old_file(saved: Path, tmp_path: Path, model: Decoder) -> None:
    target = tmp_path / "old.fxw"
    shutil.copy(saved, target)
    before = target.read_bytes()
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    for methods, options, error in (
        ({}, {}, OptionError),
        ({"forward": linear}, {}, OptionError),
        ({"two words": (linear, (x,))}, {}, OptionError),
        ({"_private": (linear, (x,))}, {}, OptionError),
        ({"forward": (linear, (x,))}, {"compile": "binary"}, OptionError),
        ({"forward": (linear, (x,))}, {"options": {"warm": 1}}, OptionError),
    ):
        with pytest.raises(error):
            fxwrap.save(target, methods, **options)  # type: ignore[arg-type]
    assert target.read_bytes() == before and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_file_is_refused(saved: Path, tmp_path: Path, seed: int) -> None:
    """A bit of it is another one, or its end is missing."""
    draw = random.Random(seed)
    content = bytearray(saved.read_bytes())
    place = draw.randrange(len(content))
    content[place] ^= 1 << draw.randrange(8)
    (tmp_path / "damaged.fxw").write_bytes(bytes(content[:place] if draw.random() < 0.3 else content))
    try:
        loaded = fxwrap.load(tmp_path / "damaged.fxw", trust=True)
    except StorageError:
        return
    # A byte of the archive that means nothing, such as a date.
    token, at = torch.ones(1, 1, dtype=torch.long), torch.tensor([0])
    expected = fxwrap.load(saved, trust=True).decode(token, at)["logits"]
    torch.testing.assert_close(loaded.decode(token, at)["logits"], expected, rtol=0, atol=0)


def test_two_write_one_file_at_one_time(tmp_path: Path) -> None:
    """Each has a file of its own until it is whole: the last one stays, and nothing of the other."""
    path, members = tmp_path / "one.fxw", {"a": bytes(1 << 20), "b": bytes(range(256)) * 4096}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(package.write, path, {"number": number}, members) for number in range(24)]
    assert not [error for write in writes if (error := write.exception())]
    with contextlib.closing(package.Package(path)) as written:
        written.check_all()
    assert [file.name for file in tmp_path.iterdir()] == ["one.fxw"]


def test_only_what_a_dead_process_of_this_machine_has_left_is_removed(tmp_path: Path) -> None:
    path, gone = tmp_path / "one.fxw", subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = (
        f".one.fxw.{platform.node()}{rest}.unfinished"
        for rest in (f".{gone.pid}.1", f".{os.getpid()}.1", "2.1.1", "")
    )
    left, ours, another_machine, unknown = (tmp_path / name for name in names)
    for file in (left, ours, another_machine, unknown):
        file.touch()
    package.write(path, {}, {"a": b"1"})
    assert sorted(tmp_path.iterdir()) == sorted([path, ours, another_machine, unknown])
