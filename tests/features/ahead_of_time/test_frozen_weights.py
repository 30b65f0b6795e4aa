"""Programs saved with ``freezing``: weights are constants of the file; packed ones are packed where it is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

import fxwrap
from fxwrap.errors import StorageError
from fxwrap.features.ahead_of_time.codegen.packed_weights import PackingCalls, packing_calls
from fxwrap.features.ahead_of_time.contents import Contents
from fxwrap.features.ahead_of_time.tensors.memory import content

FROZEN = {"options": {"freezing": True}}
packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch packs no weights here")


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


class Images(nn.Module):
    """A convolution, into which freezing folds the normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.up = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 2, 3)
        self.norm.running_mean, self.norm.running_var = torch.rand(8), torch.rand(8) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.norm(self.conv(x))))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


class Count(nn.Module):
    """Writes to one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.linear(x) + self.calls  # type: ignore[no-any-return]


class Calls(nn.Module):
    """Reads what ``Count`` writes."""

    def __init__(self, calls: Tensor, view: bool) -> None:
        super().__init__()
        self.register_buffer("seen", calls[:2] if view else calls)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.seen * 2).sum()


class Doubled(nn.Module):
    """Returns what freezing computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40))

    def forward(self, x: Tensor) -> Any:
        return x, self.weight * 2


class Table(nn.Module):
    """Returns a weight itself, which freezing leaves alone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Any:
        return x + 1, self.weight


MODELS: dict[str, tuple[type[nn.Module], Tensor]] = {
    "linear": (Dense, torch.randn(3, 64)),
    "convolutions": (Images, torch.randn(2, 3, 8, 8)),
    "recurrent": (Recurrent, torch.randn(3, 2, 8)),
}


def saved(path: Path, methods: dict[str, Any], **options: Any) -> Path:
    with torch.no_grad():
        return fxwrap.save(path / "program.fxw", methods, **{**FROZEN, **options})


def loaded(path: Path, methods: dict[str, Any], **options: Any) -> fxwrap.AotProgram:
    return fxwrap.load(saved(path, methods, **options), trust=True)


def tensors_of(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as file:
        return json.loads(file.read("manifest.json"))["tensors"]  # type: ignore[no-any-return]


def frozen(model: nn.Module, *args: Tensor) -> Any:
    """What Inductor's own frozen code returns, for what ``save`` compiles."""
    torch._dynamo.reset()
    with torch.no_grad(), config.patch(freezing=True):
        return torch.compile(torch.export.export(model, args).module())(*args)


# -- what is saved and loaded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["option", "setting"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_frozen_code(tmp_path: Path, name: str, how: str) -> None:
    """Bit for bit; however freezing is switched on."""
    kind, x = MODELS[name]
    model = kind().eval()
    with config.patch(freezing=True) if how == "setting" else contextlib.nullcontext():
        program = loaded(
            tmp_path, {"forward": (model, (x,))}, options=None if how == "setting" else FROZEN["options"]
        )
    assert not program.weights
    expected = frozen(model, x)
    with torch.no_grad():  # oneDNN's recurrent layers round otherwise where gradients may be asked for
        torch.testing.assert_close(expected, model(x))
        for _ in range(3):
            assert torch.equal(program.forward(x), expected)


@packs
@pytest.mark.parametrize("name", MODELS)
def test_packed_weights_are_stored_as_plain_ones(tmp_path: Path, name: str) -> None:
    kind, x = MODELS[name]
    known = tensors_of(saved(tmp_path, {"forward": (kind().eval(), (x,))}))
    packed = [one for one in known.values() if one["kind"] == "packed"]
    assert packed
    assert all(known[tensor]["kind"] == "constants" for one in packed for tensor in one["constants"].values())


def test_a_frozen_program_runs_without_inductor(tmp_path: Path) -> None:
    model, x = Dense().eval(), torch.ones(3, 64)
    path = saved(tmp_path, {"forward": (model, (x,))})
    script = f"""
import sys, torch, fxwrap
program = fxwrap.load({str(path)!r}, trust=True)
for _ in range(3):
    print(program.forward(torch.ones(3, 64)).sum().item())
assert "torch._inductor" not in sys.modules and "torch._dynamo" not in sys.modules
"""
    there = {**os.environ, "PATH": "/nowhere", "TORCHINDUCTOR_CACHE_DIR": "/nowhere"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=there, stdout=subprocess.PIPE, check=True
    )
    assert list(map(float, found.stdout.split())) == [frozen(model, x).sum().item()] * 3


