"""Compiles for a device that this machine lacks. Everything happens except running.

A graph is traced and differentiated on the CPU, and then retargeted: its fake tensors become fake tensors of the
device. Inductor compiles it for a ``Machine`` that has properties and runs nothing. Triton compiles every
configuration of every kernel to machine code, if it has a compiler for the device.

Torch and Triton are patched meanwhile, inside a context. A device guard stays until the process ends, and other code
in the process would see the device. So this is used in a separate process (``features/target/explain.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.utils
import torch.utils._triton
from torch._dynamo import device_interface
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.select_algorithm import AlgorithmSelectorCache, ExternKernelCaller
from torch._subclasses import FakeTensor
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.utils.cpp_extension import include_paths, library_paths
from triton import knobs
from triton.backends.driver import DriverBase
from triton.runtime import driver

from ....codegen import inductor
from ....codegen.devices.patches import Patches
from ....codegen.emit.triton_kernels import TritonLauncher
from ....codegen.torch_versions import captures_loops
from ....errors import DeviceError
from ....graphs.devices.conditional_nodes import CUDA
from ....graphs.devices.runtime import DeviceRuntime, using_runtime
from ....host_graph.nodes import Kernel
from ....native_build import built_library
from .ahead import backward_at_once
from .machines import Machine

# Seconds that the compiler may take for a file of two lines.
_PATIENCE = 120


def cannot_run(*args: Any, **kwargs: Any) -> Any:
    """Raise: it stands in for functions that would run something on the device."""
    raise NotImplementedError("there is no device to run on")


# -- the device, as torch and Triton see it ------------------------------------------------------------------------


class AbsentDriver(DriverBase):
    """Triton's driver of the device, which loads kernels and runs none."""

    # ``launcher_cls(source, metadata)`` makes a function that launches a kernel.
    launcher_cls: Any = staticmethod(lambda source, metadata: cannot_run)

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @classmethod
    def is_active(cls) -> bool:
        return True

    @property
    def utils(self) -> Any:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        properties = self._machine.properties
        return {
            "max_shared_mem": properties.shared_memory_per_block_optin,
            "multiprocessor_count": properties.multi_processor_count,
            "warpSize": properties.warp_size,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """A loaded kernel: module, function, registers, spilled words, most threads of a block."""
        registers, spilled = resources(binary)
        return object(), object(), registers, spilled // 4, self._machine.properties.max_threads_per_block

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._machine.triton

    def get_active_torch_device(self) -> torch.device:
        return self._machine.device

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is compiled to C++")

    def get_benchmarker(self) -> Any:
        return cannot_run


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory (spilled registers), of a thread of a kernel.

    Raises:
        RuntimeError: the output of Triton's cuobjdump has another form.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = re.search(r"\bREG:(\d+) STACK:(\d+) .*\bLOCAL:(\d+)", usage)
    if numbers is None:
        raise RuntimeError(f"cuobjdump tells nothing of a kernel's registers: {usage}")
    registers, stack, local = map(int, numbers.groups())
    return registers, stack + local


def _interface(machine: Machine) -> type:
    """The device interface through which Dynamo and Inductor see the device."""
    cuda = machine.device.type == "cuda"
    capability = machine.properties.major * 10 + machine.properties.minor if cuda else machine.capability

    class Interface(device_interface.DeviceInterface):
        class Worker:
            set_device = staticmethod(lambda index: None)
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(lambda device=None: machine.properties)

        class device:  # type: ignore[assignment]
            def __init__(self, index: Any) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *raised: object) -> None:
                pass

        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        exchange_device = staticmethod(lambda device: 0)
        maybe_exchange_device = staticmethod(lambda device: 0)
        device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        get_raw_stream = staticmethod(lambda device_idx: 0)
        synchronize = staticmethod(lambda device=None: None)
        get_compute_capability = staticmethod(lambda device=None: capability)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        is_triton_capable = staticmethod(lambda device=None: True)

    return Interface


