"""Triton kernels in a file: on the CPU through Triton's interpreter, and for CUDA, saved without a GPU.

What a GPU would be given is compared with what Inductor's own launcher gives it, also through Triton's own driver, on
a library that stands for CUDA's. Processes of their own do that: a CPU build of torch gets a device guard for CUDA
that stays, and the process that loads has neither Inductor nor Dynamo.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import processes
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("numpy", reason="needs NumPy, with which Triton interprets")
pytest.importorskip("safetensors", reason="tensors are saved with it")

import triton
import triton.language as tl
from test_save_and_load import edited, signed

import fxwrap
from fxwrap.errors import StorageError
from fxwrap.features.ahead_of_time.codegen.stored_triton import grid_function
from fxwrap.features.ahead_of_time.contents import Contents

HERE = Path(__file__).stem
CACHE = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "cuda-target"
FORMS = ("object", "source")

SCALE = tl.constexpr(2)


@triton.jit
def scaled(x):  # type: ignore[no-untyped-def]
    return x * SCALE


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, scaled(x) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


tuned_kernel = triton.autotune([triton.Config({"BLOCK": size}) for size in (16, 64, 32)], key=[])(add_kernel)


class Mixed(nn.Module):
    """Kernels of Inductor's and of the user's, with a size that varies. No weights: nothing has to be on a device."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 16),)
        torch.library.wrap_triton(add_kernel)[grid](x, x, out, x.numel(), BLOCK=16, num_warps=8)
        return F.layer_norm(out * 2, (x.size(1),)).sum(0), F.gelu(x.t() + 1)

    @staticmethod
    def expected(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.layer_norm(x * 6, (x.size(1),)).sum(0), F.gelu(x.t() + 1)


class Tuned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)
        torch.library.wrap_triton(tuned_kernel)[grid](x, x, out, x.numel())
        return out


def new_process(code: str, **environment: str) -> str:
    """What a program prints in a new interpreter: those that are forked have imported Inductor."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def methods_of(rows: int, columns: int) -> dict[str, Any]:
    some = torch.export.Dim("some", min=2, max=20_000)
    return {"forward": (Mixed(), (torch.randn(rows, columns),), None, ({0: some},))}


# -- on the CPU, interpreted --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files by their form."""
    from triton_lane import triton_on_cpu

    folder = tmp_path_factory.mktemp("interpreted")
    with triton_on_cpu():
        return {form: fxwrap.save(folder / f"{form}.fxw", methods_of(5, 7), compile=form) for form in FORMS}


LOADED = """
import sys, torch, fxwrap
from triton_interpreter import interpreted_triton
from safetensors.torch import load_file

inputs = load_file({known!r})
with interpreted_triton("cpu") as launches:
    program = fxwrap.load({path!r}, trust=True)
    for step in range(3):
        for name in ("a", "b"):
            found = program.forward(inputs[name])
            for position, one in enumerate(found):
                torch.testing.assert_close(one, inputs[f"{{name}}{{position}}"], rtol=1e-5, atol=1e-5)
assert not {{"torch._inductor", "torch._dynamo"}} & sys.modules.keys()
print(sorted({{(launch.kernel, launch.options["num_warps"]) for launch in launches}}))
"""


