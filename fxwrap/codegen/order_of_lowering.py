"""Corrections of the order in which Inductor runs kernels that read what others write.

::

    penalty = a * a + b * b         what reads a and b runs before the kernel that writes them, and is no part of it
    foreach: a += c, b += c

    foreach: y = a + c, z = b + d   the parts of a kernel run at the same time: none reads what another writes
    foreach: u = y * z, v = z * y

    y = x.view(int32) * 2           what reads x by a view runs before x is written (pytorch#198104)
    x[:] = 0

Kernels run in the order of their lowering, and small work is lowered where its result is needed: late, where nothing
tells that it reads what is written. Of foreach operators Inductor makes one kernel with a part for each tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ForeachKernelSchedulerNode
from torch._inductor.virtualized import V

from .devices.patches import Patches


@contextlib.contextmanager
def reads_before_writes() -> Iterator[None]:
    """A context in which Inductor runs what reads a tensor before what writes it.

    Its tables and classes are the process's: the caller holds the lock for them.
    """
    with Patches() as patches:
        for operator in lowering.foreach_ops:
            of_aten = isinstance(operator, torch._ops.OpOverload)
            if of_aten and operator._schema.is_mutable and operator in lowering.lowerings:
                patches.put_entry(lowering.lowerings, operator, _after_readers(lowering.lowerings[operator]))
        patches.put(GraphLowering, "mark_buffer_mutated", _also_of_views(GraphLowering.mark_buffer_mutated))
        can_fuse = ForeachKernelSchedulerNode.can_fuse

        def fuses(cls: type, producer: Any, consumer: Any) -> bool:
            return not _crosses(producer, consumer) and can_fuse(producer, consumer)

        patches.put(ForeachKernelSchedulerNode, "can_fuse", classmethod(fuses))
        yield


def _after_readers(lowered: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of an operator that writes, behind the lowering of what reads its operands.

    Inductor lowers the operator's computation, then the readers, and then makes the computation write.
    """

    @functools.wraps(lowered)
    def wrapped(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for name in filter(None, [tensor.maybe_get_name() for tensor in tensors]):
            V.graph.mark_buffer_mutated(name)  # lowers them; it is called again where nothing is left to lower
        return lowered(tensors, *args, **kwargs)

    return wrapped


def _also_of_views(mark: Callable[[GraphLowering, str], None]) -> Callable[[GraphLowering, str], None]:
    """Inductor's function, which lowers what reads a buffer before it is written; also what reads a view of it."""

    @functools.wraps(mark)
    def wrapped(graph: GraphLowering, name: str) -> None:
        operation: Any
        names = {name}
        for operation in graph.operations:
            of_views = isinstance(operation, (ir.FallbackKernel, ir.MultiOutput))
            if of_views and not names.isdisjoint(operation.get_inputs_that_alias_output()):
                names.update(buffer.get_name() for buffer in operation.get_outputs())
        for view in names - {name}:
            for reader in graph.name_to_users.get(view, ()):
                reader.realize()
        mark(graph, name)

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
