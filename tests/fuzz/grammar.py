"""Programs drawn from a grammar: a module's text, in which every statement stands by itself.

A recipe is data. Its statements name the values that they work on by number, counted round among those of the right
kind that there are, so that any part of a recipe is a recipe, and a program can be shrunk by leaving statements out.

::

    kind      shape    what it is
    wide      (n, 4)   inputs x and y, and most results
    narrow    (n, 2)   views of every other column, halves
    tall      (4, n)   transposed views
    row       (4,)     sums, rows of wide values, the buffer ``total``
    index     (n,)     integers from 0 to 3
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from own_operators import AROUND
from torch import Tensor

ROWS_OF_CACHE = 8


# -- recipes ------------------------------------------------------------------------------------------------------

Picks = tuple[int, int, int]


@dataclass(frozen=True)
class Statement:
    op: str
    picks: Picks


@dataclass(frozen=True)
class Recipe:
    """A program.

    Attributes:
        outputs: which values it returns, inputs and buffers among them.
        training: whether it is called with gradients.
    """

    statements: tuple[Statement, ...]
    outputs: tuple[int, ...]
    training: bool = False


@dataclass(frozen=True)
class Text:
    """A recipe as Python.

    Attributes:
        source: defines a class ``Program``.
        writes_inputs: whether x or y may be written.
        pure: whether equal inputs give equal outputs and nothing else happens: two threads may call it at one time.
        windows: whether it looks outside of x: one row behind it, and one row before it, at element 4 of the storage.
        one_graph: whether a call of it runs one program, and raises nothing.
        unknown_memory: whether no plan knows what a call takes.
    """

    source: str
    writes_inputs: bool
    pure: bool
    windows: bool
    one_graph: bool = True
    unknown_memory: bool = False

    def make(self, seed: int, device: torch.device) -> torch.nn.Module:
        """An instance whose code nobody shares: what is compiled from it is its own."""
        name = f"<program {next(_names)}>"
        linecache.cache[name] = len(self.source), None, self.source.splitlines(keepends=True), name
        space: dict[str, Any] = {}
        exec(compile(self.source, name, "exec"), space)
        torch.manual_seed(seed)
        module: torch.nn.Module = space["Program"]().to(device)
        return module


_names = iter(range(1 << 60))

_HEAD = """\
import torch
import torch.nn.functional as F
from torch._higher_order_ops.while_loop import while_loop


