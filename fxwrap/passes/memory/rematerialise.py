"""PLAN: drops a storage between two uses, and runs again what made it just before the next use.

::

    a = f(x)                            a = f(x)
    b = g(a)                            b = g(a)             a is free from here
    c = h(b)          at the peak  ->   c = h(b)
    d = k(c, a)                         a_again = f(x)
                                        d = k(c, a_again)

A kernel on the same bytes gives the same bits again, unless its threads add to one place in any order (atomic adds):
such a kernel is not repeated. It works on the host graph, after fusion: every launch, every
storage, its size and its uses are known. So a limit in bytes holds, and its price is counted before anything runs.
The place in the line, and the choice by bytes saved for each byte moved, are those of XLA's ``HloRematerialization``.

``Timeline`` is the schedule as runs of nodes over versions of storages. ``rematerialise`` changes it until it fits.
``rebuilt.py`` makes a host graph of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from ...host_graph.storages import StorageFacts
from ...packing import Buffer
from ...packing.reserved import alive_at_steps

# Counted for a run of a node besides the bytes that it moves: a launch costs time, too.
_LAUNCH = 1 << 10


@dataclass(frozen=True)
class Run:
    """One run of a node, over versions of storages. Version ``s`` of storage ``s`` is the original.

    Attributes:
        partition: the index of the partition that it belongs to.
        reads: versions whose content it needs.
        writes: versions that it writes, or that its operator returns.
        makes: those of ``writes`` whose content begins here.
        versions: version by storage, where it is not the original.
        is_again: whether the node runs again.
        awaited: the names of the communications that end here. What they use is in use until then.
    """

    node: Node
    partition: int
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    versions: Mapping[int, int]
    is_again: bool = False
    awaited: frozenset[str] = frozenset()

    @property
    def used(self) -> frozenset[int]:
        return self.reads | self.writes

    def over(self, versions: Mapping[int, int], partition: int, is_again: bool) -> Run:
        """The same run with versions renamed: present version -> new version."""

        def renamed(several: frozenset[int]) -> frozenset[int]:
            return frozenset(versions.get(one, one) for one in several)

        by_storage = dict(self.versions)
        known = {version: storage for storage, version in by_storage.items()}
        for old, new in versions.items():
            if old in self.used:
                by_storage[known.get(old, old)] = new
        reads, writes, makes = renamed(self.reads), renamed(self.writes), renamed(self.makes)
        return Run(self.node, partition, reads, writes, makes, by_storage, is_again, self.awaited)


@dataclass(frozen=True)
class Costs:
    """What is known of a program's memory at one set of sizes.

    Attributes:
        sizes: bytes by storage, of those that the program or its operators allocate.
        workspace: bytes of memory that a node needs while it runs, by node.
        work: what a node's run costs, in bytes moved.
        pure: whether a node may run again: it has no effect but what it writes, and draws nothing.
        stays: storages that the caller gets.
        captured: the partitions whose nodes may run again, in one of them.
    """

    sizes: Mapping[int, int]
    workspace: Mapping[Node, int]
    work: Callable[[Node], int]
    pure: Callable[[Node], bool]
    stays: frozenset[int]
    captured: frozenset[int]


class Timeline:
    """Runs in order, and the memory that they use.

    Attributes:
        storage_of: the storage of each version that is not the original.
    """

    def __init__(self, runs: Sequence[Run], costs: Costs, storage_of: Mapping[int, int] | None = None) -> None:
        self.runs, self.costs, self.storage_of = runs, costs, dict(storage_of or {})

    @classmethod
    def of(
        cls, partitions: Sequence[Sequence[Node]], facts: StorageFacts, costs: Costs, groups: Mapping[int, int]
    ) -> Timeline:
        """The schedule of a program, each node run once.

        Args:
            groups: inputs that may overlap (``analysis.aliasing.overlap_groups``).
        """
        runs, known = list[Run](), set[int]()

        def with_groups(storages: frozenset[int]) -> frozenset[int]:
            return storages.union(groups[index] for index in storages if index in groups)

        for number, nodes in enumerate(partitions):
            for node in nodes:
                writes = facts.writes(node) | (facts.of(node) & facts.made())
                makes = frozenset(index for index in writes if index in costs.sizes and index not in known)
                known |= makes
                # A launch counts what it writes as read: the first write to a storage reads nothing.
                reads, writes = with_groups(facts.reads(node) - makes), with_groups(writes)
                awaited = facts.awaited.get(node.name, frozenset())
                runs.append(Run(node, number, reads, writes, makes, {}, awaited=awaited))
        return cls(runs, costs)

    def _is_made(self, version: int) -> bool:
        return self.storage_of.get(version, version) in self.costs.sizes

    def size(self, version: int) -> int:
        return self.costs.sizes.get(self.storage_of.get(version, version), 0)

    @cached_property
    def uses(self) -> Mapping[int, list[int]]:
        """The positions of the runs that use each version, in order."""
        return self._places(run.used for run in self.runs)

    @cached_property
    def writers(self) -> Mapping[int, list[int]]:
        """The positions of the runs that write each version, in order."""
        return self._places(run.writes for run in self.runs)

    @staticmethod
    def _places(by_run: Iterable[frozenset[int]]) -> Mapping[int, list[int]]:
        places = defaultdict[int, list[int]](list)
        for place, versions in enumerate(by_run):
            for version in versions:
                places[version].append(place)
        return places

    @cached_property
    def in_use(self) -> list[int]:
        """Bytes in use at each run: storages from their first to their last use, and workspace."""
        end = len(self.runs)
        storages = (
            Buffer("", self.size(version), places[0], end if version in self.costs.stays else places[-1] + 1)
            for version, places in self.uses.items()
        )
        workspace = (Buffer("", self.costs.workspace.get(run.node, 0), n, n + 1) for n, run in enumerate(self.runs))
        return alive_at_steps([*storages, *workspace])

    @property
    def peak(self) -> int:
        return max(self.in_use, default=0)

    @property
    def work(self) -> int:
        """What all runs cost, in bytes moved."""
        return sum(self.costs.work(run.node) for run in self.runs)

    def again(self, version: int, place: int, peak: int) -> list[int] | None:
        """The runs to repeat before ``place``, so that ``version`` has the content there that it has now.

        What they read has to be unchanged. Of what they read and is not in use any more at the run ``peak``, they
        are repeated, too.

        Returns:
            Positions in order; None if that cannot be.
        """
        needed, todo = set[int](), [version]
        done = set[int]()
        while todo:
            wanted = todo.pop()
            if wanted in done:
                continue
            done.add(wanted)
            for writer in self.writers[wanted]:
                if writer >= place:
                    break
                needed.add(writer)
                run = self.runs[writer]
                may_repeat = self.costs.pure(run.node) and run.partition in self.costs.captured
                if not may_repeat or not all(map(self._is_made, run.writes)):
                    return None
                for read in run.reads - {wanted}:
                    if any(writer < other < place for other in self.writers[read]):
                        if not self.size(read):
                            return None
                        todo.append(read)
                    elif self.size(read) and read not in self.costs.stays and self.uses[read][-1] < peak:
                        todo.append(read)
                # A storage that was begun elsewhere is repeated from its beginning.
                todo += run.writes - run.makes - {wanted}
        for repeated in needed:
            for read in self.runs[repeated].reads:
                later = [writer for writer in self.writers[read] if repeated < writer < place]
                if not needed.issuperset(later):
                    return None
        return sorted(needed)

    def with_again(self, repeated: Sequence[int], place: int) -> Timeline:
        """The timeline in which these runs are repeated before ``place``, and later runs use what they make."""
        storage_of, versions = dict(self.storage_of), dict[int, int]()
        following = max((*self.costs.sizes, *storage_of, *self.uses)) + 1
        partition = self.runs[place].partition
        again = list[Run]()
        for position in repeated:
            for made in self.runs[position].makes:
                versions[made] = following
                storage_of[following] = storage_of.get(made, made)
                following += 1
            again.append(self.runs[position].over(versions, partition, is_again=True))
        # Later runs keep what the caller gets, and what was written by others meanwhile.
        chosen = set(repeated)
        switched = {
            old: new
            for old, new in versions.items()
            if old not in self.costs.stays
            and all(writer in chosen or writer >= place for writer in self.writers[old])
        }
        begun = {run.node.name: run.used for run in self.runs[:place]}

        def after(run: Run) -> Run:
            # A communication that has begun goes on with what it began with.
            held = frozenset().union(*(begun.get(name, frozenset()) for name in run.awaited))
            present = {old: new for old, new in switched.items() if old not in held}
            return run.over(present, run.partition, run.is_again)

        return Timeline([*self.runs[:place], *again, *map(after, self.runs[place:])], self.costs, storage_of)


def rematerialise(timeline: Timeline, limit: int) -> Timeline:
    """Repeat runs until no more than ``limit`` bytes are in use at one time, or nothing more can be gained.

    At the first run where most is in use, storages that lie idle are candidates: the one that frees most for what it
    costs is dropped before and made again after. It stays so if the peak falls, or is as high at fewer runs.
    """
    while timeline.peak > limit and (better := _with_one_more(timeline)) is not None:
        timeline = better
    return timeline


def _with_one_more(timeline: Timeline) -> Timeline | None:
    place = timeline.in_use.index(timeline.peak)
    for _, _, following, repeated in sorted(_candidates(timeline, place), reverse=True):
        changed = timeline.with_again(repeated, following)
        if _is_lower(changed, timeline):
            return changed
    return None


def _is_lower(changed: Timeline, before: Timeline) -> bool:
    fewer = changed.in_use.count(before.peak) < before.in_use.count(before.peak)
    return changed.peak < before.peak or (changed.peak == before.peak and fewer)


def _candidates(timeline: Timeline, place: int) -> Iterable[tuple[float, int, int, list[int]]]:
    """Versions that lie idle at a run: bytes freed for the cost, the version, its next use, the runs to repeat."""
    for version, places in timeline.uses.items():
        nbytes = timeline.size(version)
        if not nbytes or version in timeline.costs.stays or not places[0] < place < places[-1] or place in places:
            continue
        following = next(use for use in places if use > place)
        if timeline.runs[following].partition not in timeline.costs.captured:
            continue
        if (repeated := timeline.again(version, following, place)) is None:
            continue
        cost = sum(timeline.costs.work(timeline.runs[one].node) + _LAUNCH for one in repeated)
        yield nbytes / cost, version, following, repeated
