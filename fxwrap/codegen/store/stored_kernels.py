"""Kernels of a stored graph: whatever loads their definitions, what launches them is made here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...devices import KernelCall, kernel_kind
from ...host_graph.nodes import Kernel


def stored_kernel(
    known: Mapping[str, Any], texts: Sequence[str], definition: Any, run: Callable[..., Any] | None = None
) -> Kernel | None:
    """A kernel from its entry in a stored graph; None where its device runs no kernels of that language.

    Args:
        texts: of the modules that define kernels.
        definition: what the kernel's own definition evaluates to.
        run: launches it; None has it made from the definition.
    """
    name, language, device = known["kernel"], known["language"], torch.device(known["device"])
    text, (begin, end) = texts[known["module"]], known["source"]
    call = KernelCall(name, text[begin:end], device, definition, known["arg_types"])
    if run is None and language == "triton":
        from ..emit.triton_kernels import TritonLauncher  # imports Inductor

        run = TritonLauncher(definition, device)
    elif run is None:
        kind = kernel_kind(call)
        if kind is None or kind.name != language:
            return None
        run = kind.load(call)
    return Kernel(name, language, call.source, device, run, tuple(known["writes"]), text, known["arg_types"])
