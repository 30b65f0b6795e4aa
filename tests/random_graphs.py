"""Host graphs for tests: a maker for small ones by hand, and a strategy for random ones.

A random graph is described by a ``Recipe``, a few names and numbers that hypothesis can shrink and print; a failure
is reproduced with ``build(Recipe(...))``. Every graph runs as it is, with kernels written in Python, so that
whatever the passes decide can be compared with ``gm(*inputs)``.
"""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import torch
from hypothesis import settings
from hypothesis import strategies as st
from lazy_group import LAZY_GROUP
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxwrap.host_graph.nodes import Kernel, Kind, by_name, launch, reinterpret
from fxwrap.options import Options
from fxwrap.pipeline import CompileRequest
from fxwrap.plan import Partition

CPU = torch.device("cpu")
aten = torch.ops.aten
collectives = torch.ops._c10d_functional

# The same examples on every run, so that no test fails by chance; FXWRAP_EXAMPLES=2000 looks at that many others.
_examples = os.environ.get("FXWRAP_EXAMPLES")
PROPERTY = settings(
    max_examples=int(_examples or 60),
    derandomize=not _examples,
    deadline=None,
    database=None,
    print_blob=False,
)

# What fxwrap asks for at each compilation, but for options.
compile_request = CompileRequest


# -- kernels ------------------------------------------------------------------------------------------------
# They take operands of any size, so that a random graph can launch any of them on anything, and compute into
# temporaries, so that operands may overlap what is written. Values stay small: no inf, no NaN.


