"""``fxwrap.explain`` with ``target``: the decisions for another device, even one that this machine lacks.

On a device of this machine, a copy of the model is compiled and runs. For any other, a forked child process compiles
and sends the report back. The child replaces functions of torch, which must not be visible in this process, and a
fork already has the model. An exported program would not do: it has no graph breaks, lacks the caller's own operators
and kernels, and traces a training step differently. Pickles would not do either: they cannot hold lambdas or what
``__main__`` defines, and lose the marks of ``mark_dynamic``. The child has one thread.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ... import errors
from ...api.compile_afresh import compile_afresh
from ...backend import fxwrap as backend
from ...codegen.dynamo.collection import with_own_code
from ...devices import registered_devices
from ...errors import DeviceError, FxwrapError, UnsupportedModelError
from ...graphs.compilation import Compilation
from ...inspection.explanation import Explanation, name_of
from .codegen.ahead import backward_at_once, example_inputs

if TYPE_CHECKING:
    from ...graphs.program import Program
    from .codegen.machines import Machine

_NOT_PROVED = (
    "Nothing ran there: no number was computed and no device graph captured; what a capture refuses is not known.",
    "Times are made up: of several configurations none is chosen, Triton's templates go before libraries, and fusing "
    "always pays.",
    "The function was traced on the CPU: attention is plain arithmetic, and no library's attention kernel is called.",
    "Library calls are in the graph and in the plan; what they would do, and the workspace they take, is not known.",
    "Memory that a kernel's launcher allocates is not in the plan: some kernels make descriptors in it.",
)
_SOURCE_ONLY = "Kernels are source only: Triton's wheel has no compiler for this device."


def explain_for(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any] | None,
    calls: int,
    target: str,
) -> Explanation:
    """What ``fxwrap.explain`` does with a ``target``, and raises."""
    machine = _absent_machine(target)
    if machine is None:
        return _explain_there(_present_device(target), fn, args, kwargs, options, calls)
    _check_tensors(fn, args, kwargs)
    work = functools.partial(_compiled_for, target, machine, fn, args, kwargs, options)
    return Explanation.from_dict(_in_a_fork(target, work))


# -- which device --------------------------------------------------------------------------------------------------


def _absent_machine(target: str) -> Machine | None:
    """The machine to compile for; None for a device that must be in this machine."""
    kind, _, capability = target.partition(":")
    if kind not in ("cuda", "xpu") or (kind == "xpu" and capability):
        return None
    if torch.get_device_module(kind).is_available():
        raise DeviceError(
            f"target {target!r}: this machine has a device of that kind",
            expected="a device that is not there",
            remedy=f"move model and arguments to {kind!r} and leave target out, which tells more. For another device "
            "of that kind, hide this one (CUDA_VISIBLE_DEVICES=-1)",
        )
    if importlib.util.find_spec("triton") is None:
        raise DeviceError(
            f"target {target!r} needs Triton, which writes the kernels",
            expected="the package triton",
            got="no such package",
            remedy="pip install triton",
        )
    if not hasattr(os, "fork"):
        raise DeviceError(
            f"target {target!r} is compiled for in a fork of this process",
            expected="a system with fork",
            got=sys.platform,
            remedy="use Linux (on Windows: its subsystem for Linux)",
        )
    from .codegen import machines

    if kind == "xpu":
        return machines.xpu_machine()
    if not capability.isdecimal() or int(capability) not in machines.CAPABILITIES:
        raise DeviceError(
            f"target {target!r}: no such compute capability",
            expected=", ".join(f"cuda:{known}" for known in machines.CAPABILITIES),
            got=repr(capability),
        )
    return machines.cuda_machine(int(capability))


def _present_device(target: str) -> torch.device:
    with contextlib.suppress(RuntimeError):
        device = torch.device(target)
        if device.type == "cpu" or device.type in registered_devices():
            return device
    raise DeviceError(
        f"unknown target {target!r}",
        expected=", ".join(["'cuda:<capability>' ('cuda:90')", "'xpu'", "'cpu'", *map(repr, registered_devices())]),
        remedy="a device out of PyTorch's tree has to be registered first: fxwrap.register_device",
    )


def _check_tensors(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    owner = getattr(fn, "__self__", fn)
    state = [*owner.parameters(), *owner.buffers()] if isinstance(owner, torch.nn.Module) else []
    tensors = [leaf for leaf in tree_leaves((args, kwargs, state)) if isinstance(leaf, torch.Tensor)]
    elsewhere = {str(tensor.device) for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    if elsewhere:
        raise UnsupportedModelError(
            "a model with tensors on a device cannot be traced for another target",
            expected="parameters, buffers and arguments on the CPU",
            got=", ".join(sorted(elsewhere)),
            remedy="explain a copy on the CPU: copy.deepcopy(model).cpu()",
        )


# -- on a device that is there -------------------------------------------------------------------------------------


def _explain_there(
    device: torch.device,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any] | None,
    calls: int,
) -> Explanation:
    """Compile and run a copy of the model on a device of this machine; a backward is compiled, but does not run."""
    args, kwargs = tree_map(functools.partial(_moved, device=device), (args, kwargs))
    with backward_at_once():
        explanation = compile_afresh(_copied(fn, device), args, kwargs, options, calls)
    _plan_ahead([graph.program for graph in explanation.graphs])
    return explanation


def _plan_ahead(programs: Iterable[Program]) -> None:
    """Plan the memory of programs that no call has planned."""
    for program in programs:
        if program.newest_plan is None:
            program.plan_ahead(example_inputs(program.plan.graph))


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    moved = value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    vars(moved).update(vars(value))  # the marks of mark_dynamic
    return moved


def _copied(fn: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A copy of a module, or of a method's module, on another device. Tensors in a closure are not moved."""
    owner = getattr(fn, "__self__", fn)
    if not isinstance(owner, torch.nn.Module):
        return fn
    try:
        moved = copy.deepcopy(owner).to(device)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(owner).__name__} cannot be copied to {device}",
            expected="a module that copy.deepcopy and Module.to take",
            got=f"{type(error).__name__}: {error}",
            remedy=f"move it to {device} and leave target out",
        ) from error
    return moved if owner is fn else types.MethodType(getattr(fn, "__func__"), moved)  # noqa: B009


