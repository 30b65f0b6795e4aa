"""Runs Inductor: one ``compile_fx`` call with fxwrap's codegen in place, inside a context that leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codegen import common
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule

from ..devices import device_support
from ..errors import EmissionError, FxwrapError, MemoryLimitError, OptionError, UnsupportedModelError, causes
from ..graphs.compilation import Compilation
from ..graphs.memory.locks import lock_of_process
from ..hooks import around_graph
from ..host_graph.user_code import described
from ..options import Options
from ..passes.rewrites.host_scalars import copy_host_scalars
from ..passes.rewrites.scaled_sums import multiply_before_adding
from ..pipeline import CompileRequest
from ..plan import InputFacts
from . import torch_versions as versions
from .dynamo.names import input_names
from .emit.emission import FxwrapCodegen
from .emit.library_calls import prepare
from .order_of_lowering import reads_before_writes
from .request import requesting
from .saved_within_limit import saved_within_limit
from .store.caches import (
    cache_key,
    extended_cache_key,
    has_numbers,
    remove_entry,
    shared_storages,
    without_caches,
    without_uuid,
)
from .store.user_lines import UserLines

log = logging.getLogger(__name__)

# Inductor's settings to emit a host graph. Reuse is off so that the planner sees every buffer. In place of
# graph_partition, memory_planning and cudagraphs fxwrap has stages of its own.
_EMISSION = {
    "fx_wrapper": True,
    "cpp_wrapper": False,
    "allow_buffer_reuse": False,
    "memory_planning": False,
    "graph_partition": False,
    "triton.cudagraphs": False,
    # Inductor leaves waits out by names of buffers and by its order of kernels: neither holds for what fxwrap runs.
    **versions.without_dependent_launches(),
}
# Rewrites of the graph that Inductor gets, in order, and what they make. Where Inductor fails they are left out, the
# last one first. Inductor's own wrapper needs the first one, too, for a device without kernels.
_REWRITES: dict[Callable[[GraphModule], bool], str] = {
    prepare: "calls in place of operators",
    copy_host_scalars: "copies of host scalars on the device",
}
# Torch's tables of devices are process-wide: one compilation at a time may replace their codegen.
DEVICE_TABLES = lock_of_process()


def inductor_options() -> dict[str, tuple[Any, Any]]:
    """Inductor's option names with their present values and declared types."""
    declared: Any = config
    return {name: (value, declared.get_type(name)) for name, value in config.get_config_copy().items()}


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's options behind a ``torch.compile`` mode.

    Raises:
        OptionError: there is no such mode.
    """
    if mode is None:
        return {}
    by_mode = torch._inductor.list_mode_options()
    if mode not in by_mode:
        raise OptionError(
            f"unknown mode {mode!r}", expected=f"one of {', '.join(map(repr, sorted(by_mode)))}", got=repr(mode)
        )
    return dict(by_mode[mode])


def compile_with_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    patches: dict[str, Any],
    compilation: Compilation,
) -> Callable[..., Any]:
    """Compile a Dynamo graph. ``options.codegen`` (default: FxwrapCodegen) compiles the host graphs.

    Args:
        patches: the user's settings for Inductor.
        compilation: collects the programs; it is passed on in the request.
    """
    taken = {key: value for key, value in _EMISSION.items() if key != "triton.cudagraphs"}
    _refuse_others(patches, taken, "together with fxwrap", "which fxwrap sets itself")
    # Modes ask for Inductor's CUDA graphs; fxwrap's device graphs replace them.
    patches = {key: value for key, value in patches.items() if key not in _EMISSION}
    if getattr(config.triton, "enable_pdl", False):
        _say_that_launches_wait()
    common.init_backend_registration()  # from torch 2.15 on it calls hooks with which devices register themselves
    devices = _devices_in(gm, example_inputs)
    patches = _with_settings_of(devices, patches)
    around = around_graph(gm, options)
    key = cache_key(options, devices, shared_storages(example_inputs))
    compilation.lines = UserLines.of(gm, input_names(gm))

    def inner_compile(gm: GraphModule, example_inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            inputs = _input_facts(gm, kwargs, options)
        except EmissionError as error:
            return _through_inductor(gm, example_inputs, args, kwargs, error, base)
        request = replace(base, inputs=inputs)
        for feature in around:
            feature.check(gm, inputs.phase)
        parts = inputs.phase, sorted(inputs.donated), inputs.saved, inputs.names, compilation.keeps_saved
        with extended_cache_key(cache_key(options, devices, *parts)):
            return _compile_program(gm, example_inputs, args, kwargs, request)

    changed = without_uuid(options.codegen, FxwrapCodegen) if options.codegen is not None else []
    if changed:
        name = getattr(options.codegen, "__name__", "")
        compilation.not_stored.append(f"what {name} compiles: it changes {', '.join(changed)}, and has no uuid")
    # A hit in AOTAutograd's cache loads programs without calling ``inner_compile``: they need a request here.
    base = CompileRequest(options=options, compilation=compilation)
    with requesting(base), extended_cache_key(key), contextlib.ExitStack() as contexts:
        if has_numbers(gm):
            contexts.enter_context(without_caches())
            compilation.not_stored.append("a graph of numbers that vary: torch's keys lack those it compiles in")
        for feature in around:
            contexts.enter_context(feature.compiling())
        # ``compile_fx`` branches on these; the process's own values are meant for other backends.
        patches = {**patches, "cpp_wrapper": False, "fx_wrapper": False}

        def compile_once() -> Any:
            return compile_fx(gm, list(example_inputs), inner_compile=inner_compile, config_patches=patches)

        compiled: Any = saved_within_limit(compile_once, compilation) if options.memory_limit else compile_once()
    for feature in around:
        compiled = feature.wrapped(compiled, compilation, options)
    return compiled


@functools.cache
def _say_that_launches_wait() -> None:
    """Say, once in a process, that a setting of the process is not used."""
    warnings.warn(
        "fxwrap: torch._inductor.config.triton.enable_pdl is off in what fxwrap compiles: a kernel that starts before"
        " the one in front of it has ended waits as Inductor's order of work needs it, and fxwrap changes that order",
        stacklevel=3,
    )


def _input_facts(gm: GraphModule, kwargs: dict[str, Any], options: Options) -> InputFacts:
    phase = _phase(kwargs)
    return InputFacts(
        phase=phase,
        static=versions.static_inputs(gm, phase, kwargs.get("static_input_idxs") or ()),
        donated=versions.donated_inputs(gm) if phase == "backward" else frozenset(),
        saved=versions.saved_outputs(gm) if phase == "forward" else {},
        names=tuple(node.name for node in gm.graph.find_nodes(op="placeholder")),
        apart=options.inputs_apart,
    )


def _compile_program(
    gm: GraphModule, example_inputs: Sequence[Any], args: Any, kwargs: Any, request: CompileRequest
) -> Any:
    """Compile a graph of AOTAutograd's, which Inductor's passes edit.

    Inductor may fail on a graph that fxwrap has rewritten, or with the settings to emit it: then rewrites are left
    out one by one, and in the end Inductor's own wrapper is taken. What fails with that is Inductor's own error.
    """
    multiply_before_adding(gm)  # Inductor's own wrapper needs it, too
    pristine = GraphModule(gm, copy.deepcopy(gm.graph))
    rewrites, left_out = [rewrite for rewrite in _REWRITES if rewrite(gm)], dict[str, FxwrapError]()
    while True:
        try:
            compiled, programs = _emitted(gm, example_inputs, args, kwargs, request)
            break
        except Exception as error:
            found, of_inductor = _fallback_reason(error)
            if found is None:
                raise
            if isinstance(found, MemoryLimitError) or (request.options.strict and not of_inductor):
                # Inductor's error has it as its cause: not the other way round, too.
                raise found from found.__cause__
            reason = found
        _forget_pending_symbols(pristine)
        gm = GraphModule(pristine, copy.deepcopy(pristine.graph))
        if not of_inductor or not rewrites:
            if prepare in rewrites:
                prepare(gm)
            return _through_inductor(gm, example_inputs, args, kwargs, reason, request)
        left_out[_REWRITES[rewrites.pop()]] = reason
        for rewrite in rewrites:
            rewrite(gm)
    for name, reason in left_out.items():
        for program in programs:
            program.context.count("events", f"compiled without {name}: {str(reason).splitlines()[0]}")
    return compiled


def _through_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    args: Any,
    kwargs: Any,
    reason: FxwrapError,
    request: CompileRequest,
) -> Any:
    """What Inductor's own wrapper makes of a graph.

    Raises:
        FxwrapError: the reason why fxwrap's cannot, with ``strict``.
        MemoryLimitError: there is a ``memory_limit``.
    """
    with config.patch({"fx_graph_cache": False, "triton.cudagraphs": False}):
        compiled = compile_fx_inner(gm, example_inputs, *args, **_for_inner(kwargs))
    if request.options.memory_limit:
        raise MemoryLimitError(
            "memory_limit cannot be held: a graph would run through Inductor's own wrapper, which has none",
            expected="a graph that fxwrap can plan",
            got=str(reason),
            remedy="leave memory_limit out for this function",
        ) from reason
    if request.options.strict:
        raise reason
    _report_fallback(reason, _phase(kwargs), request)
    return compiled


def _for_inner(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a compilation without what fxwrap decides itself."""
    kwargs = {key: value for key, value in kwargs.items() if key != "fx_wrapper"}
    return {**kwargs, "cpp_wrapper": False, "cudagraphs": _boxed(kwargs.get("cudagraphs"))}