def _fit(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``source``'s elements, repeated or cut to ``target``'s shape."""
    flat = source.reshape(-1)
    return flat[torch.arange(target.numel()) % flat.numel()].reshape(target.shape)


def _mix(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.sin(_fit(a, out) + 2 * _fit(b, out) + 0.25))


def _update(a: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(torch.cos(0.5 * into + _fit(a, into)))


def _pair(a: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    _mix(a, a, first)
    second.copy_(1 - torch.sin(_fit(a, second)))


def _scale(a: torch.Tensor, number: float, out: torch.Tensor) -> None:
    out.copy_(torch.sin(_fit(a, out) * number))


def kernel(name: str, call: Callable[..., Any], writes: tuple[int, ...]) -> Kernel:
    return Kernel(name, "cpp", "", CPU, call, writes)


# A kernel is made eager by its name, so the two that serve as building blocks exist twice: what is called
# ``host_...`` is always listed in ``eager_ops``.
KERNELS = {
    made.name: made
    for made in (
        kernel("mix", _mix, (2,)),
        kernel("host_mix", _mix, (2,)),
        kernel("update", _update, (1,)),
        kernel("host_update", _update, (1,)),
        kernel("pair", _pair, (1, 2)),
        kernel("scale", _scale, (2,)),
    )
}


def halve(x: torch.Tensor) -> torch.Tensor:
    """A callable without a schema that updates its operand and returns it."""
    return x.mul_(0.5)


# -- graphs by hand -----------------------------------------------------------------------------------------


class GraphMaker:
    """Makes a host graph node by node, in program order; fake values come from running the operators.

    Args:
        values: give nodes ``meta["val"]``. Emission cannot always, and nothing may depend on it.
    """

    def __init__(self, values: bool = True) -> None:
        self.graph = Graph()
        self._root = torch.nn.Module()
        self._fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self._values = values
        self._kernels: dict[str, Node] = {}
        self._layouts: list[tuple[tuple[int, ...], torch.dtype]] = []

    def input(self, name: str, size: Sequence[int] = (4, 4), dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(name)
        self._layouts.append((tuple(size), dtype))
        self._set_value(node, lambda: torch.empty(tuple(size), dtype=dtype))
        return node

    def constant(self, name: str, tensor: torch.Tensor) -> Node:
        self._root.register_buffer(name, tensor)
        node = self.graph.get_attr(name)
        self._set_value(node, lambda: self._fake.from_tensor(tensor))
        return node

    def allocate(self, size: Sequence[int] = (4, 4), name: str | None = None) -> Node:
        stride = [1] * len(size)
        for dim in range(len(size) - 1, 0, -1):
            stride[dim - 1] = stride[dim] * size[dim]
        kwargs = {"dtype": torch.float32, "device": CPU}
        return self._call(torch.empty_strided, (tuple(size), tuple(stride)), kwargs, name)

    def launch(self, which: str | Kernel, *args: Any, name: str | None = None) -> Node:
        made = KERNELS[which] if isinstance(which, str) else which
        if made.name not in self._kernels:
            setattr(self._root, f"kernel_{made.name}", made)
            self._kernels[made.name] = self.graph.create_node("get_attr", f"kernel_{made.name}")
        return self.graph.create_node("call_function", launch, (self._kernels[made.name], *args), name=name)

    def extern(self, target: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> Node:
        return self._call(target, args, kwargs, name)

    def view(self, base: Node, size: Any, stride: Any, offset: Any = 0, name: str | None = None) -> Node:
        return self._call(reinterpret, (base, size, stride, offset), {}, name)

    def getitem(self, base: Node, index: int, name: str | None = None) -> Node:
        node = self._call(operator.getitem, (base, index), {}, name)
        if not self._values:
            node.meta["kind"] = Kind.VIEW
        return node

    def number(self, source: Node, name: str | None = None) -> Node:
        """The number in a tensor of one element, as ``.item()`` gives it: it is data-dependent."""
        return self._number(source, name, lambda shape_env: shape_env.create_unbacked_symfloat())

    def integer(self, source: Node, name: str | None = None) -> Node:
        """A data-dependent size."""
        return self._number(source, name, lambda shape_env: shape_env.create_unbacked_symint())

    def _number(self, source: Node, name: str | None, unknown: Callable[[ShapeEnv], Any]) -> Node:
        node = self.graph.create_node("call_function", aten._local_scalar_dense.default, (source,), name=name)
        # That it is a number is told with or without fake values: all that is made of it would count as tensors.
        node.meta["val"] = unknown(self._fake.shape_env)
        return node

    def finish(self, outputs: Sequence[Node]) -> GraphModule:
        self.graph.output(list(outputs))
        return GraphModule(self._root, self.graph)

    def inputs(self, seed: int) -> list[torch.Tensor]:
        """Fresh inputs; every second one starts inside its storage, as a slice of a batch does."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for position, (size, dtype) in enumerate(self._layouts):
            if dtype is torch.float32:
                numel, offset = torch.Size(size).numel(), 16 * (position % 2)
                base = torch.rand(numel + offset, generator=generator)
                found.append(base[offset:].view(size))
            else:
                found.append(torch.randint(1, 4, size, generator=generator, dtype=dtype))
        return found

    def _call(self, target: Callable[..., Any], args: Any, kwargs: Any, name: str | None) -> Node:
        node = self.graph.create_node("call_function", target, tuple(args), kwargs, name=name)

        def run() -> Any:
            fakes = torch.fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            return target(*fakes[0], **fakes[1])

        if all("val" in arg.meta for arg in node.all_input_nodes):
            self._set_value(node, run)
        return node

    def _set_value(self, node: Node, make: Callable[[], Any]) -> None:
        if self._values:
            with self._fake, torch.no_grad():
                node.meta["val"] = make()


# -- running, comparing, showing ----------------------------------------------------------------------------


def picture(partitions: Iterable[Partition]) -> str:
    """Partitions as the drawings in the tests write them: ``captured[a c] eager[b]``."""
    return " ".join(f"{p.verdict.value}[{' '.join(p.nodes)}]" for p in partitions)


def reordered(dependencies: nx.DiGraph, order: Sequence[Node] | None = None) -> nx.DiGraph:
    """The same dependency graph with its nodes in another order, reversed if none is given.

    The cut breaks ties by that order, so it shows what it does where no edge forbids it.
    """
    found = nx.DiGraph()
    found.add_nodes_from(order if order is not None else reversed(list(dependencies.nodes)))
    found.add_edges_from(dependencies.edges(data=True))
    return found


def run_schedule(gm: GraphModule, schedule: Sequence[Node], inputs: Sequence[Any]) -> Any:
    """Run ``schedule`` as it stands, and make views, sizes and memory where they are first used.

    Raises:
        AssertionError: a node is used before its turn.
    """
    placeholders = (node for node in gm.graph.nodes if node.op == "placeholder")
    known: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))
    scheduled = set(schedule)

    def look_up(node: Node) -> Any:
        if node not in known:
            assert node not in scheduled, f"{node.name} is used before it has run"
            known[node] = run(node)
        return known[node]

    def run(node: Node) -> Any:
        if node.op == "get_attr":
            return getattr(gm, str(node.target))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), look_up)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    for node in schedule:
        known[node] = run(node)
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return torch.fx.map_arg(output.args[0], look_up)


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return len(found) == len(expected) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def overlapped(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same sizes, with inputs of one type in one piece of memory, each a few elements after another."""
    found = list(inputs)
    for dtype in {value.dtype for value in inputs}:
        chosen = [position for position, value in enumerate(inputs) if value.dtype is dtype]
        base = torch.cat([inputs[position].flatten() for position in chosen])
        for step, position in enumerate(chosen):
            found[position] = base[16 * step :][: inputs[position].numel()].view(inputs[position].shape)
    return found


def expected_of(gm: GraphModule, inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Outputs, and then the inputs, some of which the graph updates: what any other way of running it must give."""
    inputs = [value.clone() for value in inputs]
    torch.manual_seed(seed)
    return [value.clone() for value in (*gm(*inputs), *inputs)]


def check_calls(
    gm: GraphModule,
    inputs: Callable[[int], list[torch.Tensor]],
    program: Callable[..., Any],
    hold: Sequence[bool],
    static: Sequence[int] = (),
) -> None:
    """Call a program once for each entry of ``hold`` with fresh inputs, and compare every call with the graph.

    Args:
        hold: whether the caller keeps the outputs of that call. Kept ones must stay as they were handed out; the
            others are spoilt, because who owns a tensor may write to it.
        static: positions of inputs whose tensor is the same on every call, with new contents.
    """
    kept: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []
    first = inputs(0)
    for call, keep in enumerate(hold):
        given = inputs(call)
        for position in static:
            given[position] = first[position].copy_(given[position])
        expected = expected_of(gm, given, call)
        torch.manual_seed(call)
        outputs = list(program(*given))
        assert same([*outputs, *given], expected), f"call {call}: wrong numbers"
        borrowed = {value.untyped_storage().data_ptr() for value in given}
        own = [value for value in outputs if value.untyped_storage().data_ptr() not in borrowed]
        if keep:
            kept.append((call, own, [value.clone() for value in own]))
        else:
            for value in own:
                value.fill_(float("nan") if value.is_floating_point() else -1)
        for earlier, values, before in kept:
            assert same(values, before), f"call {call} wrote over an output of call {earlier}"


# -- random graphs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One operation; ``picks`` choose its operands, 0 being the latest value (so that shrinking makes chains)."""

    op: str
    picks: tuple[int, ...] = (0, 0, 0)


@dataclass(frozen=True)
class Recipe:
    """What ``build`` makes a host graph from.

    Attributes:
        outputs: picks among the values.
        eager: further operators that must not be captured.
        values: whether nodes have fake values.
    """

    steps: tuple[Step, ...]
    outputs: tuple[int, ...] = (0,)
    eager: tuple[str, ...] = ()
    values: bool = True


@dataclass(frozen=True)
class RandomGraph:
    gm: GraphModule
    options: Options
    inputs: Callable[[int], list[torch.Tensor]]


ALWAYS_EAGER = ("host_mix", "host_update")
MAY_BE_EAGER = ("aten::mm", "aten::sin", "aten::add_", "aten::copy_", "aten::var_mean", "halve", "pair")

_SIZES = ((4, 4), (3, 7), (2, 5, 5), (40,), (16, 16))


@dataclass(frozen=True)
class _Value:
    """A tensor that steps can use: ``reach`` elements from its first on are there."""

    node: Node
    reach: int
    storage: int
    writable: bool = True
    handed_out: bool = True


@dataclass(frozen=True)
class _Communication:
    """A collective that is under way.

    Attributes:
        results: what to wait for, and how many elements that has.
        into: the value it updates in place, if it does.
        reads: the storage it was given.
    """

    results: tuple[tuple[Node, int], ...]
    reads: int
    into: _Value | None = None


@dataclass
class _Steps:
    """Turns steps into nodes. Operands are always initialised memory, and views stay inside of their storage.

    What a collective that is under way reads is not written, and what it fills is not used.
    """

    maker: GraphMaker
    values: list[_Value] = field(default_factory=list)
    storages: int = 0
    under_way: list[_Communication] = field(default_factory=list)

    def start(self) -> None:
        for name, size in (("x", (4, 4)), ("y", (8, 8)), ("z", (4, 4))):
            self.add(self.maker.input(name, size), torch.Size(size).numel())
        table = torch.linspace(-1, 1, 16).reshape(4, 4)
        self.add(self.maker.constant("table", table), 16, writable=False, handed_out=False)

    def add(self, node: Node, reach: int, like: _Value | None = None, **kwargs: Any) -> _Value:
        if like is None:
            self.storages += 1
            value = _Value(node, reach, self.storages, **kwargs)
        else:
            value = replace(like, node=node, reach=reach, **kwargs)
        self.values.append(value)
        return value

    def add_alias(self, result: Node, reach: int, base: _Value) -> None:
        """What an operator returns as a view of ``base``."""
        self.add(result, reach, like=base)

    def add_pieces(self, results: Node, reach: int) -> None:
        """Two results of one operator."""
        for index in (0, 1):
            self.add(self.maker.getitem(results, index), reach)

    def pick(self, pick: int, suits: Callable[[_Value], bool] = lambda value: True, write: bool = False) -> _Value:
        filled = {one.into.storage for one in self.under_way if one.into is not None}
        being_read = {one.reads for one in self.under_way}

        def may_be_used(value: _Value) -> bool:
            if value.storage in filled or (write and value.storage in being_read):
                return False
            return suits(value) and (value.writable or not write)

        found = [value for value in self.values if may_be_used(value)]
        if not found:
            self.finish()
            return self.pick(pick, suits, write)
        return found[-1 - pick % len(found)]

    def finish(self) -> None:
        """Wait for every collective."""
        while self.under_way:
            self._op_wait(0, 0, 0)

    def square(self, value: _Value, pick: int) -> Node:
        """A 4 by 4 view of a value that has 16 elements, straight or transposed, somewhere inside of it."""
        offset = pick % (value.reach - 15)
        stride = (4, 1) if pick % 3 else (1, 4)
        return self.maker.view(value.node, (4, 4), stride, offset)

    def contiguous(self, value: _Value, pick: int) -> Node:
        """The same, straight: torch 2.11 communicates nothing else."""
        return self.square(value, 3 * pick + 1)

    def buffer(self, pick: int) -> tuple[Node, int]:
        size = _SIZES[pick % len(_SIZES)]
        return self.maker.allocate(size), torch.Size(size).numel()

    def run(self, step: Step) -> None:
        getattr(self, f"_op_{step.op}")(*step.picks)

    # Each operation takes three picks.

    def _mix(self, name: str, a: int, b: int, c: int) -> None:
        operands = self.pick(a).node, self.pick(b).node
        out, reach = self.buffer(c)
        self.maker.launch(name, *operands, out)
        self.add(out, reach)

    def _op_mix(self, a: int, b: int, c: int) -> None:
        self._mix("mix", a, b, c)

    def _op_host_mix(self, a: int, b: int, c: int) -> None:
        self._mix("host_mix", a, b, c)

    def _op_update(self, a: int, b: int, c: int) -> None:
        self.maker.launch("update", self.pick(a).node, self.pick(b, write=True).node)

    def _op_host_update(self, a: int, b: int, c: int) -> None:
        self.maker.launch("host_update", self.pick(a).node, self.pick(b, write=True).node)

    def _op_pair(self, a: int, b: int, c: int) -> None:
        source = self.pick(a).node
        first, second = self.buffer(b), self.buffer(c)
        self.maker.launch("pair", source, first[0], second[0])
        self.add(*first)
        self.add(*second)

    def _op_mm(self, a: int, b: int, c: int) -> None:
        left, right = self.square(self.pick(a, _square), c), self.square(self.pick(b, _square), c)
        out = self.maker.allocate((4, 4))
        self.maker.extern(aten.mm.out, left, right, out=out)
        # The product of many matrices is large: bring it back before anything else sees it.
        self.maker.launch("update", left, out)
        self.add(out, 16)

    def _op_sin(self, a: int, b: int, c: int) -> None:
        source = self.square(self.pick(a, _square), b)
        self.add(self.maker.extern(aten.sin.default, source), 16)

    def _into(self, target: Callable[..., Any], a: int, b: int, c: int) -> None:
        # Torch refuses operands that overlap what is written in part, so the two come from different memory.
        into = self.pick(a, _square, write=True)
        source = self.pick(b, lambda value: _square(value) and value.storage != into.storage)
        result = self.maker.extern(target, self.square(into, c), self.square(source, b))
        self.add_alias(result, 16, into)

    def _op_add(self, a: int, b: int, c: int) -> None:
        self._into(aten.add_.Tensor, a, b, c)

    def _op_copy(self, a: int, b: int, c: int) -> None:
        self._into(aten.copy_.default, a, b, c)

    def _op_view(self, a: int, b: int, c: int) -> None:
        base = self.pick(a)
        length = 1 + b % base.reach
        offset = c % (base.reach - length + 1)
        self.add(self.maker.view(base.node, (length,), (1,), offset), length, like=base)

    def _op_split(self, a: int, b: int, c: int) -> None:
        base = self.pick(a, _square)
        whole = self.maker.view(base.node, (4, 4), (4, 1), b % (base.reach - 15))
        halves = self.maker.extern(aten.split.Tensor, whole, 2)
        for index in (0, 1):
            self.add_alias(self.maker.getitem(halves, index), 8, base)

    def _op_split_copy(self, a: int, b: int, c: int) -> None:
        pieces = self.maker.extern(aten.split_copy.Tensor, self.square(self.pick(a, _square), b), 2)
        self.add_pieces(pieces, 8)

    def _op_var_mean(self, a: int, b: int, c: int) -> None:
        source = self.square(self.pick(a, _square), b)
        self.add_pieces(self.maker.extern(aten.var_mean.correction, source, [c % 2]), 4)

    def _op_random(self, a: int, b: int, c: int) -> None:
        drawn = self.maker.extern(aten.rand.default, [4, 4], dtype=torch.float32, device=CPU)
        self.add(drawn, 16)

    def _op_number(self, a: int, b: int, c: int) -> None:
        source = self.pick(a)
        number = self.maker.number(self.maker.view(source.node, (), (), b % source.reach))
        doubled = self.maker.extern(operator.mul, number, 2.0)
        operand = self.pick(b).node
        out, reach = self.buffer(c)
        self.maker.launch("scale", operand, doubled, out)
        self.add(out, reach)

    def _op_halve(self, a: int, b: int, c: int) -> None:
        base = self.pick(a, _square, write=True)
        self.add_alias(self.maker.extern(halve, self.square(base, b)), 16, base)

    def _op_gather(self, a: int, b: int, c: int) -> None:
        source = self.pick(a, _square)
        gathered = self.maker.extern(
            collectives.all_gather_into_tensor.default, self.contiguous(source, b), 2, LAZY_GROUP
        )
        self.under_way.append(_Communication(((gathered, 32),), source.storage))

    def _op_gather_two(self, a: int, b: int, c: int) -> None:
        source = self.pick(a, _square)
        pieces = [self.contiguous(source, b), self.contiguous(source, c)]
        both = self.maker.extern(collectives.all_gather_into_tensor_coalesced.default, pieces, 2, LAZY_GROUP)
        results = tuple((self.maker.getitem(both, index), 32) for index in (0, 1))
        self.under_way.append(_Communication(results, source.storage))

    def _op_reduce(self, a: int, b: int, c: int) -> None:
        into = self.pick(a, _square, write=True)
        square = self.contiguous(into, b)
        self.maker.extern(collectives.all_reduce_.default, square, "sum", LAZY_GROUP)
        self.under_way.append(_Communication(((square, 16),), into.storage, into))

    def _op_wait(self, a: int, b: int, c: int) -> None:
        if not self.under_way:
            return
        ended = self.under_way.pop(-1 - a % len(self.under_way))
        for result, reach in ended.results:
            waited = self.maker.extern(collectives.wait_tensor.default, result)
            if ended.into is None:
                # Inductor goes on with the tensor itself; what wait_tensor returns is the same one.
                self.add((result, waited)[b % 2], reach)


def _square(value: _Value) -> bool:
    return value.reach >= 16


OPS = tuple(name.removeprefix("_op_") for name in vars(_Steps) if name.startswith("_op_"))


def build(recipe: Recipe) -> RandomGraph:
    """The host graph of a recipe, its options, and a function that makes fresh inputs from a seed."""
    maker = GraphMaker(values=recipe.values)
    steps = _Steps(maker)
    steps.start()
    for step in recipe.steps:
        steps.run(step)
    steps.finish()
    outputs = [steps.pick(pick, lambda value: value.handed_out).node for pick in recipe.outputs]
    options = Options(eager_ops=(*ALWAYS_EAGER, *recipe.eager))
    return RandomGraph(maker.finish(outputs), options, maker.inputs)


@st.composite
def recipes(draw: st.DrawFn, most_steps: int = 14) -> Recipe:
    picks = st.integers(0, 40)
    step = st.builds(Step, st.sampled_from(OPS), st.tuples(picks, picks, picks))
    return Recipe(
        tuple(draw(st.lists(step, min_size=1, max_size=most_steps))),
        tuple(draw(st.lists(picks, min_size=1, max_size=3))),
        tuple(draw(st.lists(st.sampled_from(MAY_BE_EAGER), max_size=3, unique=True))),
        draw(st.booleans()),
    )


def random_recipe(draw: random.Random, most_steps: int = 14) -> Recipe:
    """A recipe without hypothesis, for counting over many."""

    def picks(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(41) for _ in range(count))

    steps = tuple(Step(draw.choice(OPS), picks(3)) for _ in range(draw.randint(1, most_steps)))
    eager = tuple(draw.sample(MAY_BE_EAGER, draw.randrange(4)))
    return Recipe(steps, picks(draw.randint(1, 3)), eager, draw.random() < 0.5)


def nodes_of(gm: GraphModule, partitions: Iterable[Partition]) -> list[Node]:
    """The work of partitions, in order."""
    nodes = by_name(gm)
    return [nodes[name] for partition in partitions for name in partition.nodes]
