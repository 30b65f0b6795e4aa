"""What Inductor and fxwrap make for a CUDA device, on a machine without one: everything but running it.

fxwrap compiles for an H100 that is not there (``fxwrap.features.target.codegen.cross_target``). What comes out is
checked here: the driver's launcher is replaced by one that compares what it is given with what the cubin takes.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

import fxwrap
from fxwrap.backend import fxwrap as backend_of_fxwrap
from fxwrap.codegen import inductor
from fxwrap.codegen.emit.triton_kernels import TritonLauncher
from fxwrap.errors import StorageError
from fxwrap.features.ahead_of_time.codegen import export_triton
from fxwrap.features.ahead_of_time.codegen.stored_triton import stored_launcher
from fxwrap.features.target.codegen.ahead import example_inputs, value_of
from fxwrap.features.target.codegen.cross_target import (
    AbsentDriver,
    present,
    register_device_guard,
    retarget,
    retargeted,
)
from fxwrap.features.target.codegen.machines import cuda_machine
from fxwrap.graphs.compilation import Compilation
from fxwrap.graphs.memory.memory_provider import Saved
from fxwrap.host_graph.nodes import Kernel, Kind, kernel_of, kind_of
from fxwrap.plan import MemoryPlan, Verdict

MACHINE = cuda_machine(90)
DEVICE = MACHINE.device


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
    if not re.search(rf"^\.target sm_{MACHINE.triton.arch}", ptx, re.MULTILINE):
        raise WrongLaunch(f"{kernel.name} was compiled for something else than sm_{MACHINE.triton.arch}")
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


class _Driver(AbsentDriver):
    """Its kernels are launched by one who checks."""

    launcher_cls = CheckedLauncher


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
        without: names of constructs that no kernel may have.
        inductor: Inductor's settings while it is compiled.
        dynamic: with sizes that may vary.
        around: a context to compile in.
    """

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    training: bool = False
    constructs: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
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

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = {"strict": True, "capture": "always", **case.inductor}
        backend_of_fxwrap(gm, inputs, compilation=compilation, options=options)
        return stop

    def stop(*args: Any) -> Any:
        raise _Compiled

    with retargeted(MACHINE, _Driver), torch.set_grad_enabled(case.training), case.around():
        with contextlib.suppress(_Compiled):
            torch.compile(function, backend=backend, dynamic=case.dynamic, fullgraph=True)(*args, **kwargs)
        with present(MACHINE):
            for program in compilation.programs:
                check_program(program, outcome)
            plan_memory(compilation.programs, outcome)
    expected = {"forward", "backward"} if case.training else {"inference"}
    assert expected <= set(outcome.phases), f"compiled: {', '.join(outcome.phases) or 'nothing'}"
    missing = case.constructs - outcome.constructs
    assert not missing, f"no kernel has {', '.join(sorted(missing))}"
    unwanted = case.without & outcome.constructs
    assert not unwanted, f"a kernel has {', '.join(sorted(unwanted))}"
    return outcome


def save(path: Path, methods: Mapping[str, Any], **given: Any) -> Path:
    """What ``fxwrap.save`` does on a machine with ``DEVICE``: kernels are tuned by times that are made up."""

    def compile_program(gm: GraphModule, inputs: Sequence[Any], *rest: Any) -> Any:
        return compile_on_cpu(gm, retarget(gm, inputs, DEVICE), *rest)

    register_device_guard(DEVICE.type)
    with FakeTensorMode():
        torch.empty(1, device=DEVICE)  # with the first one, some versions initialize a device that is there
    compile_on_cpu = inductor._compile_program
    with (
        present(MACHINE),
        mock.patch.object(inductor, "_compile_program", compile_program),
        mock.patch.object(export_triton, "sample", lambda arg: value_of(arg) if isinstance(arg, Node) else arg),
        mock.patch.object(driver, "_active", _Driver(MACHINE)),
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
    forward: tuple[Any, Any] | None = None
    for program in programs:
        provider, plan = program.recorder.prepared.provider, program.plan
        inputs = example_inputs(plan.graph)
        saved = None
        if plan.phase == "backward" and forward is not None:
            (first, before), received = forward, program.recorder._forward[1]
            own_outputs = [i for p, i in first.recorder.prepared.outputs if p in first.plan.inputs.saved]
            assert received or not own_outputs, "backward gets nothing of its forward"
            saved = Saved(before, received)
        estimate = provider.estimate(inputs, None, saved)
        _note_plan(estimate.memory, outcome)
        if plan.phase == "forward":
            forward = program, estimate
        elif saved is not None and forward is not None:
            first, before = forward
            provider_before = first.recorder.prepared.provider
            hint = provider_before._with_successor(before.sized, before)
            for own, sized, hinted in (
                (provider_before, before.sized, hint),
                (provider, estimate.sized, estimate.hint),
            ):
                _note_plan(own.planner.plan_memory(sized, {}, hinted, before.memory), outcome)
            forward = None


def _note_plan(memory: MemoryPlan, outcome: Outcome) -> None:
    outcome.plans += 1
    if memory.size > outcome.arena:
        outcome.arena, outcome.lower_bound = memory.size, memory.lower_bound