def _emitted(
    gm: GraphModule, example_inputs: Sequence[Any], args: Any, kwargs: dict[str, Any], request: CompileRequest
) -> tuple[Any, list[Any]]:
    """What Inductor compiles with fxwrap's codegen in place, and the programs in it."""
    made = request.compilation.programs if request.compilation is not None else []
    before = len(made)
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(config.patch(_EMISSION))
        contexts.enter_context(codegen_in_place(request.options.codegen))  # its lock is that of all of these
        contexts.enter_context(reads_before_writes())
        if request.options.moves_work:
            contexts.enter_context(versions.one_loop_a_launch())
        if request.compilation is not None and request.compilation.keeps_saved:
            contexts.enter_context(versions.overwriting_nothing_saved())
        handover = contexts.enter_context(requesting(request))
        compiled = compile_fx_inner(gm, example_inputs, *args, **_for_inner(kwargs), fx_wrapper=True)
    if handover.not_stored:
        remove_entry(compiled)
        _note_not_stored(handover.not_stored, request)
    return compiled, made[before:]


def _forget_pending_symbols(gm: GraphModule) -> None:
    """Forget the sizes of data that a failed compilation has made and not placed in a graph.

    The next compilation shares the table of symbols, and would miss them.
    """
    mode = torch._guards.detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()


