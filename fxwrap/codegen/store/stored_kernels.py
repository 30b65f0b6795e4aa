"""Makes the kernels of a stored graph from their entries and their loaded definitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...devices import KernelCall, kernel_kind
from ...host_graph.nodes import Kernel


def stored_kernel(
    entry: Mapping[str, Any], texts: Sequence[str], definition: Any, run: Callable[..., Any] | None = None
) -> Kernel | None:
    """A kernel from its entry in a stored graph; None where its device runs no kernels of that language.

    Args:
        entry: see ``graph_json.graph_from_data``.
        texts: texts of the modules that define kernels.
        definition: the value of the kernel's definition.
        run: launches the kernel; None makes it from the definition.
    """
    name, language, device = entry["kernel"], entry["language"], torch.device(entry["device"])
    text, (begin, end) = texts[entry["module"]], entry["source"]
    call = KernelCall(name, text[begin:end], device, definition, entry["arg_types"])
    if run is None and language == "triton":
        from ..emit.triton_kernels import TritonLauncher  # imports Inductor

        run = TritonLauncher(definition, device)
    elif run is None:
        kind = kernel_kind(call)
        if kind is None or kind.name != language:
            return None
        run = kind.load(call)
    return Kernel(name, language, call.source, device, run, tuple(entry["writes"]), text, entry["arg_types"])
