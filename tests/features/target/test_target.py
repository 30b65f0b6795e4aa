"""Explanations for another device: one that is not there, in another process, and one that is."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fxwrap
from fxwrap.errors import DeviceError, FxwrapError, OptionError, UnsupportedModelError
from fxwrap.features.target.codegen.cross_target import resources
from fxwrap.features.target.codegen.machines import CAPABILITIES

HOSTSIM = Path(__file__).resolve().parents[3] / "examples" / "hostsim"


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 16, 3, stride=2), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(self.second(x)).mean((2, 3)))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Softmax(-1))


def _batch_that_varies() -> Tensor:
    x = torch.randn(4, 16, 64)
    torch._dynamo.mark_dynamic(x, 0)
    return x


Made = tuple[nn.Module, Tensor]
MODELS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: (_mlp().eval(), torch.randn(32, 64)),
    "block": lambda: (Block().eval(), torch.randn(2, 16, 64)),
    "block, bf16": lambda: (Block().eval().bfloat16(), torch.randn(2, 16, 64).bfloat16()),
    "block, dynamic": lambda: (Block().eval(), _batch_that_varies()),
    "convolutions": lambda: (Convolutions().eval(), torch.randn(2, 3, 16, 16)),
    "training": lambda: (Convolutions(), torch.randn(2, 3, 16, 16)),
}
# On hostsim, too: one in every run.
HERE_TOO = [pytest.param(name, marks=() if name == "training" else pytest.mark.sweep) for name in MODELS]
needs_hostsim = pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="hostsim needs torch >= 2.13")


def explained(name: str, target: str) -> dict[str, Any]:
    model, x = MODELS[name]()
    with torch.set_grad_enabled(name == "training"):
        return fxwrap.explain(model, x, target=target).to_dict()


def _with_hostsim(name: str) -> None:
    """In a process of its own: what is said for CUDA and for hostsim, and after a backward."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(HOSTSIM))
    with importlib.import_module("hostsim.inductor").register():
        found = {target: explained(name, target) for target in ("cuda:90", "hostsim")}
        torch.ones(1, device="hostsim", requires_grad=True).sum().backward()
        model, x = MODELS["training"]()
        said = []
        for arguments in ((model, x), (model, x.to("hostsim"))):
            try:
                fxwrap.explain(*arguments, target="cuda:90")
            except FxwrapError as error:
                said.append([type(error).__name__, str(error)])
    print(json.dumps([found, said]))


