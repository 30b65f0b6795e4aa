"""The schedule of a plan as runs of nodes over versions of storages, and the memory that they use.

::

    run           0    1    2    3    4    5
    version a     a=f  .    .         a=f  .         two versions of one storage: run 4 is run 0 again
    in use       |----------|        |-----|         from its first to its last use

A timeline is kept up to date as runs are repeated: a change costs what it changes, and a few operations of torch over
all runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from ...host_graph.storages import StorageFacts
from ...packing import Buffer
from ...packing.reserved import alive_at_steps


@dataclass(eq=False)
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
        place: its position in the timeline.
    """

    node: Node
    partition: int
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    versions: Mapping[int, int] = field(default_factory=dict)
    is_again: bool = False
    awaited: frozenset[str] = frozenset()
    place: int = -1

    @property
    def used(self) -> frozenset[int]:
        return self.reads | self.writes

    def rename(self, versions: Mapping[int, int]) -> None:
        """Use other versions: present version -> new version."""

        def renamed(several: frozenset[int]) -> frozenset[int]:
            return frozenset(versions.get(one, one) for one in several)

        by_storage = dict(self.versions)
        known = {version: storage for storage, version in by_storage.items()}
        for old, new in versions.items():
            if old in self.used:
                by_storage[known.get(old, old)] = new
        self.versions = by_storage
        self.reads, self.writes, self.makes = renamed(self.reads), renamed(self.writes), renamed(self.makes)


@dataclass(frozen=True)
class Costs:
    """What is known of a program's memory at one set of sizes.

    Attributes:
        sizes: bytes by storage, of those that the program or its operators allocate, and of those in ``given``.
        workspace: bytes of memory that a node needs while it runs, by node.
        work: what a node's run costs, in bytes moved.
        pure: whether a node may run again: it has no effect but what it writes, and draws nothing.
        stays: storages that the caller gets.
        captured: the partitions that are captured: only their nodes may run again, and only in such a partition.
        given: storages of inputs that are freed after their last use: what a forward program has saved.
    """

    sizes: Mapping[int, int]
    workspace: Mapping[Node, int]
    work: Callable[[Node], int]
    pure: Callable[[Node], bool]
    stays: frozenset[int]
    captured: frozenset[int]
    given: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Repetition:
    """Runs to repeat, and what becomes of the timeline; ``Timeline.apply`` makes it so.

    Attributes:
        again: the new runs, in order; they come before the run at ``place``.
        renamed: runs that use what ``again`` makes: new version by present version.
        storage_of: the storages of new versions.
        uses: the runs that use a version afterwards, in order, of each version that changes.
        in_use: see ``Timeline``.
    """

    place: int
    again: Sequence[Run]
    renamed: Mapping[Run, Mapping[int, int]]
    storage_of: Mapping[int, int]
    uses: Mapping[int, Sequence[Run]]
    in_use: torch.Tensor


