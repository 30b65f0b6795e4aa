"""Puts the steps of a part in lanes, as the plan puts the nodes that they run (``plan.Lanes``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from ...clocks import needed_waits
from ...host_graph.nodes import is_work
from ...host_graph.tensors import tensors_in
from ...plan import Lanes
from ..replay import steps
from ..replay.flat_python import StepsInLanes
from ..replay.operands import Bound, Local, Register
from ..replay.steps import Step

# The kinds of steps that can be in a lane.
_KINDS = (
    steps.Allocate,
    steps.View,
    steps.Resize,
    steps.CallOperator,
    steps.Arithmetic,
    steps.Launch,
    steps.CheckLayout,
    steps.CheckAlignment,
    steps.Load,
    steps.Store,
    steps.Item,
    steps.Drop,
)


def in_lanes(own: Sequence[Step], planned: Sequence[Lanes]) -> list[StepsInLanes]:
    """The steps in lanes.

    ::

        nodes         lane 0: a      lane 1: b       c in lane 0 waits for b

        steps         0  resize the region           lane 0
                      1  a                           lane 0
                      2  v0 = a view                 lane 1      that of the step that reads v0
                      3  b on v0                     lane 1      waits for step 0
                      4  drop v0                     lane 1
                      5  c                           lane 0      waits for step 3

    A step runs after those that make the locals that it reads, and memory for what it uses; a local is dropped after
    all that read it. Nodes wait for each other as planned.

    Args:
        own: all steps of a part.
    """
    found, work = list[StepsInLanes](), dict[str, int]()
    for position, step in enumerate(own):
        if step.node is not None and not step.MOVES and is_work(step.node):
            work.setdefault(step.node.name, position)
    for lanes in planned:
        positions = [work[name] for name in lanes.lane_of if name in work]
        if len(positions) != len(lanes.lane_of):
            continue  # they are in another part
        begin, end = positions[0], positions[-1] + 1
        inside = own[begin:end]
        if all(isinstance(step, _KINDS) and not step.may_retry for step in inside):
            at = {name: work[name] - begin for name in lanes.lane_of}
            found.append(_placed(begin, inside, lanes, at))
    return found


def _placed(begin: int, inside: Sequence[Step], lanes: Lanes, at: dict[str, int]) -> StepsInLanes:
    lane_of = _lanes_of_steps(inside, {at[name]: lane for name, lane in lanes.lane_of.items()})
    before = _steps_before(inside)
    for name, sources in lanes.waits_for.items():
        before[at[name]].update(at[source] for source in sources)
    position, ended = list[int](), defaultdict[int, int](int)
    for lane in lane_of:
        position.append(ended[lane])
        ended[lane] += 1
    waits = [[(lane_of[n], position[n] + 1) for n in own] for own in needed_waits(lane_of, before)]
    return StepsInLanes(begin, lane_of, waits)


def _lanes_of_steps(inside: Sequence[Step], planned: dict[int, int]) -> list[int]:
    """The lane of each step: that in which what it makes is read first, or else that of the step before it."""
    lanes = [planned.get(n, -1) for n in range(len(inside))]
    reader, following = dict[Local, int](), -1
    for n in reversed(range(len(inside))):
        step = inside[n]
        if lanes[n] < 0:
            makes = [reader[local] for local in step.results if local in reader]
            if makes:
                lanes[n] = makes[0]
            elif isinstance(step, steps.Resize) and step.nbytes:
                lanes[n] = following
        following = lanes[n] if lanes[n] >= 0 else following
        reader.update(dict.fromkeys((one for one in step.reads() if isinstance(one, Local)), lanes[n]))
    last = 0
    for n, lane in enumerate(lanes):
        last = lanes[n] = last if lane < 0 else lane
    return lanes


def _steps_before(inside: Sequence[Step]) -> list[set[int]]:
    """The steps that each has to follow, for the sake of locals, registers and the memory of regions."""
    before: list[set[int]] = [set() for _ in inside]
    writer, readers = dict[Hashable, int](), defaultdict[Hashable, list[int]](list)
    loaded = dict[Local, Register]()
    regions = {step.storage._cdata for step in inside if isinstance(step, steps.Resize)}
    for n, step in enumerate(inside):
        reads, writes = set(_read_by(step, regions)), set(_written_by(step))
        if isinstance(step, steps.Load):
            loaded[step.result] = step.register
        for keys in (reads, writes):  # a local that is loaded lies in its register
            keys |= {loaded[key] for key in keys if isinstance(key, Local) and key in loaded}
        for key in reads | writes:
            if key in writer:
                before[n].add(writer[key])
        for key in writes:
            before[n].update(readers.pop(key, ()))
            writer[key] = n
        for key in reads - writes:
            readers[key].append(n)
        before[n].discard(n)
    return before


def _read_by(step: Step, regions: set[int]) -> Iterator[Hashable]:
    for one in step.reads():
        if not isinstance(one, Bound):
            yield one
            continue
        for tensor in tensors_in(one.value) if regions else ():
            if (handle := tensor.untyped_storage()._cdata) in regions:
                yield handle


def _written_by(step: Step) -> Iterator[Hashable]:
    yield from (local for local in step.results if local is not None)
    if isinstance(step, steps.Drop):
        yield from step.locals
    elif isinstance(step, steps.Store):
        yield step.register
    elif isinstance(step, steps.Resize):
        yield step.storage._cdata
