"""A process group for one process in which a collective does nothing until somebody waits for it.

The worst that an asynchronous collective may do, every time: it reads its operands when it is waited for, and until
then what it fills is NaN. So a schedule or a memory plan that counts on it too early computes wrong numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work, _register_process_group

LAZY_GROUP = "fxwrap_lazy_group"


def _from_other(tensor: torch.Tensor) -> torch.Tensor:
    """What the process at the other end holds where this one holds ``tensor``."""
    return -0.5 * tensor


class _LazyWork(Work):
    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self._run: Callable[[], None] | None = run

    def wait(self, timeout: Any = None) -> bool:
        if self._run is not None:
            self._run()
            self._run = None
        return True


class _LazyGroup(ProcessGroup):
    """This process, and one that does not exist."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def getBackendName(self) -> str:
        return "lazy"

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Work:
        def reduce() -> None:
            for tensor in tensors:
                tensor.add_(_from_other(tensor))

        return _LazyWork(reduce)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None
    ) -> Work:
        for output in outputs:
            output.fill_(float("nan"))

        def gather() -> None:
            for output, value in zip(outputs, inputs, strict=True):
                output.copy_(torch.cat([value, _from_other(value)]))

        return _LazyWork(gather)

    def _allgather_base(self, output: torch.Tensor, value: torch.Tensor, options: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [value])


_group = _LazyGroup()


def register() -> None:
    """Torch finds the group by its name, until somebody destroys all groups."""
    _register_process_group(LAZY_GROUP, _group)  # type: ignore[arg-type]


register()


@contextlib.contextmanager
def default_group(backend: str) -> Iterator[None]:
    """Torch's default process group, of this process alone. Its end destroys all groups; ours is made anew."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        register()