@functools.cache
def with_hostsim(name: str) -> Any:
    here = Path(__file__).stem
    done = processes.run("-c", f"from {here} import _with_hostsim; _with_hostsim({name!r})", timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_hostsim
@pytest.mark.parametrize("name", HERE_TOO)
def test_every_kernel_is_machine_code_in_the_partitions_of_a_device_that_runs(name: str) -> None:
    there, here = (with_hostsim(name)[0][target] for target in ("cuda:90", "hostsim"))
    phases = ["forward", "backward"] if name == "training" else ["inference"]
    assert [graph["phase"] for graph in there["graphs"]] == [graph["phase"] for graph in here["graphs"]] == phases
    for graph, same in zip(there["graphs"], here["graphs"], strict=True):
        # What is fused to one kernel is each device's own matter.
        cut, expected = (
            [(p["verdict"], p["extern_calls"], p["reason"]) for p in one["partitions"]] for one in (graph, same)
        )
        assert cut == expected and cut[0][0] == "captured"
        assert all(partition["device"] == "cuda:0" for partition in graph["partitions"])
        assert graph["memory"]["arena_bytes"] >= graph["memory"]["lower_bound_bytes"] > 0
        assert same["memory"]["arena_bytes"] > 0
        assert len(graph["kernels"]) > 0
        for kernel in graph["kernels"]:
            assert "@triton.jit" in kernel["source"] and kernel["compiled"], kernel["name"]
            for one in kernel["compiled"]:
                assert one["configuration"] in kernel["configurations"]
                assert 0 < one["registers"] <= 255 and one["cubin_bytes"] > 1000
                assert one["spilled_bytes"] == 0 and 0 <= one["shared_bytes"] < 2**17
    (predicted,) = there["graphs"][0]["memory"]["predicted"]
    assert predicted["device"] == "cuda:0" and predicted["total"] >= there["graphs"][0]["memory"]["arena_bytes"]
    varies = any(not size.isdigit() for size in there["graphs"][0]["sizes"].values())
    assert varies == (name == "block, dynamic")
    assert "Nothing ran there" in there["limits"][0] and "H100" in there["limits"][-1]
    assert not there["fallbacks"] and not here["fallbacks"]


@needs_hostsim
def test_what_cannot_be_forked_is_told() -> None:
    after_a_backward, on_a_device = with_hostsim("training")[1]
    assert "cannot be traced for 'cuda:90' in a fork" in after_a_backward[1] and "hostsim" in after_a_backward[1]
    assert on_a_device[0] == "UnsupportedModelError" and "got: hostsim:0" in on_a_device[1]


def _state() -> list[Any]:
    """What a compilation for another device would change in this process."""
    from torch._dynamo import device_interface
    from torch._inductor import config
    from triton.runtime import driver

    return [
        dict(vars(torch.cuda)), torch.version.cuda, torch.utils._triton.has_triton(), driver._active,
        dict(device_interface.device_interfaces), config.get_config_copy(), dict(os.environ), torch.get_num_threads(),
    ]  # fmt: skip


def test_an_expression_is_compiled_elsewhere_and_nothing_changes_here(capfd: pytest.CaptureFixture[str]) -> None:
    fxwrap.explain(lambda x: x + 1, torch.ones(4))
    calls, before = list[float](), _state()

    def broken(x: Tensor) -> Tensor:
        calls.append(float((x * 2).sum()))  # where Dynamo breaks the graph, there is a result
        print(f"called with {calls}")
        return torch.softmax(x + calls[0], -1)

    explanation = fxwrap.explain(lambda x: broken(x).sin(), torch.ones(4, 8), target="cuda:80")
    document = explanation.to_dict()
    assert _state() == before and calls == []
    assert "called with [64.0]" in capfd.readouterr().out
    assert len(document["graphs"]) >= 2 and "A100" in document["limits"][-1]
    assert all(kernel["compiled"] for graph in document["graphs"] for kernel in graph["kernels"])
    assert document["versions"]["triton"] == triton.__version__
    assert "Nothing ran there" in str(explanation)


@triton.jit
def add_kernel(x, y, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(out + offsets, tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside), mask=inside)


def test_what_follows_a_kernel_of_the_users_is_not_seen() -> None:
    def added(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        add_kernel[(math.ceil(x.numel() / 128),)](x, x, out, x.numel(), 128)
        torch._dynamo.graph_break()
        return out.sin()

    document = fxwrap.explain(added, torch.ones(1000), target="cuda:90").to_dict()
    (graph,) = document["graphs"]
    (kernel,) = graph["kernels"]
    assert kernel["compiled"] and "Whatever follows the last graph is missing" in document["limits"][-1]


def test_an_xpu_has_sources() -> None:
    model, x = MODELS["training"]()
    # Without a backward: a build of torch with CUDA refuses that in a fork of a process that has run one.
    with torch.no_grad():
        document = fxwrap.explain(model.eval(), x, target="xpu").to_dict()
    assert [graph["phase"] for graph in document["graphs"]] == ["inference"]
    for graph in document["graphs"]:
        assert {partition["device"] for partition in graph["partitions"]} == {"xpu:0"}
        assert graph["memory"]["arena_bytes"] > 0
        assert all("type='xpu'" in kernel["source"] and not kernel["compiled"] for kernel in graph["kernels"])
    assert "source only" in document["limits"][-1]


def test_a_device_that_is_there_gets_a_copy() -> None:
    model, x = MODELS["training"]()
    mean = model.norm.running_mean.clone()
    explanation = fxwrap.explain(model.forward, x, target="cpu", calls=2)
    assert len(explanation.to_dict()["calls"]) == 1
    assert [graph["phase"] for graph in explanation.to_dict()["graphs"]] == ["forward", "backward"]
    assert all(graph["memory"] is not None for graph in explanation.to_dict()["graphs"])
    assert torch.equal(mean, model.norm.running_mean)


def refused(model: Any, target: str, x: Any = None, **options: Any) -> FxwrapError:
    with pytest.raises(FxwrapError) as raised:
        fxwrap.explain(model, torch.ones(4) if x is None else x, target=target, fxwrap_options=options)
    return raised.value


@pytest.mark.parametrize("target", ["cuda", "cuda:0", "cuda:91", "cuda:sm_90"])
def test_capabilities_that_are_unknown(target: str) -> None:
    error = refused(torch.sin, target)
    assert isinstance(error, DeviceError) and "no such compute capability" in error.subject
    assert error.expected == ", ".join(f"cuda:{one}" for one in CAPABILITIES)


@pytest.mark.parametrize("target", ["gpu", "xpu:1", "meta", "mps"])
def test_targets_that_are_unknown(target: str) -> None:
    error = refused(torch.sin, target)
    assert isinstance(error, DeviceError) and repr(target) in error.subject and "register_device" in error.remedy


def test_what_a_machine_has_or_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        error = refused(torch.sin, "cuda:90")
        assert isinstance(error, DeviceError) and "this machine has a device of that kind" in error.subject
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        error = refused(torch.sin, "cuda:90")
        assert isinstance(error, DeviceError) and error.remedy == "pip install triton"
    with monkeypatch.context() as patch:
        patch.delattr(os, "fork")
        error = refused(torch.sin, "cuda:90")
        assert isinstance(error, DeviceError) and error.expected == "a system with fork"


def test_models_that_cannot_be_compiled_elsewhere() -> None:
    with FakeTensorMode():
        elsewhere = torch.empty(4, device="cuda:1")
    error = refused(nn.Identity(), "cuda:90", elsewhere)
    assert isinstance(error, UnsupportedModelError) and error.got == "cuda:1"
    model = nn.Linear(4, 4)
    model.made = model.weight * 2  # deepcopy takes leaves only
    error = refused(model, "cpu")
    assert isinstance(error, UnsupportedModelError) and error.subject == "Linear cannot be copied to cpu"


def test_without_a_compiler_there_is_no_guard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    error = refused(torch.sin, "xpu")
    assert isinstance(error, DeviceError) and "CXX" in error.expected and "no-such-compiler" in error.got


def test_errors_come_back_from_the_other_process() -> None:
    error = refused(torch.sin, "cuda:90", capture="sometimes")
    assert isinstance(error, OptionError) and "sometimes" in error.got
    error = refused(nn.Linear(3, 3), "cuda:90")
    assert "cannot be compiled for 'cuda:90'" in error.subject and "TorchRuntimeError" in error.got
    assert "_compiled_for" in str(error.__cause__)
    error = refused(lambda x: os._exit(3), "cuda:90")
    assert "ended the process" in error.subject and error.got == "exit code 3"


PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 p)
{
  .local .align 16 .b8 memory[64];
  .reg .b64 %a<9>;
  .reg .b32 %r<9>;
  ld.param.u64 %a1, [p];
  ld.u32 %r1, [%a1];
  and.b32 %r2, %r1, 60;
  cvt.u64.u32 %a2, %r2;
  mov.u64 %a3, memory;
  add.u64 %a4, %a3, %a2;
  st.local.u32 [%a4], %r1;
  ld.local.u32 %r3, [%a3+8];
  st.u32 [%a1], %r3;
  ret;
}
"""


def test_resources_are_what_the_assembler_says(tmp_path: Path) -> None:
    source, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(PTX)
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90", str(source), "-o", str(cubin)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, stack = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes stack frame", said)
    assert registers is not None and stack is not None and int(stack[1]) == 64
    assert resources(cubin.read_bytes()) == (int(registers[1]), int(stack[1]))
