"""The state of a suspended arena: its lock, and the bytes of live outputs, which are on the host meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ...graphs.memory.live_outputs import OutputStorage
from ...graphs.memory.locks import LockOwner
from ...host_graph.tensors import tensor_over


@dataclass(frozen=True, eq=False)
class Suspension:
    """An arena without physical memory.

    Attributes:
        owner: holds the arena's lock, as a call would: what needs the lock to run, in Python or natively, cannot run.
        outputs: the live outputs, each with its bytes on the host.
    """

    owner: LockOwner
    outputs: list[tuple[OutputStorage, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, owner: LockOwner, live: Iterable[OutputStorage]) -> Suspension:
        """Copy live outputs to the host. Waits for the copies."""
        return cls(owner, [(output, _bytes_of(output).to("cpu", copy=True)) for output in live])

    def restore(self) -> None:
        """Copy the outputs back. Waits for the copies, because other streams may read them next."""
        for output, saved in self.outputs:
            _bytes_of(output).copy_(saved)


def _bytes_of(output: OutputStorage) -> torch.Tensor:
    return tensor_over(output.storage, (output.storage.nbytes(),), (1,), torch.uint8)
