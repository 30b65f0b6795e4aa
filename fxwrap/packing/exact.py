"""The exact search: whether a part's buffers can be placed below some capacity.

Of all placements below the capacity, look at one with the least sum of offsets: in it, every buffer lies at 0 or on
another one. So buffers are placed from below. A buffer's *natural* offset is on top of everything placed that it
meets; either it lies there, or on something that is not placed yet. Branching decides that for one buffer at a time:
first it is placed; if that fails, it is held up until something is placed that it will lie on.

After each decision, lower bounds of the offsets are raised for as long as one follows from others (``_propagate``),
and the search turns back where, in some section of time, the buffers left cannot all end below the capacity.
Placing a buffer may leave parts that no longer meet, and these are solved one after the other: if one is
impossible, nothing that the others do can help.

Working in sections, placing from below, and solving parts apart are ideas of Moffitt, "MiniMalloc: A Lightweight
Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023), which branches on the buffer with the
globally lowest offset. Here any buffer with nothing to come below may be decided, so that a search can stay where
memory is scarce; which section that is, one of four rules tells (``RULES``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from . import native
from .problem import Part

RULES = range(4)
_NEVER = 1 << 62
_LITTLE = 65536.0


class FeasibilitySearch(Protocol):
    """A search that is begun with a capacity, and goes on a little at every call of ``run``."""

    def start(self, ranks: Sequence[int], capacity: int, rule: int) -> None:
        """Begin again. Of buffers at the same offset, the one of the lower rank is tried first."""

    def run(self, nodes: int, seconds: float) -> bool | None:
        """Go on for so many nodes or seconds. True: a placement is found; False: there is none."""

    @property
    def nodes(self) -> int:
        """Looked at in all."""

    def offsets(self) -> list[int]:
        """Of the placement that was found."""


def new_search(part: Part) -> FeasibilitySearch:
    library = native.library()
    return Search(part, twins(part)) if library is None else native.NativeSearch(library, part, twins(part))


def twins(part: Part) -> list[int]:
    """For each buffer, the one before it with the same life and size, or -1: either may lie below the other."""
    seen: dict[tuple[int, int, int], int] = {}
    found = []
    for i, alike in enumerate(zip(part.begins, part.ends, part.sizes, strict=True)):
        found.append(seen.get(alike, -1))
        seen[alike] = i
    return found


class _Item:
    """A buffer that is not placed yet; held up while ``lowest`` is above ``natural``."""

    __slots__ = ("id", "lowest", "natural")

    def __init__(self, id: int, natural: int, lowest: int) -> None:
        self.id, self.natural, self.lowest = id, natural, lowest


class _Frame:
    """Items that no time separates, by begin; the one placed, and the parts that are left then."""

    __slots__ = ("chosen", "items", "part", "parts")

    def __init__(self, items: list[_Item]) -> None:
        self.items = items
        self.chosen: _Item | None = None
        self.parts: list[list[_Item]] | None = None
        self.part = 0


class Search:
    """``exact.cpp`` line by line, for machines without a compiler."""

    def __init__(self, part: Part, twins: Sequence[int]) -> None:
        self.part, self.twins = part, twins
        self.nodes = 0
        sections = len(part.loads)
        self.filled, self.bottom = [0] * sections, [0] * sections
        self.load, self.alive = [0] * sections, [0] * sections
        self.able, self.only = [0] * sections, [0] * sections
        self.span = range(0)

    def start(self, ranks: Sequence[int], capacity: int, rule: int) -> None:
        self.ranks, self.capacity, self.rule = ranks, capacity, rule
        self.trouble = [1.0] * len(self.part.loads)
        self.placed = [0] * len(self.part)
        self.result: bool | None = None
        items = sorted(range(len(self.part)), key=lambda i: self.part.begins[i])
        self.stack = [_Frame([_Item(i, 0, 0) for i in items])]

    def offsets(self) -> list[int]:
        return list(self.placed)

    def run(self, nodes: int, seconds: float) -> bool | None:
        deadline = time.monotonic() + seconds
        while self.result is None:
            frame = self.stack[-1]
            if frame.parts is not None:
                if frame.part < len(frame.parts):
                    # Copies, for a part may be solved again under another decision further up.
                    self.stack.append(_Frame([_Item(x.id, x.natural, x.lowest) for x in frame.parts[frame.part]]))
                else:
                    self._close(True)
                continue
            if nodes <= 0 or time.monotonic() >= deadline:
                break
            nodes -= 1
            self.nodes += 1
            if frame.chosen is not None:
                frame.chosen.lowest = max(frame.chosen.lowest, frame.chosen.natural + 1)
            if self._propagate(frame.items):
                frame.chosen = self._choose(frame.items)
                self._place(frame)
            else:
                self._close(False)
        return self.result

    def _close(self, solved: bool) -> None:
        self.stack.pop()
        if not self.stack:
            self.result = solved
        elif solved:
            self.stack[-1].part += 1
        else:
            self.stack[-1].parts = None

    def _propagate(self, items: list[_Item]) -> bool:
        """Raise what is lowest until nothing follows any more. False if the capacity does not suffice."""
        begins, ends, sizes = self.part.begins, self.part.ends, self.part.sizes
        self.span = range(begins[items[0].id], max(ends[item.id] for item in items))
        for s in self.span:
            self.load[s] = self.alive[s] = 0
        for item in items:
            for s in range(begins[item.id], ends[item.id]):
                self.load[s] += sizes[item.id]
                self.alive[s] += 1
        changed = True
        while changed:
            before = [item.lowest for item in items]
            self._order_twins(items)
            if not (self._find_support(items) and self._stack_up(items) and self._find_bottoms(items)):
                return False
            changed = before != [item.lowest for item in items]
        return True

    def _order_twins(self, items: list[_Item]) -> None:
        """Buffers that are alike lie in the order of their numbers."""
        here = {item.id: item for item in items}
        for item in items:
            twin = here.get(self.twins[item.id])
            if twin is not None:
                item.lowest = max(item.lowest, twin.lowest + self.part.sizes[item.id])

    def _find_support(self, items: list[_Item]) -> bool:
        """What is held up will lie on something that is not placed yet."""
        begins, ends, sizes = self.part.begins, self.part.ends, self.part.sizes
        tops = [(item.lowest + sizes[item.id], item) for item in items]
        for item in items:
            if item.lowest == item.natural:
                continue
            begin, end = begins[item.id], ends[item.id]
            support = min(
                (
                    top
                    for top, other in tops
                    if other is not item and begins[other.id] < end and begin < ends[other.id]
                ),
                default=_NEVER,
            )
            item.lowest = max(item.lowest, support)
            if item.lowest + sizes[item.id] > self.capacity:
                return False
        return True

    def _stack_up(self, items: list[_Item]) -> bool:
        """In every section, items one on the other, the lowest first: no solution has the last of them end lower."""
        filled, bottom, able = self.filled, self.bottom, self.able
        begins, ends, sizes = self.part.begins, self.part.ends, self.part.sizes
        for s in self.span:
            filled[s] = bottom[s] = -1
            able[s] = 0
        for i in sorted(range(len(items)), key=lambda i: items[i].lowest):
            item = items[i]
            size, lowest = sizes[item.id], item.lowest
            for s in range(begins[item.id], ends[item.id]):
                if filled[s] < 0:
                    bottom[s] = lowest
                filled[s] = max(filled[s], lowest) + size
                if filled[s] > self.capacity:
                    self.trouble[s] += 1
                    return False
                if lowest + self.load[s] <= self.capacity:
                    able[s] += 1
                    self.only[s] = i
        return True

    def _find_bottoms(self, items: list[_Item]) -> bool:
        """The lowest item of a section has all others above it. Where only one is able to be that, they are."""
        begins, ends, sizes = self.part.begins, self.part.ends, self.part.sizes
        for s in self.span:
            if self.alive[s] == 0:
                continue
            if self.able[s] == 0:
                self.trouble[s] += 1
                return False
            if self.able[s] > 1 or self.alive[s] == 1:
                continue
            bottom = items[self.only[s]]
            top = bottom.lowest + sizes[bottom.id]
            for item in items:
                if item is not bottom and item.lowest < top and begins[item.id] <= s < ends[item.id]:
                    item.lowest = top
        return True

    def _section(self) -> int:
        """The section to decide about."""
        able, alive, trouble = self.able, self.alive, self.trouble

        def value(s: int) -> float:
            if self.rule == 0:
                return able[s] / alive[s]
            if self.rule == 1:
                return (float(self.capacity - self.filled[s]) + _LITTLE) * able[s] / trouble[s]
            if self.rule == 2:
                return able[s] / trouble[s]
            return float(self.bottom[s])

        return min((s for s in self.span if alive[s]), key=value)

    def _choose(self, items: list[_Item]) -> _Item:
        """An item that is not held up, with nothing left that would fit below it."""
        begins, ends, sizes = self.part.begins, self.part.ends, self.part.sizes
        at = self._section()
        here = [item for item in items if begins[item.id] <= at < ends[item.id]]
        free = [x for x in here if x.lowest == x.natural and x.lowest + self.load[at] <= self.capacity]
        # All of them may be held up: then by something else, which is found from any of them.
        best = min(free, key=lambda item: (item.lowest, self.ranks[item.id])) if free else here[0]
        while True:
            begin, end, least = begins[best.id], ends[best.id], best.lowest
            below = None
            for item in items:
                top = item.lowest + sizes[item.id]
                lower = top <= least if below is None else top < least
                if lower and item is not best and begins[item.id] < end and begin < ends[item.id]:
                    below, least = item, top
            if below is None:
                return best
            best = below

    def _place(self, frame: _Frame) -> None:
        chosen = frame.chosen
        assert chosen is not None
        begins, ends = self.part.begins, self.part.ends
        begin, end = begins[chosen.id], ends[chosen.id]
        self.placed[chosen.id] = chosen.natural
        top = chosen.natural + self.part.sizes[chosen.id]
        frame.parts, frame.part = [], 0
        until = -1
        for old in frame.items:
            if old is chosen:
                continue
            item = _Item(old.id, old.natural, old.lowest)
            if begins[item.id] < end and begin < ends[item.id]:
                item.natural, item.lowest = max(item.natural, top), max(item.lowest, top)
            if begins[item.id] >= until:
                frame.parts.append([])
            until = max(until, ends[item.id])
            frame.parts[-1].append(item)
