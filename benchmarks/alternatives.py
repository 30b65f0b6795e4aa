"""The ways to call a model that benchmarks/speed.py times: fxwrap's, and those that one would pick instead."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from speed_models import Workload, step_of
from timing import own
from torch import Tensor, nn

OURS, BOUND, AHEAD, FROZEN = "fxwrap", "fxwrap bound", "fxwrap ahead of time", "fxwrap ahead of time, frozen"
EXACT = (OURS, BOUND, AHEAD)  # of Inductor's bits; packed weights and tuned kernels compute others
OWN = (*EXACT, FROZEN)
AGAIN, REFERENCE = "itself", "inductor"
Step = Callable[[], Any]
# A step, and what fxwrap.stats knows of the functions that it calls, or torch.compile returned.
Prepared = tuple[Step, list[Any]]


@dataclass(frozen=True)
class Alternative:
    """One way to call a model.

    Attributes:
        compile: arguments of ``torch.compile``; None if it is not called.
        bound: the compiled model, or the loss of a training step, goes through ``fxwrap.bind``.
        around: makes the context in which calls are timed. The first calls, which compile, are outside of it.
        ahead: makes the call of a module with inputs ahead of time, without ``torch.compile``.
        trains: whether training steps are timed, too.
        packages: what it imports besides torch and fxwrap.
        cpu_only: it is left out on other devices.
    """

    compile: Mapping[str, Any] | None = None
    bound: bool = False
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    ahead: Callable[[nn.Module, tuple[Tensor, ...]], Prepared] | None = None
    trains: bool = True
    packages: tuple[str, ...] = ()
    cpu_only: bool = False


def aotinductor(module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    """AOTInductor's package, loaded and called from Python."""
    with tempfile.TemporaryDirectory() as folder:
        exported = torch.export.export(module, inputs)
        path = torch._inductor.aoti_compile_and_package(exported, package_path=f"{folder}/model.pt2")
        package = torch._inductor.aoti_load_package(path)
    return lambda: package(*inputs), []


