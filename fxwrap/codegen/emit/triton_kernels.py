"""Triton kernels that Inductor tunes: how they are launched, and which arguments they write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node

from ...graphs.memory.locks import lock_of_process
from ...host_graph.nodes import Kernel, is_symbolic_value, launch
from ...torch_private.functions import device_guard

_TUNING = lock_of_process()


class TritonLauncher:
    """Runs a tuned Triton kernel on the current stream of its device, as Inductor's own wrapper does.

    The first call tunes. So work must run once before it is captured.
    """

    def __init__(self, tuner: Any, device: torch.device) -> None:
        self.tuner = tuner
        self._run: Callable[..., Any] = self._tune
        self._index = device.index if device.index is not None else 0
        self._stream = _raw_stream_getter(device.type)
        self._guard = device_guard(device.type)

    @property
    def is_tuned(self) -> bool:
        return self._run == self.tuner.run

    @property
    def configurations(self) -> list[dict[str, Any]]:
        """As ``Kernel.configurations``."""
        tuned = [launcher.config for launcher in self.tuner.launchers] or self.tuner.configs or ()
        return [{**c.kwargs, "num_warps": c.num_warps, "num_stages": c.num_stages} for c in tuned]

    def __call__(self, *args: Any) -> None:
        if self._guard is None:
            self._run(*args, stream=self._stream(self._index))
        else:
            with self._guard(self._index):
                self._run(*args, stream=self._stream(self._index))

    def _tune(self, *args: Any, stream: int) -> None:
        """The first run. Inductor's tuner is not safe for two threads that tune one kernel."""
        with _TUNING:
            self.tuner.run(*args, stream=stream)
            self._run = self.tuner.run


def _raw_stream_getter(device_type: str) -> Callable[[int], int]:
    if device_type == "cpu":
        return lambda index: 0
    from torch._dynamo.device_interface import get_interface_for_device

    return get_interface_for_device(device_type).get_raw_stream


def is_descriptor(function: Any) -> bool:
    """Whether a function makes one of Triton's tile descriptors, which describe a tensor to a kernel."""
    return str(getattr(function, "__module__", "")).startswith("triton.tools.")


def argument_names(tuner: Any, triton_meta: Any, raw_keys: Sequence[Any] | None, count: int) -> tuple[str, ...]:
    """The kernel's names of a launch's arguments, by position; empty for arguments that Inductor added.

    Args:
        triton_meta: names the kernel's arguments in order, constants last, except for kernels that the user wrote.
        raw_keys: Inductor's names for the arguments of a kernel that the user wrote.
        count: number of arguments of the launch.
    """
    if raw_keys is not None and len(raw_keys) == count:
        return tuple(str(key or "") for key in raw_keys)
    signature = _meta(triton_meta, "signature")
    of_kernel = count - len(_meta(getattr(tuner, "inductor_meta", None), "extra_launcher_args"))
    names = [str(name) for name in signature][:of_kernel]
    return tuple(names + [""] * (count - len(names)))


def written_arguments(
    tuner: Any, triton_meta: Any, names: Sequence[str], declared: Collection[str] | None = None
) -> tuple[int, ...]:
    """Positions of the launch arguments that a kernel writes.

    In Inductor's own kernels an argument that is only read is named ``in_ptr...``, in templates ``arg_...``. Every
    other pointer counts as written: a write too many restricts scheduling, a missing one gives wrong results.

    Args:
        names: see ``argument_names``.
        declared: see ``declared_writes``.
    """
    signature = _meta(triton_meta, "signature")
    mutated = {*(getattr(tuner, "mutated_arg_names", None) or ()), *(declared or ())}
    of_user = getattr(tuner, "custom_kernel", False)
    read_only = ("in_ptr", "arg_") if declared is not None else ("in_ptr",)
    written = []
    for position, name in enumerate(names):
        # An argument without a name is a part of the grid. Without a signature every argument may be a pointer.
        kind = str(signature.get(name, "*" if name or not signature else "grid"))
        if not kind.startswith(("*", "tensordesc", "nvTmaDesc")):
            continue
        reads_only = declared is not None and name not in declared if of_user else name.startswith(read_only)
        if name in mutated or not reads_only:
            written.append(position)
    return tuple(written)


def declared_writes(line: Any, names: Sequence[str]) -> set[str] | None:
    """Names of the arguments that a launch writes by Inductor's IR, beyond those that the kernel itself declares.

    For two sorts of kernels the arguments' names do not tell. A user's kernel has names of any form; Inductor has
    analysed it. A template can write its inputs (flex attention's backward does), and lists them.

    Returns:
        None for a user's kernel that Inductor has not analysed.
    """
    if line.raw_keys is not None:
        return _writes_of_user_kernel(line.original_fxnode_name)
    mutated = {
        name
        for operation in V.graph.operations
        for buffer in getattr(operation, "mutated_inputs", None) or ()
        for name in _names_of(buffer)
    }
    return {name for name, arg in zip(names, line.call_args, strict=True) if str(arg) in mutated}


def _writes_of_user_kernel(fx_name: str | None) -> set[str] | None:
    for operation in V.graph.operations:
        if not isinstance(operation, ir.UserDefinedTritonKernel):
            continue
        if fx_name is None or getattr(operation.fx_node, "name", None) != fx_name:
            continue
        buffers = {name for arg in operation.mutable_args for name in _names_of(arg)}
        return {name for name, value in operation.kwargs.items() if _names_of(_described(value)) & buffers}
    return None