@pytest.mark.parametrize("name", MODELS)
def test_methods_share_what_they_have_frozen(tmp_path: Path, name: str) -> None:
    """Each is frozen by itself; their constants are in the file once, and one tensor when loaded."""
    kind, x = MODELS[name]
    model = kind().eval()
    one = saved(tmp_path, {"first": (model, (x,))})
    with zipfile.ZipFile(one) as file:
        bytes_of_one = file.getinfo("constants.safetensors").file_size
    both = saved(tmp_path, {"first": (model, (x,)), "second": (model, (x,))})
    with zipfile.ZipFile(both) as file:
        assert file.getinfo("constants.safetensors").file_size == bytes_of_one
    program = fxwrap.load(both, trust=True)
    assert torch.equal(program.first(x), program.second(x))
    ours, theirs = (program[method].program.plan.graph for method in ("first", "second"))
    held = [n.target for n in ours.graph.find_nodes(op="get_attr") if isinstance(getattr(ours, n.target), Tensor)]
    assert held and all(getattr(ours, name) is getattr(theirs, name) for name in held)


def test_sizes_may_vary(tmp_path: Path) -> None:
    model, rows = Dense().eval(), torch.export.Dim("rows", min=2, max=64)
    program = loaded(tmp_path, {"forward": (model, (torch.randn(3, 64),), {}, ({0: rows},))})
    with torch.no_grad():
        for count in (2, 3, 17):
            x = torch.randn(count, 64)
            torch.testing.assert_close(program.forward(x), model(x))


def test_source_is_compiled_where_it_is_loaded(tmp_path: Path) -> None:
    model, x = Dense().eval(), torch.randn(3, 64)
    program = loaded(tmp_path, {"forward": (model, (x,))}, compile="source")
    assert torch.equal(program.forward(x), frozen(model, x))


def test_what_is_frozen_is_counted(tmp_path: Path) -> None:
    model, x = Count().eval(), torch.randn(2, 4)
    path = saved(tmp_path, {"forward": (model, (x,)), "again": (model, (x,))})
    assert Contents.of(path).weights.endswith("bytes, and 2 that are frozen")
    assert Contents.of(path).weights.startswith("1 tensors")


def test_a_weight_that_is_written_stays_a_weight(tmp_path: Path) -> None:
    model, x = Count().eval(), torch.randn(2, 4)
    with torch.no_grad():
        plain = model.linear(x)
    program = loaded(tmp_path, {"forward": (model, (x,)), "again": (model, (x,))})
    assert list(program.weights) == ["calls"]
    for call in range(1, 5):
        torch.testing.assert_close(program["again" if call % 2 else "forward"](x), plain + call)
    program.load_weights({"calls": torch.zeros(4)})
    torch.testing.assert_close(program.forward(x), plain + 1)


def test_a_frozen_result_is_the_callers(tmp_path: Path) -> None:
    """What the caller writes to it, the next call does not return."""
    model, x = Doubled().eval(), torch.randn(4)
    program = loaded(tmp_path, {"forward": (model, (x,))})
    for _ in range(3):
        same, doubled = program.forward(x)
        assert same is x and torch.equal(doubled, model.weight.detach() * 2)
        doubled.zero_()


# -- what is refused -------------------------------------------------------------------------------------------


def test_a_frozen_weight_takes_no_other_value(tmp_path: Path) -> None:
    model, x = Count().eval(), torch.randn(2, 4)
    path = saved(tmp_path, {"forward": (model, (x,))})
    with pytest.raises(StorageError, match=r"linear\.weight.*not frozen.*compiled into forward.*without freezing"):
        _one_line(lambda: fxwrap.load(path, weights={"linear.weight": torch.zeros(4, 4)}, trust=True))
    program = fxwrap.load(path, trust=True)
    with pytest.raises(StorageError, match=r"linear\.weight.*compiled into forward"):
        _one_line(lambda: program.load_weights(model.state_dict()))
    assert torch.equal(program.weights["calls"], torch.zeros(4)), "then nothing was copied"
    given = fxwrap.load(path, weights={"calls": torch.ones(4)}, trust=True)
    with torch.no_grad():
        torch.testing.assert_close(given.forward(x), model.linear(x) + 2)