def _note_not_stored(reasons: Sequence[str], request: CompileRequest) -> None:
    for reason in reasons:
        log.info("no cache can hold %s", reason)
    if request.compilation is not None:
        request.compilation.not_stored.extend(reasons)


def _boxed(cudagraphs: Any) -> Any:
    """Inductor's option for its own capture, switched off."""
    return None if cudagraphs is None else type(cudagraphs)(False)


def _fallback_reason(error: Exception) -> tuple[FxwrapError | None, bool]:
    """Why a graph is compiled another way, and whether it is Inductor that has failed.

    The reason is the fxwrap error in an error's chain of causes. It is None for failures of the machine (a full disk)
    and for what is none to Dynamo; both are raised.
    """
    found = (cause for cause in causes(error) if isinstance(cause, (FxwrapError, OSError)))
    cause = next(found, None)
    if cause is not None or versions.is_no_failure(error):
        return (cause if isinstance(cause, FxwrapError) else None), False
    failed = EmissionError(
        f"Inductor fails on what fxwrap asks of it: {described(list(causes(error))[-1])}",
        remedy="its own wrapper compiles the graph; please report this",
    )
    failed.__cause__ = error
    return failed, True


def _report_fallback(reason: FxwrapError, phase: str, request: CompileRequest) -> None:
    if request.compilation is not None:
        request.compilation.fallbacks.append(str(reason))
    log.info("a %s graph runs through Inductor's own wrapper: %s", phase, reason)
    warnings.warn(f"fxwrap: a {phase} graph runs through Inductor's own wrapper, because {reason}", stacklevel=2)


def _phase(kwargs: dict[str, Any]) -> str:
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


@contextlib.contextmanager
def codegen_in_place(codegen: type | None) -> Iterator[None]:
    """Inside the context, Inductor emits through ``codegen`` on every device.

    None stands for the codegen that a device is registered with, and for FxwrapCodegen on other devices. Only the FX
    entry of each device is replaced, which compilations by other backends do not read.
    """
    common.init_backend_registration()
    with DEVICE_TABLES:
        before = dict(common.device_codegens)
        for device, entry in before.items():
            chosen: Any = codegen or device_support(device).codegen or FxwrapCodegen
            common.device_codegens[device] = dataclasses.replace(entry, fx_wrapper_codegen=chosen)
        try:
            yield
        finally:
            common.device_codegens.update(before)


def _devices_in(gm: GraphModule, example_inputs: Sequence[Any]) -> set[torch.device]:
    """The devices in a graph.

    Raises:
        UnsupportedModelError: there is more than one accelerator.
    """
    values = list(example_inputs)
    for node in gm.graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        values.extend(value if isinstance(value, (tuple, list)) else (value,))
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    accelerators = sorted(str(device) for device in devices if device.type not in ("cpu", "meta"))
    if len(accelerators) > 1:
        raise UnsupportedModelError(
            "the compiled region uses more than one accelerator",
            expected="tensors on one accelerator, and on the CPU beside it",
            got=", ".join(accelerators),
            remedy="compile the part of the model on each device by itself",
        )
    return devices


def _refuse_others(patches: dict[str, Any], settings: dict[str, Any], where: str, setter: str) -> None:
    """Check that the user's options leave a setting as fxwrap or a device sets it.

    Raises:
        OptionError: naming the setting.
    """
    for key, value in settings.items():
        if patches.get(key, value) != value:
            raise OptionError(
                f"option {key!r} cannot be set {where}",
                expected=f"{value!r}, {setter}",
                got=repr(patches[key]),
                remedy=f"leave {key!r} out",
            )


def _with_settings_of(devices: set[torch.device], patches: dict[str, Any]) -> dict[str, Any]:
    needed = {key: value for device in devices for key, value in device_support(device.type).config.items()}
    names = ", ".join(map(str, devices))
    _refuse_others(patches, needed, "on this device", f"which the registration of {names} sets")
    return {**patches, **needed}
