"""Runs a kernel's programs, one after the other, with blocks as large as the kernel allows."""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from . import operations, parameters
from .functions import interpretable, running
from .registry import Kernel

Grid = tuple[int, int, int]
# Elements of a block that is computed at once: the interpreter's own time does not count then, and a cache has them.
_MOST = 1 << 17
_MOST_REDUCED = 1 << 14
_BLOCKS = ("XBLOCK", "YBLOCK", "ZBLOCK")
# Kernels of Inductor's that look at nothing but their block sizes.
_SIZED = ("triton_poi_", "triton_per_", "triton_red_")
_LOCK = threading.RLock()


def run(kernel: Kernel, grid: Grid, address: int, places: parameters.Places) -> None:
    """Run a launch.

    Raises:
        NotImplementedError: the interpreter cannot compute the kernel.
    """
    import numpy as np

    interpreter = operations.interpreter()
    prepared = _prepared(kernel)
    arguments = parameters.read(kernel, address, places)
    grid = prepared.enlarged(grid, arguments)
    for name in prepared.as_tensors:
        arguments[name] = interpreter._implicit_cvt(arguments[name])
    # The interpreter has one place for the number of the program that runs.
    with _LOCK, np.errstate(all="ignore"), running():
        builder, function = interpreter.interpreter_builder, prepared.function
        builder.set_grid_dim(*grid)
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    builder.grid_idx = (x, y, z)
                    function(**arguments)


class _Prepared:
    """What needs to be found out of a kernel once."""

    def __init__(self, kernel: Kernel) -> None:
        raw = kernel.function.fn
        try:
            self._source = inspect.getsource(raw)
        except (OSError, TypeError):
            raise NotImplementedError("its source is not to be had") from None
        if "x_grid_barrier" in self._source:
            raise NotImplementedError("its programs wait for each other")
        self.function = interpretable(raw)
        annotated = {name for name, kind in inspect.get_annotations(raw).items() if "constexpr" in str(kind)}
        constants = {name for name, kind in kernel.signature.items() if kind == "constexpr"}
        # None, and numbers that Triton has made constants of because they are 1.
        self.as_tensors = sorted(constants - annotated)
        self._name = raw.__name__
        numbered = [f"tl.program_id({axis})" in self._source for axis in range(3)]
        self._resizable = self._name.startswith(_SIZED) and any(numbered) and "tl.num_programs" not in self._source
        # A combo kernel's programs are those of several kernels in a row: half as many are not half of each.
        combined = "num_xblocks_" in self._source
        self._axes = [axis for axis in range(3) if numbered[axis] and not combined]
        # Whether elements behind the end are masked, along each axis.
        self._masked = {letter: f"{letter}index < {letter}numel" in self._source for letter in "xyz"}
        self._loop = "r0_index < r0_numel" in self._source and "R0_BLOCK: tl.constexpr" in self._source
        inside = re.search(r"R0_BLOCK: tl\.constexpr = (\d+)", self._source)
        self._persistent = int(inside[1]) if inside else 1
        numel = re.search(r"^\s*r0_numel = (\d+)$", self._source, re.MULTILINE)
        self._r0_numel = int(numel[1]) if numel else None

    def enlarged(self, grid: Grid, arguments: dict[str, Any]) -> Grid:
        """Larger blocks, in the arguments, and as many fewer programs: they compute the same."""
        if not self._resizable or "RSPLIT" in arguments:
            return grid
        result = list(grid)
        elements = self._persistent
        for block in (*_BLOCKS, "R0_BLOCK", "R1_BLOCK"):
            elements *= arguments.get(block, 1)
        if "R0_BLOCK" in arguments and self._loop and "R1_BLOCK" not in arguments:
            # As many at once whatever block the tuner has chosen: the order of a sum must not depend on its choice.
            numel = min(self._reduced(arguments), _MOST_REDUCED)
            while arguments["R0_BLOCK"] < numel:
                arguments["R0_BLOCK"] *= 2
                elements *= 2
        for axis in self._axes:
            block = _BLOCKS[axis]
            if block not in arguments:
                continue
            while result[axis] > 1 and elements < _MOST and (self._masked[block[0].lower()] or result[axis] % 2 == 0):
                arguments[block] *= 2
                elements *= 2
                result[axis] = (result[axis] + 1) // 2
        return result[0], result[1], result[2]

    def _reduced(self, arguments: Mapping[str, Any]) -> int:
        """Elements that are reduced to one."""
        if self._r0_numel is not None:
            return self._r0_numel
        given = arguments.get("r0_numel")
        handle = getattr(given, "handle", None)
        return int(handle.data[0]) if handle is not None else int(given or 0)


_all_prepared: weakref.WeakKeyDictionary[Kernel, _Prepared] = weakref.WeakKeyDictionary()


def _prepared(kernel: Kernel) -> _Prepared:
    found = _all_prepared.get(kernel)
    if found is None:
        found = _all_prepared[kernel] = _Prepared(kernel)
    return found
