"""PLAN: the host graph of a timeline: nodes in the order in which they run, some of them several times."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...host_graph.nodes import Kind, kind_of
from ...host_graph.stand_ins import StandIn
from ...host_graph.storages import StorageFacts
from ...host_graph.tensors import has_address
from .timeline import Run

# A node of the graph before, and versions of storages.
_Key = tuple[Node, tuple[int, ...]]


class Rebuilt:
    """A host graph in which each run of a timeline is a node.

    ::

        buf0 = allocate(...)                    buf0 = allocate(...)
        launch(k, x, buf0)                      launch(k, x, buf0)
        launch(l, buf0, y)                ->    launch(l, buf0, y)
        launch(m, buf0, z)                      buf0_again = allocate(...)
                                                launch(k, x, buf0_again)
                                                launch(m, buf0_again, z)

    First runs keep their names. Allocations, views and sizes are made where a run first needs them.

    Attributes:
        module: the graph.
        names: for each run, the name of its node.
        originals: by name of a node, the node that it is a copy of.
    """

    def __init__(self, gm: GraphModule, facts: StorageFacts, runs: Sequence[Run]) -> None:
        self._facts, self._graph = facts, Graph()
        self.originals: dict[str, Node] = {}
        self._scheduled = {run.node for run in runs}
        self._made: dict[_Key, Node] = {}
        self._checks = self._checks_by_last_work(gm, runs)
        for node in gm.graph.find_nodes(op="placeholder"):
            self._copy(node, {})
        self._add_checks(None)
        self.names = tuple(self._add(run) for run in runs)
        self._copy(gm.graph.find_nodes(op="output")[0], {})
        self.module = GraphModule(gm, self._graph)

    def _add(self, run: Run) -> str:
        made = self._copy(run.node, run.versions, is_again=run.is_again)
        if not run.is_again:
            self._add_checks(run.node)
        return made.name

    def _key(self, node: Node, storages: Collection[int], versions: Mapping[int, int]) -> _Key:
        return node, tuple(sorted(versions.get(index, index) for index in storages))

    def _keys(self, node: Node, versions: Mapping[int, int]) -> list[_Key]:
        """What a copy of a node is found by: a view by the storages of its value, work by any that it makes."""
        if node not in self._scheduled:
            return [self._key(node, self._facts.of(node), versions)]
        storages = self._facts.of(node) | self._facts.writes(node)
        return [self._key(node, {index}, versions) for index in storages] or [self._key(node, (), {})]

    def _operand(self, node: Node, user: Node, versions: Mapping[int, int]) -> Node:
        keys = self._keys(node, versions)
        if node in self._scheduled and (shared := self._facts.of(node) & self._facts.of(user)):
            keys = [self._key(node, {index}, versions) for index in shared]  # an element of a tuple: of this run
        found = next((self._made[key] for key in keys if key in self._made), None)
        return found if found is not None else self._copy(node, versions)

    def _copy(self, node: Node, versions: Mapping[int, int], is_again: bool = False) -> Node:
        operands = {one: self._operand(one, node, versions) for one in node.all_input_nodes}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        is_first = not is_again and self._keys(node, versions) == self._keys(node, {})
        name = node.name if is_first else f"{node.name}_again"
        made = self._graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        made.meta = dict(node.meta)
        if not is_first and node.op == "call_function" and "val" in node.meta:
            made.meta["val"] = _value_again(node.meta["val"], operands)
        self._made.update(dict.fromkeys(self._keys(node, versions), made))
        self.originals[made.name] = node
        return made

    def _checks_by_last_work(self, gm: GraphModule, runs: Sequence[Run]) -> Mapping[Node | None, list[Node]]:
        """The asserts of a graph by the node after whose first run they can be made; None for those on inputs."""
        position = {run.node: place for place, run in reversed(list(enumerate(runs))) if not run.is_again}
        last: dict[Node, int] = {}
        checks = defaultdict[Node | None, list[Node]](list)
        for node in gm.graph.nodes:
            own = position.get(node, -1)
            last[node] = max([own, *(last[operand] for operand in node.all_input_nodes)]) if own < 0 else own
            if kind_of(node) is Kind.CHECK and node not in position:
                checks[runs[last[node]].node if last[node] >= 0 else None].append(node)
        return checks

    def _add_checks(self, after: Node | None) -> None:
        for check in self._checks.get(after, ()):
            self._copy(check, {})


def _value_again(value: Any, operands: Mapping[Node, Node]) -> Any:
    """The fake value of a node that is made once more.

    If the first one shares an operand's storage, it shares that of the operand's copy; else it has new memory.
    """
    lies_in = {
        key: copy.meta["val"]
        for operand, copy in operands.items()
        if (key := _storage_of(operand.meta.get("val"))) is not None
    }

    def again(tensor: torch.Tensor) -> torch.Tensor:
        key = _storage_of(tensor)
        if isinstance(tensor, StandIn):  # of a graph that was loaded from a cache
            return tensor.in_storage(lies_in[key].untyped_storage() if key in lies_in else None)
        if key in lies_in:
            # Of the value's own device: a fake storage says that it is on "meta".
            empty: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            storage = lies_in[key].untyped_storage()
            return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    tensors = [one for one in torch.utils._pytree.tree_leaves(value) if _storage_of(one) is not None]
    mode = getattr(tensors[0], "fake_mode", None) if tensors else None
    if mode is None and not any(isinstance(tensor, StandIn) for tensor in tensors):
        return value
    environment = getattr(mode, "shape_env", None)
    guards = environment.suppress_guards() if environment is not None else contextlib.nullcontext()
    with mode or contextlib.nullcontext(), torch.no_grad(), guards:
        return torch.utils._pytree.tree_map_only(torch.Tensor, again, value)


def _storage_of(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and has_address(value) else None
