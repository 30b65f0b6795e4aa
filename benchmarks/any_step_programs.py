"""Seven training steps for any_step.py, written as one writes them for an ordinary loop.

A program is a function ``make(compiled)``. It makes modules and optimizers from one seed and returns the step and a
batch. ``compiled`` is given each loss function and the update of each optimizer, and returns what the step calls. On
a side that makes one program of the whole step, it returns what it is given.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from timing import own
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call, grad
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Step = Callable[..., Any]
Made = tuple[Step, tuple[Tensor, ...]]


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def compiled_by(**how: Any) -> Wrap:
    """Compiles a function, or the update of an optimizer, with a code object of its own.

    Args:
        how: arguments of ``torch.compile``.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.ismethod(function):
            assert isinstance(function, types.FunctionType)
            return torch.compile(own(function), dynamic=False, **how)
        # The update without what torch wraps around it takes a little less time.
        optimizer, bare = function.__self__, inspect.unwrap(function.__func__)
        return torch.no_grad()(torch.compile(own(lambda: bare(optimizer)), dynamic=False, **how))

    return compiled


def updated_by(optimizer: Any, compiled: Wrap) -> Any:
    """The same optimizer, its ``step`` compiled on the sides that compile it."""
    ordinary = optimizer.step
    step = compiled(ordinary)
    if step is not ordinary:
        optimizer.step = step
    return optimizer


def adam(parameters: Iterable[Tensor], compiled: Wrap, lr: float = 1e-3, **more: Any) -> Optimizer:
    return updated_by(Adam(parameters, lr, **more), compiled)


def mlp(inputs: int, width: int, outputs: int, hidden: int = 1, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(inputs, width), activation()]
    for _ in range(hidden - 1):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


# -- a world model, an actor and a critic that learn in it ---------------------------------------------------------

# Episodes, their length, steps that are imagined; sizes of an observation, an action, a latent, and layers.
EPISODES, LENGTH, HORIZON, OBSERVATION, ACTION, LATENT, WIDTH = 8, 8, 8, 12, 4, 16, 32


