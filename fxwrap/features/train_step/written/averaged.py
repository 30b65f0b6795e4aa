"""Gradients that are averages over processes from the end of each ``backward()`` on, as with DistributedDataParallel.

::

    loss.backward()       p.grad += ...         of each process's own batch
                          p.grad = average      of all of them, in buckets: one communication for many parameters

It is the same code as the step runs it and as it is traced: functional collectives, which a graph holds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ..codegen.averaging import averaging
from ..codegen.wrapped_tensors import flat

_ON = threading.local()


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Inside the context, ``backward()`` averages no gradients over processes: the next one outside averages the sum.

    For micro-batches of a step of ``fxwrap.train_step(step, group=...)``, as DistributedDataParallel's ``no_sync``.
    """
    before, _ON.off = getattr(_ON, "off", False), True
    try:
        yield
    finally:
        _ON.off = before


@contextlib.contextmanager
def averaged_gradients(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Iterator[None]:
    """Inside the context, gradients of parameters are averaged over a group whenever a ``backward()`` ends."""
    average = averaging(group)
    # The parameters that the backward pass at hand has given a gradient, by position: the order of all processes.
    given: dict[int, torch.Tensor] = {}

    def at_the_end() -> None:
        gradients = [
            grad for _, one in sorted(given.items(), key=lambda item: item[0]) if (grad := one.grad) is not None
        ]
        given.clear()
        with torch.no_grad():
            parts = flat(gradients)
            for gradient, mean in zip(parts, average(parts), strict=True):
                if mean is not None:
                    gradient.copy_(mean)

    def noting(place: int) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            if getattr(_ON, "off", False):
                return
            if not given:
                Variable._execution_engine.queue_callback(at_the_end)  # type: ignore[attr-defined]
            given[place] = parameter

        return note

    handles = [
        parameter.register_post_accumulate_grad_hook(noting(place))
        for place, parameter in enumerate(parameters)
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
