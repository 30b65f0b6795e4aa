"""Three steps of any_step_programs.py in JAX: the same layers, sizes, numbers and updates."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from any_step_programs import (
    EPISODES,
    HORIZON,
    LATENT,
    LENGTH,
    WIDTH,
    gan_batch,
    gan_modules,
    maml_batch,
    maml_model,
    world_batch,
    world_modules,
)
from torch import Tensor, nn

try:
    import jax
    import jax.numpy as jnp
    from jax import lax
except ImportError:
    jax = None

# As many threads as torch has in any_step.py.
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_THREAD}".strip()
Call = Callable[[], tuple[Tensor, ...]]


def _array(tensor: Tensor) -> Any:
    return jnp.array(tensor.detach().numpy(), copy=True)


def _weights(module: nn.Module) -> dict[str, Any]:
    return {name: _array(parameter) for name, parameter in module.named_parameters()}


def _zeros(w: Any) -> Any:
    """Adam's state."""
    zeros = jax.tree_util.tree_map(jnp.zeros_like, w)
    return zeros, jax.tree_util.tree_map(jnp.zeros_like, w), jnp.zeros(())


def _adam(
    w: Any, gradients: Any, state: Any, lr: float, beta: float = 0.9, eps: float = 1e-8, clip: float | None = None
) -> tuple[Any, Any]:
    """Adam's update, of gradients that are clipped to a norm before."""
    map_ = jax.tree_util.tree_map
    if clip is not None:
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree_util.tree_leaves(gradients)))
        gradients = map_(lambda g: g * jnp.minimum(1.0, clip / (norm + 1e-6)), gradients)
    first, second, count = state
    count = count + 1
    first = map_(lambda m, g: m + (1 - beta) * (g - m), first, gradients)
    second = map_(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
    rate, scale = lr / (1 - beta**count), jnp.sqrt(1 - 0.999**count)
    w = map_(lambda p, m, v: p - rate * m / (jnp.sqrt(v) / scale + eps), w, first, second)
    return w, (first, second, count)


def _stepping(update: Callable[..., Any], held: list[Any], batch: tuple[Tensor, ...]) -> Call:
    """A call that makes a step: ``update`` takes what is held and a batch, and returns what is held, and losses."""
    jitted, arrays = jax.jit(update, donate_argnums=tuple(range(len(held)))), list(map(_array, batch))

    def step() -> tuple[Tensor, ...]:
        *held[:], losses = jitted(*held, *arrays)
        return tuple(torch.tensor(float(loss)) for loss in jax.block_until_ready((losses, held))[0])

    return step


def jax_step(name: str) -> Call | None:
    """A call that makes a step of a program and returns its losses. None where there is none, or no JAX."""
    if jax is None or name not in _STEPS:
        return None
    return _STEPS[name]()


def _world_model() -> Call:
    tree = jax.tree_util

    def linear(w: Any, name: str, x: Any) -> Any:
        return x @ w[f"{name}weight"].T + w[f"{name}bias"]

    def mlp(w: Any, name: str, x: Any) -> Any:
        return linear(w, f"{name}2.", jax.nn.elu(linear(w, f"{name}0.", x)))

    def cell(w: Any, x: Any, state: Any) -> Any:
        reset, keep, new = jnp.split(x @ w["cell.weight_ih"].T + w["cell.bias_ih"], 3, -1)
        old_reset, old_keep, old = jnp.split(state @ w["cell.weight_hh"].T + w["cell.bias_hh"], 3, -1)
        new = jnp.tanh(new + jax.nn.sigmoid(reset + old_reset) * old)
        keep = jax.nn.sigmoid(keep + old_keep)
        return (1 - keep) * new + keep * state

    def gaussian(x: Any) -> tuple[Any, Any]:
        mean, raw = jnp.split(x, 2, -1)
        return mean, jax.nn.softplus(raw) + 0.1

    def joined(*parts: Any) -> Any:
        return jnp.concatenate(parts, -1)

    def world_loss(w: Any, seen: Any, done: Any, rewards: Any, noise: Any) -> Any:
        state, latent = jnp.zeros((EPISODES, WIDTH)), jnp.zeros((EPISODES, LATENT))
        loss, states, latents = 0.0, [], []
        for t in range(LENGTH):
            state = cell(w, joined(latent, done[:, t]), state)
            guess, spread = gaussian(linear(w, "prior.", state))
            mean, deviation = gaussian(linear(w, "posterior.", joined(state, seen[:, t])))
            latent = mean + deviation * noise[:, t]
            both = joined(state, latent)
            far = jnp.log(spread / deviation) + (deviation**2 + (mean - guess) ** 2) / (2 * spread**2) - 0.5
            loss += ((mlp(w, "decoder.", both) - seen[:, t]) ** 2).mean() + 0.1 * far.sum(-1).mean()
            loss += ((mlp(w, "reward.", both)[:, 0] - rewards[:, t]) ** 2).mean()
            states.append(state)
            latents.append(latent)
        return loss / LENGTH, (jnp.concatenate(states), jnp.concatenate(latents))

    def actor_loss(actor: Any, w: Any, target: Any, state: Any, latent: Any, noise: Any) -> Any:
        starts, rewards, returns = [], [], []
        for t in range(HORIZON):
            starts.append(joined(state, latent))
            state = cell(w, joined(latent, jnp.tanh(mlp(actor, "", starts[-1]))), state)
            mean, deviation = gaussian(linear(w, "prior.", state))
            latent = mean + deviation * noise[t]
            rewards.append(mlp(w, "reward.", joined(state, latent))[:, 0])
        value = mlp(target, "", starts[-1])[:, 0]
        for t in reversed(range(HORIZON)):
            value = rewards[t] + 0.95 * (0.05 * mlp(target, "", starts[t])[:, 0] + 0.95 * value)
            returns.append(value)
        stacked = jnp.stack(returns[::-1])
        return -stacked.mean(), (jnp.stack(starts), stacked)

    def critic_loss(critic: Any, starts: Any, returns: Any) -> Any:
        return ((mlp(critic, "", starts)[..., 0] - returns) ** 2).mean()

    settings: dict[str, float] = {"eps": 1e-5, "clip": 100.0}

    def update(weights: Any, states: Any, seen: Any, done: Any, rewards: Any, noise: Any, dreams: Any) -> Any:
        (w, actor, critic, target), (of_world, of_actor, of_critic) = weights, states
        graded = jax.value_and_grad(world_loss, has_aux=True)
        (one, (state, latent)), gradients = graded(w, seen, done, rewards, noise)
        w, of_world = _adam(w, gradients, of_world, 3e-4, **settings)
        graded = jax.value_and_grad(actor_loss, has_aux=True)
        (two, (starts, returns)), gradients = graded(actor, w, target, state, latent, dreams)
        actor, of_actor = _adam(actor, gradients, of_actor, 8e-5, **settings)
        three, gradients = jax.value_and_grad(critic_loss)(critic, starts, returns)
        critic, of_critic = _adam(critic, gradients, of_critic, 8e-5, **settings)
        target = tree.tree_map(lambda slow, fast: slow + 0.02 * (fast - slow), target, critic)
        return (w, actor, critic, target), (of_world, of_actor, of_critic), (one, two, three)

    weights = tuple(map(_weights, world_modules()))
    return _stepping(update, [weights, tuple(map(_zeros, weights[:3]))], world_batch())


def _gan() -> Call:
    """Weights and statistics of normalisations are held; layers have the names of ``gan_modules``."""

    def linear(w: Any, name: str, x: Any) -> Any:
        return x @ w[f"{name}weight"].T + w[f"{name}bias"]

    def bias(w: Any, name: str) -> Any:
        return w[f"{name}bias"][:, None, None] if f"{name}bias" in w else 0.0

    def conv(w: Any, name: str, x: Any) -> Any:
        return lax.conv_general_dilated(x, w[f"{name}weight"], (2, 2), ((1, 1), (1, 1))) + bias(w, name)

    def transposed(w: Any, name: str, x: Any) -> Any:
        kernel = jnp.flip(w[f"{name}weight"], (2, 3)).swapaxes(0, 1)
        return lax.conv_general_dilated(x, kernel, (1, 1), ((2, 2), (2, 2)), lhs_dilation=(2, 2)) + bias(w, name)

    def normalised(w: Any, name: str, x: Any, seen: Any) -> tuple[Any, Any]:
        """Batch normalisation, and its statistics afterwards."""
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
        number = x.size // x.shape[1]
        running = 0.9 * seen[0] + 0.1 * mean, 0.9 * seen[1] + 0.1 * variance * number / (number - 1)
        x = (x - mean[:, None, None]) / jnp.sqrt(variance + 1e-5)[:, None, None]
        return x * w[f"{name}weight"][:, None, None] + bias(w, name), running

    def generate(w: Any, noise: Any, seen: Any) -> tuple[Any, Any]:
        x = jax.nn.relu(linear(w, "0.", noise).reshape(-1, 32, 4, 4))
        x, seen = normalised(w, "4.", transposed(w, "3.", x), seen)
        return jnp.tanh(transposed(w, "6.", jax.nn.relu(x))), seen

    def judge(w: Any, x: Any, seen: Any) -> tuple[Any, Any]:
        x = jax.nn.leaky_relu(conv(w, "0.", x), 0.2)
        x, seen = normalised(w, "3.", conv(w, "2.", x), seen)
        return linear(w, "6.", jax.nn.leaky_relu(x, 0.2).reshape(x.shape[0], -1)), seen

    def d_loss(w: Any, real: Any, fake: Any, seen: Any) -> tuple[Any, Any]:
        good, seen = judge(w, real, seen)
        bad, seen = judge(w, fake, seen)
        return jax.nn.softplus(-good).mean() + jax.nn.softplus(bad).mean(), seen

    def g_loss(fake: Any, w: Any, seen: Any) -> tuple[Any, Any]:
        result, seen = judge(w, fake, seen)
        return jax.nn.softplus(-result).mean(), seen

    def update(weights: Any, states: Any, statistics: Any, real: Any, noise: Any) -> Any:
        (g, d), (of_g, of_d), (g_seen, d_seen) = weights, states, statistics
        fake, back, g_seen = jax.vjp(lambda w: generate(w, noise, g_seen), g, has_aux=True)
        (one, d_seen), gradients = jax.value_and_grad(d_loss, has_aux=True)(d, real, fake, d_seen)
        d, of_d = _adam(d, gradients, of_d, 2e-4, beta=0.5)
        (two, d_seen), of_fake = jax.value_and_grad(g_loss, has_aux=True)(fake, d, d_seen)
        g, of_g = _adam(g, back(of_fake)[0], of_g, 2e-4, beta=0.5)
        return (g, d), (of_g, of_d), (g_seen, d_seen), (one, two)

    weights = tuple(map(_weights, gan_modules()))
    batch = gan_batch()
    statistics = tuple((jnp.zeros(width), jnp.ones(width)) for width in (16, 32))
    return _stepping(update, [weights, tuple(map(_zeros, weights)), statistics], batch)


def _maml() -> Call:
    def loss_of(w: Any, x: Any, y: Any) -> Any:
        for name in ("0.", "2."):
            x = jax.nn.relu(x @ w[f"{name}weight"].T + w[f"{name}bias"])
        return ((x @ w["4.weight"].T + w["4.bias"] - y) ** 2).mean()

    def loss_of_tasks(w: Any, *tasks: Any) -> Any:
        losses = []
        for x, y, new_x, new_y in zip(*tasks, strict=True):
            adapted = w
            for _ in range(2):
                gradients = jax.grad(loss_of)(adapted, x, y)
                adapted = {name: value - 0.01 * gradients[name] for name, value in adapted.items()}
            losses.append(loss_of(adapted, new_x, new_y))
        return jnp.stack(losses).mean()

    def update(w: Any, state: Any, *tasks: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of_tasks)(w, *tasks)
        w, state = _adam(w, gradients, state, 1e-3)
        return w, state, (loss,)

    weights = _weights(maml_model())
    return _stepping(update, [weights, _zeros(weights)], maml_batch())


_STEPS: dict[str, Callable[[], Call]] = {"world_model": _world_model, "gan": _gan, "maml": _maml}
