"""Native replay: the steps of a recording as a unit, which the helper library runs without Python.

::

    v0 = r[2]; r[2] = None
    v1 = empty_strided(...)         ->      slot 5 = empty (3, 8)
    r[5] = v1
    c6(c4, v0, c5, out=v1)          ->      aten::addmm.out(constant, slot 2, constant, 1, 1, slot 5)  # BLAS
    del v0                          ->      drop slot 2
    c13(c9, v1, c10)                ->      cpp_fused_relu_0 at 0x7f..(constant, slot 5, constant)

A step without a native form (``steps.py``) is a call of Python; a unit may mix both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .flat_python import Part
from .guards import Description
from .lowering import Lowering
from .native import CannotReplay, NativeReplay, Unit
from .operands import Local
from .steps import Store

log = logging.getLogger(__name__)


def make_unit(native: NativeReplay, parts: Sequence[Part], registers: int, description: Description) -> Unit:
    """Make a unit of parts over the same registers. It returns the result of the last part.

    Args:
        registers: the number of registers.
        description: everything else about the unit; it gets the steps.

    Raises:
        CannotReplay: the parts cannot be run natively.
    """
    try:
        return _make_unit(native, parts, registers, description)
    except CannotReplay:
        raise
    except RuntimeError as error:  # raised by the library
        raise CannotReplay(str(error).partition("\n")[0]) from error
    except Exception as error:  # a bug: the call has already run, and should not fail
        log.warning("a recording replays in Python: its unit cannot be made", exc_info=True)
        raise CannotReplay(f"{type(error).__name__}: {error}".partition("\n")[0]) from error


def _make_unit(native: NativeReplay, parts: Sequence[Part], registers: int, description: Description) -> Unit:
    description.slots = registers
    below = False
    last: Lowering | None = None
    for part in parts:
        stores = [step for step in part.steps if isinstance(step, Store)]
        stored = {store.value: store.register.number for store in stores if isinstance(store.value, Local)}
        last = Lowering(native, stored, description)
        if part.below_autograd is not below:
            below = part.below_autograd
            last.below_autograd(below)
        if part.name:
            description.ranges.append((len(description.steps), part.name))
        for step in part.steps:
            begin = len(description.steps)
            step.lower(last)
            if step.repeats:
                description.repeats += range(begin, len(description.steps))
        description.ranges.append((len(description.steps), ""))
    assert last is not None
    if below:
        last.below_autograd(False)
    description.result = last.value(parts[-1].result)
    description.listing.append(f"return {last.text(parts[-1].result)}")
    # Every input lives as long as the call, also if no step reads it: steps know static inputs by address only.
    static = {position for position, _ in description.guards.addresses}
    unread = static - description.used
    description.loads = [(p, p) for p in range(description.inputs) if p not in unread]
    description.kept_inputs = sorted(unread) if description.empties_inputs else []
    filled = {slot for slot, _ in description.loads} | description.used
    description.cleared = sorted(filled - description.dropped)
    return native.library.unit(description.for_library())