class World(nn.Module):
    """A recurrent state, a latent that is guessed from it or from an observation, and what both of them tell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(LATENT + ACTION, WIDTH)
        self.prior = nn.Linear(WIDTH, 2 * LATENT)
        self.posterior = nn.Linear(WIDTH + OBSERVATION, 2 * LATENT)
        self.decoder = mlp(WIDTH + LATENT, WIDTH, OBSERVATION, activation=nn.ELU)
        self.reward = mlp(WIDTH + LATENT, WIDTH, 1, activation=nn.ELU)


def world_modules() -> tuple[World, nn.Module, nn.Module, nn.Module]:
    """The world, the actor, the critic and its target, always with the same numbers."""
    torch.manual_seed(0)
    world, actor = World(), mlp(WIDTH + LATENT, WIDTH, ACTION, activation=nn.ELU)
    critic = mlp(WIDTH + LATENT, WIDTH, 1, activation=nn.ELU)
    return world, actor, critic, copy.deepcopy(critic).requires_grad_(False)


def world_batch(length: int = LENGTH, horizon: int = HORIZON) -> tuple[Tensor, ...]:
    """Observations, actions, rewards, and noise of both losses."""
    torch.manual_seed(1)
    shapes = [(EPISODES, length, OBSERVATION), (EPISODES, length, ACTION), (EPISODES, length)]
    shapes += [(EPISODES, length, LATENT), (horizon, EPISODES * length, LATENT)]
    return tuple(torch.randn(shape) for shape in shapes)


def gaussian(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, raw = x.chunk(2, -1)
    return mean, F.softplus(raw) + 0.1


def world_model(compiled: Wrap, length: int = LENGTH, horizon: int = HORIZON) -> Made:
    world, actor, critic, target = world_modules()
    world_optimizer = adam(world.parameters(), compiled, 3e-4, eps=1e-5)
    actor_optimizer = adam(actor.parameters(), compiled, 8e-5, eps=1e-5)
    critic_optimizer = adam(critic.parameters(), compiled, 8e-5, eps=1e-5)

    @compiled
    def world_loss(seen: Tensor, done: Tensor, rewards: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        state, latent = seen.new_zeros(EPISODES, WIDTH), seen.new_zeros(EPISODES, LATENT)
        loss, states, latents = seen.new_zeros(()), [], []
        for t in range(length):
            state = world.cell(torch.cat([latent, done[:, t]], -1), state)
            guess, spread = gaussian(world.prior(state))
            mean, deviation = gaussian(world.posterior(torch.cat([state, seen[:, t]], -1)))
            latent = mean + deviation * noise[:, t]
            both = torch.cat([state, latent], -1)
            far = torch.log(spread / deviation) + (deviation**2 + (mean - guess) ** 2) / (2 * spread**2) - 0.5
            loss = loss + F.mse_loss(world.decoder(both), seen[:, t]) + 0.1 * far.sum(-1).mean()
            loss = loss + F.mse_loss(world.reward(both)[:, 0], rewards[:, t])
            states.append(state)
            latents.append(latent)
        return loss / length, torch.cat(states).detach(), torch.cat(latents).detach()

    @compiled
    def actor_loss(state: Tensor, latent: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        starts, rewards, returns = [], [], []
        for t in range(horizon):
            both = torch.cat([state, latent], -1)
            starts.append(both)
            state = world.cell(torch.cat([latent, torch.tanh(actor(both))], -1), state)
            mean, deviation = gaussian(world.prior(state))
            latent = mean + deviation * noise[t]
            rewards.append(world.reward(torch.cat([state, latent], -1))[:, 0])
        value = target(starts[-1])[:, 0]
        for t in reversed(range(horizon)):
            value = rewards[t] + 0.95 * (0.05 * target(starts[t])[:, 0] + 0.95 * value)
            returns.append(value)
        stacked = torch.stack(returns[::-1])
        return -stacked.mean(), torch.stack(starts).detach(), stacked.detach()

    @compiled
    def critic_loss(starts: Tensor, returns: Tensor) -> Tensor:
        return F.mse_loss(critic(starts)[..., 0], returns)

    def step(seen: Tensor, done: Tensor, rewards: Tensor, noise: Tensor, dreams: Tensor) -> tuple[Tensor, ...]:
        world_optimizer.zero_grad()
        first, states, latents = world_loss(seen, done, rewards, noise)
        first.backward()
        clip_grad_norm_(world.parameters(), 100.0)
        world_optimizer.step()
        actor_optimizer.zero_grad()
        second, starts, returns = actor_loss(states, latents, dreams)
        second.backward()
        clip_grad_norm_(actor.parameters(), 100.0)
        actor_optimizer.step()
        critic_optimizer.zero_grad()
        third = critic_loss(starts, returns)
        third.backward()
        clip_grad_norm_(critic.parameters(), 100.0)
        critic_optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
        return first.detach(), second.detach(), third.detach()

    return step, world_batch(length, horizon)


# -- images --------------------------------------------------------------------------------------------------------


def gan_modules() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator, with convolutions, of 16 by 16 pixels."""
    torch.manual_seed(0)
    generator = nn.Sequential(
        *(nn.Linear(32, 512), nn.Unflatten(1, (32, 4, 4)), nn.ReLU()),
        *(nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh()),
    )
    discriminator = nn.Sequential(
        *(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)),
        *(nn.Flatten(), nn.Linear(512, 1)),
    )
    return generator, discriminator


def gan_batch() -> tuple[Tensor, ...]:
    """Pictures and noise, drawn after the modules."""
    return torch.randn(16, 1, 16, 16).tanh(), torch.randn(16, 32)


