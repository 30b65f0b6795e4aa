"""The world model's step of any_step_programs.py in JAX: the same layers, sizes, numbers and updates."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from any_step_programs import EPISODES, HORIZON, LATENT, LENGTH, WIDTH, world_batch, world_modules
from torch import Tensor

# As many threads as torch has in any_step.py.
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def jax_world_model() -> Callable[[], tuple[Tensor, ...]] | None:
    """A call that makes a step and returns its losses. None where jax is not installed."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_THREAD}".strip()
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return None
    tree = jax.tree_util

    def array(tensor: Tensor) -> Any:
        return jnp.array(tensor.detach().numpy(), copy=True)

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

    def adam(w: Any, gradients: Any, state: Any, lr: float) -> tuple[Any, Any]:
        """Gradients clipped to a norm of 100, and Adam's update with eps=1e-5."""
        norm = jnp.sqrt(sum((g**2).sum() for g in tree.tree_leaves(gradients)))
        gradients = tree.tree_map(lambda g: g * jnp.minimum(1.0, 100.0 / (norm + 1e-6)), gradients)
        first, second, count = state
        count = count + 1
        first = tree.tree_map(lambda m, g: m + 0.1 * (g - m), first, gradients)
        second = tree.tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
        rate, scale = lr / (1 - 0.9**count), jnp.sqrt(1 - 0.999**count)
        w = tree.tree_map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) / scale + 1e-5), w, first, second)
        return w, (first, second, count)

    def update(weights: Any, states: Any, seen: Any, done: Any, rewards: Any, noise: Any, dreams: Any) -> Any:
        (w, actor, critic, target), (of_world, of_actor, of_critic) = weights, states
        graded = jax.value_and_grad(world_loss, has_aux=True)
        (one, (state, latent)), gradients = graded(w, seen, done, rewards, noise)
        w, of_world = adam(w, gradients, of_world, 3e-4)
        graded = jax.value_and_grad(actor_loss, has_aux=True)
        (two, (starts, returns)), gradients = graded(actor, w, target, state, latent, dreams)
        actor, of_actor = adam(actor, gradients, of_actor, 8e-5)
        three, gradients = jax.value_and_grad(critic_loss)(critic, starts, returns)
        critic, of_critic = adam(critic, gradients, of_critic, 8e-5)
        target = tree.tree_map(lambda slow, fast: slow + 0.02 * (fast - slow), target, critic)
        return (w, actor, critic, target), (of_world, of_actor, of_critic), (one, two, three)

    def zeros(w: Any) -> Any:
        return tree.tree_map(jnp.zeros_like, w), tree.tree_map(jnp.zeros_like, w), jnp.zeros(())

    weights = tuple({k: array(p) for k, p in module.named_parameters()} for module in world_modules())
    held = [weights, tuple(map(zeros, weights[:3]))]
    jitted, batch = jax.jit(update, donate_argnums=(0, 1)), [array(tensor) for tensor in world_batch()]

    def step() -> tuple[Tensor, ...]:
        held[0], held[1], losses = jitted(*held, *batch)
        return tuple(torch.tensor(float(loss)) for loss in jax.block_until_ready((losses, held))[0])

    return step
