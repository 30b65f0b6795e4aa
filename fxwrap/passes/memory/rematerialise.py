"""PLAN: drops a storage between two uses, and runs again what made it just before the next use.

::

    a = f(x)                            a = f(x)
    b = g(a)                            b = g(a)             a is free from here
    c = h(b)          at the peak  ->   c = h(b)
    d = k(c, a)                         a_again = f(x)
                                        d = k(c, a_again)

A kernel on the same bytes gives the same bits again, unless its threads add to one place in any order (atomic adds):
such a kernel is not repeated. It works on the host graph, after fusion: every launch, every storage, its size and its
uses are known. So a limit in bytes holds, and its price is counted before anything runs.
The place in the line, and the choice by bytes saved for each byte moved, are those of XLA's ``HloRematerialization``.

``rebuilt.py`` makes a host graph of the timeline.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from .timeline import Repetition, Run, Timeline, moved_by

# Counted for a run of a node besides the bytes that it moves: a launch costs time, too.
_LAUNCH = 1 << 10
_FAR = 1 << 62


def rematerialise(timeline: Timeline, limit: int) -> Timeline:
    """Repeat runs until no more than ``limit`` bytes are in use at one time, or nothing more can be gained.

    At the first run where most is in use, storages that lie idle are candidates: the one that frees most for what it
    costs is dropped before and made again after. It stays so if the peak falls, or is as high at fewer runs.

    Returns:
        The given timeline, which has changed.
    """
    if timeline.runs and timeline.peak > limit:
        gaps = Gaps(timeline)
        while timeline.peak > limit and gaps.close_one():
            pass
    return timeline


@dataclass(frozen=True)
class _Again:
    """The runs to repeat so that a version has its content again.

    Attributes:
        runs: in order; empty if that cannot be.
        read: the versions on which the answer depends.
        low, high: the answer holds while the place of the peak is above ``low``, and at most ``high``.
    """

    runs: Sequence[Run]
    read: frozenset[int]
    low: int = -1
    high: int = _FAR


def again(timeline: Timeline, version: int, place: int, peak: int) -> _Again:
    """The runs to repeat before ``place``, so that ``version`` has the content there that it has now.

    What they read has to be unchanged. If the last use of what they read is before the run ``peak``, the runs that
    make it are repeated, too.
    """
    needed, todo, done, low, high = set[Run](), [version], set[int](), -1, _FAR
    read, costs, writers = set[int](), timeline.costs, timeline.writers

    def impossible() -> _Again:
        return _Again((), frozenset(read | done), low, high)

    # What repeated runs make beside is read in its new version, with all that was written to it since.
    while todo or (todo := list(_half_made(needed, timeline) - done)):
        wanted = todo.pop()
        if wanted in done:
            continue
        done.add(wanted)
        for writer in writers[wanted]:
            if writer.place >= place:
                break
            needed.add(writer)
            read |= writer.used
            may_repeat = costs.pure(writer.node) and writer.partition in costs.captured
            if not may_repeat or not all(map(timeline.is_made, writer.writes)):
                return impossible()
            for one in writer.reads - {wanted}:
                if any(writer.place < other.place < place for other in writers[one]):
                    if not timeline.size(one):
                        return impossible()
                    todo.append(one)
                elif timeline.size(one) and one not in costs.stays:
                    last = timeline.uses[one][-1].place
                    if last < peak:
                        todo.append(one)
                        low = max(low, last)
                    else:
                        high = min(high, last)
            # A storage that was begun elsewhere is repeated from its beginning.
            todo += writer.writes - writer.makes - {wanted}
    for run in needed:
        for one in run.reads:
            if not needed.issuperset(other for other in writers[one] if run.place < other.place < place):
                return impossible()
    return _Again(sorted(needed, key=lambda run: run.place), frozenset(read | done), low, high)


def _half_made(needed: Collection[Run], timeline: Timeline) -> set[int]:
    """What runs to repeat begin anew and read, while others that write it in between do not run again."""
    begun = {one for run in needed for one in run.makes}
    return {
        one
        for run in needed
        for one in run.reads & begun
        if not all(writer in needed for writer in timeline.writers[one] if writer.place < run.place)
    }


class Gaps:
    """The times between two uses of a version, in which its storage lies idle; what it costs to be without it.

    Costs are computed where a gap lies over the peak, and kept for as long as nothing changes on which they depend.
    Columns of numbers, a row for each gap.

    Attributes:
        begin, end: the runs before and after the gap.
        low, high: the worth is known for all peaks above ``low``, and up to ``high``.
        worth: bytes freed for each byte moved; 0 if the storage cannot be made again.
        version: whose gap it is; -1 for rows without one.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._rows = timeline, defaultdict[int, list[int]](list)
        self._again, self._readers = list[_Again | None](), defaultdict[int, set[int]](set)
        self.begin, self.end, self.low, self.high, self.version = torch.empty((5, 0), dtype=torch.int64)
        self.worth = torch.empty(0, dtype=torch.float64)
        self._add(timeline.uses)

    def close_one(self) -> bool:
        """Drop the storage in the best gap at the peak, if that makes the timeline lower."""
        timeline, before = self._timeline, self._timeline.in_use
        peak = timeline.peak
        place = int((before == peak).nonzero()[0])
        fewest = int((before == peak).sum())
        over = (self.begin < place) & (self.end > place)
        for row in (over & ((self.low >= place) | (self.high < place))).nonzero().flatten().tolist():
            self._evaluate(row, place)
        worth = torch.where(over, self.worth, 0.0)
        while (best := float(worth.max()) if len(worth) else 0.0) > 0:
            rows = (worth == best).nonzero().flatten()
            row = int(rows[self.version[rows].argmax()])
            worth[row] = 0.0
            found = self._again[row]
            assert found is not None
            changed = timeline.repeated(found.runs, timeline.runs[int(self.end[row])])
            highest = int(changed.in_use.max())
            if highest < peak or (highest == peak and int((changed.in_use == peak).sum()) < fewest):
                self._apply(changed)
                return True
        return False

    def _evaluate(self, row: int, place: int) -> None:
        timeline, version, following = self._timeline, int(self.version[row]), int(self.end[row])
        found = again(timeline, version, following, place)
        cost = sum(timeline.costs.work(run.node) + _LAUNCH for run in found.runs)
        self._again[row] = found
        self.low[row], self.high[row] = found.low, found.high
        self.worth[row] = timeline.size(version) / cost if found.runs else 0.0
        for one in found.read:
            self._readers[one].add(row)

    def _apply(self, changed: Repetition) -> None:
        self._timeline.apply(changed)
        more = len(changed.again)
        self.begin, self.end = (moved_by(places, changed.place, more) for places in (self.begin, self.end))
        self.low, self.high = (moved_by(places, changed.place, more) for places in (self.low, self.high))
        stale = set(itertools.chain.from_iterable(self._readers.pop(version, ()) for version in changed.uses))
        if stale:
            self.low[list(stale)] = _FAR
        gone = [row for version in changed.uses for row in self._rows.pop(version, ())]
        if gone:
            self.begin[gone] = _FAR
            self.version[gone] = -1
        self._add(changed.uses)

    def _add(self, versions: Iterable[int]) -> None:
        timeline, rows = self._timeline, list[tuple[int, int, int]]()
        for version in versions:
            if not timeline.size(version) or version in timeline.costs.stays:
                continue
            for begin, end in itertools.pairwise(timeline.uses[version]):
                if end.partition in timeline.costs.captured:
                    self._rows[version].append(len(self._again) + len(rows))
                    rows.append((version, begin.place, end.place))
        self._again += [None] * len(rows)
        new = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
        self.version, self.begin, self.end = (
            torch.cat([old, new[:, column]]) for column, old in enumerate((self.version, self.begin, self.end))
        )
        unknown = torch.full((len(rows),), _FAR)
        self.low, self.high = torch.cat([self.low, unknown]), torch.cat([self.high, unknown])
        self.worth = torch.cat([self.worth, torch.zeros(len(rows), dtype=torch.float64)])