def gan(compiled: Wrap) -> Made:
    generator, discriminator = gan_modules()
    g_optimizer = adam(generator.parameters(), compiled, 2e-4, betas=(0.5, 0.999))
    d_optimizer = adam(discriminator.parameters(), compiled, 2e-4, betas=(0.5, 0.999))

    @compiled
    def generate(noise: Tensor) -> Tensor:
        return generator(noise)

    @compiled
    def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
        return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()

    @compiled
    def generator_loss(fake: Tensor) -> Tensor:
        return F.softplus(-discriminator(fake)).mean()

    def step(real: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        fake = generate(noise)
        d_optimizer.zero_grad()
        d_loss = discriminator_loss(real, fake.detach())
        d_loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = generator_loss(fake)
        g_loss.backward()
        g_optimizer.step()
        return d_loss.detach(), g_loss.detach()

    return step, gan_batch()


def distillation(compiled: Wrap) -> Made:
    """A small network of convolutions learns from labels and from a frozen one that is wider."""
    torch.manual_seed(0)

    def network(width: int) -> nn.Module:
        def block(before: int, after: int) -> list[nn.Module]:
            return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

        first, second = block(3, width), block(width, 2 * width)
        return nn.Sequential(
            *first, nn.MaxPool2d(2), *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)
        )

    teacher, student = network(16).eval().requires_grad_(False), network(8)
    optimizer = updated_by(SGD(student.parameters(), 0.05, momentum=0.9, weight_decay=5e-4), compiled)

    @compiled
    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.log_softmax(teacher(images) / 4.0, -1)
        scores = student(images)
        soft = F.kl_div(F.log_softmax(scores / 4.0, -1), wanted, reduction="batchmean", log_target=True)
        return 0.9 * 16.0 * soft + 0.1 * F.cross_entropy(scores, labels)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (torch.randn(16, 3, 12, 12), torch.randint(10, (16,)))


# -- a gradient of gradients ---------------------------------------------------------------------------------------


def maml_model() -> nn.Module:
    torch.manual_seed(0)
    return mlp(1, 40, 1, hidden=2)


def maml_batch() -> tuple[Tensor, ...]:
    """Inputs and results of four tasks of regression, to adapt to and to be judged by; drawn after the model."""
    x, shift = torch.rand(4, 20, 1) * 10 - 5, torch.rand(4, 1, 1) * 3
    y = torch.sin(x + shift)
    return x[:, :10], y[:, :10], x[:, 10:], y[:, 10:]


