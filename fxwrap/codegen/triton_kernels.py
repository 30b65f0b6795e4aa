"""Triton kernels as Inductor tunes them: launching, and which arguments they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..host_graph import launch


class TritonLauncher:
    """Runs a tuned Triton kernel on the current stream, as Inductor's own wrapper does.

    The first call tunes; captured work must therefore have run once before it is captured.
    """

    def __init__(self, tuner: Any, device: torch.device) -> None:
        self.tuner = tuner
        self._run = tuner.run
        self._index = device.index if device.index is not None else 0
        self._stream = _raw_stream_getter(device.type)

    def __call__(self, *args: Any) -> None:
        self._run(*args, stream=self._stream(self._index))


def _raw_stream_getter(device_type: str) -> Callable[[int], int]:
    if device_type == "cpu":
        return lambda index: 0
    from torch._dynamo.device_interface import get_interface_for_device

    return get_interface_for_device(device_type).get_raw_stream


def written_arguments(tuner: Any, triton_meta: Any, count: int) -> tuple[int, ...]:
    """Positions of the call arguments that a kernel writes.

    Inductor names what its own kernels only read ``in_ptr...``. Everything else that is a pointer counts as
    written: for a kernel the user wrote nothing better is known without reading it, and too many writes only
    cost freedom in scheduling.
    """
    signature = _signature(triton_meta)
    constants = triton_meta.get("constants", {}) if isinstance(triton_meta, Mapping) else {}
    mutated = set(getattr(tuner, "mutated_arg_names", None) or ())
    names = [name for name in signature if name not in constants][:count]
    written = []
    for position, name in enumerate(names):
        pointer = str(signature[name]).startswith("*")
        if pointer and (name in mutated or not name.startswith("in_ptr")):
            written.append(position)
    return tuple(written)


def _signature(triton_meta: Any) -> Mapping[str, Any]:
    if isinstance(triton_meta, Mapping):
        return triton_meta.get("signature", {})
    return getattr(triton_meta, "signature", {})


def lower_launches(gm: GraphModule) -> GraphModule:
    """Replace the portable Triton call by the launch of the tuned kernel, in place.

    ::

        triton_kernel_wrapper_mutation(kernel_idx=0, grid=[(1, 1, 1)], kwargs={in_ptr0: a, out_ptr0: b, ...})
            becomes
        launch(triton_poi_fused_add_0, a, b, 128)

    The portable form names the kernel by an index into a process-wide table and looks its launcher up at every
    call, which is slow; other compilers understand it, which is why emission makes it.
    """
    changed = False
    for node in list(gm.graph.nodes):
        tuned: tuple[Node, ...] | None = node.meta.get("launch")
        if tuned is None or node.target is launch:
            continue
        with gm.graph.inserting_before(node):
            replacement = gm.graph.call_function(launch, tuned)
        replacement.meta = {key: value for key, value in node.meta.items() if key not in ("launch", "val")}
        node.replace_all_uses_with(replacement)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.recompile()
    return gm