@functools.cache
def register_device_guard(device_type: str) -> None:
    """Register a device guard with torch that does nothing. It stays until the process ends.

    Raises:
        DeviceError: this build of torch lacks the device, and the guard cannot be compiled.
    """
    if device_type == "cuda" and torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return
    flags = ["-std=c++20", f"-DDEVICE={device_type.upper()}", *(f"-I{folder}" for folder in include_paths())]
    flags += [*(f"-L{folder}" for folder in library_paths()), "-lc10"]
    source = Path(__file__).with_name("device_guard.cpp")
    try:
        ctypes.CDLL(str(built_library("guard", source, flags, key=[torch.__version__], patience_s=_PATIENCE)))
    except (OSError, subprocess.SubprocessError) as error:
        messages = (getattr(error, "stderr", None) or "").strip().splitlines()
        raise DeviceError(
            f"no device guard for {device_type}, which this build of torch lacks",
            expected="a C++ compiler (CXX can name one) that finds torch's headers",
            got=f"{error}" + (f": {messages[0]}" if messages else ""),
            remedy=f"install one, or a build of torch for {device_type}, which needs no such device",
        ) from error


@contextlib.contextmanager
def present(machine: Machine) -> Iterator[None]:
    """Inside the context, Inductor compiles for a machine's device as if it were present."""
    register_device_guard(machine.device.type)
    device_interface.init_device_reg()
    kind = machine.device.type
    nodes = CUDA if kind == "cuda" and captures_loops() else None
    runtime = DeviceRuntime(machine.device, cannot_run, True, False, "none", conditional_nodes=nodes)
    module = torch.get_device_module(machine.device)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: machine.capability,
        "get_device_properties": lambda device=None: machine.properties,
        "is_tf32_supported": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=kind: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=kind: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    with Patches() as replaced:
        for name, answer in answers.items():
            replaced.put(module, name, answer)
        if kind == "cuda":  # without a version, parts of torch take the device for a ROCm device
            replaced.put(torch.version, "cuda", "12.8")
        for name in (kind, f"{kind}:0"):
            replaced.put_entry(device_interface.device_interfaces, name, _interface(machine))
        # The wrapper's module imports it, and a CPU build of torch does not have it.
        replaced.put(torch._C, f"_{kind}_getCurrentRawStream", lambda index: 0)
        replaced.put(triton_helpers, "set_driver_to_gpu", lambda: None)
        replaced.put(benchmarker, "benchmark", lambda *args, **kwargs: 1.0)
        replaced.put(AlgorithmSelectorCache, "do_autotuning", _prefer_templates)
        replaced.put(AlgorithmSelectorCache, "make_precompile_fn", lambda *args, **kwargs: dict)
        replaced.put(TritonScheduling, "benchmark_codegened_module", _one_millisecond)
        if machine.triton is None:
            replaced.put(torch.utils._triton, "triton_hash_with_backend", lambda: "no compiler")
            replaced.put(CachingAutotuner, "precompile", lambda *args, **kwargs: None)
        replaced.enter_context(config.patch(compile_threads=1, use_static_triton_launcher=False))
        replaced.enter_context(using_runtime(runtime))
        replaced.callback(_forget)
        _forget()
        yield