class Program(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = torch.nn.Parameter(torch.randn(4) / 2)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("cache", torch.randn({rows}, 4))

    def forward(self, x, y, flag, number):
"""


class _Writer:
    """Writes a recipe out, statement by statement."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.lines = recipe, list[str]()
        # By kind: names, the newest last.
        self.values: dict[str, list[str]] = {"wide": ["x", "y"], "narrow": [], "tall": [], "row": [], "index": []}
        self.from_inputs = {"x", "y"}  # lie in the memory of an input, or may
        self.of_buffers = set[str]()
        self.also_returned = list[str]()
        self.writes_inputs = self.windows = False
        self.pure = self.one_graph = True
        self.unknown_memory = False

    def text(self) -> Text:
        for statement in self.recipe.statements:
            getattr(self, f"_op_{statement.op}")(*statement.picks)
        made = [f"v{number}" for number in range(2, sum(map(len, self.values.values())))]
        everything = ["self.total", "x", "y", *made]
        chosen = [everything[-1 - pick % len(everything)] for pick in self.recipe.outputs] + self.also_returned
        self.lines.append(f"return {', '.join(chosen)},")
        body = "".join(f"        {line}\n" for line in self.lines)
        return Text(
            _HEAD.format(rows=ROWS_OF_CACHE) + body,
            self.writes_inputs,
            self.pure,
            self.windows,
            self.one_graph,
            self.unknown_memory,
        )

    # -- words

    def pick(self, kind: str, pick: int) -> str:
        """A value of a kind; made of a wide one where there is none."""
        names = self.values[kind]
        if not names:
            wide = self.pick("wide", pick)
            made = {
                "narrow": f"{wide}[:, ::2]",
                "tall": f"{wide}.t()",
                "row": f"{wide}.sum(0)",
                "index": f"{wide}.argmax(1)",
            }
            return self.add(kind, made[kind], wide if kind in ("narrow", "tall") else "")
        return names[-1 - pick % len(names)]

    def add(self, kind: str, expression: str, view_of: str = "") -> str:
        name = f"v{sum(map(len, self.values.values()))}"
        self.lines.append(f"{name} = {expression}")
        self.values[kind].append(name)
        for known in (self.from_inputs, self.of_buffers):
            if view_of in known:
                known.add(name)
        return name

    def written(self, name: str) -> str:
        """A value that is written: where it may be an input, no input is a leaf of autograd."""
        if name in self.from_inputs:
            self.writes_inputs, self.pure = True, False
        if name in self.of_buffers:
            self.pure = False
        return name

    # -- compiled kernels and library calls

    def _op_sin(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"{self.pick('wide', a)}.sin()")

    def _op_mix(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"{self.pick('wide', a)} * 2 + {self.pick('wide', b)}")

    def _op_softmax(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"{self.pick('wide', a)}.softmax({b % 2})")

    def _op_sum(self, a: int, b: int, c: int) -> None:
        self.add("row", f"{self.pick('wide', a)}.sum(0)")

    def _op_square(self, a: int, b: int, c: int) -> None:
        """Its backward scales a saved tensor, which may be overwritten."""
        wide = self.pick("wide", a)
        self.add("wide", f"{wide} * {wide}")

    def _op_scores(self, a: int, b: int, c: int) -> None:
        wide = self.pick("wide", a)
        self.add("row", (f"({wide} * {wide}).sum(0)", f"{wide}.logsumexp(0)", f"{wide}.norm(dim=0)")[b % 3])

    def _op_spread(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"{self.pick('wide', a)} + {self.pick('row', b)}")

    def _op_linear(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"F.linear({self.pick('wide', a)}, self.weight, self.bias)")

    def _op_matmul(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"{self.pick('wide', a)} @ ({self.pick('tall', b)} @ {self.pick('wide', c)})")

    def _op_join(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"torch.cat([{self.pick('narrow', a)}, {self.pick('narrow', b)}], 1)")

    def _op_sort(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"torch.sort({self.pick('wide', a)}, {b % 2})[0]")

    def _op_look_up(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"self.cache[{self.pick('index', a)}]")

    def _op_scale_by_number(self, a: int, b: int, c: int) -> None:
        self.add("wide", f"{self.pick('wide', a)} * number")

    # -- views

    def _op_columns(self, a: int, b: int, c: int) -> None:
        wide = self.pick("wide", a)
        self.add("narrow", f"{wide}[:, {('::2', '1:3', '2:')[b % 3]}]", wide)

    def _op_transposed(self, a: int, b: int, c: int) -> None:
        wide = self.pick("wide", a)
        self.add("tall", f"{wide}.t()", wide)

    def _op_straightened(self, a: int, b: int, c: int) -> None:
        tall = self.pick("tall", a)
        self.add("wide", f"{tall}.t()", tall)

    def _op_row_of_cache(self, a: int, b: int, c: int) -> None:
        name = self.add("row", f"self.cache[{a % ROWS_OF_CACHE}]")
        self.of_buffers.add(name)

    def _op_some_rows(self, a: int, b: int, c: int) -> None:
        """A view of a size that data decide."""
        self.unknown_memory = True
        wide = self.pick("wide", a)
        name = self.add("row", f"({wide}[0, 0] > 0).long().item()")
        self.lines += [f"torch._check({name} >= 0)", f"torch._check({name} <= 1)", f"{name}s = {wide}[:{name}]"]
        self.lines.append(f"{name} = {name}s.{('abs()', 'square()')[b % 2]}.sum(0)")
        if c % 2:
            self.also_returned.append(f"{name}s")

    def _op_window(self, a: int, b: int, c: int) -> None:
        if self.writes_inputs:
            return  # what takes the place of a written x is no part of anything
        self.windows, x = True, "x.detach()" if self.recipe.training else "x"
        window = (".as_strided((x.shape[0] + 1, 4), (4, 1))[1:]", ".as_strided((x.shape[0], 4), (4, 1), 4)")[b % 2]
        self.add("wide", f"{x}{window} * 2")

    # -- updates in place

    def _op_add_(self, a: int, b: int, c: int) -> None:
        self.lines.append(f"{self.written(self.pick('wide', a))}.add_(1)")

    def _op_scale_columns_(self, a: int, b: int, c: int) -> None:
        self.lines.append(f"{self.written(self.pick('narrow', a))}.mul_(2)")

    def _op_copy_(self, a: int, b: int, c: int) -> None:
        self.lines.append(f"{self.written(self.pick('wide', a))}.copy_({self.pick('wide', b)}.detach() * 2)")

    def _op_update_input_(self, a: int, b: int, c: int) -> None:
        self.lines.append(f"{self.written('xy'[a % 2])}.add_({self.pick('row', b)}.detach())")

    def _op_total_(self, a: int, b: int, c: int) -> None:
        self.pure = False
        self.lines.append(f"self.total.add_({self.pick('row', a)}.detach())")

    def _op_cache_(self, a: int, b: int, c: int) -> None:
        self.pure = False
        self.lines.append(f"self.cache[{a % ROWS_OF_CACHE}] = {self.pick('row', b)}.detach()")

    # -- random numbers, branches, operators of one's own

    def _op_dropout(self, a: int, b: int, c: int) -> None:
        self.pure = False
        self.add("wide", f"F.dropout({self.pick('wide', a)}, 0.5)")

    def _op_noise(self, a: int, b: int, c: int) -> None:
        self.pure = False
        self.add("wide", f"{self.pick('wide', a)} + torch.rand_like({self.pick('wide', b)})")

    def _op_if_flag(self, a: int, b: int, c: int) -> None:
        wide = self.pick("wide", a)
        self.add("wide", f"{wide}.cos() if flag else {wide} + 1")

    def _op_if_long(self, a: int, b: int, c: int) -> None:
        wide = self.pick("wide", a)
        self.add("wide", f"{wide}.cos() if x.shape[0] > 3 else {wide} + 1")

    def _op_if_positive(self, a: int, b: int, c: int) -> None:
        """Ends the graph, and goes on in one of two."""
        self.one_graph = False
        wide = self.pick("wide", a)
        self.add("wide", f"{wide}.cos() if {wide}.sum() > 0 else {wide} + 1")

    def _op_cond(self, a: int, b: int, c: int) -> None:
        # Of branches that are differentiated Inductor's own wrapper has no stable answer on all versions of torch.
        wide = self.pick("wide", a) + (".detach()" if self.recipe.training else "")
        weight = "self.weight" + (".detach()" if self.recipe.training else "")
        # A product takes no workspace; a convolution does.
        convolved = f"F.conv1d(v.t()[None], {weight}[:, :, None])[0].t().contiguous()"
        branches = f"lambda v: v.cos(), lambda v: {convolved if c % 3 == 0 else f'v @ {weight}'}"
        self.add("wide", f"torch.cond({wide}.sum() > 0, {branches}, ({wide},))")

    def _op_loop(self, a: int, b: int, c: int) -> None:
        """Its condition writes. Where it is differentiated, torch refuses that.

        What it carries is computed, and no clone: Inductor drops the clone of what the condition writes, and then its
        first iteration reads what is written.
        """
        if self.recipe.training:
            return
        counted = self.written(self.pick("wide", b))
        name = self.add("wide", f"{self.pick('wide', a)}.sin()")
        self.lines += ["def condition(i, v):", f"    {counted}.add_(1)", "    return i < 2"]
        start = f"(torch.zeros((), dtype=torch.int64, device=x.device), {name})"
        self.lines.append(f"{name} = while_loop(condition, lambda i, v: (i + 1, v.cos()), {start})[1]")

    def _op_break(self, a: int, b: int, c: int) -> None:
        self.one_graph = False
        self.lines.append("torch._dynamo.graph_break()")

    def _op_raises(self, a: int, b: int, c: int) -> None:
        self.pure = self.one_graph = False
        self.add("wide", f"torch.ops.fxwrap_fuzz.raises({self.pick('wide', a)}.detach())")

    def _op_loss(self, a: int, b: int, c: int) -> None:
        """Saves a result of its own."""
        self.unknown_memory = True
        self.add("row", f"torch.ops.fxwrap_fuzz.loss({self.pick('wide', a)})[0]")

    def _op_keeps(self, a: int, b: int, c: int) -> None:
        self.pure, self.unknown_memory = False, True
        # Of its own memory: an input that is kept is its caller's.
        self.add("wide", f"torch.ops.fxwrap_fuzz.keeps({self.pick('wide', a)}.detach().sin())")

    def _op_scales_(self, a: int, b: int, c: int) -> None:
        name = self.pick("wide", a)
        if name not in self.from_inputs or self.recipe.training:
            name = self.add("wide", f"{name}.detach().clone()")
        self.lines.append(f"torch.ops.fxwrap_fuzz.scale_({self.written(name)})")

    def _op_both_(self, a: int, b: int, c: int) -> None:
        self.unknown_memory = True
        name = self.add("wide", f"{self.pick('wide', a)}.detach().cos()")
        self.add("wide", f"torch.ops.fxwrap_fuzz.both_({name}, {self.pick('wide', b + 1)}.detach())")

    def _op_takes_memory(self, a: int, b: int, c: int) -> None:
        self.unknown_memory = True
        self.add("wide", f"torch.ops.fxwrap_fuzz.takes_memory({self.pick('wide', a)})")

    def _op_tells(self, a: int, b: int, c: int) -> None:
        """Has an effect, whose token AOTAutograd counts among the inputs."""
        self.pure, self.unknown_memory = False, True
        self.lines.append(f"torch.ops.fxwrap_fuzz.tells({self.pick('wide', a)}.detach().sin())")

    def _op_solved(self, a: int, b: int, c: int) -> None:
        """Torch checks errors of these by an operator that has an effect. Of a weight, or of data."""
        wide = self.pick("wide", a)
        of = ("self.weight @ self.weight.t()", f"{wide}.t() @ {wide}")[b % 2]
        matrix = f"({of} + 2 * torch.eye(4, device=x.device))"
        ways = f"{wide} @ torch.linalg.inv({matrix})", f"torch.linalg.solve({matrix}, {wide}.t()).t()"
        self.add("wide", (*ways, f"{wide} @ torch.linalg.cholesky({matrix})")[c % 3])

    def _op_same(self, a: int, b: int, c: int) -> None:
        # Inductor takes the result for new memory, which it may use again: it is handed out and nothing else.
        if not self.writes_inputs and not self.recipe.training:
            self.also_returned.append(f"torch.ops.fxwrap_fuzz.same({'xy'[a % 2]})")


OPS = tuple(name.removeprefix("_op_") for name in vars(_Writer) if name.startswith("_op_"))
# Each of these compiles more than one program, or is worth little where there are many of it.
RARE = ("some_rows", "if_flag", "if_positive", "if_long", "cond", "break", "scale_by_number", "sort", "keeps", "same")
RARE += ("loop", "window", "tells", "solved")


def text_of(recipe: Recipe) -> Text:
    return _Writer(recipe).text()


def random_recipe(draw: random.Random, most_statements: int = 6) -> Recipe:
    """A recipe that runs eagerly."""
    while True:
        rare = draw.sample(RARE, 1)
        ops = [op for op in OPS if op not in RARE or op in rare]

        def pick() -> int:
            return min(draw.randrange(12), draw.randrange(12))  # what was made lately is used more often

        statements = [
            Statement(draw.choice(ops), (pick(), pick(), pick())) for _ in range(draw.randint(2, most_statements))
        ]
        outputs = [pick() for _ in range(draw.randint(1, 3))]
        recipe = Recipe(tuple(statements), tuple(outputs), draw.random() < 0.4)
        if runs_eagerly(recipe):
            return recipe


def runs_eagerly(recipe: Recipe, rows: int = 3) -> bool:
    """Whether torch itself runs it, and its backward: some updates in place it refuses."""
    text = text_of(recipe)
    state = torch.get_rng_state()
    try:
        module = text.make(0, torch.device("cpu"))
        x, y = torch.randn(2, rows, 4).unbind()
        if recipe.training and not text.writes_inputs:
            x.requires_grad_()
        with torch.set_grad_enabled(recipe.training):
            outputs = module(x, y, True, 2)
        losses = [out.sum() for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        if losses:
            sum(losses, torch.zeros(())).backward()
        return bool(losses) or not recipe.training
    except (RuntimeError, TypeError):
        return False
    finally:
        AROUND.kept.clear()
        torch.set_rng_state(state)


def shrunk_recipe(recipe: Recipe, fails: Callable[[Recipe], bool]) -> Recipe:
    """The recipe without every statement and output that the failure does not need."""
    for index in reversed(range(len(recipe.statements))):
        fewer = recipe.statements[:index] + recipe.statements[index + 1 :]
        shorter = Recipe(fewer, recipe.outputs, recipe.training)
        if runs_eagerly(shorter) and fails(shorter):
            recipe = shorter
    for index in reversed(range(len(recipe.outputs))):
        shorter = Recipe(recipe.statements, recipe.outputs[:index] + recipe.outputs[index + 1 :], recipe.training)
        if shorter.outputs and runs_eagerly(shorter) and fails(shorter):
            recipe = shorter
    return recipe
