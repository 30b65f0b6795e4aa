"""The host graph as nested drawings: partitions, the modules in each, the nodes in each module.

A drawing has few boxes even for a large graph: a group of nodes is one box, which opens another drawing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import networkx as nx

from ...inspection.document import GraphData, NodeData

# The largest number of boxes in one drawing; a module with more nodes is split into runs of nodes.
_MOST = 60


class Box(TypedDict):
    """A box of a drawing: a node of the host graph, or a group of nodes.

    ``opens`` is the name of the group's drawing, ``node`` the name of the node; the other one is empty. ``x`` is the
    column, ``y`` the row.
    """

    id: str
    label: str
    about: str
    opens: str
    node: str
    verdict: str
    x: float
    y: float


class Drawing(TypedDict):
    """One drawing; ``up`` is the name of the drawing that contains it as a box."""

    title: str
    up: str
    boxes: list[Box]
    edges: list[dict[str, float]]


def drawings(graph: GraphData) -> dict[str, Drawing]:
    """All drawings of a graph by name; the first is named "top"."""
    nodes, drawn = graph.nodes, dict[str, Drawing]()
    work = [name for partition in graph.partitions for name in partition.nodes]
    edges = _edges(nodes, work)
    partition_of = {name: partition.index for partition in graph.partitions for name in partition.nodes}
    verdicts = {partition.index: partition.verdict.value for partition in graph.partitions}

    def draw(name: str, title: str, up: str, members: list[str], key: Callable[[str], Any]) -> None:
        groups = _grouped(members, key)
        group_of = {member: group for group, inside in groups.items() for member in inside}
        between = nx.DiGraph()
        between.add_nodes_from(groups)
        pairs = ((group_of[a], group_of[b]) for a, b in edges if a in group_of and b in group_of)
        between.add_edges_from((one, other) for one, other in pairs if one != other)
        places = _places(between)
        boxes: dict[Any, Box] = {}
        for number, (group, inside) in enumerate(groups.items()):
            alone, node, (x, y) = len(inside) == 1, nodes[inside[0]], places[group]
            boxes[group] = {
                "id": f"{name}/{number}",
                "label": _short(node) if alone else group[0],
                "about": f"{node.line}\n{node.user_line}" if alone else _about(nodes, inside),
                "opens": "" if alone else f"{name}/{number}",
                "node": inside[0] if alone else "",
                "verdict": verdicts[partition_of[inside[0]]],
                "x": x,
                "y": y,
            }
        lines = ((*places[one], *places[other]) for one, other in between.edges)
        drawn[name] = {
            "title": title,
            "up": up,
            "boxes": list(boxes.values()),
            "edges": [dict(zip(("x", "y", "x2", "y2"), line, strict=True)) for line in lines],
        }
        for group, inside in groups.items():
            if boxes[group]["opens"]:
                draw(boxes[group]["opens"], f"{title} / {group[0]}", name, inside, _next_key(nodes, inside))

    by_partition: Callable[[str], Any] = lambda name: f"partition {partition_of[name]}"  # noqa: E731
    single = len(graph.partitions) == 1
    draw("top", "host graph", "", work, _next_key(nodes, work) if single else by_partition)
    return drawn


def _grouped(members: list[str], key: Callable[[str], Any]) -> dict[tuple[str, int], list[str]]:
    """Groups of members, by key and number.

    Members that run one after the other are one group, so that no two groups depend on each other (a module that is
    used twice gives two groups). If there are too many groups, those with the same key are merged.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for number, (name, inside) in enumerate(itertools.groupby(members, key)):
        groups[str(name), number] = list(inside)
    if len(groups) <= _MOST:
        return groups
    merged: dict[tuple[str, int], list[str]] = {}
    for (name, _), several in groups.items():
        merged.setdefault((name, 0), []).extend(several)
    return merged if len(merged) > 1 else groups


def _next_key(nodes: Mapping[str, NodeData], members: list[str]) -> Callable[[str], Any]:
    """The key that splits members further: the next part of their modules' paths; then runs; then single nodes."""
    paths = {name: tuple(filter(None, nodes[name].module.split("."))) for name in members}
    depth = 0
    while len({paths[name][:depth] for name in members}) == 1 and any(len(paths[name]) > depth for name in members):
        depth += 1
    if len({paths[name][:depth] for name in members}) > 1:
        return lambda name: ".".join(paths[name][:depth]) or "outside of modules"
    if len(members) > _MOST:
        size = max(_MOST // 2, -(-len(members) // _MOST))
        runs = {name: number // size for number, name in enumerate(members)}
        return lambda name: f"nodes {runs[name] * size} to {min((runs[name] + 1) * size, len(members)) - 1}"
    return lambda name: name


def _edges(nodes: Mapping[str, NodeData], work: Iterable[str]) -> set[tuple[str, str]]:
    """The dependencies of work: (last writer of a storage, later node that reads or writes it)."""
    last_writer: dict[str, str] = {}
    edges: set[tuple[str, str]] = set()
    for name in work:
        node = nodes[name]
        edges |= {(last_writer[s], name) for s in (*node.reads, *node.writes) if s in last_writer}
        last_writer.update(dict.fromkeys(node.writes, name))
    return edges


def _places(graph: nx.DiGraph) -> dict[Any, tuple[float, float]]:
    """The column and row of each box: below all boxes that it depends on, and close to them.

    Groups that depend on each other (two branches of a model that run in turn) are in one row.
    """
    order = {name: number for number, name in enumerate(graph)}
    condensed = nx.condensation(graph)
    places: dict[Any, tuple[float, float]] = {}
    for row, layer in enumerate(nx.topological_generations(condensed)):
        members = sorted((m for c in layer for m in condensed.nodes[c]["members"]), key=order.__getitem__)

        def wish(name: Any) -> float:
            above = [places[other][0] for other in graph.predecessors(name) if other in places]
            return sum(above) / len(above) if above else 0.0

        wishes = {name: wish(name) for name in members}
        members.sort(key=lambda name: (wishes[name], order[name]))
        middle = sum(wishes.values()) / len(wishes)
        for column, name in enumerate(members):
            places[name] = middle + column - (len(members) - 1) / 2, float(row)
    return places


def _about(nodes: Mapping[str, NodeData], inside: list[str]) -> str:
    launches, calls = (sum(nodes[name].kind == kind for name in inside) for kind in ("launch", "extern"))
    return f"{count(launches, 'launch')}, {count(calls, 'library call')}"


def count(number: int, what: str) -> str:
    """``1 launch``, ``2 launches``."""
    return f"{number:,} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")


def _short(node: NodeData) -> str:
    return node.operator.removeprefix("aten::") if node.operator else node.kind