class Timeline:
    """Runs in order, and the memory that they use.

    Attributes:
        uses: the runs that use each version, in order.
        writers: the runs that write each version, in order.
        storage_of: the storage of each version that is not the original.
        in_use: bytes in use at each run: storages from their first to their last use (those that are given, from the
            begin; those that the caller gets, to the end), and workspace. int64 of (runs).
    """

    def __init__(self, runs: Sequence[Run], costs: Costs) -> None:
        self.runs, self.costs, self.storage_of = list(runs), costs, dict[int, int]()
        self.uses: dict[int, list[Run]] = defaultdict(list)
        self.writers: dict[int, list[Run]] = defaultdict(list)
        begins = frozenset[str]().union(*(run.awaited for run in runs))
        self._begun: dict[str, list[Run]] = {name: [] for name in begins}
        for place, run in enumerate(self.runs):
            run.place = place
            self._enter(run)
        self._following = max([*costs.sizes, *self.uses], default=0) + 1
        self.in_use = torch.tensor(self._alive(), dtype=torch.int64)

    def _enter(self, run: Run) -> None:
        for version in run.used:
            self.uses[version].append(run)
        for version in run.writes:
            self.writers[version].append(run)
        if run.node.name in self._begun:
            self._begun[run.node.name].append(run)

    def _alive(self) -> list[int]:
        ends = {version: self._end(version, runs) + 1 for version, runs in self.uses.items()}
        storages = (Buffer("", self.size(v), self._begin(v, runs), ends[v]) for v, runs in self.uses.items())
        workspace = (Buffer("", self._workspace(run), run.place, run.place + 1) for run in self.runs)
        return alive_at_steps([*storages, *workspace])

    @classmethod
    def of(
        cls, partitions: Sequence[Sequence[Node]], facts: StorageFacts, costs: Costs, groups: Mapping[int, int]
    ) -> Timeline:
        """The schedule of a program, each node run once.

        Args:
            groups: inputs that may overlap (``analysis.aliasing.overlap_groups``).
        """
        runs, known = list[Run](), set(costs.given)

        def with_groups(storages: frozenset[int]) -> frozenset[int]:
            return storages.union(groups[index] for index in storages if index in groups)

        for number, nodes in enumerate(partitions):
            for node in nodes:
                writes = facts.writes(node) | (facts.of(node) & facts.made())
                makes = frozenset(index for index in writes if index in costs.sizes and index not in known)
                known |= makes
                # ``facts.reads`` has what a launch writes, too; of a storage that it is the first to write, it reads
                # nothing.
                reads, writes = with_groups(facts.reads(node) - makes), with_groups(writes)
                awaited = facts.awaited.get(node.name, frozenset())
                runs.append(Run(node, number, reads, writes, makes, awaited=awaited))
        return cls(runs, costs)

    # -- memory -----------------------------------------------------------------------------------------

    @property
    def peak(self) -> int:
        return int(self.in_use.max()) if self.runs else 0

    @property
    def work(self) -> int:
        """What all runs cost, in bytes moved."""
        return sum(self.costs.work(run.node) for run in self.runs)

    def is_made(self, version: int) -> bool:
        storage = self.storage_of.get(version, version)
        return storage in self.costs.sizes and storage not in self.costs.given

    def size(self, version: int) -> int:
        return self.costs.sizes.get(self.storage_of.get(version, version), 0)

    def _workspace(self, run: Run) -> int:
        return self.costs.workspace.get(run.node, 0)

    def _begin(self, version: int, uses: Sequence[Run]) -> int:
        return 0 if version in self.costs.given else uses[0].place

    def _end(self, version: int, uses: Sequence[Run]) -> int:
        return len(self.runs) - 1 if version in self.costs.stays else uses[-1].place

    # -- repeating runs ---------------------------------------------------------------------------------

    def repeated(self, runs: Sequence[Run], following: Run) -> Repetition:
        """The same with runs repeated before ``following``; later runs use what they make. Nothing changes yet."""
        place, storage_of, versions = following.place, dict[int, int](), dict[int, int]()
        again = list[Run]()
        for run in runs:
            for made in run.makes:
                versions[made] = self._following + len(storage_of)
                storage_of[versions[made]] = self.storage_of.get(made, made)
            copy = replace(run, partition=following.partition, is_again=True, place=place + len(again))
            copy.rename(versions)
            again.append(copy)
        renamed = self._renamed(versions, runs, place)
        uses = defaultdict[int, list[Run]](list)
        known = frozenset[int]().union(*(run.used for run in runs))
        for version in known:
            uses[version] += (run for run in self.uses[version] if run.place < place)
        for copy in again:
            for version in copy.used:
                uses[version].append(copy)
        for version in known:
            later = (run for run in self.uses[version] if run.place >= place)
            uses[version] += (run for run in later if version not in renamed.get(run, ()))
        for run in sorted(renamed, key=lambda run: run.place):
            for new in renamed[run].values():
                uses[new].append(run)
        return Repetition(place, again, renamed, storage_of, uses, self._in_use_with(place, again, storage_of, uses))

    def _renamed(self, versions: Mapping[int, int], chosen: Collection[Run], place: int) -> dict[Run, dict[int, int]]:
        """The later runs that use new versions. They keep what the caller gets, and what others wrote meanwhile."""
        renamed = defaultdict[Run, dict[int, int]](dict)
        for old, new in versions.items():
            if old in self.costs.stays or any(w.place < place and w not in chosen for w in self.writers[old]):
                continue
            for run in self.uses[old]:
                # A communication that has begun goes on with what it began with.
                if run.place >= place and not any(old in self._used_by(name, place) for name in run.awaited):
                    renamed[run][old] = new
        return renamed

    def _used_by(self, communication: str, place: int) -> frozenset[int]:
        begun = [run for run in self._begun[communication] if run.place < place]
        return begun[-1].used if begun else frozenset()

    def _in_use_with(
        self,
        place: int,
        again: Sequence[Run],
        storage_of: Mapping[int, int],
        uses: Mapping[int, Sequence[Run]],
    ) -> torch.Tensor:
        following, more, last = self.runs[place], len(again), len(self.runs) - 1
        new_there = (v for v in following.used if self.uses[v][0] is following and v not in self.costs.given)
        begins = sum(map(self.size, new_there))
        between = int(self.in_use[place]) - self._workspace(following) - begins
        new = torch.tensor([between + self._workspace(run) for run in again], dtype=torch.int64)
        in_use = torch.cat([self.in_use[:place], new, self.in_use[place:]])
        copies = set(again)

        def moved(run: Run) -> int:
            return run.place + more if run.place >= place and run not in copies else run.place

        def begin(version: int, uses: Sequence[Run]) -> int:
            return 0 if version in self.costs.given else moved(uses[0])

        for version, after in uses.items():
            storage = storage_of.get(version)
            size = self.size(version) if storage is None else self.costs.sizes.get(storage, 0)
            if not size:
                continue
            stays = version in self.costs.stays
            if storage is None:
                before = self.uses[version]
                in_use[begin(version, before) : (last + more if stays else moved(before[-1])) + 1] -= size
            in_use[begin(version, after) : (last + more if stays else moved(after[-1])) + 1] += size
        return in_use

    def apply(self, repetition: Repetition) -> None:
        """Repeat the runs."""
        place, again, more = repetition.place, repetition.again, len(repetition.again)
        for run in self.runs[place:]:
            run.place += more
        self.runs[place:place] = again
        self.storage_of.update(repetition.storage_of)
        self._following += len(repetition.storage_of)
        for run, versions in repetition.renamed.items():
            run.rename(versions)
        for version, runs in repetition.uses.items():
            self.uses[version] = list(runs)
            self.writers[version] = [run for run in runs if version in run.writes]
        for run in again:
            if run.node.name in self._begun:
                self._begun[run.node.name] = sorted([*self._begun[run.node.name], run], key=lambda run: run.place)
        self.in_use = repetition.in_use


def moved_by(places: torch.Tensor, place: int, more: int) -> torch.Tensor:
    """Positions of runs after ``more`` runs were put before the one at ``place``."""
    return places + more * (places >= place)