def maml(compiled: Wrap) -> Made:
    """Two steps of the inner loop for each task, second derivatives."""
    model = maml_model()
    optimizer = adam(model.parameters(), compiled)

    def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    @compiled
    def loss_of_tasks(*tasks: Tensor) -> Tensor:
        losses = []
        for x, y, new_x, new_y in zip(*tasks, strict=True):
            adapted = dict(model.named_parameters())
            for _ in range(2):
                gradients = grad(loss_of)(adapted, x, y)
                adapted = {name: value - 0.01 * gradients[name] for name, value in adapted.items()}
            losses.append(loss_of(adapted, new_x, new_y))
        return torch.stack(losses).mean()

    def step(*tasks: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of_tasks(*tasks)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, maml_batch()


# -- reinforcement learning ----------------------------------------------------------------------------------------


def ppo(compiled: Wrap) -> Made:
    """Two epochs of four mini-batches each, in an order that is given."""
    torch.manual_seed(0)
    body, policy, value = mlp(8, 64, 64, activation=nn.Tanh), nn.Linear(64, 4), nn.Linear(64, 1)
    model = nn.ModuleList([body, policy, value])
    optimizer = adam(model.parameters(), compiled, 2.5e-4, eps=1e-5)

    @compiled
    def loss_of(seen: Tensor, actions: Tensor, before: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
        features = torch.tanh(body(seen))
        choice = Categorical(logits=policy(features))
        ratio = (choice.log_prob(actions) - before).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return 0.5 * F.mse_loss(value(features)[:, 0], returns) - gain - 0.01 * choice.entropy().mean()

    def step(order: Tensor, *rollout: Tensor) -> Tensor:
        losses = []
        for epoch in order:
            for rows in epoch.split(32):
                loss = loss_of(*(each[rows] for each in rollout))
                optimizer.zero_grad()
                loss.backward()
                clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses)

    order = torch.stack([torch.randperm(128) for _ in range(2)])
    seen, actions = torch.randn(128, 8), torch.randint(4, (128,))
    before = torch.log(torch.rand(128) * 0.2 + 0.15)
    return step, (order, seen, actions, before, torch.randn(128), torch.randn(128))


def sac(compiled: Wrap) -> Made:
    """Two critics with targets, a policy, and a temperature that is learned."""
    torch.manual_seed(0)
    actor, first, second = mlp(11, 64, 6, hidden=2), mlp(14, 64, 1, hidden=2), mlp(14, 64, 1, hidden=2)
    critics = nn.ModuleList([first, second])
    targets = copy.deepcopy(critics).requires_grad_(False)
    temperature = torch.zeros((), requires_grad=True)
    actor_optimizer = adam(actor.parameters(), compiled, 3e-4)
    critic_optimizer = adam(critics.parameters(), compiled, 3e-4)
    temperature_optimizer = adam([temperature], compiled, 3e-4)

    def act(seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = actor(seen).chunk(2, -1)
        spread = spread.clamp(-5.0, 2.0)
        action = torch.tanh(mean + spread.exp() * noise)
        likely = -0.5 * noise**2 - spread - 0.919 - torch.log(1.0 - action**2 + 1e-6)
        return action, likely.sum(-1, keepdim=True)

    def worth(of: nn.ModuleList, seen: Tensor, action: Tensor) -> Tensor:
        both = torch.cat([seen, action], -1)
        return torch.min(of[0](both), of[1](both))

    @compiled
    def critic_loss(seen: Tensor, action: Tensor, reward: Tensor, after: Tensor, noise: Tensor) -> Tensor:
        with torch.no_grad():
            reply, likely = act(after, noise)
            wanted = reward + 0.99 * (worth(targets, after, reply) - temperature.exp() * likely)
        both = torch.cat([seen, action], -1)
        return F.mse_loss(critics[0](both), wanted) + F.mse_loss(critics[1](both), wanted)

    @compiled
    def actor_loss(seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        action, likely = act(seen, noise)
        return (temperature.detach().exp() * likely - worth(critics, seen, action)).mean(), likely.detach()

    @compiled
    def temperature_loss(likely: Tensor) -> Tensor:
        return -(temperature * (likely - 3.0)).mean()

    def step(
        seen: Tensor, action: Tensor, reward: Tensor, after: Tensor, noise: Tensor, other: Tensor
    ) -> tuple[Tensor, ...]:
        critic_optimizer.zero_grad()
        of_critics = critic_loss(seen, action, reward, after, noise)
        of_critics.backward()
        critic_optimizer.step()
        actor_optimizer.zero_grad()
        of_actor, likely = actor_loss(seen, other)
        of_actor.backward()
        actor_optimizer.step()
        temperature_optimizer.zero_grad()
        of_temperature = temperature_loss(likely)
        of_temperature.backward()
        temperature_optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
                slow.lerp_(fast, 0.005)
        return of_critics.detach(), of_actor.detach(), of_temperature.detach()

    shapes = [(64, 11), (64, 3), (64, 1), (64, 11), (64, 3), (64, 3)]
    return step, tuple(torch.randn(shape) for shape in shapes)


# -- language ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.before(x)).view(batch, length, 3 * self.heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*split.chunk(3, 1), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.after(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def gpt(compiled: Wrap) -> Made:
    """Four micro-batches make one update; matrices decay, vectors do not."""
    torch.manual_seed(0)
    model = GPT(vocabulary=128, context=32, width=64, heads=4, layers=2)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = updated_by(AdamW(groups, 6e-4, betas=(0.9, 0.95)), compiled)

    @compiled
    def loss_of(ids: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), following.flatten()) / 4

    def step(text: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in text.chunk(4):
            loss = loss_of(part[:, :-1], part[:, 1:])
            loss.backward()
            total = total + loss.detach()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step, (torch.randint(128, (8, 33)),)


PROGRAMS: dict[str, Callable[[Wrap], Made]] = {
    "world_model": world_model,
    "gan": gan,
    "maml": maml,
    "ppo": ppo,
    "sac": sac,
    "distillation": distillation,
    "gpt": gpt,
}
