"""CUDA without a GPU: a sample of benchmarks/cuda_target.py, and faults that its checks have to find.

Whatever compiles for CUDA runs in a process of its own: a CPU build of torch gets a device guard there that stays.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import processes
import pytest

pytest.importorskip("triton")

import torch
from cuda_lane import DEVICE, CheckedLauncher, WrongLaunch, check_binary, stored_arguments
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node

from fxwrap.codegen.emit.emission import FxwrapCodegen
from fxwrap.host_graph.nodes import kernel_of, reinterpret

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parents[2] / "benchmarks" / "cuda_target.py"
CACHE = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "cuda-target"


def sweep(tmp_path: Path, *arguments: str, timeout: float) -> dict[str, dict[str, Any]]:
    """Run the script; what it found, by name."""
    results = tmp_path / "results.jsonl"
    cached = ("--cache", str(CACHE))
    done = processes.run(str(SCRIPT), "--results", str(results), *cached, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return {found["name"]: found for found in map(json.loads, results.read_text().splitlines())}


SAMPLE = {
    "vit, inference": set(),
    "resnet, training": set(),
    "mix-order reduction": {"workspace"},
    "cooperative reduction": {"cooperative", "semaphores"},
    "persistent TMA matmul": {"template", "descriptor", "scratch memory"},
    "decomposed k": set(),
    "user's kernel, autotuned": {"user's", "several configurations"},
}


def test_a_sample(tmp_path: Path) -> None:
    found = sweep(tmp_path, "--only", f"^({'|'.join(SAMPLE)})$", timeout=300)
    assert found.keys() == SAMPLE.keys()
    for name, constructs in SAMPLE.items():
        one = found[name]
        assert constructs <= set(one["constructs"]), name
        assert one["cubins"] >= one["kernels"] > 0 and one["checked"] >= one["launches"] > 0, name
        assert one["stored"] == one["kernels"] and not one["not_stored"], name
        assert one["captured"] and one["plans"] and one["arena"] >= one["lower_bound"] > 0, name
    assert found["resnet, training"]["phases"] == ["forward", "backward"]


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_all_of_it(tmp_path: Path) -> None:
    from cuda_constructs import CASES

    assert sweep(tmp_path, timeout=3500).keys() == CASES.keys()


def test_a_failure_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("cuda_target_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(script)
    failed = {"name": "foreach", "seconds": 1.0, "failure": "WrongLaunch: no\nsuch argument"}
    monkeypatch.setattr(script, "outcomes", lambda *_: iter([failed]))
    assert script.main(["--only", "^foreach$"]) == 1
    assert "| foreach | **failed**: WrongLaunch: no such argument |" in capsys.readouterr().out


# -- faults in host graphs -----------------------------------------------------------------------------------------


class Planted(FxwrapCodegen):
    """Spoils the last launch of a graph."""

    spoil: Callable[[Node], None]

    def passes(self) -> Iterable[Callable[[GraphModule], None]]:
        def spoil_last(gm: GraphModule) -> None:
            type(self).spoil([node for node in gm.graph.nodes if kernel_of(node) is not None][-1])
            gm.recompile()

        return [spoil_last]


def _replaced(launch: Node, target: Callable[..., Any], *rest: Any) -> None:
    """Put a view where the launch takes its first tensor."""
    tensor = launch.args[1]
    assert isinstance(tensor, Node)
    with launch.graph.inserting_before(launch):
        view = launch.graph.call_function(target, (tensor, *rest))
    with tensor.meta["val"].fake_mode:
        view.meta["val"] = target(tensor.meta["val"], *rest)
    launch.update_arg(1, view)


def swap(launch: Node) -> None:
    handle, first, second, *others = launch.args
    launch.args = (handle, second, first, *others)


def leave_out(launch: Node) -> None:
    launch.args = launch.args[:-1]


def add_one(launch: Node) -> None:
    launch.args = (*launch.args, 1)


def another_type(launch: Node) -> None:
    _replaced(launch, torch.ops.aten.view.dtype, torch.int32)


def shift(launch: Node) -> None:
    _replaced(launch, reinterpret, (100,), (1,), 1)


def too_many(launch: Node) -> None:
    launch.args = (*launch.args[:-1], 2**31)


def write_in_secret(launch: Node) -> None:
    kernel = kernel_of(launch)
    assert kernel is not None
    kernel.writes = ()


FAULTS = {
    swap: "argument 0, in_ptr0: *fp32, got a tensor of torch.int64",
    leave_out: "missing 1 required positional argument",
    add_one: "multiple values for argument 'stream'",
    another_type: "got a tensor of torch.int32",
    shift: "got a tensor 4 bytes into its storage, compiled for multiples of 16",
    too_many: "xnumel: i32, got 2147483648",
    write_in_secret: "nothing writes buf0 before",  # the verifier finds it before anything is launched
}


def _spoiled(fault: Callable[[Node], None]) -> str:
    """In a process of its own: what is said of a program with a fault; empty if nothing is."""
    from cuda_lane import Case, examine

    codegen = type("Spoiled", (Planted,), {"spoil": staticmethod(fault)})
    make = lambda: ((lambda x, y: x.sin() + y), (torch.randn(1024), torch.arange(1024)), {})
    torch._dynamo.reset()
    try:
        examine(Case(make, inductor={"codegen": codegen}))
    except Exception as error:
        return str(error)
    return ""


def _traces_left() -> list[str]:
    """In a process of its own: what is not as it was after something was compiled for the device."""
    from cuda_constructs import CASES
    from cuda_lane import examine
    from torch._dynamo import device_interface
    from torch._inductor import config
    from triton.runtime import driver

    def state() -> dict[str, Any]:
        return {
            **{f"torch.cuda.{name}": value for name, value in vars(torch.cuda).items() if callable(value)},
            "torch.version.cuda": torch.version.cuda,
            "has_triton": torch.utils._triton.has_triton(),
            "driver": driver._active,
            "interfaces": dict(device_interface.device_interfaces),
            "inductor": config.get_config_copy(),
        }

    device_interface.init_device_reg()
    before = state()
    examine(CASES["foreach"])
    return [name for name, value in state().items() if before.get(name) != value]


def in_a_process(expression: str) -> Any:
    """What an expression over this module's names is there."""
    here = Path(__file__).stem
    program = f"import json; from {here} import *; from {here} import _spoiled, _traces_left"
    code = f"{program}; print(json.dumps({expression}))"
    done = processes.run("-c", code, timeout=300, TORCHINDUCTOR_CACHE_DIR=str(CACHE))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_faults_in_launches_are_found() -> None:
    said = in_a_process("{'none': _spoiled(lambda launch: None), **{f.__name__: _spoiled(f) for f in FAULTS}}")
    assert said["none"] == ""
    for fault, expected in FAULTS.items():
        assert expected in said[fault.__name__], fault.__name__


