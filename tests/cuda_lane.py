"""What Inductor and fxwrap make for a CUDA device, on a machine without one: everything but running it.

A graph is traced and differentiated on the CPU, and then retargeted: its fake tensors become fake CUDA tensors, and
Inductor compiles it for an H100 that answers questions and does nothing. Kernels are compiled to cubins for sm_90; in
the place of the driver's launcher stands one that compares what it is given with what the cubin takes.

Kernels and graphs are made as on the machine that is described here. What only a GPU can tell is made up: how long a
configuration takes, and how many registers a kernel has.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import json
import os
import re
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.utils
import torch.utils._triton
from torch._dynamo import device_interface
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.select_algorithm import AlgorithmSelectorCache, ExternKernelCaller
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.cpp_extension import include_paths, library_paths
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

import fxwrap
from fxwrap.backend import fxwrap as backend_of_fxwrap
from fxwrap.codegen import export_triton, inductor
from fxwrap.codegen.stored_triton import stored_launcher
from fxwrap.codegen.triton_kernels import TritonLauncher
from fxwrap.compilation import Compilation
from fxwrap.errors import StorageError
from fxwrap.graphs.devices.runtime import DeviceRuntime, using_runtime
from fxwrap.graphs.memory_provider import Saved
from fxwrap.host_graph.nodes import Kernel, Kind, kernel_of, kind_of
from fxwrap.passes.analysis.sizes import hint
from fxwrap.plan import MemoryPlan, Verdict

TARGET = GPUTarget("cuda", 90, 32)
DEVICE = torch.device("cuda", 0)
# An H100 SXM, as its driver describes it.
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)


class WrongLaunch(AssertionError):
    """A launch that does not fit the kernel it launches."""


# -- launches ------------------------------------------------------------------------------------------------------

_POINTERS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint64: "u64", torch.uint32: "u32", torch.uint16: "u16", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
_PTX_TYPES = {
    "i1": 8,
    "i8": 8,
    "u8": 8,
    "i16": 16,
    "u16": 16,
    "i32": 32,
    "u32": 32,
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
}
# What the driver takes at most, by axis.
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)


class CheckedLauncher:
    """Stands where Triton's launcher of a compiled kernel does: takes what it takes, and checks it."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.kernel = metadata.name
        self.types: dict[str, Any] = dict(src.signature)
        names = list(self.types)
        position = lambda key: names.index(key) if isinstance(key, str) else key[0]
        self.constants = {position(key): value for key, value in src.constants.items()}
        # What the compiler took for granted: addresses and numbers that are multiples of 16.
        self.divisible = {
            key[0]: value for key, attributes in src.attrs.items() for name, value in attributes
            if name == "tt.divisibility"
        }  # fmt: skip

    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *args: Any) -> None:
        _packed, _metadata, _enter, _exit, *arguments = args
        for axis, (blocks, most) in enumerate(zip((x, y, z), _MOST_BLOCKS, strict=True)):
            if not isinstance(blocks, int) or not 0 <= blocks <= most:
                raise WrongLaunch(f"{self.kernel}: the grid has {blocks} blocks on axis {axis}")
        if len(arguments) != len(self.types):
            raise WrongLaunch(f"{self.kernel} takes {len(self.types)} arguments, got {len(arguments)}")
        for position, ((name, kind), value) in enumerate(zip(self.types.items(), arguments, strict=True)):
            wrong = self._wrong(position, str(kind), value)
            if wrong:
                raise WrongLaunch(f"{self.kernel}: argument {position}, {name}: {kind}, got {wrong}")

    def _wrong(self, position: int, kind: str, value: Any) -> str:
        """What an argument is, if it is not what the kernel takes; else empty."""
        if kind == "constexpr":
            known = self.constants.get(position)
            differs = isinstance(known, (int, float)) and isinstance(value, (int, float)) and known != value
            return f"{value!r}, compiled for {known!r}" if differs else ""
        if kind.startswith("*"):
            return self._wrong_tensor(position, kind[1:].removeprefix("k"), value)
        if kind.startswith("tensordesc"):
            return _wrong_descriptor(kind, value)
        if kind.startswith(("fp", "bf")):
            return "" if isinstance(value, (int, float)) else repr(value)
        if isinstance(value, bool) and kind in ("i1", "u1"):
            return ""
        bits = int(kind[1:])
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if kind[0] == "i" else (0, 2**bits)
        if not isinstance(value, int) or not low <= value < high:
            return repr(value)
        return (
            f"{value}, compiled for multiples of {self.divisible[position]}" if self._uneven(position, value) else ""
        )

    def _wrong_tensor(self, position: int, dtype: str, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        if value.device != DEVICE:
            return f"a tensor on {value.device}"
        if _POINTERS.get(value.dtype) != dtype:
            return f"a tensor of {value.dtype}"
        offset = value.storage_offset() * value.element_size()
        # Storages begin at multiples of more than that: planned ones, and those of the caching allocator.
        return f"a tensor {offset} bytes into its storage, compiled for multiples of {self.divisible[position]}" if (
            self._uneven(position, offset)
        ) else ""  # fmt: skip

    def _uneven(self, position: int, number: int) -> bool:
        return bool(number % self.divisible.get(position, 1))


def _wrong_descriptor(kind: str, value: Any) -> str:
    found = re.match(r"tensordesc<(\w+)\[([\d, ]*)\]", kind)
    if not isinstance(value, TensorDescriptor) or found is None:
        return repr(value)
    block = [int(size) for size in found[2].split(",")]
    if _POINTERS.get(value.base.dtype) != found[1] or list(value.block_shape) != block:
        return f"a descriptor of {value.base.dtype}, {value.block_shape}"
    return ""


def check_binary(kernel: Any) -> None:
    """Compare a compiled kernel's machine code with what its signature says: target, name, parameters.

    Raises:
        WrongLaunch: they differ.
    """
    cubin, ptx = kernel.asm["cubin"], kernel.asm["ptx"]
    if cubin[:4] != b"\x7fELF" or int.from_bytes(cubin[18:20], "little") != 190:  # EM_CUDA
        raise WrongLaunch(f"{kernel.name} is no cubin")
    if not re.search(rf"^\.target sm_{TARGET.arch}", ptx, re.MULTILINE):
        raise WrongLaunch(f"{kernel.name} was compiled for something else than sm_{TARGET.arch}")
    entry = re.search(rf"\.entry {re.escape(kernel.name)}\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise WrongLaunch(f"{kernel.name} is not in its own machine code")
    taken = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)", entry[1])
    kinds = [str(kind) for kind in kernel.src.signature.values() if kind != "constexpr"]
    if any(kind.startswith("tensordesc") for kind in kinds):
        return  # each stands for several parameters
    # Two pointers to scratch memory come last, in every kernel.
    expected = [str(_PTX_TYPES.get(kind, 64)) for kind in kinds] + ["64", "64"]
    if taken != expected:
        raise WrongLaunch(f"{kernel.name} takes parameters of {taken} bits, its signature says {expected}")


_STORES = ("tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store", "tt.descriptor_reduce")
# What has no address for a result, whatever its operands are.
_VALUES = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather", *_STORES)
_OPERATION = re.compile(r"\s*(?:(%\w+)(?::\d+)?(?:, %\w+)* = )?\"?([a-z_]+\.[a-z_.]+)(.*?)(?: loc\(|$)")


def stored_arguments(ttir: str) -> set[str]:
    """Names of the arguments whose memory a kernel writes, read from Triton's own form of it.

    Every address is followed from the argument that it was computed from to the store.

    Raises:
        WrongLaunch: there is a store of which nothing tells where it goes.
    """
    head, body = re.split(r"tt\.func public @\w+\(", ttir)[1].split("\n", 1)
    behind = {name: {name[1:]} for name in re.findall(r"(%\w+): !tt\.(?:ptr|tensordesc)<", head)}
    stored: set[str] = set()
    for line in body.splitlines():
        found = _OPERATION.match(line)
        if found is None:
            continue
        result, operation, rest = found.groups()
        operands = re.findall(r"%\w+", rest)
        if operation in _STORES:
            if not behind.get(operands[0]):
                raise WrongLaunch(f"it is not known where a store goes: {line.strip()}")
            stored |= behind[operands[0]]
        # Names inside of a loop, for what comes from outside of it at first.
        for inside, outside in re.findall(r"(%\w+) = (%\w+)", rest):
            behind[inside] = behind.get(outside, set())
        if result is not None:
            addresses = operation not in _VALUES
            behind[result] = set().union(*(behind.get(name, set()) for name in operands)) if addresses else set()
    return stored


def _cannot_run(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("there is no device to run on")


class _Driver(DriverBase):
    """An H100, as Triton sees it, that loads kernels and runs none."""

    launcher_cls = CheckedLauncher

    def __init__(self) -> None:
        """Nothing to look up."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    @property
    def utils(self) -> Any:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
            "multiprocessor_count": PROPERTIES.multi_processor_count,
            "warpSize": PROPERTIES.warp_size,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        module, function, registers, spills = object(), object(), 0, 0
        return module, function, registers, spills, PROPERTIES.max_threads_per_block

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is compiled to C++")

    def get_benchmarker(self) -> Any:
        return _cannot_run


# -- the device ----------------------------------------------------------------------------------------------------


class Interface(device_interface.DeviceInterface):
    """An H100, as Dynamo and Inductor see it."""

    class Worker:
        set_device = staticmethod(lambda index: None)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: PROPERTIES)

    class device:
        def __init__(self, index: Any) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *raised: object) -> None:
            pass

    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda index: None)
    exchange_device = staticmethod(lambda index: 0)
    maybe_exchange_device = staticmethod(lambda index: 0)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    get_raw_stream = staticmethod(lambda index: 0)
    synchronize = staticmethod(lambda device=None: None)
    get_compute_capability = staticmethod(lambda device=None: TARGET.arch)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    is_triton_capable = staticmethod(lambda device=None: True)


# What is decided for a device whose graphs freeze addresses; nothing is captured.
RUNTIME = DeviceRuntime(DEVICE, _cannot_run, frozen_addresses=True, runs_while_capturing=False, implementation="none")


# What a CUDA build of torch does without a GPU (``_ensureCUDADeviceGuardSet``). A CPU build has no guard for CUDA:
# operators that switch devices raise there, and abort the process where nobody catches.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


@functools.cache
def register_device_guard() -> None:
    """Give torch a guard for CUDA devices that does nothing. It stays until the process ends."""
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return
    key = hashlib.sha256(f"{torch.__version__}{_GUARD}".encode()).hexdigest()[:16]
    path = Path(cache_dir()) / f"cuda-guard-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            includes = [f"-I{directory}" for directory in include_paths()]
            libraries = [f"-L{directory}" for directory in library_paths()]
            command = [get_cpp_compiler(), "-std=c++20", "-shared", "-fPIC", *includes, "-x", "c++", "-"]
            subprocess.run([*command, "-o", str(made), *libraries, "-lc10"], input=_GUARD, text=True, check=True)
            os.replace(made, path)
    ctypes.CDLL(str(path))


@contextlib.contextmanager
def cuda_target() -> Iterator[None]:
    """Have Inductor compile for ``DEVICE`` as if it were there, inside of the context only."""
    register_device_guard()
    device_interface.init_device_reg()
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: PROPERTIES,
        "is_tf32_supported": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        # Without one, some places take the device for a ROCm one.
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        interfaces = {"cuda": Interface, "cuda:0": Interface}
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, interfaces))
        # The wrapper's module imports it, and a CPU build of torch does not have it.
        stream = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True)
        stack.enter_context(stream)
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(mock.patch.object(benchmarker, "benchmark", lambda *args, **kwargs: 1.0))
        choose = mock.patch.object(AlgorithmSelectorCache, "do_autotuning", _prefer_templates)
        stack.enter_context(choose)
        fused = mock.patch.object(TritonScheduling, "benchmark_codegened_module", _one_millisecond)
        stack.enter_context(fused)
        no_op = mock.patch.object(AlgorithmSelectorCache, "make_precompile_fn", lambda *args, **kwargs: dict)
        stack.enter_context(no_op)
        stack.enter_context(config.patch(compile_threads=1, use_static_triton_launcher=False))
        stack.enter_context(using_runtime(RUNTIME))
        stack.callback(_forget)
        _forget()
        yield


def _prefer_templates(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
    """Times of the choices for a matrix product, made up: Triton's templates, in their order, before libraries."""
    choices = kwargs["choices"] if "choices" in kwargs else args[5]
    return {c: isinstance(c, ExternKernelCaller) + position * 1e-3 for position, c in enumerate(choices)}


def _one_millisecond(self: Any, module: Any, *args: Any, **kwargs: Any) -> tuple[float, str]:
    """What a kernel takes, fused or not, made up: so fusing pays."""
    return 1.0, module.__file__


def _forget() -> None:
    """Drop what torch remembers of devices."""
    PyCodeCache.cache_clear()
    DeviceProperties.create.cache_clear()
    for module in (torch.utils._triton, torch._inductor.utils):
        for function in vars(module).values():
            if callable(getattr(function, "cache_clear", None)):
                function.cache_clear()


def retarget(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Move a graph of fake CPU tensors to ``DEVICE``, subgraphs too, in place; returns its inputs there."""
    moved: dict[int, tuple[Any, Any]] = {}

    def on_device(value: Any) -> Any:
        if isinstance(value, torch.device):
            return DEVICE if value.type == "cpu" else value
        if not isinstance(value, FakeTensor) or value.device.type != "cpu":
            return value
        if id(value) not in moved:
            moved[id(value)] = value, _like(value)  # held, so that no other gets its id
        return moved[id(value)][1]

    def everywhere(value: Any) -> Any:
        return torch.utils._pytree.tree_map(on_device, value)

    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            node.args, node.kwargs = (
                torch.fx.node.map_aggregate(given, on_device) for given in (node.args, node.kwargs)
            )
            for key in ("val", "example_value", "eager_input_vals"):
                if key in node.meta:
                    node.meta[key] = everywhere(node.meta[key])
            node.meta.pop("tensor_meta", None)
        module.recompile()
    return [everywhere(value) for value in inputs]


def _like(value: FakeTensor) -> torch.Tensor:
    """A fake tensor with the same layout on the device."""
    with value.fake_mode:
        offset = value.storage_offset()
        if isinstance(offset, int) and offset == 0:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=DEVICE)
        reach = 1 + sum((n - 1) * s for n, s in zip(value.size(), value.stride(), strict=True))
        whole = torch.empty((offset + reach,), dtype=value.dtype, device=DEVICE)
        return whole.as_strided(value.size(), value.stride(), offset)


class _Compiled(Exception):
    """Ends the call that had something compiled: there is nothing to run it on."""


# -- one compilation -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Something to compile.

    Attributes:
        make: makes a function, or a module, and what it is called with.
        training: differentiate it, and compile forward and backward.
        constructs: names (see ``constructs_of``) that have to be in the kernels, or there is nothing to see.
        inductor: Inductor's settings while it is compiled.
        dynamic: with sizes that may vary.
        around: a context to compile in.
    """

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    training: bool = False
    constructs: frozenset[str] = frozenset()
    inductor: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass
class Outcome:
    """What came out of compiling a case, over all of its graphs.

    Attributes:
        phases: "inference", or "forward" and "backward", for each graph.
        cubins: machine code, one for each configuration of each kernel.
        checked: launches of one configuration whose arguments were compared with it.
        stored: kernels that were launched again from what a saved program holds of them.
        not_stored: why others were not.
        arena: bytes of the largest arena that was planned.
        lower_bound: bytes that any plan for it would have.
    """

    phases: list[str] = field(default_factory=list)
    nodes: int = 0
    launches: int = 0
    externs: int = 0
    kernels: int = 0
    cubins: int = 0
    checked: int = 0
    stored: int = 0
    captured: int = 0
    eager: int = 0
    plans: int = 0
    arena: int = 0
    lower_bound: int = 0
    constructs: set[str] = field(default_factory=set)
    eager_reasons: list[str] = field(default_factory=list)
    not_stored: list[str] = field(default_factory=list)


def examine(case: Case) -> Outcome:
    """Compile a case for ``DEVICE`` and check all that comes out.

    Raises:
        FxwrapError: a graph could not be emitted, or a schedule or a plan was refused.
        WrongLaunch: a launch does not fit its kernel.
        AssertionError: a construct that the case is about did not occur.
    """
    torch.manual_seed(0)
    with torch.set_grad_enabled(case.training):
        function, args, kwargs = case.make()
    compilation, outcome = Compilation(), Outcome()

    def compile_program(gm: GraphModule, inputs: Sequence[Any], *rest: Any) -> Any:
        moved = retarget(gm, inputs)
        with cuda_target():
            compiled = compile_on_cpu(gm, moved, *rest)
            check_program(compilation.programs[-1], outcome)
            return compiled

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = {"strict": True, "capture": "always", **case.inductor}
        backend_of_fxwrap(gm, inputs, compilation=compilation, options=options)
        return stop

    def stop(*args: Any) -> Any:
        raise _Compiled

    compile_on_cpu = inductor._compile_program
    with (
        mock.patch.object(inductor, "_compile_program", compile_program),
        # What a cache holds has no fake tensors to launch with.
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        # Folding would compute on tensors that are not there.
        config.patch(joint_graph_constant_folding=False, fx_graph_cache=False),
        # The CPU's own attention is an operator that no other device has.
        sdpa_kernel(SDPBackend.MATH),
        # Tracing a kernel that the user wrote asks the driver, too.
        mock.patch.object(driver, "_active", _Driver()),
        torch.set_grad_enabled(case.training),
        case.around(),
    ):
        with contextlib.suppress(_Compiled):
            torch.compile(function, backend=backend, dynamic=case.dynamic, fullgraph=True)(*args, **kwargs)
        with cuda_target():
            plan_memory(compilation.programs, outcome)
    expected = {"forward", "backward"} if case.training else {"inference"}
    assert expected <= set(outcome.phases), f"compiled: {', '.join(outcome.phases) or 'nothing'}"
    missing = case.constructs - outcome.constructs
    assert not missing, f"no kernel has {', '.join(sorted(missing))}"
    return outcome


def save(path: Path, methods: Mapping[str, Any], **given: Any) -> Path:
    """What ``fxwrap.save`` does on a machine with ``DEVICE``: kernels are tuned by times that are made up."""

    def compile_program(gm: GraphModule, inputs: Sequence[Any], *rest: Any) -> Any:
        return compile_on_cpu(gm, retarget(gm, inputs), *rest)

    register_device_guard()
    with FakeTensorMode():
        torch.empty(1, device=DEVICE)  # with the first one, some versions initialize a device that is there
    compile_on_cpu = inductor._compile_program
    with (
        cuda_target(),
        mock.patch.object(inductor, "_compile_program", compile_program),
        mock.patch.object(export_triton, "sample", lambda arg: value_of(arg) if isinstance(arg, Node) else arg),
        mock.patch.object(driver, "_active", _Driver()),
        config.patch(joint_graph_constant_folding=False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        return fxwrap.save(path, methods, **given)


def check_program(program: Any, outcome: Outcome) -> None:
    """Compare every launch of a program with the machine code of every configuration that could be chosen for it."""
    plan = program.plan
    outcome.phases.append(plan.phase)
    seen: set[str] = set()
    for gm in plan.graph.modules():
        if not isinstance(gm, GraphModule):
            continue
        for node in gm.graph.nodes:
            outcome.nodes += 1
            outcome.externs += kind_of(node) is Kind.EXTERN
            kernel = kernel_of(node)
            if kernel is None:
                continue
            outcome.launches += 1
            compiled = compiled_kernels(kernel)
            check_launch(node)
            if kernel.name not in seen:
                seen.add(kernel.name)
                outcome.kernels += 1
                outcome.cubins += len(compiled)
                outcome.constructs |= constructs_of(kernel)
                for result in compiled:
                    check_binary(result)
                check_stored(node, outcome)
            outcome.checked += len(compiled)
    for partition in plan.partitions:
        captured = partition.verdict is Verdict.CAPTURED
        outcome.captured += captured
        outcome.eager += not captured
        if partition.reason:
            outcome.eager_reasons.append(partition.reason)


def tuner_of(kernel: Kernel) -> Any:
    """Inductor's tuner behind a Triton kernel."""
    assert isinstance(kernel.call, TritonLauncher), f"{kernel.name} is launched by {kernel.call!r}"
    return kernel.call.tuner


def compiled_kernels(kernel: Kernel) -> list[Any]:
    """What Triton compiled of a kernel: one for each configuration that the tuner would try."""
    return [result.kernel for result in tuner_of(kernel).compile_results]


def check_launch(node: Node) -> None:
    """Launch as the program would, with every configuration: on fake tensors, to a launcher that checks.

    Raises:
        WrongLaunch: an argument is not what the kernel takes.
    """
    kernel = kernel_of(node)
    assert kernel is not None
    args = torch.fx.map_arg(tuple(node.args[1:]), value_of)
    tuner = tuner_of(kernel)
    for launcher, result in zip(tuner.launchers, tuner.compile_results, strict=True):
        names = inspect.signature(launcher).parameters
        declared = {name for position, name in enumerate(names) if position in kernel.writes}
        if unknown := stored_arguments(result.kernel.asm["ttir"]) - declared:
            raise WrongLaunch(
                f"{kernel.name} writes {', '.join(sorted(unknown))}, which the host graph does not know"
            )
        try:
            launcher(*args, stream=0)
        except TypeError as error:
            raise WrongLaunch(f"{kernel.name}: {error}") from error


def check_stored(node: Node, outcome: Outcome) -> None:
    """Launch a kernel once from what a saved program holds of it, as ``check_launch`` does.

    Raises:
        WrongLaunch: an argument is not what the kernel takes, or the grid is another one.
    """
    kernel = kernel_of(node)
    assert kernel is not None
    args = torch.fx.map_arg(tuple(node.args[1:]), value_of)
    try:
        with mock.patch.object(export_triton, "_tuned", lambda kernel, tuner, args: tuner.launchers[0].config):
            found = export_triton.triton_to_data(kernel, args)
    except StorageError as error:
        outcome.not_stored.append(f"{kernel.name}: {error.subject}")
        return
    assert found.binary is not None
    grids: list[Any] = []
    call = CheckedLauncher.__call__
    note = lambda self, *given: grids.append(given[:3]) or call(self, *given)
    with mock.patch.object(CheckedLauncher, "__call__", note):
        stored_launcher(json.loads(json.dumps(found.data)), found.source, found.binary[0], DEVICE)(*args)
        tuner_of(kernel).launchers[0](*args, stream=0)
    if grids[0] != grids[1]:
        raise WrongLaunch(f"{kernel.name}: Inductor's grid is {grids[1]}, that of the stored kernel {grids[0]}")
    outcome.stored += 1


def value_of(node: Node) -> Any:
    """What a node stands for when the program runs: a fake tensor, a number."""
    return torch.utils._pytree.tree_map(_concrete, node.meta["val"])


def _concrete(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        number = hint(value)
        return _UNKNOWN_SIZE if number is None else number
    if isinstance(value, torch.SymFloat):
        return 0.5
    if isinstance(value, torch.SymBool):
        return True
    if isinstance(value, FakeTensor) and not all(isinstance(n, int) for n in (*value.size(), *value.stride())):
        size, stride = ([_concrete(number) for number in numbers] for numbers in (value.size(), value.stride()))
        with value.fake_mode:
            return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return value


# For a data-dependent size: odd, because nothing may be taken for granted of it.
_UNKNOWN_SIZE = 7

_IN_SOURCE = {
    "device assert": "tl.device_assert(",
    "random": "triton_helpers.rand",
    "atomic": "tl.atomic_",
    "descriptor": "make_tensor_descriptor(",
    "inline assembly": "inline_asm",
}
_IN_META = {
    "combo": "combo_grid_meta",
    "grid as arguments": "extra_launcher_args",
    "persistent": "persistent_reduction",
}


def constructs_of(kernel: Kernel) -> set[str]:
    """What of interest is in a kernel, read from its source and from what Inductor says of it."""
    tuner = tuner_of(kernel)
    found = {name for name, text in _IN_SOURCE.items() if text in kernel.source}
    found |= {name for name, key in _IN_META.items() if tuner.inductor_meta.get(key)}
    found.add(tuner.heuristic_type.name.lower().replace("_", " "))
    for result in tuner.compile_results:
        if result.compile_meta.get("launch_cooperative_grid"):
            found.add("cooperative")
        if result.compile_meta.get("launch_pdl"):
            found.add("dependent launch")
        if result.kernel.metadata.global_scratch_size:
            found.add("scratch memory")
        found |= {"workspace" for name in result.kernel.src.signature if name.startswith("ws_ptr")}
        found |= {"semaphores" for name in result.kernel.src.signature if name.startswith("sem_ptr")}
        if any(str(kind).startswith("tensordesc") for kind in result.kernel.src.signature.values()):
            found.add("descriptor argument")
    if len(tuner.compile_results) > 1:
        found.add("several configurations")
    if tuner.custom_kernel:
        found.add("user's")
    return found


def plan_memory(programs: Sequence[Any], outcome: Outcome) -> None:
    """Plan memory as a warm-up and the recording after it do; every plan is verified as it is made.

    A forward is planned by itself, and again with the backward that gets what it saves.
    """
    forward: tuple[Any, Any, Any] | None = None
    for program in programs:
        provider, plan = program._cut.provider, program.plan
        inputs = [_fake(value_of(node)) for node in program._cut.placeholders]
        saved = None
        if plan.phase == "backward" and forward is not None:
            (first, before, _), received = forward, program._forward[1]
            own_outputs = [i for p, i in first._cut.outputs if p in first.plan.saved]
            assert received or not own_outputs, "backward gets nothing of its forward"
            saved = Saved(before, received)
        estimate, memory = provider.expect(plan, inputs, None, saved)
        _note_plan(memory, outcome)
        if plan.phase == "forward":
            forward = program, estimate, memory
        elif saved is not None and forward is not None:
            first, before, memory_before = forward
            provider_before = first._cut.provider
            hint = provider_before._with_successor(before.planned, before)
            for own, planned, hinted in (
                (provider_before, before.planned, hint),
                (provider, estimate.planned, estimate.hint),
            ):
                _note_plan(own.planner.plan(planned, lambda device: (), hinted, memory_before), outcome)
            forward = None


def _note_plan(memory: MemoryPlan, outcome: Outcome) -> None:
    outcome.plans += 1
    if memory.size > outcome.arena:
        outcome.arena, outcome.lower_bound = memory.size, memory.lower_bound


def _fake(value: Any) -> Any:
    """A fake tensor in a storage of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