def _prefer_templates(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
    """Invented times for the choices of a matrix product: Triton's templates, in their order, before libraries."""
    choices = kwargs["choices"] if "choices" in kwargs else args[5]
    return {c: isinstance(c, ExternKernelCaller) + position * 1e-3 for position, c in enumerate(choices)}


def _one_millisecond(self: Any, module: Any, *args: Any, **kwargs: Any) -> tuple[float, str]:
    """An invented time, the same for every kernel, so that fusing pays."""
    return 1.0, module.__file__


_REMEMBERING = [
    function
    for module in (torch.utils._triton, torch._inductor.utils)
    for function in vars(module).values()
    if callable(getattr(function, "cache_clear", None))
]


def _forget() -> None:
    """Clear torch's caches of devices and their properties."""
    PyCodeCache.cache_clear()
    for function in (DeviceProperties.create, *_REMEMBERING):
        function.cache_clear()


# -- graphs --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def retargeted(machine: Machine, driver_type: type[AbsentDriver] = AbsentDriver) -> Iterator[None]:
    """Inside the context, fxwrap compiles graphs traced on the CPU for a machine's device, with their backward."""
    compile_on_cpu, options = inductor._compile_program, flex_attention._apply_kernel_options

    def compile_program(gm: GraphModule, inputs: Sequence[Any], *rest: Any) -> Any:
        moved = retarget(gm, inputs, machine.device)
        with present(machine):
            return compile_on_cpu(gm, moved, *rest)

    def differentiable(*args: Any, **kwargs: Any) -> Any:
        return {**options(*args, **kwargs), "OUTPUT_LOGSUMEXP": True}

    with (
        Patches() as replaced,
        backward_at_once(),
        # A program from a cache has no kernels to report, and constant folding would compute on absent tensors.
        torch._functorch.config.patch(enable_autograd_cache=False),
        config.patch(joint_graph_constant_folding=False, fx_graph_cache=False),
        # The CPU's own attention is an operator that no other device has.
        sdpa_kernel(SDPBackend.MATH),
    ):
        replaced.put(inductor, "_compile_program", compile_program)
        # Tracing a user's kernel asks Triton for its driver and for a device.
        replaced.put(driver, "_active", driver_type(machine))
        replaced.put(torch.utils._triton, "has_triton", lambda **_: True)
        replaced.put(torch.utils._triton, "has_triton_tensor_descriptor_host_tma", lambda: True)
        # On the CPU flex attention has no backward, and its forward saves nothing for it.
        replaced.put(flex_attention, "_validate_device", lambda *args: None)
        replaced.put(flex_attention, "_apply_kernel_options", differentiable)
        yield


def start_anew(target: str) -> None:
    """Give a process for a target a cache folder of its own, and reset Dynamo.

    The caches would hold configurations that were chosen by invented times.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache_dir(), "fxwrap-target", target.replace(":", "-"))
    torch._dynamo.reset()


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Inside the context, no other thread compiles.

    A fork in it copies no lock that another thread holds, which the child could never take.
    """
    with compile_lock, inductor.DEVICE_TABLES:
        yield


def retarget(gm: GraphModule, inputs: Sequence[Any], device: torch.device) -> list[Any]:
    """Move a graph of fake CPU tensors, with its subgraphs, to a device, in place.

    Returns:
        The inputs on the device.
    """
    moved: dict[int, tuple[Any, Any]] = {}

    def on_device(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device if value.type in ("cpu", "meta") else value
        if not isinstance(value, FakeTensor) or value.device.type not in ("cpu", "meta"):
            return value
        if id(value) not in moved:
            moved[id(value)] = value, _like(value, device)  # with ``value``, whose id must stay in use
        return moved[id(value)][1]

    def everywhere(value: Any) -> Any:
        return torch.utils._pytree.tree_map(on_device, value)

    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            node.args, node.kwargs = (
                torch.fx.node.map_aggregate(operands, on_device) for operands in (node.args, node.kwargs)
            )
            for key in ("val", "example_value", "eager_input_vals"):
                if key in node.meta:
                    node.meta[key] = everywhere(node.meta[key])
            node.meta.pop("tensor_meta", None)
        module.recompile()
    return [everywhere(value) for value in inputs]


def _like(value: FakeTensor, device: torch.device) -> torch.Tensor:
    """A fake tensor with the same layout on the device."""
    with value.fake_mode:
        offset = value.storage_offset()
        if isinstance(offset, int) and offset == 0:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        reach = 1 + sum((n - 1) * s for n, s in zip(value.size(), value.stride(), strict=True))
        whole = torch.empty((offset + reach,), dtype=value.dtype, device=device)
        return whole.as_strided(value.size(), value.stride(), offset)


# -- kernels -------------------------------------------------------------------------------------------------------


def machine_code(kernel: Kernel) -> list[dict[str, Any]]:
    """The machine code of a kernel: registers, and sizes in bytes, for each configuration that tuning would try."""
    if not isinstance(kernel.call, TritonLauncher):
        return []
    return [
        {
            "configuration": {**c.kwargs, "num_warps": c.num_warps, "num_stages": c.num_stages},
            "registers": result.kernel.n_regs,
            "spilled_bytes": 4 * result.kernel.n_spills,
            "shared_bytes": result.kernel.metadata.shared,
            "cubin_bytes": len(result.kernel.asm["cubin"]),
        }
        for result in kernel.call.tuner.compile_results
        for c in [result.config]
    ]