def test_nothing_is_left_behind() -> None:
    assert in_a_process("_traces_left()") == []


# -- the checks by themselves --------------------------------------------------------------------------------------


def launcher(**signature: str) -> CheckedLauncher:
    source = types.SimpleNamespace(signature=signature, constants={(2,): 8}, attrs={(0,): [["tt.divisibility", 16]]})
    return CheckedLauncher(source, types.SimpleNamespace(name="kernel"))


def tensor(dtype: torch.dtype = torch.float32, device: Any = DEVICE, offset: int = 0) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(64, dtype=dtype, device=device).as_strided((32,), (1,), offset)


GRID = (1, 1, 1)


@pytest.mark.parametrize(
    ("grid", "arguments", "said"),
    [
        (GRID, (tensor(), 64, 8), ""),
        (GRID, (tensor(offset=4), -(2**31), 8), ""),
        ((2**31 - 1, 65535, 0), (tensor(), 64, 8), ""),
        ((1, 65536, 1), (tensor(), 64, 8), "65536 blocks on axis 1"),
        ((1.0, 1, 1), (tensor(), 64, 8), "1.0 blocks on axis 0"),
        (GRID, (tensor(), 64), "takes 3 arguments, got 2"),
        (GRID, (64, 64, 8), "argument 0, pointer: *fp32, got 64"),
        (GRID, (tensor(torch.int32), 64, 8), "a tensor of torch.int32"),
        (GRID, (tensor(device="cpu"), 64, 8), "a tensor on cpu"),
        (GRID, (tensor(offset=1), 64, 8), "4 bytes into its storage"),
        (GRID, (tensor(), tensor(), 8), "argument 1, count: i32"),
        (GRID, (tensor(), 1.5, 8), "count: i32, got 1.5"),
        (GRID, (tensor(), 2**31, 8), "count: i32, got 2147483648"),
        (GRID, (tensor(), 64, 16), "constant: constexpr, got 16, compiled for 8"),
    ],
)
def test_what_a_launcher_refuses(grid: tuple[Any, ...], arguments: tuple[Any, ...], said: str) -> None:
    launch = launcher(pointer="*fp32", count="i32", constant="constexpr")
    try:
        launch(*grid, 0, None, None, None, None, None, *arguments)
    except WrongLaunch as error:
        assert said and said in str(error)
    else:
        assert not said


