"""HOSTCUDA_ORDER=lifo: a graph's nodes run in another order that their dependencies allow."""

from __future__ import annotations

from scripts import run

LIFO = {"HOSTCUDA_ORDER": "lifo"}

BRANCHES = """
    def branches(one, two, place, result, waits):
        fork, written, join = event(), event(), event()
        record(fork, one)
        wait(two, fork)
        fill(place, 1, one)
        record(written, one)
        if waits:
            wait(two, written)
        copy(result, place, two)
        record(join, two)
        wait(one, join)
"""


def test_relying_on_the_order_of_issue() -> None:
    """PLANTED: a stream of the capture reads what another one writes, without waiting for it."""
    script = (
        BRANCHES
        + """
    for waits in (False, True):
        one, two, place, result = stream(), stream(), memory(), memory()
        graph = captured(one, lambda: branches(one, two, place, result, waits))
        launch(graph, one)
        print(waits, byte(result, one))
    """
    )
    assert run(script, **LIFO) == ["False 0", "True 1"]
    assert run(script) == ["False 1", "True 1"]  # the order of issue is one that is allowed


def test_a_chain_keeps_its_order() -> None:
    script = """
        one, place = stream(), memory()
        def work():
            for i in range(20):
                fill(place, i, one)
        print(byte_after := (launch(captured(one, work), one), byte(place, one))[1])
    """
    assert run(script, **LIFO) == ["19"]


def test_every_dependency_is_kept() -> None:
    """Random forks and joins over ten streams: each host function runs after those that it depends on."""
    script = """
        import random
        for seed in range(20):
            draw = random.Random(seed)
            streams, seen, keep = [stream() for _ in range(5)], [], []
            before = {0: set(), **{i: set() for i in range(1, 5)}}  # by stream: what ran before its next node
            edges = []
            def work():
                fork = event()
                record(fork, streams[0])
                for other in streams[1:]:
                    wait(other, fork)
                for node in range(40):
                    at = draw.randrange(5)
                    if draw.random() < 0.4:
                        source, mark = draw.randrange(5), event()
                        record(mark, streams[source])
                        wait(streams[at], mark)
                        before[at] |= before[source]
                    keep.append(HOST_FUNCTION(lambda _, node=node: seen.append(node)))
                    do("cudaLaunchHostFunc", streams[at], keep[-1], None)
                    edges.extend((first, node) for first in before[at])
                    before[at].add(node)
                for other in streams[1:]:
                    join = event()
                    record(join, other)
                    wait(streams[0], join)
            launch(captured(streams[0], work), streams[0])
            do("cudaDeviceSynchronize")
            place = {node: i for i, node in enumerate(seen)}
            assert sorted(place) == list(range(40)), seed
            assert all(place[first] < place[second] for first, second in edges), seed
            if seen != sorted(seen):
                print("another order")
    """
    assert len(run(script, **LIFO)) > 15
    assert run(script) == []
