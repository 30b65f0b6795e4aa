"""Threads of tests."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence

import torch


def in_threads(work: Sequence[Callable[[], object]]) -> None:
    """Run functions at one time, on the device of the test; raise the first error."""
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            with torch.no_grad():
                one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(run, one)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
