"""Quick heuristics: lowest offset first, with a few ways to break ties.

What they may try is counted in orders, not in seconds: the same buffers get the same places on every machine.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .problem import Part

# Orders times buffers: what may be tried.
_WORK = 3_200
_FEWEST, _MOST = 2, 10
# Where that leaves the arena above its lower bound: orders that are mended, how often each, and orders times buffers.
_MENDED, _TIMES, _MENDING_WORK = 4, 50, 20_000
# Loads during a buffer's life are looked at one by one up to so many in all.
_SPANS = 20_000_000
# Bytes for the bit masks of one order.
_MASKS = 1 << 26

Stop = Callable[[], bool]


def portfolio(part: Part, bound: int, before: Sequence[int] = ()) -> list[int]:
    """The best offsets of a few orders, and of mended ones; the first that needs no more than ``bound`` bytes.

    Args:
        before: offsets that buffers of the whole problem had in another plan; one with the same order comes first.
    """
    best = stacked(part, [before[i] for i in part.members]) if before else []
    if best and height(part, best) <= bound:
        return best
    for offsets in itertools.chain(_of_orders(part), _of_mended_orders(part, bound)):
        if not best or height(part, offsets) < height(part, best):
            best = offsets
            if height(part, best) <= bound:
                break
    return best


def _of_orders(part: Part) -> Iterator[list[int]]:
    for order in itertools.islice(orders(part), min(_MOST, max(_FEWEST, _WORK // len(part)))):
        yield lowest_offset_first(part, order)


def _of_mended_orders(part: Part, bound: int) -> Iterator[list[int]]:
    """A buffer comes the earlier, the more often it has ended above ``bound``.

    Known as squeaky wheel optimization, from Joslin and Clements (1999).
    """
    times = min(_TIMES, _MENDING_WORK // (_MENDED * len(part)))
    for order in itertools.islice(orders(part), _MENDED if times else 0):
        too_high = [0] * len(part)
        for _ in range(times):
            offsets = lowest_offset_first(part, sorted(order, key=too_high.__getitem__, reverse=True))
            yield offsets
            for i in order:
                too_high[i] += offsets[i] + part.sizes[i] > bound


def stacked(part: Part, before: Sequence[int]) -> list[int]:
    """Buffers on top of one another, in the order of offsets that they had before.

    What lay above a buffer lies above it again, whatever the sizes are now: an optimum for other sizes stays one if
    all of them grow alike.
    """
    tops, offsets = [0] * len(part.loads), [0] * len(part)
    for i in sorted(range(len(part)), key=lambda i: (before[i], part.begins[i])):
        begin, end = part.begins[i], part.ends[i]
        offsets[i] = max(tops[begin:end])
        tops[begin:end] = [offsets[i] + part.sizes[i]] * (end - begin)
    return offsets


def height(part: Part, offsets: Sequence[int]) -> int:
    return max(offset + size for offset, size in zip(offsets, part.sizes, strict=True))


@dataclass(frozen=True)
class Weights:
    """What makes a buffer hard to place, by position in its part.

    Attributes:
        lives: sections.
        areas: lives times sizes.
        crowds: the most bytes that are live at once during its life; all 0 if that would take too long to find.
    """

    lives: list[int]
    areas: list[int]
    crowds: list[int]


def weights_of(part: Part) -> Weights:
    lives = [end - begin for begin, end in zip(part.begins, part.ends, strict=True)]
    areas = [life * size for life, size in zip(lives, part.sizes, strict=True)]
    crowds = [0] * len(part)
    if part.spans <= _SPANS:
        crowds = [max(part.loads[begin:end]) for begin, end in zip(part.begins, part.ends, strict=True)]
    return Weights(lives, areas, crowds)


def orders(part: Part) -> Iterator[list[int]]:
    """Orders in which ties are broken, without end: by several keys first, then by keys with noise."""
    begins, ends, sizes = part.begins, part.ends, part.sizes
    found = weights_of(part)
    lives, areas, crowds = found.lives, found.areas, found.crowds
    everything = range(len(part))
    keys: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda i: (-crowds[i], -lives[i], -sizes[i]),
        lambda i: (-areas[i], begins[i]),
        lambda i: (-ends[i], -sizes[i]),
        lambda i: (begins[i], -ends[i], -sizes[i]),
        lambda i: (-sizes[i], -lives[i]),
        lambda i: (-crowds[i], -areas[i]),
        lambda i: (-ends[i], begins[i], -sizes[i]),
        lambda i: (-lives[i], -sizes[i]),
    )
    for key in keys:
        yield sorted(everything, key=key)
    draw = random.Random(0)
    while True:
        for weights in (areas, ends, areas, lives):
            noisy = [-weight * draw.uniform(0.5, 1.5) for weight in weights]
            yield sorted(everything, key=noisy.__getitem__)


def lowest_offset_first(part: Part, order: Sequence[int], stop: Stop | None = None) -> list[int]:
    """Again and again, place the buffer that can lie lowest above all that is placed; of several, the first in order.

    The top of what is placed is kept as segments of equal height. A buffer can lie on the lowest segment if it lives
    within: bit masks, ranked by ``order``, tell which do. If none does, the segment rises to its lower neighbour.
    Known as best fit of a skyline in strip packing, and for buffers from Sekiyama, Imai, Negishi and Raymond,
    "Profile-guided memory optimization for deep neural networks" (2018).

    Returns:
        Offsets by position in the part; an empty list if ``stop`` said so before the end.
    """
    begins, ends, sizes = part.begins, part.ends, part.sizes
    sections = len(part.loads)
    within = _Lives(part, order)
    height = [0] * sections
    right, left = [sections] * sections, [-1] * (sections + 1)  # of the segment that begins at a section
    alive = [False] * sections
    alive[0] = True
    lowest = [(0, 0)]  # height and begin of segments; some are outdated
    unplaced = (1 << len(order)) - 1
    offsets = [0] * len(order)
    while unplaced:
        level, a = heapq.heappop(lowest)
        if not alive[a] or height[a] != level:
            continue
        b = right[a]
        fitting = unplaced & within.masks(a, b)
        if fitting:
            best = fitting & -fitting
            unplaced ^= best
            i = order[best.bit_length() - 1]
            offsets[i] = level
            level += sizes[i]
            begin, end = begins[i], ends[i]
            if a < begin:
                right[a], left[begin] = begin, a
                alive[begin] = True
                heapq.heappush(lowest, (height[a], a))
            if end < b:
                height[end], right[end], left[end], left[b] = height[a], b, begin, end
                alive[end] = True
                heapq.heappush(lowest, (height[end], end))
            if stop is not None and stop():
                return []
        else:
            begin, end = a, b
            beside = ([height[left[a]]] if a > 0 else []) + ([height[b]] if b < sections else [])
            level = min(beside)
        # Segments of one height are one.
        if begin > 0 and height[left[begin]] == level:
            alive[begin] = False
            begin = left[begin]
        if end < sections and height[end] == level:
            alive[end] = False
            end = right[end]
        height[begin], right[begin], left[end] = level, end, begin
        heapq.heappush(lowest, (level, begin))
    return offsets


class _Lives:
    """Which buffers live within some sections, as bit masks: bit r is the buffer of rank r."""

    def __init__(self, part: Part, order: Sequence[int]) -> None:
        sections = len(part.loads)
        self.starting: list[list[int]] = [[] for _ in range(sections + 1)]
        self.ending: list[list[int]] = [[] for _ in range(sections + 1)]
        for rank, i in enumerate(order):
            self.starting[part.begins[i]].append(rank)
            self.ending[part.ends[i]].append(rank)
        # Masks for every section would need sections x buffers bits, twice: a part of them is kept.
        self.stride = 1 + sections * len(order) // 4 // _MASKS
        self.after, self.before = [0], [0]  # what begins at a section or later; what ends at one or earlier
        mask = 0
        for section in range(sections, -1, -1):
            for rank in self.starting[section]:
                mask |= 1 << rank
            if section % self.stride == 0:
                self.after.append(mask)
        self.after.reverse()
        mask = 0
        self.before.clear()
        for section in range(sections + 1):
            for rank in self.ending[section]:
                mask |= 1 << rank
            if section % self.stride == 0:
                self.before.append(mask)

    def masks(self, begin: int, end: int) -> int:
        stride = self.stride
        if stride == 1:
            return self.after[begin] & self.before[end]
        kept = -(-begin // stride)
        after = self.after[kept]
        for section in range(begin, min(kept * stride, len(self.starting))):
            for rank in self.starting[section]:
                after |= 1 << rank
        kept = end // stride
        before = self.before[kept]
        for section in range(kept * stride + 1, end + 1):
            for rank in self.ending[section]:
                before |= 1 << rank
        return after & before
