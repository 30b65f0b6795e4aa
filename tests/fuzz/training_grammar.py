"""Models, losses and optimizers drawn from a grammar: a module's text, in which every part stands by itself.

A value ``h`` of ``(rows, 16)`` goes through the parts, each of which takes it and gives it back in this shape: any
parts of a model are a model, and one can be shrunk by leaving parts out. A batch is ``x`` and ``y`` of
``(rows, 16)``, ``index`` of ``(rows,)``, and ``task``, a number.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import own_operators  # noqa: F401 (registers what models call)
import torch
from torch import nn, optim

WIDTH = 16


# -- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    kind: str
    pick: int


@dataclass(frozen=True)
class Recipe:
    """A model and its loss."""

    parts: tuple[Part, ...]
    loss: str

    @property
    def kinds(self) -> set[str]:
        return {part.kind for part in self.parts}


_HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
"""
# All but the first return more than the loss.
LOSSES = {
    "squares": "(h - y).square().mean()",
    "classes": "F.cross_entropy(h, index), h, h.argmax(-1)",
    "penalty": "F.smooth_l1_loss(h, y) + 0.01 * sum(p.square().sum() for p in model.parameters()), h.detach().mean()",
}


class _Writer:
    """Writes a model out, part by part."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.made, self.lines = recipe, list[str](), list[str]()

    def source(self) -> str:
        for number, part in enumerate(self.recipe.parts):
            getattr(self, f"_part_{part.kind}")(f"p{number}", part.pick)
        body = "".join(f"        {line}\n" for line in self.made)
        body += "\n    def forward(self, x, index, task):\n        h = x\n"
        body += "".join(f"        {line}\n" for line in [*self.lines, "return h"])
        loss = "\n\ndef loss(model, x, y, index, task):\n    h = model(x, index, task)\n"
        return f"{_HEAD}{body}{loss}    return {LOSSES[self.recipe.loss]}\n"

    def _layer(self, name: str, layer: str, use: str) -> None:
        self.made.append(f"self.{name} = nn.{layer}")
        self.lines.append(f"h = {use}")

    # -- what models are made of

    def _part_linear(self, name: str, pick: int) -> None:
        self._layer(name, f"Linear(16, 16, bias={pick % 3 > 0})", f"self.{name}(h)")

    def _part_activation(self, name: str, pick: int) -> None:
        self.lines.append(f"h = {('torch.tanh', 'F.relu', 'F.gelu', 'F.silu')[pick % 4]}(h)")

    def _part_block(self, name: str, pick: int) -> None:
        self._layer(name, "Linear(16, 16)", f"h + torch.tanh(self.{name}(F.layer_norm(h, (16,))))")

    def _part_layer_norm(self, name: str, pick: int) -> None:
        self._layer(name, "LayerNorm(16)", f"self.{name}(h)")

    def _part_batch_norm(self, name: str, pick: int) -> None:
        # Without the second term a gradient of a bias before it cancels, and Adam makes steps of what rounding left.
        self._layer(name, f"BatchNorm1d(16, momentum={(0.1, 0.3)[pick % 2]})", f"self.{name}(h) + 0.1 * h")

    def _part_convolution(self, name: str, pick: int) -> None:
        self._layer(name, "Conv2d(1, 4, 3, padding=1)", f"self.{name}(h.view(-1, 1, 4, 4)).mean(1).flatten(1)")

    def _part_attention(self, name: str, pick: int) -> None:
        self._layer(name, "Linear(16, 48)", "h")
        self.lines += [
            f"q, k, v = (one.view(1, -1, 2, 8).transpose(1, 2) for one in self.{name}(h).chunk(3, -1))",
            f"z = F.scaled_dot_product_attention(q, k, v, is_causal={bool(pick % 2)})",
            "h = h + z.transpose(1, 2).reshape(-1, 16)",
        ]

    def _part_cell(self, name: str, pick: int) -> None:
        self._layer(name, "GRUCell(16, 16)", f"self.{name}(h, self.{name}(h))")

    def _part_embedding(self, name: str, pick: int) -> None:
        self._layer(name, "Embedding(16, 16)", f"h + self.{name}(index)")

    def _part_softmax(self, name: str, pick: int) -> None:
        self.lines.append("h = h + h.softmax(-1)")

    def _part_gram(self, name: str, pick: int) -> None:
        self.lines.append("h = h + h @ (h.t() @ h) / (8 * h.shape[0])")

    def _part_sort(self, name: str, pick: int) -> None:
        self.lines.append(f"h = {('h.sort(1)[0]', 'h.gather(1, h.argsort(1))', 'h.cumsum(1) / 4')[pick % 3]}")

    def _part_pool(self, name: str, pick: int) -> None:
        self.lines.append("h = F.max_pool2d(h.view(-1, 1, 4, 4), 2).flatten(1).repeat(1, 4)")

    def _part_checkpoint(self, name: str, pick: int) -> None:
        inside = f"lambda v: v + torch.tanh(self.{name}(v)) * v.sigmoid()"
        self._layer(name, "Linear(16, 16)", f"torch.utils.checkpoint.checkpoint({inside}, h, use_reentrant=False)")

    # -- which parameters get gradients

    def _part_heads(self, name: str, pick: int) -> None:
        """They take turns."""
        self.made += [f"self.{name}{which} = nn.Linear(16, 16)" for which in "ab"]
        self.lines.append(f"h = self.{name}a(h) if task % 2 else self.{name}b(h)")

    def _part_sometimes(self, name: str, pick: int) -> None:
        self._layer(name, "Linear(16, 16)", f"h + torch.tanh(self.{name}(h)) if task % 2 == {pick % 2} else h")

    def _part_unused(self, name: str, pick: int) -> None:
        self.made.append(f"self.{name} = nn.Linear(3, 2)")

    def _part_frozen(self, name: str, pick: int) -> None:
        self._layer(name, "Linear(16, 16).requires_grad_(False)", f"torch.tanh(self.{name}(h))")

    def _part_tied(self, name: str, pick: int) -> None:
        self.made += [f"self.{name} = nn.Linear(16, 16)", f"self.{name}again = nn.Linear(16, 16)"]
        self.made.append(f"self.{name}again.weight = self.{name}.weight")
        self.lines.append(f"h = torch.tanh(self.{name}again(torch.tanh(self.{name}(h))))")

    # -- buffers, random numbers, effects, and what no plan knows

    def _part_total(self, name: str, pick: int) -> None:
        self.made.append(f'self.register_buffer("{name}", torch.zeros(16))')
        self.lines.append(f"self.{name}.mul_(0.9).add_(h.detach().mean(0))")
        if pick % 2:
            self.lines.append(f"h = h + 0.1 * self.{name}")

    def _part_counter(self, name: str, pick: int) -> None:
        self.made.append(f'self.register_buffer("{name}", torch.zeros((), dtype=torch.long))')
        self.lines.append(f"self.{name} += 1")

    def _part_dropout(self, name: str, pick: int) -> None:
        self.lines.append("h = F.dropout(h, 0.3, self.training)")

    def _part_noise(self, name: str, pick: int) -> None:
        self.lines.append(f"h = h + 0.1 * torch.{('rand_like', 'randn_like')[pick % 2]}(h)")

    def _part_solved(self, name: str, pick: int) -> None:
        """Torch checks errors of these by an operator that has an effect. Of a parameter, or of data."""
        self.made.append(f"self.{name} = nn.Parameter(torch.randn(16, 16) / 8)")
        of = ("h.t() @ h / h.shape[0]", f"self.{name} @ self.{name}.t()")[pick % 2]
        self.lines.append(f"a = {of} + 2 * torch.eye(16, dtype=h.dtype, device=h.device)")
        ways = "h @ torch.linalg.inv(a)", "torch.linalg.solve(a, h.t()).t()", "h @ torch.linalg.cholesky(a)"
        self.lines.append(f"h = {ways[pick // 2 % 3]}")

    def _part_tells(self, name: str, pick: int) -> None:
        self.lines.append("torch.ops.fxwrap_fuzz.tells(h.detach())")

    def _part_takes_memory(self, name: str, pick: int) -> None:
        self.lines.append("h = torch.ops.fxwrap_fuzz.takes_memory(h)")

    def _part_some_rows(self, name: str, pick: int) -> None:
        """As many as data decide."""
        self._layer(name, "Linear(16, 16)", "h")
        self.lines += [
            "rows = (h.detach()[:, 0] > h.detach()[:, 1]).nonzero().squeeze(-1)",
            f"h = h + torch.zeros_like(h).index_add(0, rows, torch.tanh(self.{name}(h[rows])))",
        ]

    def _part_cond(self, name: str, pick: int) -> None:
        branches = "lambda v: v.cos(), lambda v: v.sin() * 2"
        self.lines.append(f"h = h + torch.cond(h.detach().sum() > 0, {branches}, (h.detach(),))")


PARTS = tuple(name.removeprefix("_part_") for name in vars(_Writer) if name.startswith("_part_"))
# What a call takes of these is known when they have run.
UNKNOWN_MEMORY = {"takes_memory", "some_rows", "tells"}
# Gradients that are zero but for rounding decide nothing here, as they do for an optimizer that reads signs.
SMOOTH = {
    "linear",
    "activation",
    "heads",
    "sometimes",
    "unused",
    "frozen",
    "total",
    "counter",
    "takes_memory",
    "tells",
}


def source_of(recipe: Recipe) -> str:
    return _Writer(recipe).source()


def made_from(source: str) -> dict[str, Any]:
    """What a source defines: ``Model`` and ``loss``, whose code nobody shares."""
    name = f"<training program {next(_names)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    space: dict[str, Any] = {}
    exec(compile(source, name, "exec"), space)
    return space


_names = iter(range(1 << 60))


def random_model(draw: random.Random, kinds: tuple[str, ...] = PARTS, most_parts: int = 5) -> Recipe:
    """One that has something to train."""
    drawn = [Part(draw.choice(kinds), draw.randrange(12)) for _ in range(draw.randint(1, most_parts))]
    again = [part for part in drawn if part.kind == "checkpoint"][1:]  # torch has one in a step, or none
    parts = (Part("linear", draw.randrange(12)), *(part for part in drawn if part not in again))
    return Recipe(parts, draw.choice(tuple(LOSSES)))


# -- optimizers ------------------------------------------------------------------------------------------------------

_DECAY: Mapping[str, tuple[Any, ...]] = {"weight_decay": (0.0, 0.1, 0.3), "maximize": (False, True)}
_BETAS: Mapping[str, tuple[Any, ...]] = {
    "betas": ((0.9, 0.999), (0.8, 0.99), (0.7, 0.999)),
    "eps": (1e-8, 1e-3),
    **_DECAY,
}
# By optimizer, the values that its settings may have, and change to. Those without state first.
OPTIMIZERS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "SGD": {"momentum": (0.0, 0.5, 0.9), "nesterov": (False, True), "dampening": (0.0, 0.5), **_DECAY},
    "Adam": {"amsgrad": (False, True), "decoupled_weight_decay": (False, True), **_BETAS},
    "AdamW": {"amsgrad": (False, True), **_BETAS},
    "NAdam": {"momentum_decay": (4e-3, 0.1), "decoupled_weight_decay": (False, True), **_BETAS},
    "RAdam": {"decoupled_weight_decay": (False, True), **_BETAS},
    "Adamax": _BETAS,
    "Adagrad": {"lr_decay": (0.0, 0.1), "initial_accumulator_value": (0.0, 0.1), "eps": (1e-10, 1e-3), **_DECAY},
    "Adadelta": {"rho": (0.9, 0.8, 0.5), "eps": (1e-6, 1e-3), **_DECAY},
    "RMSprop": {
        "alpha": (0.99, 0.9, 0.5),
        "momentum": (0.0, 0.5, 0.9),
        "centered": (False, True),
        "eps": (1e-8, 1e-3),
        **_DECAY,
    },
    "Rprop": {"etas": ((0.5, 1.2), (0.3, 1.5)), "step_sizes": ((1e-6, 50.0), (1e-4, 0.1)), "maximize": (False, True)},
    "ASGD": {"lambd": (1e-4, 1e-2), "alpha": (0.75, 0.5), "t0": (1e6, 2.0), **_DECAY},
}
# What these decide is what state a parameter gets at its first gradient: the ordinary loop fails if they change.
_STAY = {
    ("SGD", "dampening"),
    ("RMSprop", "momentum"),
    ("RMSprop", "centered"),
    ("Adagrad", "initial_accumulator_value"),
}
# Counts of steps, and what is made of them, are float32 for these unless the default is float64. The loop computes
# with Python's numbers instead, which have 53 bits.
COUNTS_IN_FLOAT32 = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "ASGD"}
RATES = (1e-2, 3e-3, 2e-2)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        groups: "one", "two" with settings of their own, or "some": without the last parameters.
        foreach: as given; "fused" for ``fused=True``.
        rate: "number", or "tensor".
    """

    name: str
    settings: tuple[tuple[str, Any], ...]
    groups: str = "one"
    foreach: Any = None
    rate: str = "number"

    def make(self, model: nn.Module) -> optim.Optimizer:
        parameters, settings = list(model.parameters()), dict(self.settings)
        dtype, device = parameters[0].dtype, parameters[0].device
        settings["lr"] = torch.tensor(RATES[0], dtype=dtype, device=device) if self.rate == "tensor" else RATES[0]
        if self.foreach is not None:
            settings.update({"fused": True} if self.foreach == "fused" else {"foreach": self.foreach})
        half = (len(parameters) + 1) // 2
        given: Any = parameters
        if self.groups == "two" and parameters[half:]:
            given = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": RATES[1]}]
        elif self.groups == "some":
            given = parameters[:half]
        made: optim.Optimizer = getattr(optim, self.name)(given, **settings)
        return made

    @property
    def changeable(self) -> tuple[str, ...]:
        """What may change between steps, beside the rate."""
        flags = "amsgrad", "foreach"
        return tuple(n for n in OPTIMIZERS[self.name] if n not in flags and (self.name, n) not in _STAY)

    def __str__(self) -> str:
        return f"{self.name}({dict(self.settings)}, groups={self.groups}, foreach={self.foreach}, rate={self.rate})"


def random_optimizer(draw: random.Random, names: tuple[str, ...] = tuple(OPTIMIZERS)) -> Optimizer:
    name = draw.choice(("SGD", "AdamW", "Adam", *names) if len(names) > 3 else names)
    known = OPTIMIZERS[name]
    settings = {
        one: draw.choice(known[one]) for one in draw.sample(tuple(known), min(len(known), draw.randint(0, 3)))
    }
    if settings.get("nesterov"):
        settings.update(momentum=settings.get("momentum") or 0.9, dampening=0.0)
    has_fused = name in ("SGD", "Adam", "AdamW", "Adagrad")
    foreach = draw.choice((None, None, True, False, "fused" if has_fused else None))
    # With foreach=True torch takes a rate that is a tensor only where capturable=True, which the CPU has not.
    rate = "tensor" if foreach in (None, False) and draw.random() < 0.1 else "number"
    return Optimizer(name, tuple(settings.items()), draw.choice(("one", "one", "two", "some")), foreach, rate)