def test_a_weight_that_one_method_has_frozen_takes_no_other_value(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(40), requires_grad=False)
    doubled, x = Doubled().eval(), torch.randn(40)
    doubled.weight = weight
    path = saved(tmp_path, {"table": (Table(weight), (x,)), "double": (doubled, (x,))})
    program = fxwrap.load(path, trust=True)
    assert list(program.weights) == ["weight"] and torch.equal(program.double(x)[1], program.table(x)[1] * 2)
    for give in (lambda w: fxwrap.load(path, weights=w, trust=True), program.load_weights):
        with pytest.raises(StorageError, match="compiled into double"):
            _one_line(lambda give=give: give({"weight": torch.zeros(40)}))


@pytest.mark.parametrize("view", [False, True], ids=["the same", "a part"])
def test_a_weight_is_not_frozen_in_one_method_and_written_by_another(tmp_path: Path, view: bool) -> None:
    count, x = Count().eval(), torch.randn(2, 4)
    methods = {"read": (Calls(count.calls, view), (x,)), "count": (count, (x,))}
    with pytest.raises(StorageError, match=r"'calls' of 'count'.*'seen' of 'read'.*frozen.*without freezing"):
        _one_line(lambda: saved(tmp_path, methods))
    saved(tmp_path, methods if not view else {"count": methods["count"]}, options=None)


@pytest.mark.parametrize("freezing", [True, False])
@pytest.mark.parametrize("view", [False, True], ids=["the same", "a part"])
def test_a_method_that_writes_to_one_of_two_names_is_refused(tmp_path: Path, view: bool, freezing: bool) -> None:
    """AOTAutograd makes one input of both; freezing then takes inputs for others."""
    model, x = Count().eval(), torch.randn(2, 4)
    model.register_buffer("other", model.calls[:2] if view else model.calls)
    with pytest.raises(StorageError, match=r"writes to a weight that shares memory.*calls, other"):
        _one_line(lambda: saved(tmp_path, {"forward": (model, (x,))}, options={"freezing": freezing}))


def test_frozen_weights_are_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"frozen.*weights=False.*first\.weight"):
        _one_line(lambda: saved(tmp_path, {"forward": (Dense().eval(), (torch.randn(3, 64),))}, weights=False))


def test_a_tensor_that_somebody_else_has_packed_is_refused() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch packs no weights here")
    with pytest.raises(StorageError, match=r"constant 'c'.*plain memory.*without freezing"):
        _one_line(lambda: PackingCalls().graph_of("constant 'c'", torch.randn(4, 4).to_mkldnn()))


@packs
def test_a_weight_that_cannot_be_packed_here_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = saved(tmp_path, {"forward": (Dense().eval(), (torch.randn(3, 64),))})
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members["manifest.json"])
    packed = next(one for one in manifest["tensors"].values() if one["kind"] == "packed")
    (node,) = [one for one in packed["graph"]["nodes"] if one[1] == "call_function"]
    node[2] = "operator aten::matmul.default"
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    with pytest.raises(StorageError, match=r"cannot be loaded.*packs it.*without freezing"):
        _one_line(lambda: fxwrap.load(path, trust=True))


def test_inductor_is_as_it_was_afterwards() -> None:
    from torch._inductor.constant_folding import ConstantFolder

    before = ConstantFolder.run_node
    with packing_calls(True):
        assert ConstantFolder.run_node is not before
    with packing_calls(False):
        assert ConstantFolder.run_node is before
    assert ConstantFolder.run_node is before


def test_tensors_of_one_value_and_layout_have_one_content() -> None:
    one = torch.arange(6.0).view(2, 3)
    assert content(one) == content(one.clone()) == content(torch.arange(12.0).view(2, 6)[:, :3] * 0 + one)
    assert content(one) != content(one + 1)
    assert content(one) != content(one.t().contiguous().t()), "the same numbers in other strides"
    assert content(one) != content(one.to(torch.int32)) and content(one) != content(one.view(3, 2))


def _one_line(run: Any) -> None:
    """Errors have lines for what was expected and got: one line is easier to match."""
    try:
        run()
    except StorageError as error:
        raise StorageError(" ".join(str(error).split())) from error
