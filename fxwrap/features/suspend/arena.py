"""Arenas whose memory can be given back to the device while their graphs and addresses stay."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...errors import DeviceError
from ...graphs.memory.arenas import Arena, ArenaUser
from ...graphs.memory.live_outputs import OutputStorage
from ...graphs.memory.locks import LockOwner, lock_of_process
from ...graphs.memory.take_memory import take_memory
from ...host_graph.tensors import tensor_over
from .memory import suspendable_memory

log = logging.getLogger(__name__)

# Held while memory is suspended or resumed, for milliseconds. Reentrant: a signal handler may call a program.
_changing = lock_of_process()
# Arenas whose live outputs are on the host: whoever has one need not have its recording.
_with_outputs: set[SuspendableArena] = set()


@dataclass(frozen=True, eq=False)
class Suspension:
    """What is kept of an arena without physical memory.

    Attributes:
        owner: holds the arena's lock, as a call would: what needs the lock to run, in Python or natively, cannot run.
        outputs: the live outputs, each with its bytes on the host.
    """

    owner: LockOwner
    outputs: list[tuple[OutputStorage, torch.Tensor]]

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


@dataclass(eq=False)
class SuspendableArena(Arena):
    """An arena of programs with the option ``suspendable``.

    Attributes:
        suspension: what is kept while its memory is suspended; None while it is not.
    """

    suspension: Suspension | None = None

    @classmethod
    def new(cls, device: torch.device) -> SuspendableArena:
        """With memory of torch's allocator where the device has no other; ``fxwrap.suspend`` says why then."""
        try:
            return cls(device, memory=suspendable_memory(device))
        except DeviceError as error:
            # As text: a log handler that keeps the error would keep its frames, and their tensors.
            log.warning("%s", str(error))
            return cls(device)

    def suspend(self, owner: LockOwner) -> int:
        """Give its physical memory back. Until it is resumed, its lock is held, and live outputs are on the host.

        Args:
            owner: holds the arena's lock. The suspension keeps it until ``resume``.

        Returns:
            The number of bytes.
        """
        assert self.memory is not None
        with _changing:
            self.suspension = Suspension.of(owner, self.live())
            if self.suspension.outputs:
                _with_outputs.add(self)
            self.changed()  # native units miss: the call goes through Python, which resumes
            return self.memory.suspend(self.block)

    def is_suspended(self) -> bool:
        return self.suspension is not None

    def resume(self) -> int:
        """Take physical memory again; returns how many bytes, 0 if the arena was not suspended. Other threads wait.

        Raises:
            MemoryLimitError: the device is out of memory. The arena stays suspended.
        """
        with _changing:
            suspension = self.suspension
            if suspension is None or self.memory is None:
                return 0
            nbytes = take_memory(self.device, self.memory.resume, lambda: None)
            suspension.restore()
            self._end_suspension(suspension)
            return nbytes

    def _end_suspension(self, suspension: Suspension) -> None:
        self.suspension = None
        _with_outputs.discard(self)
        self.lock.release(suspension.owner)

    def end_if_suspended(self, users: Iterable[ArenaUser], why: str) -> bool:
        """End some of its recordings if it is suspended; returns whether it was.

        If it then has neither recordings nor live outputs, it is an empty arena again, and its lock is released.
        """
        with _changing:
            suspension = self.suspension
            if suspension is None:
                return False
            for user in users:
                user.end(why)
            if not self.users() and not self.live():
                self.clear("")
                self._end_suspension(suspension)
            return True