TTIR = """module {
  tt.func public @kernel(%source: !tt.ptr<f32> loc("source"), %target: !tt.ptr<f32> loc("target"), %n: i32) {
    %base:2 = scf.for %i = %zero to %n step %one iter_args(%moved = %target, %from = %source) -> (tt.ptr, tt.ptr) {
      %at = tt.addptr %STORED, %i : !tt.ptr<f32>, i32 loc(#loc1)
      %value = tt.load %from : !tt.ptr<f32> loc(#loc2)
      tt.store %at, %value : !tt.ptr<f32> loc(#loc3)
    }
    tt.return loc(#loc4)
  }
}
"""


def test_stores_are_followed_to_arguments() -> None:
    assert stored_arguments(TTIR.replace("%STORED", "%moved")) == {"target"}
    assert stored_arguments(TTIR.replace("%STORED", "%from")) == {"source"}
    with pytest.raises(WrongLaunch, match="not known where"):
        stored_arguments(TTIR.replace("%STORED", "%value"))


def test_what_is_no_cubin_for_the_target_is_refused() -> None:
    ptx = ".target sm_90a\n.visible .entry kernel(\n\t.param .u64 .ptr .global .align 1 kernel_param_0,\n"
    ptx += "\t.param .u32 kernel_param_1,\n\t.param .u64 kernel_param_2,\n\t.param .u64 kernel_param_3\n)"
    cubin = b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little")

    def compiled(**changed: Any) -> Any:
        made = {"cubin": cubin, "ptx": ptx, "signature": {"a": "*fp32", "n": "i32", "B": "constexpr"}, **changed}
        source = types.SimpleNamespace(signature=made["signature"])
        return types.SimpleNamespace(name="kernel", src=source, asm=made)

    check_binary(compiled())
    faults: list[tuple[dict[str, Any], str]] = [
        ({"cubin": b"\x7fELF" + bytes(16)}, "is no cubin"),
        ({"ptx": ptx.replace("sm_90a", "sm_80")}, "something else than sm_90"),
        ({"ptx": ptx.replace("entry kernel", "entry other")}, "not in its own"),
        ({"signature": {"a": "*fp32", "n": "i64"}}, "its signature says"),
        ({"signature": {"a": "*fp32"}}, "its signature says"),
    ]
    for changed, said in faults:
        with pytest.raises(WrongLaunch, match=said):
            check_binary(compiled(**changed))
