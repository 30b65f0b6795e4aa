"""Flat functions: host-graph nodes as straight-line Python, with known values bound.

::

    buf0 = empty_strided(...)                  def flat(r):
    t = reinterpret(w, (8, 8), (1, 8), 0)          v0 = r[0]
    addmm.out(bias, x, t, out=buf0)     ->         c0(c1, v0, c2, out=c3)    # torch.addmm(bias, x, t, ...)
    launch(relu, buf0, buf1)                       c4(c3, c5)                # the kernel itself

``c``s are bound values: memory, views of it, sizes. ``r`` are the registers: values that change from call to call.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.control_flow import control_flow_of
from ...host_graph.nodes import (
    Kind,
    checks_on,
    constants,
    effective_users,
    is_work,
    kernel_of,
    kind_of,
    nodes_in,
    output_node,
    reinterpret,
    schema_of,
)
from ...plan import Partition, ProgramPlan
from ..replay import steps
from ..replay.flat_python import Part
from ..replay.operands import LITERALS, Bound, Call, Local, Operand, Register
from ..replay.steps import Drop, Item, Load, Nested, Resize, Step
from .nested import InGraph, nested_step
from .step_kinds import OPTIONS, is_default, kind_of_call, only_elements_used

# Kinds of nodes that are evaluated at their first use.
_ON_DEMAND = (Kind.VIEW, Kind.SYMBOLIC, Kind.ALLOCATION)
Resizes = Mapping[Node, Sequence[Resize]]

# Post-processing of a node's result, passed in a one-element list so that the callee can drop the last reference.
PostProcessing = Mapping[Node, Callable[[list[Any]], Any]]


class FlatBuilder:
    """Builds one flat function.

    Args:
        bound: known values. Views and arithmetic of bound values are evaluated while building, and added.
        registers: the register of each value that the function loads or stores.
        emptied: values whose registers are not read again; reading them empties the register.
        before, after: steps before and after a node's own.
        post_processing: functions through which results of nodes go.
        may_retry: whether a node may run again after it was out of memory.
        in_graph: how branches and loops become nodes of the device graph; None if the host decides.
        calls: functions to call in place of a node's own.
    """

    def __init__(
        self,
        bound: MutableMapping[Node, Any],
        registers: Mapping[Node, int],
        emptied: Container[Node] = (),
        before: Resizes = MappingProxyType({}),
        after: Resizes = MappingProxyType({}),
        post_processing: PostProcessing = MappingProxyType({}),
        may_retry: Callable[[Node], bool] = lambda node: False,
        in_graph: InGraph | None = None,
        calls: Mapping[Node, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self.bound, self.registers, self._emptied = bound, registers, emptied
        self._before, self._after, self._may_retry = before, after, may_retry
        self.in_graph, self._calls = in_graph, calls
        self._filled: list[torch.UntypedStorage] = []  # regions that got memory here
        self._post_processing = post_processing
        self._elements: dict[Node, list[Node | None]] = {}  # by tuple: its elements; None if not needed
        self._kept_when_made: set[Node] = set()  # allocations and views that this function makes and keeps
        self._names = itertools.count()
        self._subgraphs: dict[GraphModule, Callable[..., Any]] = {}
        self._locals: dict[Node, Local | Bound | Register] = {}
        self._steps: list[Step] = []
        self._last_use: dict[Local, int] = {}
        self._pinned: set[Local] = set()
        self._checked: set[Any] = set()

    # -- appending ---------------------------------------------------------------------------------

    def append(
        self, nodes: Iterable[Node], stores: Iterable[Node] = (), ends: Mapping[Node, Iterable[Node]] | None = None
    ) -> None:
        """Append the work of ``nodes``, in order, and keep the values of ``stores`` in their registers.

        A check runs as soon as the value that it checks exists. A check that needs data-dependent values is among the
        nodes itself.

        Args:
            ends: the communications that each node waits for. Their operands live until then.
        """
        nodes = list(nodes)
        kept, scheduled = set(stores), set(nodes)
        self._kept_when_made = {node for node in kept - scheduled if kind_of(node) in (Kind.ALLOCATION, Kind.VIEW)}
        for node in nodes:
            self._add_all(self._before, [node])
            self._statement(node, scheduled)
            for begun in (ends or {}).get(node, ()):
                for local in self._locals_in(begun):
                    self._use(local)
            if node in kept:
                self.keep(node)
            for checker in checks_on([node]):
                if not any(arg in scheduled for arg in checker.all_input_nodes if arg not in self._locals):
                    self.check(checker)
            self._add_all(self._after, [node])

    def append_graph(self, gm: GraphModule) -> None:
        """Append the work of a subgraph, in its order."""
        inputs = gm.graph.find_nodes(op="placeholder")
        work = [node for node in gm.graph.nodes if is_work(node)]
        with_their_values = set(checks_on([*inputs, *work]))
        for node in checks_on(inputs):
            if self.available(node):
                self.check(node)
        self.append(
            node
            for node in gm.graph.nodes
            if node in work or (kind_of(node) is Kind.CHECK and node not in with_their_values)
        )

    def _add_all(self, around: Resizes, nodes: Iterable[Node]) -> None:
        for step in (step for node in nodes for step in around.get(node, ())):
            self._steps.append(step)
            # Views of a region can be made only while it has memory: it is resized here as it will be in a call.
            if step.nbytes and not step.storage.nbytes():
                step.storage.resize_(step.nbytes)
                self._filled.append(step.storage)
            elif not step.nbytes and any(step.storage is filled for filled in self._filled):
                step.storage.resize_(0)

    def append_partition(self, plan: ProgramPlan, partition: Partition, stores: Iterable[Node] = ()) -> None:
        """Append a partition: its nodes, or the call of its replacement (``compile_partition``)."""
        signature = plan.compiled.get(partition.index)
        if signature is None:
            self.append(plan.work_in(partition), stores, plan.awaited)
            return
        self._kept_when_made = {node for node in stores if kind_of(node) is Kind.ALLOCATION}
        self._add_all(self._before, plan.work_in(partition))
        inputs, outputs = ([plan.nodes[name] for name in names] for names in (signature.inputs, signature.outputs))
        self._call(getattr(plan.graph, signature.target), inputs, outputs, plan.work_in(partition)[-1])
        for node in stores:
            self.keep(node)
        self._add_all(self._after, plan.work_in(partition))

    def _call(
        self, function: Callable[..., Any], inputs: Sequence[Node], outputs: Sequence[Node], node: Node
    ) -> None:
        """Append ``*outputs, = function(*inputs)``, as the step that runs ``node``."""
        args = tuple(map(self.operand, inputs))
        results = tuple(self.new_local() for _ in outputs)
        self._steps.append(steps.CallPython(function, args, unpacks=bool(results), results=results, node=node))
        self._locals.update(zip(outputs, results, strict=True))
        for local in (*results, *(self._locals[given] for given in inputs if given in self._locals)):
            self._use(local)

    def begin_range(self, name: str) -> None:
        """Begin a range of profiles (``record_function``). It ends where the next one begins."""
        self._steps.append(steps.Range(name))

    def keep(self, node: Node) -> None:
        """Append a store of a value in its register."""
        elements = self._elements.get(node)
        value: Operand
        if elements is None:
            value = self._reference(node)
        else:
            value = tuple(None if element is None else self._reference(element) for element in elements)
        self._steps.append(steps.Store(Register(self.registers[node]), value, node=node))
        for element in elements if elements is not None else [node]:
            if element is not None:
                self._use(self._locals[element])

    def check(self, node: Node) -> None:
        """Append an assert. If all its operands are bound, it runs now instead.

        One whose operands do not exist yet, or that was appended before, is skipped.
        """
        if all(self._is_known(arg) for arg in node.all_input_nodes):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.bound.__getitem__)
            node.target(*args, **kwargs)  # type: ignore[operator]
        elif self.available(node):
            asked = node.target, node.args
            if asked not in self._checked:  # Inductor's wrapper asserts some things twice
                self._checked.add(asked)
                self._append(self._step(node), node)

    def stand_for(self, node: Node, operand: Bound | Register) -> None:
        """Use ``operand`` wherever ``node`` is used. Views of it are made at every call, even if it is bound."""
        self._locals[node] = operand

    def register(self, node: Node) -> Register:
        """The register of a node, as an operand."""
        return Register(self.registers[node])

    def build(self, result: Any = None, name: str = "", give_back: Callable[[], object] | None = None) -> Part:
        """Build the function.

        Args:
            result: the value that the function returns; nodes in it stand for their values.
            name: see ``Part``.
            give_back: frees memory; called when a step that may run again is out of memory, before it runs again.
        """
        returned = self.operand(result, is_result=True)
        for region in self._filled:
            region.resize_(0)  # still filled: its region ends in a later partition
        return Part.of(self._with_drops(), returned, name, give_back)

    def _with_drops(self) -> list[Step]:
        """The steps, in which each local is dropped after its last use."""
        dead: dict[int, list[Local]] = {}
        for local, position in self._last_use.items():
            if local not in self._pinned:
                dead.setdefault(position, []).append(local)
        everything: list[Step] = []
        for position, step in enumerate(self._steps):
            everything.append(step)
            if position in dead:
                everything.append(Drop(tuple(dead[position])))
        return everything

    # -- steps ---------------------------------------------------------------------------------------

    def _statement(self, node: Node, scheduled: Container[Node]) -> None:
        if kind_of(node) is Kind.CHECK and node not in self._post_processing:
            self.check(node)
            return
        if node.target is operator.getitem and node in self._locals:
            return  # the number is an element of a tuple that was taken apart
        step = self._step(node)
        if node in self._post_processing:
            call = self._gathered(step, node) if isinstance(step, Nested) else step.call()
            step = _processed(call, self._post_processing[node])
        if is_work(node) and not node.users and node not in self._post_processing:
            if isinstance(step, Nested):
                step = dataclasses.replace(step, results=(None,) * len(node.meta["val"]), unpacks=True)
            self._append(step, node, self._may_retry(node))
        elif node.users and only_elements_used(node):
            self._take_apart(node, step, scheduled)
        else:
            self.assign(node, step)

    def _gathered(self, step: Nested, node: Node) -> Call:
        """Append a branch or a loop; its results as the result of a call."""
        results = tuple(self.new_local() for _ in node.meta["val"])
        self._append(dataclasses.replace(step, results=results, unpacks=True), node)
        self.use_next(node, results)
        return Call(tuple, (results,))

    def _take_apart(self, node: Node, step: Step, scheduled: Container[Node]) -> None:
        """Define the elements of a tuple as locals of their own, so that each is freed after its own last use."""
        count, positions = len(node.meta["val"]), {user: int(user.args[1]) for user in node.users}  # type: ignore[arg-type]
        overload = schema_of(node)
        if isinstance(step, Nested) or (overload is not None and len(overload._schema.returns) == count > 1):
            elements = {position % count: self.new_local() for position in positions.values()}
            results = tuple(map(elements.get, range(count)))
            self._append(dataclasses.replace(step, results=results, unpacks=True), node, self._may_retry(node))
            for user, position in positions.items():
                self._locals[user] = self._use(elements[position % count])
        else:
            self.assign(node, step)
            whole = self._locals[node]
            assert isinstance(whole, Local)
            for user, position in positions.items():
                self.assign(user, Item(whole, position))
                self._use(whole)
        parts: list[Node | None] = [None] * count
        for user, position in positions.items():
            if any(further not in scheduled for further in effective_users(user)):
                parts[position] = user
        self._elements[node] = parts

    def _append(self, step: Step, node: Node, may_retry: bool = False) -> None:
        self._steps.append(dataclasses.replace(step, node=node, may_retry=may_retry))

    def new_local(self) -> Local:
        return Local(f"v{next(self._names)}")

    def assign(self, node: Node, step: Step) -> None:
        """Append the step that makes a node's value."""
        self._locals[node] = local = self.new_local()
        may_retry = not isinstance(step, (Load, Item)) and self._may_retry(node)
        self._steps.append(dataclasses.replace(step, results=(local,), node=node, may_retry=may_retry))
        self._use(local)

    def _use(self, operand: Local | Bound | Register) -> Local | Bound | Register:
        if isinstance(operand, Local):
            self._last_use[operand] = len(self._steps) - 1
        return operand

    def _step(self, node: Node) -> Step:
        """The step that runs a node, of the kind that suits it. (``_statement`` may make it a call of Python.)"""
        if (flow := control_flow_of(node)) is not None and (not node.users or only_elements_used(node)):
            return nested_step(self, node, flow)
        kernel, function = kernel_of(node), node.meta.get("call", node.target)
        args = tuple(map(self.operand, node.args if kernel is None else node.args[1:]))
        given = {name: value for name, value in node.kwargs.items() if not is_default(node, name, value)}
        kwargs = {name: self.operand(value) for name, value in given.items()}
        self.use_next(node)
        if node in self._calls:
            return steps.CallPython(self._calls[node], args, kwargs)
        if kernel is not None:
            return steps.Launch(kernel, args)
        if node.target is torch.empty_strided and {"dtype", "device"} <= given.keys() <= OPTIONS:
            (size, stride), options = args, dict[str, Any](given)
            return steps.Allocate(size, stride, **options, on_cpu=node.meta.get("call"))
        if (overload := schema_of(node)) is not None:
            special = (kind for kind in (steps.Multiply, steps.ReadNumber) if overload in kind.OVERLOADS)
            return next(special, steps.CallOperator)(function, args, kwargs, overload=overload)
        if node.target is reinterpret and not kwargs:
            return steps.View(function, *args)
        return kind_of_call(node)(function, args, kwargs)

    def block(self, gm: GraphModule, given: Mapping[Node, Operand], ends: Container[Operand] = ()) -> steps.Block:
        """The steps of a subgraph.

        Args:
            given: for each input of the subgraph, and each allocation that is given memory from outside, the operand
                of this function that it is.
            ends: operands that may be dropped after their last use in it.
        """
        inner = FlatBuilder(constants(gm), {}, in_graph=self.in_graph)
        inner._names = self._names
        for node, operand in given.items():
            if isinstance(operand, Local):
                inner._locals[node] = operand
                if operand not in ends:
                    inner._pinned.add(operand)
            else:
                inner.bound[node] = operand.value if isinstance(operand, Bound) else operand
        inner.append_graph(gm)
        values = [inner.operand(value, is_result=True) for value in output_node(gm).args[0]]  # type: ignore[union-attr]
        return steps.Block(tuple(inner._with_drops()), tuple(values))

    def allocate(self, step: steps.Allocate, node: Node) -> Local:
        """Append an allocation, which a node needs."""
        local = self.new_local()
        self._append(dataclasses.replace(step, results=(local,)), node)
        return local

    def use_next(self, node: Node, others: Iterable[Operand] = ()) -> None:
        """Note that the next step uses the operands of a node, and others. Making them may have appended steps."""
        for local in (*self._locals_in(node), *others):
            if isinstance(local, Local):
                self._last_use[local] = len(self._steps)

    def _locals_in(self, node: Node) -> list[Local | Bound | Register]:
        return [self._locals[arg] for arg in node.all_input_nodes if arg in self._locals]

    def operand(self, value: Any, is_result: bool = False) -> Any:
        """An operand. What the function returns is made at each call, and its locals are not dropped."""
        if isinstance(value, Node):
            return self._reference(value, pin=is_result)
        if type(value) in LITERALS:
            return value
        if not is_result and all(self._is_known(node) for node in nodes_in(value)):
            return self._bind(torch.fx.map_arg(value, self.bound.__getitem__))
        if isinstance(value, (tuple, list)):
            items = [self.operand(item, is_result) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, slice):
            return slice(*map(self.operand, (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {name: self.operand(item) for name, item in value.items()}
        return self._bind(value)

    def _bind(self, value: Any) -> Bound:
        if isinstance(value, GraphModule):
            if value not in self._subgraphs:
                self._subgraphs[value] = flat_subgraph(value)
            value = self._subgraphs[value]
        return Bound(value)

    def _reference(self, node: Node, pin: bool = False) -> Local | Bound | Register:
        if node not in self._locals and self._is_known(node):
            return self._bind(self.bound[node])
        if node not in self._locals:
            if node in self._kept_when_made:
                self.assign(node, self._step(node))
                self.keep(node)
            elif node in self.registers:
                self.assign(node, Load(self.register(node), node in self._emptied))
            elif kind_of(node) in _ON_DEMAND:
                self.assign(node, self._step(node))
            else:
                raise AssertionError(f"{node.name} is used before it has run")
        local = self._use(self._locals[node])
        if pin and isinstance(local, Local):
            self._pinned.add(local)
        return local

    def _is_known(self, node: Node) -> bool:
        """Whether a node's value is known now; views and arithmetic of known values are evaluated."""
        if node in self.bound:
            return True
        if node in self.registers or kind_of(node) not in (Kind.VIEW, Kind.SYMBOLIC):
            return False
        if not all(self._is_known(arg) for arg in node.all_input_nodes):
            return False
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.bound.__getitem__)
        self.bound[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return True

    def available(self, node: Node) -> bool:
        """Whether a value or a check needs no work that has not run yet in this function."""
        if node in self.bound or node in self._locals or node in self.registers:
            return True
        if kind_of(node) not in (Kind.VIEW, Kind.SYMBOLIC, Kind.CHECK):
            return False
        return all(self.available(arg) for arg in node.all_input_nodes)


def flat_subgraph(gm: GraphModule) -> Callable[..., Any]:
    """A subgraph (a branch, the body of a loop) as a flat function of its inputs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    builder = FlatBuilder(constants(gm), {node: position for position, node in enumerate(inputs)})
    builder.append_graph(gm)
    run = builder.build(output_node(gm).args[0]).run
    return lambda *values: run(list(values))


def _processed(call: Call, process: Callable[[list[Any]], Any]) -> steps.CallPython:
    """A call whose result goes through ``process``, which gets the last reference to it."""

    def processed(*args: Any, **kwargs: Any) -> Any:
        return process([call.function(*args, **kwargs)])

    return steps.CallPython(processed, call.args, call.kwargs)