def _described(value: Any) -> Any:
    """The tensor behind a descriptor, whose name differs; any other value itself."""
    return value.tensor if isinstance(value, ir.TMADescriptor) else value


def _names_of(buffer: Any) -> set[str]:
    """A buffer's name, and the name of the buffer that it is a mutated version of."""
    if not isinstance(buffer, ir.IRNode):
        return set()
    name = buffer.get_name()
    real = getattr(V.graph.scheduler, "mutation_real_name", None) or {}
    return {name, real.get(name, name)}


def _meta(meta: Any, key: str) -> Any:
    """An entry of a kernel's metadata; empty where there is none, as for kernels that are not Triton's."""
    return (meta.get(key) if isinstance(meta, Mapping) else None) or {}


@dataclass(frozen=True)
class TunedLaunch:
    """What it takes to replace a portable call by the tuned launch.

    The arguments are looked up in the call by name, so that changes by passes reach the launch.

    Attributes:
        places: for each argument of the launch ``("kwargs", name)`` or ``("grid", axis)``; None for an argument that
            the kernel does not read because its value is compiled in.
        values: the arguments when the launch was emitted.
    """

    kernel: Kernel
    places: tuple[tuple[str, Any] | None, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, kernel: Kernel, tuner: Any, names: Sequence[str], values: Sequence[Any]) -> TunedLaunch | None:
        """The tuned launch of a kernel; None where a portable call cannot hold all of its arguments."""
        inductor_meta = getattr(tuner, "inductor_meta", None)
        extra = len(_meta(inductor_meta, "extra_launcher_args"))
        if extra and _meta(inductor_meta, "grid_type") != "FixedGrid":
            return None  # the grid is computed from them by a formula of the chosen configuration
        constants = _meta(getattr(tuner, "triton_meta", None), "constants")
        places: list[tuple[str, Any] | None] = []
        for position, (name, value) in enumerate(zip(names, values, strict=True)):
            axis = position - (len(values) - extra)
            if axis >= 0:
                places.append(("grid", axis))
            elif name and name not in constants:
                places.append(("kwargs", name))
            elif isinstance(value, Node):
                return None
            else:
                places.append(None)
        return cls(kernel, tuple(places), tuple(values))

    def put_into(self, call: Node) -> None:
        """Set a portable call's arguments and grid to the launch's, and attach this object for the lowering."""
        arguments, grid = _parts(call)
        for place, value in zip(self.places, self.values, strict=True):
            match place:
                case ("grid", axis):
                    grid[axis] = value
                case ("kwargs", name):
                    if name not in arguments:
                        raise KeyError(name)
                    arguments[name] = value
        call.kwargs = {**call.kwargs, "kwargs": arguments, "grid": [tuple(grid)]}
        call.meta["launch"] = self

    def arguments(self, call: Node) -> tuple[Any, ...]:
        """The launch's arguments, read from a portable call."""
        arguments, grid = _parts(call)
        values = []
        for place, value in zip(self.places, self.values, strict=True):
            match place:
                case ("grid", axis):
                    values.append(grid[axis])
                case ("kwargs", name):
                    values.append(arguments[name])
                case _:
                    values.append(value)
        return tuple(values)


def _parts(call: Node) -> tuple[dict[str, Any], list[Any]]:
    arguments: Any = call.kwargs["kwargs"]
    grids: Any = call.kwargs["grid"]
    return dict(arguments), list(grids[0])


def lower_launches(gm: GraphModule) -> GraphModule:
    """Replace portable Triton calls by launches of the tuned kernels, in place, subgraphs included.

    ::

        triton_kernel_wrapper_mutation(kernel_idx=0, grid=[(1, 1, 1)], kwargs={in_ptr0: a, out_ptr0: b, ...})
            becomes
        launch(triton_poi_fused_add_0, a, b, 128)

    The portable form names the kernel by an index into a process-wide table. It looks up the launcher at every call,
    which is slow, and it has no tuning. Emission makes it because other compilers understand it.
    """
    for child in gm.children():
        if isinstance(child, GraphModule):
            lower_launches(child)
    calls = [node for node in gm.graph.nodes if isinstance(node.meta.get("launch"), TunedLaunch)]
    handles: dict[str, Node] = {}
    for node in calls:
        tuned: TunedLaunch = node.meta["launch"]
        name = tuned.kernel.name
        with gm.graph.inserting_before(node):
            if name not in handles:
                # A pass may have made another graph module, which has only the attributes that its nodes refer to.
                setattr(gm, name, tuned.kernel)
                handles[name] = gm.graph.create_node("get_attr", name)
            replacement = gm.graph.call_function(launch, (handles[name], *tuned.arguments(node)))
        replacement.meta = {key: value for key, value in node.meta.items() if key not in ("launch", "val")}
        node.replace_all_uses_with(replacement)
        gm.graph.erase_node(node)
    if calls:
        _drop_dead_arithmetic(gm)
        gm.recompile()
    return gm


def _drop_dead_arithmetic(gm: GraphModule) -> None:
    """Remove the arithmetic of symbolic grids, which only the portable form uses; the launcher computes its grid."""
    for node in reversed(gm.graph.nodes):
        operands = (node, *node.all_input_nodes)
        if node.op == "call_function" and not node.users and all(map(_is_arithmetic, operands)):
            gm.graph.erase_node(node)


def _is_arithmetic(node: Node) -> bool:
    return is_symbolic_value(node.meta.get("val"))