def torch_aot_compile(module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    """``torch.compile`` with Inductor, without evaluation of frames and without guards on globals."""

    def call(*given: Tensor) -> Any:
        return module(*given)

    compiled = torch.compile(own(call), fullgraph=True, **_INDUCTOR).aot_compile((inputs, {}))
    return lambda: compiled(*inputs), []


def fxwrap_ahead(module: nn.Module, inputs: tuple[Tensor, ...], options: Mapping[str, Any] | None = None) -> Prepared:
    """fxwrap's program, called without Dynamo."""
    import fxwrap

    forward = fxwrap.aot_compile({"forward": (module, inputs)}, options=options)["forward"]
    return lambda: forward(*inputs), [forward]


def _session(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """An inference session of ONNX Runtime with all its graph optimizations and torch's number of threads.

    What a module writes to its buffers is not in the exported graph: the decoder's cache is written to a copy.
    """
    import onnxruntime

    exported = torch.onnx.export(module, inputs, dynamo=True, verbose=False)
    assert exported is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3  # errors
    text = exported.model_proto.SerializeToString()
    return onnxruntime.InferenceSession(text, options, providers=["CPUExecutionProvider"])


def onnxruntime_run(module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    """``session.run`` with NumPy arrays, which are views of the inputs and made once; its results are arrays, too."""
    session = _session(module, inputs)
    arrays = {expected.name: value.numpy() for expected, value in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: session.run(None, arrays)[0], []


def onnxruntime_bound(module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    """``session.run_with_iobinding``: inputs and the result have memory of the caller's, the same at each call."""
    session = _session(module, inputs)
    arrays = {expected.name: value.numpy() for expected, value in zip(session.get_inputs(), inputs, strict=True)}
    (output,) = session.get_outputs()
    result = session.run(None, arrays)[0]
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    binding.bind_output(output.name, "cpu", 0, result.dtype, result.shape, result.ctypes.data)

    def step(held: Any = arrays) -> Any:  # the binding has addresses alone
        session.run_with_iobinding(binding)
        return result

    return step, []


_INDUCTOR = {"backend": "inductor"}
_CPP = {"cpp_wrapper": True}
_AUTOTUNED = {"max_autotune": True}
_ONNX = ("onnx", "onnxruntime", "onnxscript")
ALTERNATIVES: dict[str, Alternative] = {
    "eager": Alternative(),
    REFERENCE: Alternative(_INDUCTOR),
    # Guards are evaluated only where one function has been compiled several times: the caller promises the rest. A
    # compiled AdamW, which was compiled once, raises "Recompilation triggered" so (torch 2.13).
    "inductor unsafe": Alternative(
        _INDUCTOR,
        around=functools.partial(torch.compiler.set_stance, "default", skip_guard_eval_unsafe=True),
        trains=False,
    ),
    "cpp_wrapper": Alternative({**_INDUCTOR, "options": _CPP}),
    "autotuned": Alternative({**_INDUCTOR, "options": _AUTOTUNED}),
    "cpp_wrapper autotuned": Alternative({**_INDUCTOR, "options": {**_CPP, **_AUTOTUNED}}),
    "reduce-overhead": Alternative({**_INDUCTOR, "mode": "reduce-overhead"}),
    "graph by hand": Alternative(_INDUCTOR),
    "aot_compile": Alternative(ahead=torch_aot_compile, trains=False),
    "aotinductor": Alternative(ahead=aotinductor, trains=False),
    "onnxruntime": Alternative(ahead=onnxruntime_run, trains=False, packages=_ONNX, cpu_only=True),
    "onnxruntime bound": Alternative(ahead=onnxruntime_bound, trains=False, packages=_ONNX, cpu_only=True),
    "fxwrap autotuned": Alternative({"backend": "fxwrap", "options": _AUTOTUNED}),
    # Nothing is ever recorded: what calls take before recordings, and beyond their limit.
    "fxwrap eager": Alternative({"backend": "fxwrap", "options": {"warmup": 1 << 40}}),
    OURS: Alternative({"backend": "fxwrap"}),
    BOUND: Alternative({"backend": "fxwrap"}, bound=True),
    AHEAD: Alternative(ahead=fxwrap_ahead, trains=False),
    FROZEN: Alternative(
        ahead=functools.partial(fxwrap_ahead, options={"freezing": True, **_AUTOTUNED}), trains=False
    ),
}
WITH_AUTOTUNE = ("autotuned", "cpp_wrapper autotuned", "fxwrap autotuned", FROZEN)
ON_CUDA = ("reduce-overhead", "graph by hand")
IF_ASKED = ("fxwrap eager",)


def defaults(device: str, autotune: bool) -> list[str]:
    """The alternatives that are timed without being named."""
    left_out = (*IF_ASKED, *(() if autotune else WITH_AUTOTUNE), *(() if device == "cuda" else ON_CUDA))
    return [name for name in ALTERNATIVES if name not in left_out]


def why_not(name: str, device: str) -> str:
    """Why an alternative cannot run here; empty if it can."""
    alternative = ALTERNATIVES[name]
    missing = [package for package in alternative.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install 'fxwrap[rivals]'"
    if alternative.cpu_only and device != "cpu":
        return "it is timed on the CPU only"
    if alternative.ahead is aotinductor and device == "hostsim":
        return "AOTInductor does not know the device"
    return ""


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Exporters warn of operators that are not used here, and of their own calls."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def compiled_with(alternative: Alternative, device: str) -> dict[str, Any]:
    """Arguments of ``torch.compile``; on a device out of the tree with the settings of its registration."""
    arguments = dict(alternative.compile or {})
    if device == "hostsim" and arguments["backend"] == "inductor":
        from memory_peak import settings_of

        arguments["options"] = {**settings_of(device), **arguments.get("options", {})}
    return arguments


def prepared(name: str, workload: Workload, module: nn.Module, inputs: tuple[Tensor, ...], device: str) -> Prepared:
    """A step of a model with an alternative; what ``torch.compile`` makes has not been called yet, or by ``bind``."""
    import fxwrap

    alternative, functions = ALTERNATIVES[OURS if name == AGAIN else name], list[Any]()
    if alternative.ahead is not None:
        with _without_warnings():
            return alternative.ahead(module, inputs)

    def compiled(function: Callable[..., Any]) -> Any:
        if alternative.compile is None:
            return function
        made = torch.compile(own(function), fullgraph=True, **compiled_with(alternative, device))
        functions.append(made)
        return made

    def bound(function: Any) -> Any:
        if alternative.bound:
            functions[-1] = function = fxwrap.bind(function, *inputs)
        return function

    return step_of(module, inputs, workload.training, compiled, bound), functions
