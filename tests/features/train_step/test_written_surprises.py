"""What a search for wrong numbers has found in written steps: each is the loop's number now, or an error."""

from __future__ import annotations

import collections
import copy
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import fxwrap
from fxwrap.features.train_step.codegen.tracing_state import is_fake

pytestmark = pytest.mark.compiler
x = torch.ones(3, 2)


def net(rate: float = 0.0) -> tuple[nn.Linear, optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, optim.SGD(model.parameters(), rate)


def train(optimizer: optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def refusal(step: Callable[..., Any], *args: Any) -> str:
    step(*args)
    with pytest.raises(fxwrap.TrainStepError) as error:
        step(*args)
    return str(error.value)


# -- things that look alike -----------------------------------------------------------------------------------------


def test_two_variables_of_one_name_are_two() -> None:
    def normed() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
        m = nn.BatchNorm1d(2)
        return m, lambda z: m(z)

    def updated(m: nn.Module) -> tuple[optim.Optimizer, Callable[[torch.Tensor], torch.Tensor]]:
        opt = optim.SGD(m.parameters(), 0.1)
        return opt, lambda z: train(opt, m(z).sum())

    (a, of_a), (_, of_b) = normed(), normed()
    optimizer = optim.SGD(a.parameters(), 0.0)
    step = fxwrap.train_step(lambda z: train(optimizer, (of_a(z) + of_b(z)).square().mean()))
    z = torch.randn(5, 2)
    step(z), step(z)
    a.eval()
    mean = a.running_mean.clone()  # type: ignore[operator,union-attr]
    step(z)
    assert torch.equal(mean, a.running_mean)  # type: ignore[arg-type]
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    (opt, of_first), (_, of_second) = updated(first), updated(second)
    both = fxwrap.train_step(lambda z: (of_first(z), of_second(z)))
    both(x), both(x)
    opt.param_groups[0]["lr"] = 0.0
    weight = first.weight.clone()
    both(x)
    assert torch.equal(weight, first.weight)


def test_the_order_of_a_dictionary_counts() -> None:
    tensors = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    step = fxwrap.train_step(lambda: tensors["a"] + 10 * tensors["b"])
    step(), step()
    tensors["a"] = tensors.pop("a")
    assert step().item() == 21
    names = {"mse": 1}
    model, _ = net()
    named = fxwrap.train_step(lambda: model.weight.sum() * 0 + (1.0 if "mse" in names else 2.0))
    named(), named()
    names["l1"] = names.pop("mse")
    assert named().item() == 2


def test_a_state_with_its_entries_in_another_order() -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.Adam(model.parameters(), 0.1)
    step = fxwrap.train_step(lambda z: train(optimizer, model(z).square().sum()))
    step(x), step(x)
    twin, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    for number, one in state["state"].items():
        state["state"][number] = dict(reversed(one.items()))
    other = optim.Adam(twin.parameters(), 0.1)
    other.load_state_dict(state)
    optimizer.load_state_dict(copy.deepcopy(state))
    for _ in range(3):
        torch.testing.assert_close(step(x), train(other, twin(x).square().sum()))


def test_one_argument_given_twice_is_not_two_arguments() -> None:
    step = fxwrap.train_step(lambda a, b: (a + 10 * b).sum())
    one, two = torch.ones(2), torch.full((2,), 2.0)
    step(one, one), step(one, one)
    assert step(one, two).item() == 42
    held = torch.ones(3)
    mixed = fxwrap.train_step(lambda a: (held + 10 * a).sum())
    mixed(held), mixed(held)
    assert mixed(torch.full((3,), 2.0)).item() == 63


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 4, 2, 1), (4, 1, 0, 3, 2)])
def test_arguments_that_share_memory_and_are_written(order: tuple[int, ...]) -> None:
    """A part of another argument, another part, one tensor twice, a parameter, and tensors that lie apart."""
    model, optimizer = net(0.1)
    twin = copy.deepcopy(model)
    of_twin = optim.SGD(twin.parameters(), 0.1)

    def written(a: torch.Tensor, b: torch.Tensor, model: nn.Linear, optimizer: optim.Optimizer) -> torch.Tensor:
        with torch.no_grad():
            b.mul_(0.5)
        return train(optimizer, model(a).square().sum() + b.mean())

    def given(which: int, model: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
        one = torch.arange(8.0).view(4, 2) / 8
        return one, [one[:2], one[2:], one, model.weight, one[:2].clone()][which]

    step = fxwrap.train_step(lambda a, b: written(a, b, model, optimizer))
    for which in (*order, *order, *order):
        (a, b), (c, d) = given(which, model), given(which, twin)
        torch.testing.assert_close(step(a, b), written(c, d, twin, of_twin))
        torch.testing.assert_close((a, b, model.state_dict()), (c, d, twin.state_dict()))
    assert sum(step.traced.values()) == len(order), step.traced


def test_arguments_that_share_memory_and_are_read_are_as_any() -> None:
    rows = torch.arange(20.0).view(10, 2)
    model, optimizer = net(0.0)
    step = fxwrap.train_step(lambda a, b: train(optimizer, (model(a) - model(b)).square().sum()))
    for number in range(6):
        a, b = rows[number : number + 2], rows[2 * number % 7 : 2 * number % 7 + 2]
        torch.testing.assert_close(step(a, b), (model(a) - model(b)).square().sum().detach())
    assert sum(step.traced.values()) == 1


def test_an_argument_that_is_gone_is_not_another() -> None:
    model, optimizer = net()
    step = fxwrap.train_step(lambda f: f(train(optimizer, model(x).sum()) * 0 + 1))
    assert [step(lambda v, s=s: v * s).item() for s in (1, 2, 3, 4, 5)] == [1, 2, 3, 4, 5]


# -- things that change ---------------------------------------------------------------------------------------------


def test_another_dtype_in_the_same_tensor() -> None:
    model, optimizer = net(0.1)
    step = fxwrap.train_step(lambda: train(optimizer, model(torch.ones(1, 2, dtype=model.weight.dtype)).sum()))
    for _ in range(4):
        step()
    model.double()
    expected = model(torch.ones(1, 2).double()).sum().item()
    assert step().item() == pytest.approx(expected)


def test_settings_of_a_module_and_of_classes() -> None:
    class Settings:
        scale = 1.0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.settings, self.more = nn.Linear(2, 2), {"scale": 1.0}, types.SimpleNamespace(scale=1.0)

        def scaled(self, z: torch.Tensor) -> torch.Tensor:
            return self.layer(z) * self.settings["scale"] * self.more.scale * Settings.scale

    model = Model()
    optimizer = optim.SGD(model.parameters(), 0.0)
    step = fxwrap.train_step(lambda z: train(optimizer, model.scaled(z).sum()))
    step(x), step(x)
    first = step(x).item()
    model.settings["scale"] = 2.0
    assert step(x).item() == pytest.approx(2 * first)
    model.more.scale = 3.0
    assert step(x).item() == pytest.approx(6 * first)
    Settings.scale = 5.0
    assert step(x).item() == pytest.approx(30 * first)


def test_what_a_hook_closes_over() -> None:
    model, optimizer = net()
    scale = {"of": 1.0}
    model.register_forward_hook(lambda module, args, result: result * scale["of"])
    step = fxwrap.train_step(lambda z: train(optimizer, model(z).sum()))
    step(x), step(x)
    first = step(x).item()
    scale["of"] = 2.0
    assert step(x).item() == pytest.approx(2 * first)


@pytest.mark.parametrize("kind", [optim.Adam, optim.SGD, optim.NAdam])
def test_a_setting_that_changes_is_read_with_all_of_its_bits(kind: Any) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        twin, errors = copy.deepcopy(model), list[float]()
        more = {"momentum": 0.9} if kind is optim.SGD else {}
        optimizers = [kind(one.parameters(), 1e-2, **more) for one in (model, twin)]
        schedules = [optim.lr_scheduler.OneCycleLR(one, 2e-2, total_steps=36) for one in optimizers]
        step = fxwrap.train_step(lambda z: train(optimizers[0], model(z).square().mean()))
        for _ in range(6):
            z = torch.randn(5, 4)
            errors.append((step(z) - train(optimizers[1], twin(z).square().mean())).abs().item())
            for schedule in schedules:
                schedule.step()
        assert max(errors) < 1e-13, errors
    finally:
        torch.set_default_dtype(before)


def test_modes_that_a_step_sets() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    optimizer = optim.SGD(model.parameters(), 0.1)

    def written(z: torch.Tensor) -> torch.Tensor:
        model.train()
        return train(optimizer, model(z).sum())

    step = fxwrap.train_step(written)
    for _ in range(5):
        step(x)
        assert model.training and model[1].training
        model.eval()
    assert fxwrap.stats(step)["replays"] >= 1


# -- things that a step changes -------------------------------------------------------------------------------------


def test_optimizers_that_are_not_found_or_keep_numbers() -> None:
    class Lit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.opt = net(0.1)

        def training_step(self, z: torch.Tensor) -> torch.Tensor:
            return train(self.opt, self.net(z).sum())

    lit = Lit()
    step = fxwrap.train_step(lit.training_step)
    step(x), step(x)
    lit.opt.param_groups[0]["lr"] = 0.0
    weight = lit.net.weight.clone()
    step(x)
    assert torch.equal(weight, lit.net.weight)
    model, optimizer = net(0.1)
    assert "optimizers=[...]" in refusal(
        fxwrap.train_step(lambda given, z: train(given, model(z).sum())), optimizer, x
    )

    class Counts(optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1.0, "k": 0})
            self.n = 0

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            self.n += 1
            for group in self.param_groups:
                group["k"] += 1
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] / group["k"] / self.n * parameter.grad)

    counting = Counts(model.parameters())
    message = refusal(fxwrap.train_step(lambda z: train(counting, model(z).sum())), x)
    assert "setting k" in message and counting.n == 1 and counting.param_groups[0]["k"] == 1