@pytest.mark.parametrize("form", FORMS)
def test_another_process_needs_no_inductor_and_no_dynamo(
    form: str, interpreted: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    known = {name: torch.randn(rows, 7) for name, rows in (("a", 5), ("b", 9))}
    for name, x in list(known.items()):
        known |= {f"{name}{position}": one.contiguous() for position, one in enumerate(Mixed.expected(x))}
    save_file(known, tmp_path / "known")
    code = LOADED.format(path=str(interpreted[form]), known=str(tmp_path / "known"))
    launched = ast.literal_eval(new_process(code))
    assert ("add_kernel", 8) in launched and len(launched) >= 3


def test_what_an_interpreter_runs_is_source(interpreted: dict[str, Path]) -> None:
    """As Inductor wrote it; the configuration is said beside it."""
    for path in interpreted.values():
        contents = Contents.of(path)
        (method,) = contents.methods
        assert {kernel.language for kernel in method.kernels} == {"triton"}
        with zipfile.ZipFile(path) as file:
            for kernel in method.kernels:
                (member,) = kernel.members
                text = file.read(member).decode()
                assert "@triton.jit" in text and "triton_heuristics." in text and not kernel.target
                assert "num_warps" in kernel.configuration


def test_the_fastest_configuration_is_saved(tmp_path: Path) -> None:
    """It was never called: it is measured on zeros."""
    from triton_lane import triton_on_cpu

    x = torch.randn(5, 40)
    with triton_on_cpu(cost=lambda launch: launch.grid[0]) as launches:
        path = fxwrap.save(tmp_path / "tuned.fxw", {"forward": (Tuned(), (x,))})
        (kernel,) = Contents.of(path).methods[0].kernels
        assert "BLOCK 64" in kernel.configuration
        launches.clear()
        torch.testing.assert_close(fxwrap.load(path, trust=True).forward(x), x * 3)
        assert [launch.grid for launch in launches] == [(4, 1, 1)]


def in_kernels(**changes: Any) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    """Other data of every kernel, with its right digest."""

    def change(data: bytes) -> bytes:
        program = json.loads(data)
        for kernel in program["triton"].values():
            kernel.update(changes)
        return json.dumps(program).encode()

    return signed("programs/forward.json", change)


WRONG: dict[str, tuple[Callable[[dict[str, Any], dict[str, bytes]], None], str]] = {
    "a grid that calls": (in_kernels(grid=["__import__('os').getpid()", "1", "1"]), "a grid with"),
    "a grid of two": (in_kernels(grid=["1", "1"]), "three formulas"),
    "no source": (in_kernels(source="kernels/none.py"), "no member"),
    "another function": (in_kernels(function="nobody"), "a kernel that Triton loads"),
    "no parameters": (in_kernels(parameters=[]), "a grid with|cannot be loaded"),
    "constants that are none": (in_kernels(constants=7), "a kernel that Triton loads"),
    "source that is none": (signed("kernels/0.py", lambda data: b"def ("), "a kernel that Triton loads"),
    "source that does not compile": (
        signed("kernels/0.py", lambda data: data.replace(b"tl.load(", b"tl.nothing(")),
        "a kernel that Triton loads",
    ),
    "another device": (lambda manifest, _: manifest.update(devices=["abacus:0"]), "no device of the type abacus"),
    "devices that are none": (lambda manifest, _: manifest.update(devices=7), "fxwrap.save"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused(name: str, interpreted: dict[str, Path], tmp_path: Path) -> None:
    from triton_lane import triton_on_cpu

    edit, expected = WRONG[name]
    with triton_on_cpu() as launches, pytest.raises(StorageError, match=expected):
        fxwrap.load(edited(interpreted["source"], tmp_path / "wrong.fxw", edit), trust=True)
    assert not launches


def test_without_triton_or_its_driver(interpreted: dict[str, Path]) -> None:
    with pytest.raises(StorageError, match="a kernel that Triton loads on cpu"):
        fxwrap.load(interpreted["object"], trust=True)
    nothing = mock.patch("fxwrap.features.ahead_of_time.machine.triton_version", lambda: "")
    with nothing, pytest.raises(StorageError, match="no Triton here"):
        fxwrap.load(interpreted["object"], trust=True)


# -- grids --------------------------------------------------------------------------------------------------------

COMBO = {"num_kernels": 2, "default_config": None, "min_blocks": 8, "xnumel_0": None, "xnumel_1": 300}
COMBO |= {"no_x_dim_0": False, "no_x_dim_1": False}
BLOCKS = {"XBLOCK": 32, "YBLOCK": 4, "ZBLOCK": 2}
GRIDS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "Grid1D": ({}, BLOCKS),
    "Grid2D": ({}, BLOCKS),
    "Grid3D": ({}, BLOCKS),
    "BatchMatmulGrid3D": ({}, BLOCKS),
    "Grid2DWithYZOverflow": ({}, BLOCKS),
    "MixOrderReductionGrid": ({}, {"XBLOCK": 2, "RSPLIT_SIZE": 64}),
    "CooperativeReductionGrid": ({}, {"XBLOCK": 2, "RSPLIT": 16}),
    "SplitScanGrid": ({}, {"R0_BLOCK": 128}),
    "FixedGrid": ({"fixed_grid": ["_grid_0", "_grid_1", "_grid_2"]}, {}),
    "SequentialComboKernelGrid": ({"combo_grid_meta": COMBO}, BLOCKS),
    "SequentialFlattenComboKernelGrid": ({"combo_grid_meta": COMBO}, {"XBLOCK_0": 32, "XBLOCK_1": 8}),
    "RoundRobinComboKernelGrid": ({"combo_grid_meta": COMBO}, BLOCKS),
}
SIZES = [name + suffix for name in ("xnumel", "ynumel", "znumel", "r0_numel") for suffix in ("", "_0", "_1")]
PARAMETERS = [*SIZES, "_grid_0", "_grid_1", "_grid_2"]


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_what_inductor_computes(name: str) -> None:
    import random
    from types import SimpleNamespace

    from torch._inductor.runtime.triton_heuristics import GridExpr

    from fxwrap.features.ahead_of_time.codegen.export_triton import _grid

    meta, config = GRIDS[name]
    result: Any = SimpleNamespace(inductor_meta={"grid_type": name, **meta}, config=config)
    stored = grid_function(_grid(result, PARAMETERS), PARAMETERS)
    draw = random.Random(0)
    for most in (3, 1000, 10_000_000):
        for _ in range(20):
            sizes = {name: draw.randint(1, most) for name in PARAMETERS}
            theirs = GridExpr.from_meta(result.inductor_meta, config).eval_slow(sizes)
            assert stored(*sizes.values()) == theirs


@pytest.mark.parametrize(
    "formula",
    [
        "open('x')",
        "().__class__",
        "(lambda: 1)()",
        "[1][0]",
        "x ** 9",
        "1 << x",
        "1.5",
        "True",
        "'1'",
        "nobody",
        "max(x, key=x)",
        "(y := 1)",
        "[i for i in x]",
        "x and 1",
        "(",
    ],
)
def test_a_grid_is_arithmetic_and_nothing_else(formula: str) -> None:
    assert grid_function(["max(x, 1) // 2 if x == 3 else -(x % 5)", "1", "1"], ["x"])(3) == (1, 1, 1)
    with pytest.raises(StorageError, match="grid"):
        grid_function([formula, "1", "1"], ["x"])


# -- for CUDA, without a GPU --------------------------------------------------------------------------------------


def values_of(args: Sequence[Any]) -> list[Any]:
    """What a launch is tried with: a name for each tensor, a number for each size."""
    found: list[Any] = []
    for position, arg in enumerate(args):
        value = arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg
        if isinstance(value, torch.Tensor):
            found.append(f"pointer {position}")
        else:
            found.append(1000 + position if isinstance(arg, torch.fx.Node) else value)
    return found


class Recorded:
    """Stands for Triton's launcher of a kernel, and notes what it is given."""

    calls: list[Any]

    def __init__(self, source: Any, metadata: Any) -> None:
        self.metadata = metadata

    def __call__(self, *given: Any) -> None:
        x, y, z, stream, function, packed, _launch_metadata, _enter, _leave, *args = given
        assert function == self.metadata.name
        self.calls.append([self.metadata.name, [x, y, z], stream, list(packed), self.metadata.shared, args])


def save_for_cuda(folder: Path) -> None:
    """In a process of its own: files of both forms, and what Inductor's own launchers do."""
    import cuda_lane

    from fxwrap.features.ahead_of_time.codegen import export_triton

    calls, seen = [], []
    to_data = export_triton.triton_to_data

    def note(kernel: Any, args: Any) -> Any:
        found = to_data(kernel, args)
        Recorded.calls = []
        if kernel.name in seen:
            return found
        seen.append(kernel.name)
        driver = cuda_lane._Driver
        load = lambda self, name, binary, shared, device: (object(), name, 0, 0, 1024)
        with mock.patch.object(driver, "launcher_cls", Recorded), mock.patch.object(driver, "load_binary", load):
            tuner = kernel.call.tuner
            with torch._inductor.config.patch(use_static_triton_launcher=False):
                launcher = tuner._precompile_config(tuner.launchers[0].config).make_launcher()
            launcher(*values_of(args), stream=7)
        calls.extend(Recorded.calls)
        return found

    with mock.patch("fxwrap.features.ahead_of_time.save.triton_to_data", note):
        for form in FORMS:
            cuda_lane.save(folder / f"{form}.fxw", methods_of(512, 64), compile=form)
    cuda_lane.save(folder / "weights.fxw", {"forward": (nn.Linear(8, 8).eval(), (torch.randn(4, 8),))})
    (folder / "calls.json").write_text(json.dumps(calls))


@pytest.fixture(scope="module")
def for_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with files for an H100."""
    folder = tmp_path_factory.mktemp("cuda")
    code = f"from pathlib import Path; from {HERE} import *; save_for_cuda(Path({str(folder)!r}))"
    done = processes.run("-c", code, timeout=300, TORCHINDUCTOR_CACHE_DIR=str(CACHE))
    assert done.returncode == 0, done.stderr
    return folder


def test_every_kernel_has_source_and_machine_code(for_cuda: Path) -> None:
    for form in FORMS:
        (method,) = Contents.of(for_cuda / f"{form}.fxw").methods
        assert len(method.kernels) >= 3
        with zipfile.ZipFile(for_cuda / f"{form}.fxw") as file:
            for kernel in method.kernels:
                source, *binary = kernel.members
                assert "@triton.jit" in file.read(source).decode()
                assert (kernel.device, kernel.target != "") == ("cuda:0", form == "object")
                if form == "object":
                    assert kernel.target == "compute capability 9.0"
                    code = file.read(binary[0])
                    assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == 190  # EM_CUDA
                else:
                    assert not binary


def test_weights_are_saved_for_the_device_of_the_program(for_cuda: Path) -> None:
    with zipfile.ZipFile(for_cuda / "weights.fxw") as file:
        manifest = json.loads(file.read("manifest.json"))
    assert {tensor["device"] for tensor in manifest["tensors"].values()} == {"cuda:0"}
    assert manifest["devices"] == ["cuda:0"] and "weights.safetensors" in manifest["members"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_without_the_device_nothing_runs(for_cuda: Path) -> None:
    for form in FORMS:
        with (
            mock.patch("fxwrap.features.ahead_of_time.load.stored_launcher", side_effect=AssertionError),
            pytest.raises(StorageError, match="no cuda devices here") as raised,
        ):
            fxwrap.load(for_cuda / f"{form}.fxw", trust=True)
        assert "cuda:0" in str(raised.value.expected)
        assert ("compute capability 9.0" in str(raised.value.expected)) == (form == "object")


def launch_without_a_gpu(path: str, architecture: int) -> None:
    """In a process of its own, with a driver that launches nothing: load, and launch every kernel once."""
    import hashlib

    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    from fxwrap.host_graph.nodes import kernel_of

    loaded = []

    def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        loaded.append(hashlib.sha256(binary).hexdigest())
        return None, name, 0, 0, 1024

    class StandIn(DriverBase):
        launcher_cls = Recorded
        utils = mock.Mock(load_binary=load_binary, get_device_properties=lambda device: {"max_shared_mem": 1 << 18})
        is_active = classmethod(lambda cls: True)

        def __init__(self) -> None:
            """Nothing to look up."""

        get_current_device = get_current_stream = get_active_torch_device = lambda self, device=0: 7 * (device == 0)
        get_current_target = lambda self: GPUTarget("cuda", architecture, 32)
        map_python_to_cpp_type = get_benchmarker = lambda self, *args: None

    Recorded.calls = []
    driver.set_active(StandIn())
    found: dict[str, Any] = {"error": ""}
    with mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1):
        try:
            program = fxwrap.load(path, trust=True)
            nodes = program["forward"].program.plan.graph.graph.nodes
            for node in nodes:
                if (kernel := kernel_of(node)) is not None:
                    kernel.call(*values_of(node.args[1:]))
        except StorageError as error:
            found["error"] = str(error)
    there = [name for name in ("torch._inductor", "torch._dynamo") if name in sys.modules]
    print(json.dumps({**found, "calls": Recorded.calls, "loaded": loaded, "imported": there}))


def in_a_process(path: Path, architecture: int) -> Any:
    code = f"from {HERE} import launch_without_a_gpu; launch_without_a_gpu({str(path)!r}, {architecture})"
    return json.loads(new_process(code))


@pytest.mark.parametrize("form", FORMS)
def test_the_driver_gets_what_inductor_gives_it(form: str, for_cuda: Path) -> None:
    found = in_a_process(for_cuda / f"{form}.fxw", 90)
    assert not found["error"] and not found["imported"]
    calls = json.loads((for_cuda / "calls.json").read_text())
    assert found["calls"] == calls and len(calls) >= 3
    if form == "object":
        with zipfile.ZipFile(for_cuda / "object.fxw") as file:
            members = json.loads(file.read("manifest.json"))["members"]
        assert set(found["loaded"]) == {known["sha256"] for name, known in members.items() if name.endswith("cubin")}


def test_machine_code_is_for_one_architecture(for_cuda: Path, tmp_path: Path) -> None:
    """Both are named, and nothing is loaded; source is compiled for whatever is there."""

    def plant(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        manifest["triton"]["targets"]["cuda:0"] = ["cuda", 100, 32]

    found = in_a_process(edited(for_cuda / "object.fxw", tmp_path / "planted.fxw", plant), 90)
    assert "cuda:0 is compute capability 9.0" in found["error"] and "compute capability 10.0" in found["error"]
    assert 'compile="source"' in found["error"] and not found["loaded"]
    found = in_a_process(for_cuda / "source.fxw", 80)
    assert not found["error"] and found["loaded"]


def test_machine_code_is_for_one_triton(for_cuda: Path, tmp_path: Path) -> None:
    def plant(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        manifest["triton"]["version"] = "1.0.0"

    found = in_a_process(edited(for_cuda / "object.fxw", tmp_path / "planted.fxw", plant), 90)
    assert f"triton {triton.__version__} here" in found["error"] and "triton 1.0.0" in found["error"]
    assert not found["loaded"]


# -- through Triton's own driver for CUDA -------------------------------------------------------------------------

# What that driver links to, for a device that launches nothing: each launch becomes a line of text.
LIBCUDA = r"""
#include <cuda.h>
#include <stdio.h>
#include <string.h>

#define ANSWERS(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
static char said[4096];
static int loaded, arguments;

const char *said_by_the_last_launch(void) { return said; }
int kernels_loaded(void) { return loaded; }
void expect_arguments(int count) { arguments = count; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 12080; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  *value = what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
         : what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0 : 232448;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
ANSWERS(cuCtxSetCurrent, CUcontext context)
ANSWERS(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device)
ANSWERS(cuCtxSetLimit, CUlimit limit, size_t value)
ANSWERS(cuCtxGetLimit, size_t *value, CUlimit limit)
ANSWERS(cuFuncSetAttribute, CUfunction function, CUfunction_attribute what, int value)
ANSWERS(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
ANSWERS(cuPointerGetAttribute, void *data, CUpointer_attribute what, CUdeviceptr pointer)
ANSWERS(cuPointerGetAttributes, unsigned count, CUpointer_attribute *what, void **data, CUdeviceptr pointer)
ANSWERS(cuStreamIsCapturing, CUstream stream, CUstreamCaptureStatus *status)
ANSWERS(cuModuleUnload, CUmodule module)
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "an error"; return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute what, CUfunction function) {
  *value = what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (memcmp(image, "\x7f" "ELF", 4) || ((const unsigned char *)image)[18] != 190) return CUDA_ERROR_INVALID_IMAGE;
  loaded++;
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **values, void **extra) {
  char *end = said;
  end += sprintf(end, "%s %u %u %u %u %u %lu", (char *)function, config->gridDimX, config->gridDimY, config->gridDimZ,
                 config->blockDimX, config->sharedMemBytes, (unsigned long)config->hStream);
  for (int i = 0; i < arguments; i++) end += sprintf(end, " %u", *(unsigned *)values[i]);
  return CUDA_SUCCESS;
}
"""


def launch_through_the_driver(path: str, library: str) -> None:
    """In a process of its own: load, and launch every kernel once, with numbers for addresses."""
    import ctypes
    import types

    from fxwrap.host_graph.nodes import kernel_of

    stub = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # found again by its name
    stub.said_by_the_last_launch.restype = ctypes.c_char_p
    device = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "current_stream": lambda device=None: types.SimpleNamespace(cuda_stream=7),
    }
    said = []
    with (
        mock.patch.multiple(torch.cuda, **device),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, create=True),
        mock.patch.object(torch.version, "hip", None),
    ):
        program = fxwrap.load(path, trust=True)
        for node in program["forward"].program.plan.graph.graph.nodes:
            if (kernel := kernel_of(node)) is not None:
                values = list(map(number_of, values_of(node.args[1:])))
                stub.expect_arguments(argument_counts(path)[kernel.name])
                kernel.call(*values)
                said.append(stub.said_by_the_last_launch().decode())
    assert not {"torch._inductor", "torch._dynamo"} & sys.modules.keys()
    print(json.dumps([said, stub.kernels_loaded()]))


def number_of(value: Any) -> Any:
    return 4096 + 16 * int(value.split()[1]) if isinstance(value, str) else value


def stored_kernels(path: str | Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as file:
        found: dict[str, Any] = json.loads(file.read("programs/forward.json"))["triton"]
        return found


def argument_counts(path: str) -> dict[str, int]:
    """How many arguments the machine code of each kernel takes, without scratch memory."""
    return {
        name: sum(kind != "constexpr" for _, kind in known["signature"])
        for name, known in stored_kernels(path).items()
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is there")
def test_tritons_own_driver_launches_what_was_saved(for_cuda: Path, tmp_path: Path) -> None:
    """Machine code, grid, threads, shared memory, stream and arguments arrive where CUDA would launch."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library, path = tmp_path / "libcuda.so.1", for_cuda / "object.fxw"
    command = [compiler, "-shared", "-fPIC", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1", "-x", "c", "-"]
    subprocess.run([*command, "-o", str(library)], input=LIBCUDA, text=True, check=True)
    code = f"from {HERE} import launch_through_the_driver as f; f({str(path)!r}, {str(library)!r})"
    there = {"TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    said, loaded = json.loads(new_process(code, **there))
    signatures = [[kind for _, kind in known["signature"]] for known in stored_kernels(path).values()]
    expected = []
    for (name, grid, stream, (warps, *_), shared, args), kinds in zip(
        json.loads((for_cuda / "calls.json").read_text()), signatures, strict=True
    ):
        given = [number_of(value) for value, kind in zip(args, kinds, strict=True) if kind != "constexpr"]
        expected.append(" ".join(map(str, [name, *grid, 32 * warps, shared, stream, *given])))
    assert said == expected and loaded == len(expected)
