"""Writes to single numbers of float64, such as an optimizer's counts, which torch would lose.

Where a Python number has to be compiled in, Dynamo analyses the function a second time, and takes inputs that are not
needed any more out of the graph (``remove_tensorify_specialized_graphargs``, torch 2.13 and 2.14). It goes by the
values of nodes, and what a method such as ``copy_`` returns has the value of the input that it writes::

    first analysis                        second analysis
    eta = placeholder                     eta = placeholder
    eta.copy_(rate / count)               (taken out: nothing uses what copy_ returns)

So the update would compute with the old ``eta`` at all later steps. Here only inputs are taken out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch._dynamo.output_graph import OutputGraph

from ....codegen.devices.patches import Patches

_METHOD = "remove_tensorify_specialized_graphargs"
_lock = threading.Lock()
_inside = [0]
_patches = Patches()


@contextlib.contextmanager
def writes_kept() -> Iterator[None]:
    """A context in which no write is lost, in any thread; the last thread to leave it puts torch's method back."""
    with _lock:
        _inside[0] += 1
        if _inside[0] == 1 and (original := getattr(OutputGraph, _METHOD, None)) is not None:
            _patches.put(OutputGraph, _METHOD, _of_inputs_only(original))
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                _patches.close()


def _of_inputs_only(original: Any) -> Any:
    def remove(self: OutputGraph) -> None:
        work = [node for node in self.graph.nodes if node.op != "placeholder" and "example_value" in node.meta]
        values = [node.meta.pop("example_value") for node in work]
        try:
            original(self)
        finally:
            for node, value in zip(work, values, strict=True):
                node.meta["example_value"] = value

    return remove
