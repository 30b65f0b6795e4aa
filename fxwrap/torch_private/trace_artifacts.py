"""Where torch's tools find what was compiled: structured traces (tlparse), the folder of TORCH_COMPILE_DEBUG."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._guards import CompileContext, compile_context
from torch._logging import trace_structured


@dataclass(frozen=True)
class TracedCompilation:
    """The compilation that runs in this thread.

    Attributes:
        trace_id: its id, with which later artifacts are shown, too; None outside of any compilation.
        folder: of Inductor's debug files; None where they are off.
    """

    trace_id: Any
    folder: Path | None

    @classmethod
    def current(cls) -> TracedCompilation:
        # A saved program runs without Inductor, which then has no debug files.
        virtualized: Any = sys.modules.get("torch._inductor.virtualized")
        folder = getattr(virtualized.V.debug, "_path", None) if virtualized is not None else None
        return cls(CompileContext.current_trace_id(), Path(folder) if folder else None)

    def write(self, name: str, encoding: str, text: Callable[[], str]) -> None:
        """Write an artifact to the structured trace. The text is made only where somebody reads it.

        Args:
            encoding: "string" or "json".
        """
        with self._context():
            trace_structured(
                "artifact",
                metadata_fn=lambda: {"name": name, "encoding": encoding},
                payload_fn=text,
                expect_trace_id=False,
            )

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        if self.trace_id is None:
            return contextlib.nullcontext()
        context = CompileContext(self.trace_id.compile_id)
        context.attempt = self.trace_id.attempt
        return compile_context(context)
