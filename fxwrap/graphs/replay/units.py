"""Native replay: the steps of a recording as a unit, which the helper library runs without Python.

::

    v0 = r[2]; r[2] = None          ->      (v0 is slot 2)
    v1 = empty_strided(...)                 slot 5 = empty (3, 8)
    r[5] = v1                               (v1 is slot 5)
    c6(c4, v0, c5, out=v1)                  aten::addmm.out(constant, slot 2, constant, 1, 1, slot 5), or the BLAS
    del v0                                  drop slot 2
    c13(c9, v1, c10)                        cpp_fused_relu_0 at 0x7f..(constant, slot 5, constant)

A step without a native form (``steps.py``) is a call of Python; a unit may mix both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...torch_private.native_units import CannotReplay, NativeReplay, Unit
from .flat_python import Part
from .guards import Description
from .lowering import Lowering

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
        lowering = Lowering(native, registers, description)
        for part in parts:
            lowering.append(part)
        return lowering.unit()
    except CannotReplay:
        raise
    except RuntimeError as error:  # raised by the library
        raise CannotReplay(str(error).partition("\n")[0]) from error
    except Exception as error:  # a bug: the call has already run, and should not fail
        log.warning("a recording replays in Python: its unit cannot be made", exc_info=True)
        raise CannotReplay(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
