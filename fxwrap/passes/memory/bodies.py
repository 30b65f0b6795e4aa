"""What calls take beside their results; of branches and loops the most that any way through them takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from ...host_graph.control_flow import ControlFlow, control_flow_of
from ...host_graph.nodes import Kind, kind_of, output_values
from ...packing import Buffer
from ...packing.lifetimes import Lifetimes
from ...packing.reserved import most_alive
from ..analysis.aliasing import analyse_storages
from .requirements import expected_sizes
from .workspace import measure_workspace, needs_no_workspace

_WORK = Kind.LAUNCH, Kind.EXTERN


def workspace_of(gm: GraphModule, symbols: Mapping[Any, int] | None = None) -> dict[str, int]:
    """The most bytes that each library call, branch and loop takes at one time beyond what it returns, by node.

    What is not known is missing (``measure_workspace``); so is a branch or a loop with such a call.

    Args:
        symbols: the sizes, by symbol; by default those that the program was compiled for.
    """
    bodies = _Bodies(measure_workspace(_calls_in(gm), symbols), symbols)
    known = dict[str, int]()
    for node in gm.graph.nodes:
        if kind_of(node) is Kind.EXTERN and (nbytes := bodies.of(node)) is not None:
            known[node.name] = nbytes
    return known


def _calls_in(gm: GraphModule) -> Iterator[Node]:
    """The calls of a graph, and of the subgraphs that it calls."""
    for node in gm.graph.nodes:
        if kind_of(node) is Kind.EXTERN:
            yield node
            for subgraph in flow.subgraphs if (flow := control_flow_of(node)) is not None else ():
                yield from _calls_in(subgraph)


def _placed(flow: ControlFlow) -> Iterator[set[str]]:
    """For each subgraph, the nodes whose results lie in memory that the branch or the loop is given."""
    for gm, views in zip(flow.subgraphs, flow.temporaries, strict=True):
        returned = zip(output_values(gm), flow.results, strict=True) if gm in flow.returning else ()
        yield {*views, *(value.name for value, several in returned if several)}


@dataclass(frozen=True)
class _Bodies:
    """What calls take beyond what they return. None stands for what is not known."""

    measured: Mapping[Node, int]
    symbols: Mapping[Any, int] | None

    def of(self, node: Node) -> int | None:
        if (flow := control_flow_of(node)) is None:
            return self.measured.get(node)
        if flow.repeats and node.args[4:] == (True,):
            return None  # it keeps what each iteration has returned
        taken = [
            self._of_subgraph(gm, flow, placed) for gm, placed in zip(flow.subgraphs, _placed(flow), strict=True)
        ]
        return max(nbytes for nbytes in taken if nbytes is not None) if None not in taken else None

    def _of_subgraph(self, gm: GraphModule, flow: ControlFlow, placed: Collection[str]) -> int | None:
        """A loop has what the last iteration has returned while the next one makes the same again."""
        facts, work = analyse_storages(gm), [node for node in gm.graph.nodes if kind_of(node) in _WORK]
        lifetimes, sizes = (
            Lifetimes.of(facts.named_in([node]) for node in work),
            expected_sizes(gm, facts, self.symbols),
        )
        buffers, returned = list[Buffer](), 0
        for index in facts.made() & lifetimes.keys():
            if facts.storages[index].node in placed:
                continue
            if index not in sizes:
                return None
            steps, stays = lifetimes[index], index in facts.handed_out
            if stays and gm in flow.returning:
                returned += sizes[index]
            else:
                buffers.append(Buffer("", sizes[index], steps.start, len(work) if stays else steps.stop))
        for step, node in enumerate(work):
            if kind_of(node) is Kind.EXTERN and not needs_no_workspace(node):
                if (nbytes := self.of(node)) is None:
                    return None
                buffers.append(Buffer("", nbytes, step, step + 1))
        return most_alive(buffers) + (returned if flow.repeats else 0)