def test_an_optimizer_that_counts_in_python() -> None:
    class Counts(optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(0.1 / state["step"] * parameter.grad)

    model = nn.Linear(2, 2)
    optimizer = Counts(model.parameters())
    step = fxwrap.train_step(lambda z: train(optimizer, model(z).sum()))
    assert "Python number, 'step'" in refusal(step, x)
    assert optimizer.state[model.weight]["step"] == 1


class _Holder(optim.Optimizer):
    """Hands its calls to another optimizer, as Accelerate's does, and makes nothing of its own."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class _Imitation:
    """Has the class of another optimizer, too, as Lightning's has."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self._optimizer = inner
        self.__class__ = type("Imitation", (_Imitation, type(inner)), {})  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@pytest.mark.parametrize("kind", [_Holder, _Imitation])
@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_in_another(kind: Any, given: bool) -> None:
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        inner = optim.Adam(model.parameters(), 0.1)
        outer = kind(inner)

        def written(z: torch.Tensor, model: Any = model, outer: Any = outer) -> torch.Tensor:
            return train(outer, model(z).square().mean())

        step = fxwrap.train_step(written, optimizers=[outer] if given else []) if compile_it else written
        losses = []
        for number in range(6):
            if number == 4:
                inner.param_groups[0]["lr"] = 0.05
            losses.append(step(x).clone())
        results.append((losses, inner.state_dict()["state"]))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    assert dict(step.traced) == {"first trace": 1}


def test_a_first_update_with_a_state_that_was_loaded() -> None:
    """A scheduler has the optimizer note its first step, which is not that of the first call."""
    model, _ = net()
    before = optim.Adam(model.parameters(), 0.1)
    train(before, model(x).sum())
    optimizer = optim.Adam(model.parameters(), 0.1)
    optimizer.load_state_dict(before.state_dict())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)

    def written(z: torch.Tensor, last: bool) -> torch.Tensor:
        loss = model(z).sum()
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step = fxwrap.train_step(written)
    for number in range(6):
        step(x, number % 2 == 1)
        if number % 2 == 1:
            scheduler.step()
    assert optimizer.state[model.weight]["step"] == 4
    assert dict(step.traced) == {"first trace": 1, "argument 1 is False, was True": 1}


