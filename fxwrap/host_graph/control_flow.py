"""Branches and loops: the functions that a host graph calls for them, and the subgraphs that these call.

A subgraph is a host graph of its own, a module of the graph that holds it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node


def switch(
    selector: Any,
    operands: Sequence[Any],
    *branches: Callable[..., Any],
    by_truth: bool = False,
    results: Sequence[Sequence[Any]] = (),
    temporaries: Sequence[Mapping[str, Any]] = (),
) -> Any:
    """Run one of several branches.

    Args:
        selector: a number or a tensor with one: the position of the branch; one that is no position is the last's.
        by_truth: of two branches, the second if the selector is true, as ``torch.cond`` before torch 2.14.
        results: for each result, the tensor that it is written to, if there is one.
        temporaries: for each branch, tensors that its allocations may lie in, by name. Here they do not.
    """
    position = 0 if is_fake(selector) else position_of(selector, len(branches), by_truth)
    return _placed(branches[position](*operands), results)  # results of all branches look the same


def while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    carried: Sequence[Any],
    additional: Sequence[Any] = (),
    stacked: bool = False,
    results: Sequence[Sequence[Any]] = (),
    temporaries: Sequence[Mapping[str, Any]] = (),
) -> list[Any]:
    """Run ``body(*carried, *additional) -> carried`` while ``condition`` of the same values holds.

    Args:
        stacked: return the carried values of every iteration, stacked, instead of the last ones.
        results: for each value that is carried, the two tensors that iterations write it to in turn, if there are.
        temporaries: for the condition and the body, as for ``switch``.
    """
    values = list(carried)
    passes: list[Sequence[Any]] = []
    fake = any(map(is_fake, (*carried, *additional)))  # one iteration gives the results' layout
    ran = 0
    while not ran if fake else condition(*values, *additional)[0]:
        values, ran = _placed(body(*values, *additional), results, ran), ran + 1
        if stacked:
            passes.append(values)
    return results_of_loop(values, passes if stacked else ran > 0)


def _placed(values: Sequence[Any], places: Sequence[Sequence[Any]], turn: int = 0) -> list[Any]:
    """Values, each copied to the next of its places, if it has any."""
    pairs = itertools.zip_longest(values, places, fillvalue=())
    return [place[turn % len(place)].copy_(value) if place else value for value, place in pairs]


def position_of(selector: Any, branches: int, by_truth: bool) -> int:
    """The position of the branch that a selector chooses (``switch``)."""
    position = int(bool(selector)) if by_truth else int(selector)
    return position if 0 <= position < branches else branches - 1


def results_of_loop(carried: Sequence[Any], passes: Sequence[Sequence[Any]] | bool) -> list[Any]:
    """What a loop returns.

    Args:
        carried: the values that are carried in the end.
        passes: what each iteration has carried, if that is to be stacked; otherwise whether there was an iteration.
    """
    if isinstance(passes, bool):
        # No result is an operand.
        return [value.clone() if isinstance(value, torch.Tensor) and not passes else value for value in carried]
    return [torch.stack(values) for values in zip(*(passes or [carried]), strict=True)]  # type: ignore[arg-type]


def is_fake(value: Any) -> bool:
    return hasattr(value, "fake_mode")


@dataclass(frozen=True)
class ControlFlow:
    """A node that calls subgraphs, depending on data.

    Attributes:
        subgraphs: all that it may call.
        returning: those of them whose results the node returns; the condition of a loop is none.
        operands: what each of ``subgraphs`` is called with, by position.
        repeats: whether results of one call are operands of the next.
        results: for each result, the places that it is written to; for a loop two, in turn. Empty for those without.
        temporaries: for each of ``subgraphs``, views that its allocations lie in, by name.
    """

    subgraphs: tuple[GraphModule, ...]
    returning: tuple[GraphModule, ...]
    operands: tuple[Any, ...]
    repeats: bool
    results: Sequence[Sequence[Node]]
    temporaries: Sequence[Mapping[str, Node]]


def control_flow_of(node: Node) -> ControlFlow | None:
    """What a ``switch`` or ``while_loop`` calls; None for other nodes."""
    gm = node.graph.owning_module
    if node.op != "call_function" or node.target not in (switch, while_loop) or gm is None:
        return None
    args: Any = node.args
    given: Any = node.kwargs
    results = given.get("results") or ((),) * len(node.meta.get("val") or ())

    def subgraph(handle: Any) -> GraphModule:
        return operator.attrgetter(str(handle.target))(gm)

    if node.target is switch:
        _, operands, *handles = args
        branches = tuple(map(subgraph, handles))
        temporaries: Any = given.get("temporaries") or ({},) * len(branches)
        return ControlFlow(branches, branches, tuple(operands), False, results, temporaries)
    condition, body, carried, *rest = args
    subgraphs = subgraph(condition), subgraph(body)
    operands = (*carried, *(rest[0] if rest else ()))
    return ControlFlow(subgraphs, subgraphs[1:], operands, True, results, given.get("temporaries") or ({}, {}))


def unchanged(flow: ControlFlow) -> frozenset[int]:
    """The positions of what a loop carries that its body returns as it got it."""
    _, body = flow.subgraphs
    inputs, (output,) = body.graph.find_nodes(op="placeholder"), body.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    return frozenset(position for position, value in enumerate(returned) if value is inputs[position])


def counts_on_the_host(flow: ControlFlow, device: torch.device) -> bool:
    """Whether the host decides in a loop that is captured on a device.

    It does so without data then, and the capture goes through all iterations (``passes/partition/host_counters.py``).
    """
    if not flow.repeats:
        return False
    (output,) = flow.subgraphs[0].graph.find_nodes(op="output")
    decides: Any = output.args[0]
    return bool(decides[0].meta["val"].device.type != device.type)
