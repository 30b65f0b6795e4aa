"""``no_garbage_collection``: suspends it while objects are built of which nearly all stay alive."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend Python's garbage collection, in the whole process.

    A full collection also traverses everything that Dynamo and Inductor have made, which takes 0.2 to 0.5 s. Building
    a host graph of 1,000 nodes would cause one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