def test_tensors_that_change_places() -> None:
    held = types.SimpleNamespace(before=torch.tensor(0.0), now=torch.tensor(0.0))

    def moves(value: torch.Tensor) -> torch.Tensor:
        held.before, held.now = held.now, value * 1
        return held.before

    step = fxwrap.train_step(moves)
    assert [step(torch.tensor(float(v))).item() for v in (1, 2, 3, 4)] == [0, 1, 2, 3]
    pair = types.SimpleNamespace(a=torch.zeros(1), b=torch.zeros(1))

    def ties() -> torch.Tensor:
        pair.a = pair.b
        pair.b.add_(1.0)
        return pair.a.sum()

    pair.a = torch.zeros(1)
    step = fxwrap.train_step(ties)
    step()
    pair.a = torch.zeros(1)
    with pytest.raises(fxwrap.TrainStepError, match="two of the names"):
        step()


def test_data_that_a_step_sets() -> None:
    model, _ = net()

    def written(z: torch.Tensor) -> None:
        (gradient,) = torch.autograd.grad(model(z).sum(), [model.weight])
        model.weight.data = model.weight.data - 0.1 * gradient

    assert "data" in refusal(fxwrap.train_step(written), x)
    assert model.weight.device.type == "cpu" and not is_fake(model.weight) and model(x).isfinite().all()