# -- on a device that is not there ---------------------------------------------------------------------------------


class _NotFollowed(Exception):
    """A graph cannot run on the CPU, so that graphs after it are unknown."""


def _compiled_for(
    target: str,
    machine: Machine,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """In the child process: compile for a machine's device; returns the report."""
    from .codegen.cross_target import machine_code, present, register_device_guard, retargeted, start_anew

    compilation, limits = Compilation(), [*_NOT_PROVED, f"The device is taken for this one: {machine.name}."]
    if machine.triton is None:
        limits.append(_SOURCE_ONLY)

    def compile_only(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        backend(gm, inputs, compilation=compilation, options=options)

        def on_cpu(*inputs: Any) -> Any:
            try:
                return gm(*inputs)  # the code after a graph break needs results
            except Exception as error:
                raise _NotFollowed(f"{type(error).__name__}: {error}") from error

        return on_cpu

    torch.set_num_threads(1)  # a fork has only the thread that forked
    start_anew(target)
    register_device_guard(machine.device.type)
    with retargeted(machine):
        try:
            torch.compile(with_own_code(fn), backend=compile_only)(*args, **kwargs)
        except _NotFollowed as error:
            limits.append(f"Whatever follows the last graph is missing, for that does not run on the CPU: {error}")
        with present(machine):
            _plan_ahead(compilation.programs)
    explanation = Explanation.of([compilation], name_of(fn))
    document = explanation.to_dict()
    for entry, graph in zip(document["graphs"], explanation.graphs, strict=True):
        for kernel_entry, kernel in zip(entry["kernels"], graph.kernels, strict=True):
            kernel_entry["compiled"] = machine_code(kernel)
    versions = {**document["versions"], "triton": importlib.metadata.version("triton")}
    return {**document, "versions": versions, "limits": limits}


def _in_a_fork(target: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run ``work`` in a fork of this process, and return its result, which is plain data.

    Raises:
        FxwrapError: ``work`` raised, or the process ended early.
    """
    from .codegen.cross_target import no_compilation

    reading, writing = os.pipe()
    with no_compilation(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads of this process, which the fork lacks
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _answer(work, writing, target)
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as pipe:
            answer = json.loads(pipe.read() or "{}")
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if "document" in answer:
        document: dict[str, Any] = answer["document"]
        return document
    if "error" in answer:
        kind, parts, text = answer["error"]
        raise _rebuilt(kind, parts) from _ThereError(text)
    raise FxwrapError(
        f"compiling for {target!r} ended the process that did it",
        expected="a report",
        got=f"exit code {code}",
        remedy="fewer models at a time, if memory was short; otherwise please report this",
    )


class _ThereError(Exception):
    """An error of the child process, with its traceback as text."""


def _answer(work: Callable[[], dict[str, Any]], writing: int, target: str) -> None:
    """In the child process: send the result of ``work``, and exit without the usual clean-up."""
    code = 1
    try:
        with open(writing, "w", encoding="utf-8") as pipe:
            try:
                answer: dict[str, Any] = {"document": work()}
            except BaseException as error:
                answer = {"error": (*_described(error, target), traceback.format_exc())}
            pipe.write(json.dumps(answer))
        sys.stdout.flush()
        code = 0
    finally:
        os._exit(code)


def _described(error: BaseException, target: str) -> tuple[str, dict[str, str]]:
    """An error as the name of its class and its parts."""
    for cause in errors.causes(error):
        if isinstance(cause, FxwrapError):
            parts = {name: getattr(cause, name) for name in ("subject", "expected", "got", "remedy")}
            return type(cause).__name__, parts
    if "Autograd-and-Fork" in str(error):
        return "FxwrapError", {
            "subject": f"a training graph cannot be traced for {target!r} in a fork of this process any more",
            "expected": "a process that has run no backward, or has no accelerator, for which autograd has threads",
            "got": f"an accelerator, {torch.accelerator.current_accelerator()}, and a backward that has run",
            "remedy": "ask before the first backward, or in a process of its own",
        }
    return "FxwrapError", {
        "subject": f"the function cannot be compiled for {target!r}",
        "expected": "",
        "got": "\n".join(f"{type(error).__name__}: {error}".splitlines()[:3]),
        "remedy": "the traceback of the process that compiled is this error's cause; without a target, "
        "fxwrap.explain tells whether it is a matter of the target",
    }


def _rebuilt(kind: str, parts: dict[str, str]) -> FxwrapError:
    error: FxwrapError = getattr(errors, kind, FxwrapError)(parts.pop("subject"), **parts)
    return error
