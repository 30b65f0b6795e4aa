"""Registers devices out of PyTorch's tree with Inductor and fxwrap, by one call whose handle unregisters them."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._dynamo import device_interface as interfaces
from torch._inductor import config as inductor_config
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen

from ...devices import (
    OF_ANY_ACCELERATOR,
    CaptureCost,
    ConditionalNodes,
    DeviceSupport,
    KernelKind,
    Placements,
    RecoverFromFailedCapture,
    SuspendableMemory,
    device_function,
    registered_devices,
)
from ...eager_rules import EagerRule
from ...errors import DeviceError, OptionError
from ...options import parse_options
from ..emit.emission import FxwrapCodegen
from ..emit.library_calls import LIBRARY_CALLS, LibraryCalls
from ..inductor import DEVICE_TABLES
from ..torch_versions import CPP_DEVICE_NAMES, registered_operators
from .patches import Patches

# Settings where Inductor checks for the CPU although it means C++ kernels.
_CPP_CONFIG = {
    "cuda_backend": "cpp",  # devices without a setting use this one
    "loop_reindexing_after_fusion": False,
    "loop_ordering_after_fusion": False,
    "loop_index_inversion_in_fusion": False,
    "layout_optimization": False,
}
_SCHEDULING: dict[str, tuple[type, dict[str, Any]]] = {
    "cpp": (CppScheduling, _CPP_CONFIG),
    "triton": (TritonScheduling, {}),
    "none": (LibraryCalls, LIBRARY_CALLS),
}


class DeviceRegistration:
    """The handle of a registered device. ``unregister()``, or the end of its context, takes everything back."""

    def __init__(self, support: DeviceSupport, undo: contextlib.ExitStack) -> None:
        self.support = support
        self._undo = undo

    def unregister(self) -> None:
        """Take the registration back. A second call does nothing. Compiled functions keep working."""
        with DEVICE_TABLES:
            self._undo.close()

    def __enter__(self) -> DeviceRegistration:
        return self

    def __exit__(self, *_: object) -> None:
        self.unregister()

    def __repr__(self) -> str:
        return f"<registration of device {self.support.device_type!r}>"


def register_device(
    device_type: str,
    *,
    scheduling: str | type | None = None,
    wrapper: type | None = None,
    codegen: type | None = None,
    interface: type | None = None,
    op_overrides: Any = None,
    cpp_device: str | None = None,
    config: Mapping[str, Any] | None = None,
    device_graph: Callable[[Any], Any] | None = None,
    eager_ops: str | EagerRule | Iterable[str | EagerRule] = (),
    kernels: KernelKind | Iterable[KernelKind] = (),
    cost: CaptureCost | None = None,
    after_failed_capture: RecoverFromFailedCapture | None = None,
    suspendable_memory: Callable[[torch.device], SuspendableMemory] | None = None,
    conditional_nodes: ConditionalNodes | None = None,
    placements: Callable[[torch.device], contextlib.AbstractContextManager[Placements]] | None = None,
) -> DeviceRegistration:
    """Tell Inductor and fxwrap how to compile for a device.

    Args:
        device_type: its name, as in ``torch.device(name)``.
        scheduling: "cpp" (Inductor's C++ kernels, on a device that reaches host memory), "triton", a scheduling
            class of Inductor's kind, or "none": no kernels, every operation is a call of the device's own operators.
            None where Inductor has one for the device.
        wrapper: Inductor's Python wrapper for graphs that cannot become host graphs.
        codegen: a subclass of ``FxwrapCodegen``; the ``codegen`` option of a compilation has precedence.
        interface: a ``DeviceInterface`` of Dynamo; by default made from ``torch.<device_type>``.
        op_overrides: Inductor's ``DeviceOpOverrides``; by default made from ``torch.<device_type>``.
        cpp_device: the device's name in C++; by default "at::kPrivateUse1".
        config: Inductor's settings for compiling graphs with this device; other graphs are not affected.
        device_graph: ``device_graph(pool)`` makes an object with the methods of ``torch.accelerator.Graph``; by
            default that class itself.
        eager_ops: operators that its graphs cannot capture, by name or as ``EagerRule``; a named operator must be
            registered with torch already.
        kernels: kinds of compiled kernels (``KernelKind``); Triton's kernels need none.
        cost: time that issuing work takes the host, for the cost model of captures.
        after_failed_capture: ``after_failed_capture(device, pool)`` restores the device's allocator after
            ``capture_end`` has raised. A device needs it if its allocator then still records to the pool, as CUDA's.
        suspendable_memory: ``suspendable_memory(device)`` makes a ``SuspendableMemory`` for an arena; without it
            ``fxwrap.suspend`` raises on this device.
        conditional_nodes: the nodes of its graphs that decide at a replay what runs; without them branches and loops
            (``torch.cond``, ``while_loop``) are decided on the host, between replays.
        placements: ``placements(device)`` is a context around one capture, which gives a ``Placements``: it decides
            where operators allocate. Without it they allocate in the pool of the graphs, outside of the plan.

    Returns:
        A handle whose ``unregister()`` takes everything back.

    Raises:
        DeviceError: the device does not exist, is registered already, something that it needs is missing, or an
            argument is of another kind.
    """
    _check_name(device_type)
    _check_kinds(
        device_type,
        config=config,
        cost=cost,
        eager_ops=eager_ops,
        kernels=kernels,
        conditional_nodes=conditional_nodes,
    )
    support = DeviceSupport(
        device_type,
        (kernels,) if isinstance(kernels, KernelKind) else tuple(kernels),
        _eager_ops(device_type, eager_ops),
        device_graph,
        codegen,
        {**_settings(scheduling), **(config or {})},
        cost,
        after_failed_capture,
        suspendable_memory,
        conditional_nodes,
        placements,
    )
    _check(support, scheduling)
    with DEVICE_TABLES, Patches() as patches:
        enter = patches.put_entry
        enter(registered_devices(), device_type, support)
        # What torch knows of a device in its tree stays, unless the caller says otherwise.
        if interface is not None or device_type not in interfaces.device_interfaces:
            interface = interface or _interface(device_type, _is_triton(scheduling))
            for name in (device_type, *(f"{device_type}:{index}" for index in range(_device_count(device_type)))):
                enter(interfaces.device_interfaces, name, interface)
        if op_overrides is not None or device_type not in common.device_op_overrides_dict:
            enter(
                common.device_op_overrides_dict,
                device_type,
                op_overrides or _OpOverrides(device_type, cpp_device or _CPP_DEVICE),
            )
        if cpp_device is not None or device_type not in CPP_DEVICE_NAMES:
            enter(CPP_DEVICE_NAMES, device_type, cpp_device or _CPP_DEVICE)
        entry = common.device_codegens.get(device_type)
        if scheduling is not None or wrapper is not None:
            entry = common.DeviceCodegen(
                _scheduling_class(scheduling) if scheduling is not None else entry.scheduling,  # type: ignore[union-attr]
                wrapper or DeviceWrapper,  # type: ignore[arg-type]
                None,
                codegen or FxwrapCodegen,  # type: ignore[arg-type]
            )
            enter(common.device_codegens, device_type, entry)
        return DeviceRegistration(support, patches.pop_all())


_CPP_DEVICE = "at::kPrivateUse1"


def _check_name(name: Any) -> None:
    try:
        is_type = isinstance(name, str) and torch.device(name).index is None
        if is_type:
            torch.get_device_module(name)
    except RuntimeError as error:
        raise DeviceError(
            f"no device {name!r} to register",
            expected="a device that torch knows, with a module torch.<name>",
            got=str(error).splitlines()[0],
            remedy="call torch.utils.rename_privateuse1_backend and torch._register_device_module first",
        ) from None
    if not is_type:
        raise DeviceError(
            f"{name!r} is no type of device", expected="its name, without an index, such as 'cuda'", got=repr(name)
        )


def _check_kinds(device: str, **arguments: Any) -> None:
    """Check the types of arguments that would otherwise be accepted, and fail or have no effect in a compilation."""
    kinds: dict[str, tuple[Any, str]] = {
        "config": ((Mapping, types.NoneType), "a dictionary of Inductor's settings"),
        "conditional_nodes": ((ConditionalNodes, types.NoneType), "a fxwrap.ConditionalNodes"),
        "cost": ((CaptureCost, types.NoneType), "a fxwrap.CaptureCost"),
        "eager_ops": ((EagerRule, Iterable), "names of operators and fxwrap.EagerRule, or one of them"),
        "kernels": ((KernelKind, Iterable), "a list of fxwrap.KernelKind, or one of them"),
    }
    for name, value in arguments.items():
        kind, expected = kinds[name]
        if not isinstance(value, kind):
            raise DeviceError(f"device {device!r}: wrong {name}", expected=expected, got=repr(value))


def _eager_ops(device: str, eager_ops: str | EagerRule | Iterable[str | EagerRule]) -> tuple[str | EagerRule, ...]:
    """Operators and rules, checked and normalized like the option ``eager_ops``."""
    listed = eager_ops if isinstance(eager_ops, (str, EagerRule)) else list(eager_ops)
    try:
        options, _ = parse_options({"eager_ops": listed}, {}, registered_operators())
    except OptionError as error:
        raise DeviceError(
            f"device {device!r}: {error.subject}", expected=error.expected, got=error.got, remedy=error.remedy
        ) from None
    return options.eager_ops


def _check(support: DeviceSupport, scheduling: Any) -> None:
    name = support.device_type
    if name in registered_devices():
        raise DeviceError(
            f"device {name!r} is registered already", remedy="call unregister() on the handle of its registration"
        )
    common.init_backend_registration()
    interfaces.get_registered_device_interfaces()  # fills torch's tables now: later it would overwrite entries
    common.get_device_op_overrides("cpu")
    is_given = isinstance(scheduling, type) or (isinstance(scheduling, str) and scheduling in _SCHEDULING)
    if not is_given and not (scheduling is None and name in common.device_codegens):
        raise DeviceError(
            f"device {name!r} needs a scheduling",
            expected=f"{', '.join(map(repr, _SCHEDULING))} or a subclass of Inductor's BaseScheduling",
            got=repr(scheduling),
        )
    wrong = [setting for setting in support.config if setting not in inductor_config.get_config_copy()]
    if wrong:
        raise DeviceError(
            f"device {name!r}: Inductor has no setting {', '.join(map(repr, wrong))}",
            expected="settings of torch._inductor.config",
        )
    if support.codegen is not None and not hasattr(support.codegen, "compile_graph"):
        raise DeviceError(
            f"device {name!r}: wrong codegen", expected="a class with compile_graph()", got=repr(support.codegen)
        )
    if wrong_kinds := [kind for kind in support.kernels if not isinstance(kind, KernelKind)]:
        raise DeviceError(
            f"device {name!r}: wrong kernels", expected="fxwrap.KernelKind", got=", ".join(map(repr, wrong_kinds))
        )
    if scheduling == "cpp" and not support.kernels:
        raise DeviceError(
            f"device {name!r} runs C++ kernels, and nothing says how they are launched",
            expected="kernels=[fxwrap.cpp_kernels(launch)]",
            remedy="give a launch(function, *args) that runs now, or records while the current stream captures",
        )


def _settings(scheduling: Any) -> dict[str, Any]:
    present = inductor_config.get_config_copy()
    settings = _SCHEDULING[scheduling][1] if isinstance(scheduling, str) and scheduling in _SCHEDULING else {}
    return {key: value for key, value in settings.items() if key in present}


def _scheduling_class(scheduling: Any) -> Any:
    return _SCHEDULING[scheduling][0] if isinstance(scheduling, str) else scheduling


def _is_triton(scheduling: Any) -> bool:
    return scheduling is not None and issubclass(_scheduling_class(scheduling), TritonScheduling)


def _device_count(device_type: str) -> int:
    count = getattr(torch.get_device_module(device_type), "device_count", None)
    return count() if count is not None else 1


class _LaunchesByKind:
    """A wrapper that launches kernels which are not Triton's through ``fxwrap.devices.launch_kernel``."""

    def _generate_kernel_call_helper(
        self, kernel_name: str, call_args: Any, *, device: Any = None, triton: bool = True, **kwargs: Any
    ) -> None:
        wrapper: Any = self
        if triton or device is None or device.type == "cpu":
            plain: Any = super()
            plain._generate_kernel_call_helper(kernel_name, call_args, device=device, triton=triton, **kwargs)
            return
        args = ", ".join([repr(str(device)), repr(kernel_name), kernel_name, *map(str, call_args)])
        wrapper.writeline(f"_launch_kernel({args})")


class _SubgraphWrapper(_LaunchesByKind, SubgraphPythonWrapperCodegen):
    """The wrapper of a subgraph, such as a branch of ``cond``."""


class DeviceWrapper(_LaunchesByKind, PythonWrapperCodegen):
    """Inductor's Python wrapper for a registered device."""

    @staticmethod
    def create(
        is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, partition_signatures: Any = None
    ) -> PythonWrapperCodegen:
        if is_subgraph:
            return _SubgraphWrapper(subgraph_name, parent_wrapper, partition_signatures)
        return DeviceWrapper()

    def write_header(self) -> None:
        super().write_header()
        self.imports.writeline("from fxwrap.devices import launch_kernel as _launch_kernel")


class _OpOverrides(common.DeviceOpOverrides):
    """The Python that Inductor's wrapper writes about a device, in terms of ``torch.<device type>``."""

    def __init__(self, device_type: str, cpp_device: str) -> None:
        self._name, self._cpp_name = device_type, cpp_device

    def aten_device_type(self) -> str:
        return self._cpp_name

    def import_get_raw_stream_as(self, name: str) -> str:
        return (
            "from torch._dynamo.device_interface import get_interface_for_device\n"
            f"{name} = get_interface_for_device({self._name!r}).get_raw_stream"
        )

    def set_device(self, device_idx: int) -> str:
        return f"torch.{self._name}.set_device({device_idx})"

    def synchronize(self) -> str:
        named = hasattr(torch.get_device_module(self._name), "synchronize")
        return f"torch.{self._name if named else 'accelerator'}.synchronize()"

    def device_guard(self, device_idx: int) -> str:
        return f"torch.{self._name}.device({device_idx})"


def _interface(device_type: str, triton: bool) -> type:
    """A device interface for Dynamo, made from ``torch.<device type>``; what that lacks stays unimplemented."""
    module: Any = torch.get_device_module(device_type)

    class CompileWorker:
        """The part of the interface for Inductor's compile processes, which must not touch the device."""

        set_device = staticmethod(getattr(module, "set_device", lambda index: None))
        current_device = staticmethod(getattr(module, "current_device", lambda: 0))

        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            properties = getattr(module, "get_device_properties", lambda device: types.SimpleNamespace())(device)
            if hasattr(properties, "multi_processor_count"):
                return properties
            # Inductor splits reductions by this number. Without one the host's number of cores is used.
            others = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
            return types.SimpleNamespace(multi_processor_count=os.cpu_count() or 1, **others)

    def exchange_device(index: int) -> int:
        before = module.current_device()
        module.set_device(index)
        return before

    def maybe_exchange_device(index: int) -> int:
        return exchange_device(index) if index >= 0 else module.current_device()

    def get_raw_stream(index: int) -> int:
        stream = device_function(device_type, "current_stream")(index)
        return getattr(stream, "native_handle", None) or stream.stream_id

    methods: dict[str, Any] = {
        "Worker": CompileWorker,
        "exchange_device": staticmethod(exchange_device),
        "maybe_exchange_device": staticmethod(maybe_exchange_device),
        "get_raw_stream": staticmethod(get_raw_stream),
        "is_available": staticmethod(getattr(module, "is_available", lambda: True)),
        "device_count": staticmethod(lambda: _device_count(device_type)),
        "is_bf16_supported": staticmethod(
            lambda including_emulation=False: getattr(module, "is_bf16_supported", lambda: True)()
        ),
        "get_compute_capability": staticmethod(lambda device=None: ""),
        "is_triton_capable": staticmethod(lambda device=None: triton),
    }
    names = "current_device set_device device stream current_stream set_stream synchronize memory_allocated"
    for name in names.split():
        if hasattr(module, name) or name in OF_ANY_ACCELERATOR:
            function = device_function(device_type, name)
            methods[name] = function if name == "device" else staticmethod(function)
    for name in ("Event", "Stream"):
        methods[name] = getattr(module, name, getattr(torch, name))
    return type(f"{device_type.capitalize()}Interface", (interfaces.DeviceInterface,), methods)
