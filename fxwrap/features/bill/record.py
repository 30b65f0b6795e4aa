"""``fxwrap.record`` with ``dry_run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

from ...api import record as without_bill
from ...api.compile_afresh import rehearsal_of
from ...graphs.memory.take_memory import empty_cache
from .bill import Bill
from .rehearsal import Rehearsal


@overload
def record(fn: Callable[..., Any], *examples: Any, dry_run: Literal[False] = False) -> int: ...
@overload
def record(fn: Callable[..., Any], *examples: Any, dry_run: Literal[True]) -> Bill: ...
def record(fn: Callable[..., Any], *examples: Any, dry_run: bool = False) -> int | Bill:
    """Call ``fn`` with examples until no call makes a recording. The largest comes first, so that arenas grow once.

    ::

        fxwrap.record(decode, *[(torch.zeros(batch, 1, dtype=torch.long),) for batch in (1, 2, 4, 8)])

    Each call has its usual side effects (on buffers, on files), except that a training step
    (``train_step``) changes nothing that it trains. Results are dropped, and the states of random number
    generators are restored. For training, pass a function that also runs the backward. The modes of later calls
    (``torch.no_grad``, ``torch.inference_mode``, autocast) must be active here as well.

    Args:
        fn: what ``torch.compile`` returned, or a function that calls compiled code.
        examples: the arguments of one call each: a tuple of positional arguments, or a single one. Every call gets
            copies, so that no example is taken for an input whose address stays. An input whose address does stay,
            such as a cache, should be held by ``fn`` itself. Copies have the strides of the examples, and share
            memory where the examples do.
        dry_run: find out what recordings would keep, without a capture. The calls compile, warm up and compute as
            usual, and need the memory that recordings would keep, until this returns. What is recorded already is
            left alone, and is not in the bill. An operator whose capture fails is only found by a capture.

    Returns:
        The number of recordings that were made; with ``dry_run`` the bill.

    Raises:
        FxwrapError: ``fn`` calls nothing that was compiled with fxwrap, or runs through Inductor's own wrapper.
        InputError: there are no examples.
    """
    if not dry_run:
        return without_bill.record(fn, *examples)
    calls, rehearsal = without_bill.ExampleCalls(examples), Rehearsal()
    try:
        with rehearsal_of(fn), rehearsal.under_way():
            calls.make(fn, lambda: rehearsal.progress, rehearsal.compiling())
        if not rehearsal.rehearsed:
            raise without_bill.no_program(fn)
        return rehearsal.bill()
    finally:
        rehearsal.end()
        empty_cache()
