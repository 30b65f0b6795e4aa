"""A timeline that is kept up to date, beside one that is computed anew after every change.

::

    run           0    1    2    3    4
    a             a=f  .    .    .    uses a
    in use       |--------------------|             before
    in use       |-|             |----|             after: f runs again in front of run 4
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest

from fxwrap.passes.memory.rematerialise import Gaps, rematerialise
from fxwrap.passes.memory.timeline import Costs, Run, Timeline


@dataclass(frozen=True)
class Work:
    """As much of a node as a timeline reads."""

    name: str


def chain() -> Timeline:
    """a = f(); b = g(a); c = h(b); d = k(c, a)"""
    nodes: list[Any] = [Work(name) for name in "fghk"]
    reads = [set(), {0}, {1}, {2, 0}]
    runs = [
        Run(node, 0, frozenset(read), frozenset({n}), frozenset({n}))
        for n, (node, read) in enumerate(zip(nodes, reads, strict=True))
    ]
    sizes = {0: 100, 1: 10, 2: 100, 3: 10}
    return Timeline(
        runs, Costs(sizes, {}, lambda node: 1, lambda node: True, stays=frozenset({3}), captured=frozenset({0}))
    )


def shown(timeline: Timeline) -> str:
    return " ".join(run.node.name + "_again" * run.is_again for run in timeline.runs)


def test_what_is_idle_at_the_peak_is_made_again() -> None:
    timeline = chain()
    assert timeline.in_use.tolist() == [100, 110, 210, 210]
    assert rematerialise(timeline, 209) is timeline
    assert shown(timeline) == "f g h f_again k"
    assert timeline.in_use.tolist() == [100, 110, 110, 200, 210], "as high at fewer runs"


def test_a_repetition_changes_nothing_before_it_is_applied() -> None:
    timeline = chain()
    f, *_, k = timeline.runs
    found = timeline.repeated([f], k)
    assert shown(timeline) == "f g h k" and timeline.in_use.tolist() == [100, 110, 210, 210]
    timeline.apply(found)
    assert shown(timeline) == "f g h f_again k"
    assert timeline.in_use.tolist() == [100, 110, 110, 200, 210]
    assert [run.place for run in timeline.runs] == [0, 1, 2, 3, 4]


def random_timeline(draw: random.Random) -> Timeline:
    """With storages that several runs write, communications, effects, workspace, and partitions that run eagerly."""
    count, sizes, versions = draw.randint(3, 40), dict[int, int](), list[int]()
    nodes: list[Any] = [Work(f"n{number}") for number in range(count)]
    partitions, under_way, runs = sorted(draw.choice(range(3)) for _ in nodes), list[str](), list[Run]()
    for node, partition in zip(nodes, partitions, strict=True):
        reads, makes = set(draw.sample(versions, min(len(versions), draw.randint(0, 3)))), set[int]()
        for _ in range(draw.choice((1, 1, 1, 2, 0))):
            makes.add(len(versions))
            sizes[len(versions)] = draw.choice((0, 64, 64, 128, 256))
            versions.append(len(versions))
        writes = {*makes, *([draw.choice(versions)] if versions and draw.random() < 0.25 else [])}
        awaited = frozenset[str]()
        if under_way and draw.random() < 0.3:
            awaited = frozenset({under_way.pop(0)})
        elif draw.random() < 0.2:
            under_way.append(node.name)
        runs.append(Run(node, partition, frozenset(reads), frozenset(writes), frozenset(makes), awaited=awaited))
    work = {node: draw.choice((100, 1000, 3000)) for node in nodes}
    pure = {node: draw.random() < 0.9 for node in nodes}
    costs = Costs(
        sizes=sizes,
        workspace={node: draw.choice((64, 128)) for node in nodes if draw.random() < 0.2},
        work=work.__getitem__,
        pure=pure.__getitem__,
        stays=frozenset(version for version in versions if draw.random() < 0.15),
        captured=frozenset(partition for partition in range(3) if draw.random() < 0.85),
    )
    return Timeline(runs, costs)


def _state(timeline: Timeline) -> Any:
    runs = [(run.node.name, run.is_again, run.reads, run.writes, run.makes, run.versions) for run in timeline.runs]
    return runs, timeline.in_use.tolist()


# pytest -m sweep tests/passes/memory/test_timeline.py
@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.sweep)])
def test_what_is_kept_is_what_would_be_computed(count: int) -> None:
    """Memory, uses, and what it costs to close a gap."""
    changed = 0
    for seed in range(count):
        kept, anew = (random_timeline(random.Random(seed)) for _ in range(2))
        assert _state(kept) == _state(anew)
        limit, before = int(kept.peak * random.Random(seed).choice((0, 0.5, 0.8))), len(kept.runs)
        rematerialise(kept, limit)
        while anew.peak > limit and Gaps(anew).close_one():
            computed = Timeline(copy.deepcopy(anew.runs), anew.costs)
            computed.storage_of = anew.storage_of
            assert anew.in_use.tolist() == computed._alive()
            for table, other in ((anew.uses, computed.uses), (anew.writers, computed.writers)):
                places = {version: [run.place for run in runs] for version, runs in table.items() if runs}
                assert places == {version: [run.place for run in runs] for version, runs in other.items()}
        assert _state(kept) == _state(anew), seed
        changed += len(kept.runs) > before
    assert changed > count / 4
