"""Training steps as people write them: each makes a step and its batches, to be run as a loop and as one program.

A habit returns the step and a function that makes the batch of a call. ``step.after`` is what the loop does between
calls.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import fxwrap

# A step, and the batch of a call by its number.
Made = tuple[Any, Callable[[int], tuple[Any, ...]]]
HABITS: dict[str, Callable[[], Made]] = {}
# How far a program may be from the loop in bfloat16.
IN_BFLOAT16 = {"muon", "autocast"}
mse = F.mse_loss


def habit(make: Callable[[], Made]) -> Callable[[], Made]:
    HABITS[make.__name__] = make
    return make


def mlp(inputs: int = 6, width: int = 8, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def xy(number: int = 5, inputs: int = 6, outputs: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(number, inputs), torch.randn(number, outputs)


def simple(model: nn.Module, optimizer: Any, loss_of: Any = lambda model, x, y: mse(model(x), y)) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@habit
def sgd() -> Made:
    model = mlp()
    return simple(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)), lambda i: xy()


def _with(optimizer_of: Any) -> Made:
    model = mlp()
    return simple(model, optimizer_of(model.parameters())), lambda i: xy()


HABITS.update(
    {
        name: functools.partial(_with, make)
        for name, make in {
            "adam": lambda p: torch.optim.Adam(p, 1e-2),
            "amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
            "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, centered=True, momentum=0.5),
            "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
            "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
            "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
            "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
            "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
            "radam": lambda p: torch.optim.RAdam(p, 1e-2),
            "rprop": lambda p: torch.optim.Rprop(p, 1e-2),
        }.items()
    }
)


@habit
def muon() -> Made:
    model = nn.Linear(6, 3, bias=False)
    return simple(model, torch.optim.Muon(model.parameters(), 1e-2)), lambda i: xy()


@habit
def gan() -> Made:
    g = mlp(4, 8, 6)
    d = mlp(6, 8, 1)
    og = torch.optim.Adam(g.parameters(), 1e-3, betas=(0.5, 0.9))
    od = torch.optim.Adam(d.parameters(), 1e-3, betas=(0.5, 0.9))

    def step(real: Any, z: Any) -> Any:
        od.zero_grad()
        fake = g(z)
        ld = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        ld.backward()
        od.step()
        og.zero_grad()
        lg = F.softplus(-d(fake)).mean()
        lg.backward()
        og.step()
        return {"d": ld, "g": lg}

    return step, lambda i: (torch.randn(5, 6), torch.randn(5, 4))


@habit
def wgan_gp() -> Made:
    g = mlp(4, 8, 6)
    d = mlp(6, 8, 1)
    og = torch.optim.RMSprop(g.parameters(), 1e-3)
    od = torch.optim.RMSprop(d.parameters(), 1e-3)

    def step(real: Any, z: Any, eps: Any) -> Any:
        fake = g(z).detach()
        mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
        (grad,) = torch.autograd.grad(d(mix).sum(), mix, create_graph=True)
        gp = ((grad.norm(2, 1) - 1) ** 2).mean()
        od.zero_grad()
        ld = d(fake).mean() - d(real).mean() + 10 * gp
        ld.backward()
        od.step()
        og.zero_grad()
        lg = -d(g(z)).mean()
        lg.backward()
        og.step()
        return ld.detach(), lg.detach()

    return step, lambda i: (torch.randn(5, 6), torch.randn(5, 4), torch.rand(5, 1))


@habit
def maml() -> Made:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(xs: Any, ys: Any, xq: Any, yq: Any) -> Any:
        optimizer.zero_grad()
        total = 0.0
        for k in range(2):
            p = dict(model.named_parameters())
            loss = mse(functional_call(model, p, (xs[k],)), ys[k])
            g = torch.autograd.grad(loss, list(p.values()), create_graph=True)
            fast = {n: v - 0.1 * gg for (n, v), gg in zip(p.items(), g, strict=True)}
            total = total + mse(functional_call(model, fast, (xq[k],)), yq[k])
        total.backward()
        optimizer.step()
        return total.detach()

    return step, lambda i: (torch.randn(2, 5, 6), torch.randn(2, 5, 3), torch.randn(2, 5, 6), torch.randn(2, 5, 3))


@habit
def func_grad_vmap() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any, y: Any) -> Any:
        p = {k: v.detach() for k, v in model.named_parameters()}
        per = vmap(grad(lambda p, x, y: mse(functional_call(model, p, (x[None],)), y[None])), in_dims=(None, 0, 0))(
            p, x, y
        )
        optimizer.zero_grad()
        for k, v in model.named_parameters():
            v.grad = (per[k] / (1 + per[k].flatten(1).norm(dim=1).reshape(-1, *[1] * (per[k].dim() - 1)))).mean(0)
        optimizer.step()
        return mse(model(x), y).detach()

    return step, lambda i: xy()


@habit
def tied() -> Made:
    class T(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(7, 6)
            self.h = nn.Linear(6, 7, bias=False)
            self.h.weight = self.e.weight

        def forward(self, i: Any) -> Any:
            return self.h(torch.tanh(self.e(i)))

    model = T()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return simple(model, optimizer, lambda model, x, y: F.cross_entropy(model(x), y)), lambda i: (
        torch.randint(7, (5,)),
        torch.randint(7, (5,)),
    )


@habit
def lstm() -> Made:
    class L(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r = nn.LSTM(6, 5, batch_first=True)
            self.h = nn.Linear(5, 3)

        def forward(self, x: Any) -> Any:
            return self.h(self.r(x)[0][:, -1])

    model = L()
    return simple(model, torch.optim.Adam(model.parameters(), 1e-2)), lambda i: (
        torch.randn(4, 3, 6),
        torch.randn(4, 3),
    )


@habit
def gru() -> Made:
    class L(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r = nn.GRU(6, 5, 2, bidirectional=True)
            self.h = nn.Linear(10, 3)

        def forward(self, x: Any) -> Any:
            return self.h(self.r(x)[0][-1])

    model = L()
    return simple(model, torch.optim.Adam(model.parameters(), 1e-2)), lambda i: (
        torch.randn(3, 4, 6),
        torch.randn(4, 3),
    )


@habit
def param_hooks() -> Made:
    model = mlp()
    model[0].weight.register_hook(lambda g: g * 2)
    model[2].bias.register_hook(lambda g: g.clamp(-0.01, 0.01))
    model[2].weight.register_post_accumulate_grad_hook(half)
    return simple(model, torch.optim.SGD(model.parameters(), 0.1)), lambda i: xy()


@habit
def module_hooks() -> Made:
    model = mlp()
    model[1].register_forward_hook(lambda mod, a, out: out * 1.5)
    model[0].register_full_backward_hook(lambda mod, gi, go: None if gi[0] is None else (gi[0] * 2,))
    model[2].register_forward_pre_hook(lambda mod, a: (a[0] + 0.1,))
    return simple(model, torch.optim.SGD(model.parameters(), 0.1)), lambda i: xy()


@habit
def step_hooks() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(
        lambda optimizer, a, k: [p.grad.clamp_(-0.05, 0.05) for p in model.parameters()] and None
    )
    return simple(model, optimizer), lambda i: xy()


@habit
def custom_function() -> Made:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Any) -> Any:
            ctx.save_for_backward(x)
            return torch.round(x * 4) / 4

        @staticmethod
        def backward(ctx, g: Any) -> Any:
            (x,) = ctx.saved_tensors
            return g * (x.abs() < 2)

    model = mlp()
    return simple(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda model, x, y: mse(Round.apply(model(x)), y)
    ), lambda i: xy()


@habit
def retain_graph() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        out = model(x)
        a = mse(out, y)
        b = out.abs().mean()
        a.backward(retain_graph=True)
        (0.1 * b).backward()
        optimizer.step()
        return a.detach(), b.detach()

    return step, lambda i: xy()


@habit
def checkpoint_new() -> Made:
    model = mlp()
    return simple(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda model, x, y: mse(checkpoint(model, x, use_reentrant=False), y),
    ), lambda i: xy()


@habit
def checkpoint_reentrant() -> Made:
    model = mlp()
    return simple(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda model, x, y: mse(checkpoint(model, x.requires_grad_(), use_reentrant=True), y),
    ), lambda i: xy()


@habit
def accumulate_inside() -> Made:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        t = 0
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = mse(model(a), b) / 4
            loss.backward()
            t = t + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return t

    return step, lambda i: xy(8)


@habit
def accumulate_outside() -> Made:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: Any, y: Any, last: Any) -> Any:
        loss = mse(model(x), y) / 3
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step, lambda i: (*xy(), i % 3 == 2)


@habit
def zero_at_end() -> Made:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: Any, y: Any) -> Any:
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda i: xy()


@habit
def zero_not_none() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: xy()


@habit
def grad_read() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        n = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        optimizer.step()
        return loss.detach(), n

    return step, lambda i: xy()


@habit
def ema() -> Made:
    model = mlp()
    e = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = mse(model(x), y) + 0.1 * mse(model(x), e(x))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(e.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
        return loss.detach()

    return step, lambda i: xy()


@habit
def averaged_model() -> Made:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    step = simple(model, optimizer)
    step.after = lambda: average.update_parameters(model)
    step.also = average.parameters
    return step, lambda i: xy()


@habit
def batchnorm() -> Made:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return simple(model, torch.optim.SGD(model.parameters(), 1e-1)), lambda i: xy(8)


@habit
def spectral_norm() -> Made:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
    return simple(model, torch.optim.SGD(model.parameters(), 0.1)), lambda i: xy()


@habit
def weight_norm() -> Made:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
    return simple(model, torch.optim.SGD(model.parameters(), 0.1)), lambda i: xy()


@habit
def orthogonal() -> Made:
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))
    return simple(model, torch.optim.SGD(model.parameters(), 0.1)), lambda i: xy()


@habit
def autocast() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = mse(out.float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: xy()


@habit
def per_group_rates() -> Made:
    model = mlp()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "weight_decay": 0.0}], 1e-2
    )
    return simple(model, optimizer), lambda i: xy()


@habit
def distill() -> Made:
    t = mlp().eval().requires_grad_(False)
    student = mlp(6, 4, 3)
    optimizer = torch.optim.Adam(student.parameters(), 1e-2)

    def step(x: Any, y: Any) -> Any:
        with torch.no_grad():
            q = F.softmax(t(x) / 2, -1)
        optimizer.zero_grad()
        loss = F.kl_div(F.log_softmax(student(x) / 2, -1), q, reduction="batchmean") * 4 + F.cross_entropy(
            student(x), y
        )
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: (torch.randn(5, 6), torch.randint(3, (5,)))


@habit
def eval_inside() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any, y: Any) -> Any:
        model.train()
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            v = mse(model(x), y)
        model.train()
        return loss.detach(), v

    return step, lambda i: xy(8)


@habit
def custom_optimizer() -> Made:
    class Lion(torch.optim.Optimizer):
        def __init__(s, p, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01):
            super().__init__(p, dict(lr=lr, betas=betas, weight_decay=weight_decay))

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    st = self.state[p]
                    if not st:
                        st["exp_avg"] = torch.zeros_like(p)
                    a = st["exp_avg"]
                    b1, b2 = g["betas"]
                    p.mul_(1 - g["lr"] * g["weight_decay"])
                    p.add_((a * b1 + p.grad * (1 - b1)).sign(), alpha=-g["lr"])
                    a.mul_(b2).add_(p.grad, alpha=1 - b2)

    model = mlp()
    return simple(model, Lion(model.parameters())), lambda i: xy()


@habit
def rebinding_optimizer() -> Made:
    class Mine(torch.optim.Optimizer):
        def __init__(self, p: Any, lr: Any = 1e-1) -> None:
            super().__init__(p, dict(lr=lr))

        @torch.no_grad()
        def step(self) -> Any:
            for g in self.param_groups:
                for p in g["params"]:
                    st = self.state[p]
                    st["m"] = 0.9 * st.get("m", torch.zeros_like(p)) + p.grad
                    p.sub_(g["lr"] * st["m"])

    model = mlp()
    return simple(model, Mine(model.parameters())), lambda i: xy()


@habit
def rate_changes() -> Made:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    step = simple(model, optimizer)
    step.after = lambda: schedule.step()
    return step, lambda i: xy()


@habit
def onecycle() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    step = simple(model, optimizer)
    step.after = lambda: schedule.step()
    return step, lambda i: xy()


@habit
def method_of_a_trainer() -> Made:
    class Trainer:
        def __init__(self) -> None:
            self.net = mlp()
            self.opt = torch.optim.Adam(self.net.parameters(), 1e-2)
            self.scale = 2.0
            self.helpers = {"clip": 0.5}

        def loss(self, x: Any, y: Any) -> Any:
            return self.scale * mse(self.net(x), y)

        def training_step(self, x: Any, y: Any) -> Any:
            self.opt.zero_grad(set_to_none=True)
            loss = self.loss(x, y)
            loss.backward()
            nn.utils.clip_grad_value_(self.net.parameters(), self.helpers["clip"])
            self.opt.step()
            return loss

    t = Trainer()
    return t.training_step, lambda i: xy()


@habit
def dict_batch() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any, *, weight: Any = 1.0) -> Any:
        optimizer.zero_grad()
        loss = weight * mse(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "n": len(batch)}

    return step, lambda i: (dict(zip("xy", xy(), strict=True)),)


@habit
def sac() -> Made:
    pi = mlp(6, 8, 4)
    q1 = mlp(8, 8, 1)
    q2 = mlp(8, 8, 1)
    t1 = copy.deepcopy(q1)
    t2 = copy.deepcopy(q2)
    la = torch.zeros((), requires_grad=True)
    op = torch.optim.Adam(pi.parameters(), 1e-3)
    oq = torch.optim.Adam([*q1.parameters(), *q2.parameters()], 1e-3)
    oa = torch.optim.Adam([la], 1e-3)

    def act(s: Any, e: Any) -> Any:
        model, ls = pi(s).chunk(2, -1)
        u = model + e * ls.clamp(-5, 2).exp()
        a = torch.tanh(u)
        lp = (-0.5 * e**2 - ls - torch.log(1 - a**2 + 1e-6)).sum(-1, keepdim=True)
        return a, lp

    def step(s: Any, a: Any, r: Any, s2: Any, e1: Any, e2: Any) -> Any:
        with torch.no_grad():
            a2, lp2 = act(s2, e1)
            y = r + 0.99 * (torch.min(t1(torch.cat([s2, a2], -1)), t2(torch.cat([s2, a2], -1))) - la.exp() * lp2)
        sa = torch.cat([s, a], -1)
        lq = mse(q1(sa), y) + mse(q2(sa), y)
        oq.zero_grad()
        lq.backward()
        oq.step()
        na, lp = act(s, e2)
        lpi = (la.exp().detach() * lp - torch.min(q1(torch.cat([s, na], -1)), q2(torch.cat([s, na], -1)))).mean()
        op.zero_grad()
        lpi.backward()
        op.step()
        lal = -(la * (lp.detach() - 2)).mean()
        oa.zero_grad()
        lal.backward()
        oa.step()
        with torch.no_grad():
            for q, t in ((q1, t1), (q2, t2)):
                for b, c in zip(q.parameters(), t.parameters(), strict=True):
                    c.lerp_(b, 0.05)
        return lq.detach(), lpi.detach(), lal.detach()

    return step, lambda i: (
        torch.randn(5, 6),
        torch.randn(5, 2),
        torch.randn(5, 1),
        torch.randn(5, 6),
        torch.randn(5, 2),
        torch.randn(5, 2),
    )


@habit
def ppo() -> Made:
    body = mlp(6, 8, 8)
    pi = nn.Linear(8, 3)
    v = nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*body.parameters(), *pi.parameters(), *v.parameters()], 1e-3)

    def step(s: Any, a: Any, old: Any, adv: Any, ret: Any) -> Any:
        for _ in range(2):
            h = torch.tanh(body(s))
            d = torch.distributions.Categorical(logits=pi(h))
            r = (d.log_prob(a) - old).exp()
            loss = (
                -torch.min(r * adv, r.clamp(0.8, 1.2) * adv).mean()
                + 0.5 * mse(v(h)[:, 0], ret)
                - 0.01 * d.entropy().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(body.parameters(), 0.5)
            optimizer.step()
        return loss.detach()

    return step, lambda i: (torch.randn(5, 6), torch.randint(3, (5,)), torch.randn(5), torch.randn(5), torch.randn(5))


@habit
def heads_take_turns() -> Made:
    b = mlp(6, 8, 8)
    heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
    optimizer = torch.optim.Adam([*b.parameters(), *heads.parameters()], 1e-2)

    def step(x: Any, y: Any, which: Any) -> Any:
        optimizer.zero_grad()
        loss = mse(heads[which](b(x)), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: (*xy(), i % 2)


@habit
def scaler() -> Made:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    def batch(i: Any) -> Any:
        x, y = xy()
        if i == 3:
            x[0, 0] = float("inf")
        return x, y

    return step, batch


@habit
def skip_if() -> Made:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        n = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        fxwrap.step_if(torch.isfinite(n), optimizer)
        return loss.detach()

    def batch(i: Any) -> Any:
        x, y = xy()
        if i == 3:
            x[0, 0] = float("inf")
        return x, y

    return step, batch


@habit
def moe() -> Made:
    r = nn.Linear(6, 2)
    ex = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    optimizer = torch.optim.SGD([*r.parameters(), *ex.parameters()], 0.1)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        w = r(x).softmax(-1)
        k = w.argmax(-1)
        out = torch.zeros_like(y)
        for e in range(2):
            i = (k == e).nonzero()[:, 0]
            out = out.index_add(0, i, ex[e](x[i]) * w[i, e : e + 1])
        loss = mse(out, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: xy(7)


@habit
def float64() -> Made:
    model = mlp().double()
    return simple(model, torch.optim.Adam(model.parameters(), 1e-2)), lambda i: tuple(t.double() for t in xy())


@habit
def adversarial_input() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any, y: Any) -> Any:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(mse(model(x), y), x)
        x = (x + 0.05 * g.sign()).detach()
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: xy()


@habit
def inplace_weights() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.clamp_(-0.3, 0.3)
            model[2].weight.div_(model[2].weight.norm().clamp(min=1))
        return loss.detach()

    return step, lambda i: xy()


@habit
def attention() -> Made:
    class A(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.MultiheadAttention(6, 2, batch_first=True)
            self.l = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
            self.h = nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            return self.h(self.l(self.a(x, x, x)[0])[:, 0])

    model = A()
    return simple(model, torch.optim.SGD(model.parameters(), 1e-1, momentum=0.9)), lambda i: (
        torch.randn(3, 4, 6),
        torch.randn(3, 3),
    )


@habit
def conv() -> Made:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    return simple(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)), lambda i: (
        torch.randn(3, 2, 6, 6),
        torch.randn(3, 3),
    )


@habit
def moco_queue() -> Made:
    q = mlp(6, 8, 4)
    k = copy.deepcopy(q).requires_grad_(False)
    queue = F.normalize(torch.randn(8, 4), dim=1)
    optimizer = torch.optim.SGD(q.parameters(), 0.1)

    def step(a: Any, b: Any) -> Any:
        with torch.no_grad():
            for p, r in zip(k.parameters(), q.parameters(), strict=True):
                p.lerp_(r, 0.1)
            kk = F.normalize(k(b), dim=1)
        qq = F.normalize(q(a), dim=1)
        lg = torch.cat([(qq * kk).sum(1, keepdim=True), qq @ queue.T], 1) / 0.2
        loss = F.cross_entropy(lg, torch.zeros(4, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue.copy_(torch.cat([kk, queue[:-4]]))
        return loss.detach()

    return step, lambda i: (torch.randn(4, 6), torch.randn(4, 6))


@habit
def two_optimizers_one_model() -> Made:
    model = mlp()
    a = torch.optim.SGD(model[0].parameters(), 0.1)
    b = torch.optim.Adam(model[2].parameters(), 1e-2)

    def step(x: Any, y: Any) -> Any:
        a.zero_grad()
        b.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        a.step()
        b.step()
        return loss.detach()

    return step, lambda i: xy()


@habit
def sam() -> Made:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        with torch.no_grad():
            n = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
            es = [p.grad * 0.05 / n for p in model.parameters()]
            for p, e in zip(model.parameters(), es, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), es, strict=True):
                p.sub_(e)
        optimizer.step()
        return loss.detach()

    return step, lambda i: xy()


@habit
def changing_sizes() -> Made:
    model = mlp()
    return simple(model, torch.optim.SGD(model.parameters(), 0.1)), lambda i: xy((5, 5, 5, 7, 7, 7, 3, 5)[i])


@habit
def freeze_later() -> Made:
    model = mlp()
    step = simple(model, torch.optim.SGD(model.parameters(), 0.1))
    step.after = functools.partial(freeze, model, [0])
    return step, lambda i: xy()


def freeze(model, c):
    c[0] += 1
    if c[0] == 4:
        model[0].requires_grad_(False)


@habit
def load_later() -> Made:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = simple(model, optimizer)
    c = [0]
    keep = []

    def after() -> Any:
        c[0] += 1
        if c[0] == 3:
            keep.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        if c[0] == 5:
            model.load_state_dict(keep[0][0])
            optimizer.load_state_dict(keep[0][1])

    step.after = after
    return step, lambda i: xy()


@habit
def set_data() -> Made:
    model = mlp()
    step = simple(model, torch.optim.SGD(model.parameters(), 0.1))
    c = [0]

    def after() -> Any:
        c[0] += 1
        if c[0] == 4:
            model[0].weight.data = model[0].weight.data * 0.5

    step.after = after
    return step, lambda i: xy()


def half(p):
    p.grad.mul_(0.5)
