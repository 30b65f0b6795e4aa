"""Two corrections of how Inductor orders foreach operators, of which it makes one kernel with a part for each tensor.

::

    penalty = a * a + b * b         what reads a and b runs before the kernel that writes them, and is no part of it
    foreach: a += c, b += c

    foreach: y = a + c, z = b + d   the parts of a kernel run at the same time: none reads what another writes
    foreach: u = y * z, v = z * y
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor import lowering
from torch._inductor.scheduler import ForeachKernelSchedulerNode
from torch._inductor.virtualized import V

from .devices.patches import Patches


@contextlib.contextmanager
def foreach_in_order() -> Iterator[None]:
    """A context in which Inductor keeps the order of foreach operators and what they depend on.

    Its tables and classes are the process's: the caller holds the lock for them.
    """
    with Patches() as patches:
        for operator in lowering.foreach_ops:
            of_aten = isinstance(operator, torch._ops.OpOverload)
            if of_aten and operator._schema.is_mutable and operator in lowering.lowerings:
                patches.put_entry(lowering.lowerings, operator, _after_readers(lowering.lowerings[operator]))
        can_fuse = ForeachKernelSchedulerNode.can_fuse

        def fuses(cls: type, producer: Any, consumer: Any) -> bool:
            return not _crosses(producer, consumer) and can_fuse(producer, consumer)

        patches.put(ForeachKernelSchedulerNode, "can_fuse", classmethod(fuses))
        yield


def _after_readers(lowered: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of an operator that writes, behind the lowering of what reads its operands.

    Kernels run in the order of their lowering, and small work is lowered where its result is needed. Inductor lowers
    it when it notes the write, where the operator's own computation, which is then made to write, is lowered already.
    """

    @functools.wraps(lowered)
    def wrapped(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for tensor in tensors:
            for reader in V.graph.name_to_users.get(tensor.maybe_get_name(), ()):
                reader.realize()
        return lowered(tensors, *args, **kwargs)

    return wrapped


def _crosses(producer: Any, consumer: Any) -> bool:
    """Whether two nodes in one kernel would have parts that depend on each other."""
    made, used = _parts(producer), _parts(consumer)
    pairs = {
        (place, other)
        for place, part in enumerate(made)
        for other, reader in enumerate(used)
        if not part.get_buffer_names().isdisjoint(dep.name for dep in reader.read_writes.reads)
    }
    if len(made) > 1 and len(used) > 1:  # the parts become one in pairs
        return any(place != other for place, other in pairs)
    return len(pairs) > 1


def _parts(node: Any) -> Sequence[Any]:
    return node.snodes if isinstance(node, ForeachKernelSchedulerNode) else [node]
