"""The CPU's device graph, which repeats its calls."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ...errors import CaptureError

# A weak reference, so that an interrupted capture ends when its graph is freed.
_capturing: ContextVar[weakref.ref[CPUGraph] | None] = ContextVar("fxwrap_capturing", default=None)


def capturing_graph() -> CPUGraph | None:
    reference = _capturing.get()
    return reference() if reference is not None else None


class CPUGraph:
    """The device graph of the CPU: a list of calls with bound arguments.

    Between ``capture_begin`` and ``capture_end``, every call that this thread issues with ``issue`` runs and is kept;
    ``replay`` runs the calls again, in order.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._captured = False

    def capture_begin(self) -> None:
        if self._captured:
            raise CaptureError("CPU graph: already captured", remedy="call reset() before capturing again")
        if capturing_graph() is not None:
            raise CaptureError("CPU graph: another capture is under way on this thread")
        _capturing.set(weakref.ref(self))

    def capture_end(self) -> None:
        if capturing_graph() is not self:
            raise CaptureError("CPU graph: capture_end() without capture_begin()")
        self._captured = True
        _capturing.set(None)

    def add(self, call: Callable[[], Any]) -> None:
        """Run a call, and keep it."""
        call()
        self._calls.append(call)

    def instantiate(self) -> None:
        """Does nothing: the calls are bound already."""

    def replay(self) -> None:
        if not self._captured:
            raise CaptureError("CPU graph: nothing was captured", remedy="capture before replay()")
        for call in self._calls:
            call()

    def reset(self) -> None:
        self._calls, self._captured = [], False

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def enable_debug_mode(self) -> None:
        """Does nothing: calls can always be listed."""

    def debug_dump(self, path: str) -> None:
        """Write the captured calls to ``path``: the source of each, or its name."""
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{getattr(call, 'source', call)}\n" for call in self._calls)


def issue(call: Callable[[], Any]) -> None:
    """Run ``call`` now; a CPU graph that captures on this thread keeps it.

    On an accelerator, the device's graph captures the work that ``call`` launches.
    """
    graph = capturing_graph()
    if graph is None:
        call()
    else:
        graph.add(call)


@dataclass(frozen=True)
class BoundCall:
    """A flat function bound to its registers: a call without arguments, for ``issue``.

    Attributes:
        source: the source of the function.
        registers: the registers of the recording.
        context: makes the context in which the function runs.
        inputs: the number of input registers, which come first (``SimulatedGraph`` reads it).
        stores: the registers that the function fills.
    """

    function: Callable[[list[Any]], Any]
    source: str
    registers: list[Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    inputs: int
    stores: list[int]

    def __call__(self) -> None:
        with self.context():
            self.function(self.registers)
