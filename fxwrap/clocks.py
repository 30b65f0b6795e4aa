"""Vector clocks: how far each lane has come when a member of another one runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def needed_waits(lanes: Sequence[int], before: Sequence[Collection[int]]) -> Iterator[tuple[int, ...]]:
    """For each member of lanes, the members of other lanes that it has to wait for; the fewest that imply the rest.

    By the vector clocks of Fidge and Mattern (1988): of each member it is known how far every lane has come before.

    Args:
        lanes: the lane of each member, in an order in which each depends on earlier ones only.
        before: the members that each depends on.
    """
    count = max(lanes, default=-1) + 1
    ended, clocks = [0] * count, list[list[int]]()  # how many members of each lane have ended once a member has
    latest, position = [[0] * count for _ in range(count)], list[int]()
    for member, lane in enumerate(lanes):
        clock = list(latest[lane])
        position.append(ended[lane])
        waits = list[int]()
        for other in sorted(before[member], reverse=True):
            if clock[lanes[other]] <= position[other]:
                waits.append(other)
                clock = list(map(max, clock, clocks[other]))
        ended[lane] += 1
        clock[lane] = ended[lane]
        clocks.append(clock)
        latest[lane] = clock
        yield tuple(reversed(waits))
