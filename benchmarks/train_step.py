"""What a training step costs: fxwrap.train_step beside the ordinary loop, compiled as well as it can be.

    python benchmarks/train_step.py                         # all models, one thread
    python benchmarks/train_step.py --models mlp --seconds 10

Alternatives of one model, each with a copy of it and an AdamW of its own:

    ordinary, inductor   the loss compiled, loss.backward(), the optimizer's step compiled
    ordinary, fxwrap     the same with backend="fxwrap"
    one function         the graph of train_step, by Inductor's Python wrapper
    train_step           fxwrap.train_step
    jax                  the MLP's step by jax.jit with optax.adamw, where both are installed

They are timed in turn, in random order. Shown are medians in microseconds a step, and the median of the ratios to
"ordinary, inductor" in the same turn. Losses and parameters after four steps are compared: "train_step" with
"one function" bit for bit, all with the first within 1e-3. Exit code 1 if they differ.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import statistics
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from speed_models import Made, gru, mlp, recommender
from timing import geometric_mean, in_turn, own
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

import fxwrap
from fxwrap.features.train_step.codegen import as_it_stands

ORDINARY, OURS, ONE, STEP, JAX = "ordinary, inductor", "ordinary, fxwrap", "one function", "train_step", "jax"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder() -> Made:
    return Decoder(2, 32, 64), (torch.randint(0, 64, (2, 16)),)


def convolutions() -> Made:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 8), *block(8, 16), nn.Flatten(), nn.Linear(64, 10)), (torch.randn(4, 3, 8, 8),)


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: mlp(blocks=6),
    "gru": lambda: gru(steps=8),
    "recommender": lambda: recommender(bags=8),
    "decoder": decoder,
    "convolutions": convolutions,
}


def loss(model: nn.Module, *inputs: Tensor) -> Tensor:
    return model(*inputs).square().mean()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def ordinary(model: nn.Module, inputs: tuple[Any, ...], **how: Any) -> Callable[[], Any]:
    """The loop, whose loss and update are compiled; ``how`` are arguments of ``torch.compile``."""
    optimizer = adamw(model)
    loss_of = torch.compile(own(lambda *inputs: loss(model, *inputs)), **how)
    bare: Any = inspect.unwrap(torch.optim.AdamW.step)
    update = torch.no_grad()(torch.compile(own(lambda: bare(optimizer)), **how))  # type: ignore[call-arg]

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss_of(*inputs)
        value.backward()
        update()
        return value.detach()

    return step


def one_function(model: nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """The graph that train_step compiles, by Inductor's own wrapper."""
    step = fxwrap.train_step(model, loss, adamw(model))
    with mock.patch.object(as_it_stands, "fxwrap", lambda gm, examples, **_: compile_fx(gm, list(examples))):
        first = [step(*inputs)]
    return lambda: first.pop() if first else step(*inputs)


def whole(model: nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    step = fxwrap.train_step(model, loss, adamw(model))
    return lambda: step(*inputs)


def jax_mlp(model: nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Any] | None:
    """The MLP's step in JAX: the same layers, sizes and numbers. None where jax or optax is not installed."""
    try:
        import jax
        import jax.numpy as jnp
        import optax
    except ImportError:
        return None

    def array(tensor: Tensor) -> Any:
        return jnp.asarray(tensor.detach().numpy())

    parameters = [{name: array(value) for name, value in block.named_parameters()} for block in model.children()]

    def linear(block: Any, name: str, x: Any) -> Any:
        return x @ block[f"{name}.weight"].T + block[f"{name}.bias"]

    def loss_of(parameters: Any, x: Any) -> Any:
        for block in parameters:
            centred = x - x.mean(-1, keepdims=True)
            normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            hidden = linear(block, "up", normed * block["norm.weight"] + block["norm.bias"])
            x = x + linear(block, "down", jax.nn.relu(hidden))
        return (x**2).mean()

    optimizer = optax.adamw(1e-3, weight_decay=1e-2)

    def update(parameters: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(parameters, x)
        changes, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state, value

    jitted = jax.jit(update, donate_argnums=(0, 1))
    held = [parameters, optimizer.init(parameters)]
    x = array(inputs[0])

    def step() -> Tensor:
        held[0], held[1], value = jitted(held[0], held[1], x)
        return torch.tensor(float(value))

    return step


def made(name: str) -> tuple[dict[str, Callable[[], Any]], dict[str, nn.Module]]:
    """Steps of each alternative, and their models."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    models = {one: copy.deepcopy(model) for one in (ORDINARY, OURS, ONE, STEP)}
    steps = {
        ORDINARY: ordinary(models[ORDINARY], inputs, backend="inductor"),
        OURS: ordinary(models[OURS], inputs, backend="fxwrap"),
        ONE: one_function(models[ONE], inputs),
        STEP: whole(models[STEP], inputs),
    }
    if name == "mlp" and (step := jax_mlp(model, inputs)) is not None:
        steps[JAX] = step
    return steps, models


def difference(steps: dict[str, Callable[[], Any]], models: dict[str, nn.Module]) -> str:
    """What is wrong with the numbers of the first four steps; empty if nothing is."""
    losses = {name: torch.stack([step() for _ in range(4)]) for name, step in steps.items()}
    state = {name: list(model.state_dict().values()) for name, model in models.items()}
    if not torch.equal(losses[STEP], losses[ONE]) or not all(map(torch.equal, state[STEP], state[ONE])):
        return "train_step and Inductor's wrapper of the same function differ"
    far = [name for name in steps if not torch.allclose(losses[name], losses[ORDINARY], rtol=1e-3, atol=1e-5)]
    return f"losses of {', '.join(far)} are not the ordinary loop's" if far else ""


def main() -> int:
    # gpu_checks.py imports this module where torch is all that is installed.
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=10, help="for each model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    columns = ORDINARY, OURS, ONE, STEP, JAX
    table = Table("model", *(f"{name}, us" for name in columns), "ratio")
    ratios, wrong = [], False
    for name in given.models:
        steps, models = made(name)
        if problem := difference(steps, models):
            print(f"{name}: {problem}")
            wrong = True
        times = in_turn(steps, given.seconds)
        ratios.append(statistics.median(a / b for a, b in zip(times[STEP], times[ORDINARY], strict=True)))
        shown = [
            f"{statistics.median(times[one]):.0f}" if one in times else "" for one in (ORDINARY, OURS, ONE, STEP, JAX)
        ]
        table.add_row(name, *shown, f"{ratios[-1]:.2f}")
        torch._dynamo.reset()
    Console(width=160).print(table)
    print(f"train_step / ordinary step by Inductor, geometric mean: {geometric_mean(ratios):.3f}")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
