"""Quick packing heuristics: the lowest offset first, with several orders to break ties.

Their effort is limited by the number of orders, not by time: the same buffers get the same offsets on every machine.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from .problem import PackingPart

# The limit of orders times buffers.
_WORK = 3_200
_FEWEST, _MOST = 2, 10
# Used where the arena is then above its lower bound: orders that are mended, how often each, orders times buffers.
_MENDED, _TIMES, _MENDING_WORK = 4, 50, 20_000
# The limit of sections, summed over buffers, up to which the loads during each buffer's life are compared.
_SPANS = 20_000_000
# Bytes for the bit masks of one order.
_MASKS = 1 << 26


def portfolio(part: PackingPart, bound: int, previous: Sequence[int] = ()) -> list[int]:
    """The best offsets that a few orders give, some of them mended. It ends at the first within ``bound`` bytes.

    Args:
        previous: offsets in another plan, by position in the whole problem; their order is tried first.
    """
    best = stacked(part, [previous[i] for i in part.members]) if previous else []
    if best and height(part, best) <= bound:
        return best
    for offsets in itertools.chain(_of_orders(part), _of_mended_orders(part, bound)):
        if not best or height(part, offsets) < height(part, best):
            best = offsets
            if height(part, best) <= bound:
                break
    return best


def _of_orders(part: PackingPart) -> Iterator[list[int]]:
    for order in itertools.islice(orders(part), min(_MOST, max(_FEWEST, _WORK // len(part)))):
        yield lowest_offset_first(part, order)


def _of_mended_orders(part: PackingPart, bound: int) -> Iterator[list[int]]:
    """Offsets of orders that are mended again and again: buffers that ended above ``bound`` more often come earlier.

    This is squeaky wheel optimization (Joslin and Clements, 1999).
    """
    times = min(_TIMES, _MENDING_WORK // (_MENDED * len(part)))
    for order in itertools.islice(orders(part), _MENDED if times else 0):
        too_high = [0] * len(part)
        for _ in range(times):
            offsets = lowest_offset_first(part, sorted(order, key=too_high.__getitem__, reverse=True))
            yield offsets
            for i in order:
                too_high[i] += offsets[i] + part.sizes[i] > bound


def stacked(part: PackingPart, previous: Sequence[int]) -> list[int]:
    """Offsets that put buffers on top of one another, in the order of their offsets in another plan.

    What lay above a buffer lies above it again, whatever its size is now. An optimum for other sizes stays one if all
    sizes grow by the same factor.
    """
    tops, offsets = [0] * len(part.loads), [0] * len(part)
    for i in sorted(range(len(part)), key=lambda i: (previous[i], part.begins[i])):
        begin, end = part.begins[i], part.ends[i]
        offsets[i] = max(tops[begin:end])
        tops[begin:end] = [offsets[i] + part.sizes[i]] * (end - begin)
    return offsets


def height(part: PackingPart, offsets: Sequence[int]) -> int:
    """Bytes that a part needs with these offsets."""
    return max(offset + size for offset, size in zip(offsets, part.sizes, strict=True))


def orders(part: PackingPart) -> Iterator[list[int]]:
    """An endless sequence of orders to break ties with: by several keys first, then by keys with noise."""
    begins, ends, sizes = part.begins, part.ends, part.sizes
    lives = [end - begin for begin, end in zip(begins, ends, strict=True)]
    areas = [life * size for life, size in zip(lives, sizes, strict=True)]
    # The most bytes that are live at once during a buffer's life; all 0 where computing them takes too long.
    crowds = [0] * len(part)
    if part.spans <= _SPANS:
        crowds = [max(part.loads[begin:end]) for begin, end in zip(begins, ends, strict=True)]
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
        for measure in (areas, ends, areas, lives):
            noisy = [-weight * draw.uniform(0.5, 1.5) for weight in measure]
            yield sorted(everything, key=noisy.__getitem__)


def lowest_offset_first(part: PackingPart, order: Sequence[int]) -> list[int]:
    """Place one buffer after the other: the one that can lie lowest above the placed ones, and of several the first.

    The top of the placed buffers is a sequence of segments of equal height. A buffer can lie on the lowest segment if
    it lives within that segment's sections; bit masks, ranked by ``order``, tell which do. If none does, the segment
    rises to its lower neighbour. In strip packing this is best fit of a skyline. For buffers it is from Sekiyama,
    Imai, Negishi and Raymond, "Profile-guided memory optimization for deep neural networks" (2018).

    Args:
        order: positions in the part, the first tried first.

    Returns:
        Offsets by position in the part.
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
        else:
            begin, end = a, b
            beside = ([height[left[a]]] if a > 0 else []) + ([height[b]] if b < sections else [])
            level = min(beside)
        # Join neighbours of the same height.
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
    """Bit masks of the buffers that live within a range of sections. Bit r is the buffer of rank r."""

    def __init__(self, part: PackingPart, order: Sequence[int]) -> None:
        sections = len(part.loads)
        self.starting: list[list[int]] = [[] for _ in range(sections + 1)]
        self.ending: list[list[int]] = [[] for _ in range(sections + 1)]
        for rank, i in enumerate(order):
            self.starting[part.begins[i]].append(rank)
            self.ending[part.ends[i]].append(rank)
        # Masks for all sections take sections x buffers bits, twice. Every ``stride``-th is stored.
        self.stride = 1 + sections * len(order) // 4 // _MASKS
        self.after, self.before = [0], [0]  # buffers that begin at a section or later; that end at one or earlier
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
        stored = -(-begin // stride)
        after = self.after[stored]
        for section in range(begin, min(stored * stride, len(self.starting))):
            for rank in self.starting[section]:
                after |= 1 << rank
        stored = end // stride
        before = self.before[stored]
        for section in range(stored * stride + 1, end + 1):
            for rank in self.ending[section]:
                before |= 1 << rank
        return after & before