def test_a_refused_step_has_written_nothing_to_tensors_that_are_not_found() -> None:
    hidden = collections.deque([torch.zeros(1)])
    step = fxwrap.train_step(lambda: hidden[0].add_(1.0))
    assert "found in no module" in refusal(step)
    assert hidden[0].item() == 1


def test_objects_and_plain_leaves() -> None:
    model, optimizer = net()
    step = fxwrap.train_step(lambda z: types.SimpleNamespace(loss=train(optimizer, model(z).sum())))
    assert "SimpleNamespace" in refusal(step, x)
    alpha = torch.zeros((), requires_grad=True)
    of_alpha = optim.SGD([alpha], 0.1)
    step = fxwrap.train_step(lambda z: train(of_alpha, (z * alpha).sum()))
    for number in range(4):
        step(x)
        assert not is_fake(alpha.grad) and alpha.item() == pytest.approx(-0.6 * (number + 1))


def test_values_that_a_trace_would_leave_behind() -> None:
    class Slotted:
        __slots__ = ("value",)

    model, optimizer = net()
    held = Slotted()
    queue: collections.deque[Any] = collections.deque(maxlen=2)

    def in_slots(z: torch.Tensor) -> torch.Tensor:
        held.value = model(z)
        return train(optimizer, held.value.sum())

    def in_a_queue(z: torch.Tensor) -> torch.Tensor:
        loss = train(optimizer, model(z).sum())
        queue.append(loss)
        return loss

    for written in (in_slots, in_a_queue):
        assert "it leaves a tensor that it computes" in refusal(fxwrap.train_step(written), x)


# -- random numbers -------------------------------------------------------------------------------------------------


def test_generators_that_are_set() -> None:
    def seeds() -> torch.Tensor:
        torch.manual_seed(0)
        return torch.rand(1)

    def others() -> torch.Tensor:
        state = torch.get_rng_state()
        torch.rand(2)
        torch.set_rng_state(state)
        return torch.rand(4)

    def again() -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.get_rng_state()
        first = torch.rand(3)
        first.mul_(100)
        torch.set_rng_state(state)
        return first, torch.rand(3)

    assert "seed" in refusal(fxwrap.train_step(seeds))
    assert "other numbers" in refusal(fxwrap.train_step(others))
    step = fxwrap.train_step(again)
    for _ in range(4):
        first, second = step()
        torch.testing.assert_close(first, 100 * second)


def test_other_threads_keep_their_generators() -> None:
    weight, wrong = torch.ones(64, requires_grad=True), list[Any]()
    (model, optimizer), note = net(0.1), wrong.append  # the step does not reach the list by a name

    def other() -> None:
        dropped = checkpoint(lambda v: F.dropout(v * weight, 0.5), torch.ones(64), use_reentrant=False)
        (gradient,) = torch.autograd.grad(dropped.sum(), [weight])
        note(not torch.equal(gradient, dropped.detach()))

    def written(z: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return train(optimizer, model(z).sum())

    step = fxwrap.train_step(written)
    for _ in range(3):
        step(x)
    assert wrong and not any(wrong)
