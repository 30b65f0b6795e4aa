"""Habits of training loops: what people do around steps, with fxwrap's step in the place of the ordinary one.

Each habit is written once, over a maker of steps, and is run twice: with ordinary steps and with fxwrap's.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import Maker, Net, OrdinaryStep, assert_same, batch, squares, values
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import fxwrap


def _made(make: Maker, **settings: Any) -> tuple[Net, optim.Optimizer, Any]:
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, make(model, squares, optimizer, **settings)


# -- the learning rate, and other settings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1)),
    ],
    ids=["steps", "cosine", "lambda"],
)
def test_schedulers_compile_nothing_anew(scheduler: Any) -> None:
    def habit(make: Maker) -> Iterator[Any]:
        _, optimizer, step = _made(make)
        schedule = scheduler(optimizer)
        for _ in range(8):
            yield step(*batch())
            schedule.step()
        yield schedule.get_last_lr()

    assert fxwrap.stats(assert_same(habit))["programs"] == 1


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD], ids=["AdamW", "SGD"])
def test_a_schedule_of_momentum_compiles_once_more(kind: Any) -> None:
    """OneCycleLR changes beta1 or the momentum with each step. From its first change on it is a tensor, too."""

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        optimizer = kind(model.parameters(), lr=1e-2, **({"momentum": 0.9} if kind is optim.SGD else {}))
        step, schedule = make(model, squares, optimizer), lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12)
        for _ in range(8):
            yield step(*batch())
            schedule.step()

    assert fxwrap.stats(assert_same(habit, 1e-4))["programs"] == 2


def test_a_plateau() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        _, optimizer, step = _made(make)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        for _ in range(5):
            loss = step(*batch())
            schedule.step(loss)
            yield loss, optimizer.param_groups[0]["lr"]

    assert_same(habit)


def test_settings_that_are_set_by_hand() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, optimizer, step = _made(make)
        for lr, decay in ((1e-2, 0.0), (1e-3, 0.0), (1e-3, 0.5), (1e-3, 0.5), (1e-2, 0.25)):
            optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_a_learning_rate_that_is_a_tensor() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, rate = Net(), torch.tensor(1e-2)
        step = make(model, squares, optim.Adam(model.parameters(), lr=rate))
        for _ in range(4):
            yield step(*batch())
            rate.mul_(0.5)

    assert fxwrap.stats(assert_same(habit))["programs"] == 1


def test_groups_with_rates_of_their_own() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1, "lr": 1e-2}, {"params": others, "weight_decay": 0.0}]
        step = make(model, squares, optim.AdamW(groups, lr=1e-3))
        for _ in range(6):
            yield step(*batch())

    assert_same(habit)


# -- states ------------------------------------------------------------------------------------------------------


def test_states_are_those_that_the_loop_makes_when_it_makes_them() -> None:
    """Not of parameters without a gradient; a later first gradient is no call that runs as it is written."""
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)])
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    step = fxwrap.train_step(model, lambda m, x, head: m[head](x).square().mean(), optimizer)
    used = set[torch.Tensor]()
    for head in (0, 0, 1, 0, 1):
        step(batch()[0], head)
        used |= {*model[head].parameters()}
        assert {p for p in model.parameters() if optimizer.state.get(p)} == used
    assert not step.ordinary_calls
    counts = [int(optimizer.state[one.weight]["step"]) for one in (model[0], model[1])]
    assert counts == [3, 2]


# -- which parameters are trained --------------------------------------------------------------------------------


def test_a_group_that_is_added() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        optimizer = optim.AdamW(model.last.parameters(), lr=1e-2)
        step = make(model, squares, optimizer)
        for _ in range(3):
            yield step(*batch())
        optimizer.add_param_group({"params": model.first.parameters(), "lr": 1e-3})
        for _ in range(3):
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_frozen_parameters_that_thaw() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, _, step = _made(make)
        model.first.requires_grad_(False)
        for _ in range(3):
            yield step(*batch())
        yield values(model.first)
        model.first.requires_grad_(True)
        for _ in range(3):
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_tied_parameters() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 3))
        model[2].weight = model[0].weight
        step = make(model, squares, optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_parameters_that_the_loss_does_not_use() -> None:
    """They get no gradient, and so no weight decay."""

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        model.unused = nn.Linear(2, 2)
        step = make(model, squares, optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5))
        for _ in range(3):
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_an_optimizer_of_some_parameters() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, squares, optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9))
        for _ in range(4):
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_two_optimizers_in_turn() -> None:
    """As for a GAN: each step trains one part."""

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        one = make(model, squares, optim.Adam(model.first.parameters(), lr=1e-2))
        other = make(model, lambda model, x, y: -squares(model, x, y), optim.SGD(model.last.parameters(), lr=1e-3))
        for _ in range(4):
            yield one(*batch()), other(*batch(3))
        yield values(model)

    assert_same(habit)


# -- what modules do ------------------------------------------------------------------------------------------------


class WithBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # type: ignore[operator]
        return super().forward(x)


def test_buffers_and_evaluation_between_steps() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = WithBuffers()
        step = make(model, squares, optim.SGD(model.parameters(), lr=1e-2))
        for _ in range(4):
            yield step(*batch())
            model.eval()
            with torch.no_grad():
                yield model(batch(3, 7)[0])
            model.train()
        yield values(model)

    assert_same(habit)


def test_steps_in_evaluation_mode() -> None:
    """A fine-tuning that keeps the statistics of its norms."""

    def habit(make: Maker) -> Iterator[Any]:
        model = WithBuffers()
        step = make(model, squares, optim.SGD(model.parameters(), lr=1e-2))
        yield step(*batch())
        model.norm.eval()
        for _ in range(3):
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_dropout_draws_anew_and_is_reproducible() -> None:
    """Inductor draws other numbers than eager torch: they are compared with themselves."""
    model = nn.Sequential(Net(), nn.Dropout(0.5))
    step = fxwrap.train_step(model, squares, optim.SGD(model.parameters(), lr=0.0))

    def drawn() -> list[float]:
        torch.manual_seed(3)
        return [float(step(*batch())) for _ in range(6)]

    first = drawn()
    assert len(set(first)) > 3 and drawn() == first


def test_autocast() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = model(x)
        return ((z.float() - y) ** 2).mean()

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, loss, optim.AdamW(model.parameters(), lr=1e-2))
        for _ in range(4):
            yield step(*batch())
        assert all(p.dtype is torch.float32 for p in model.parameters())

    assert_same(habit, 2e-2)


def test_checkpointed_activations() -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = torch.utils.checkpoint.checkpoint(lambda x: self.norm(self.first(x)).relu(), x, use_reentrant=False)
            return self.last(z)

    def habit(make: Maker) -> Iterator[Any]:
        model = Checkpointed()
        step = make(model, squares, optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            yield step(*batch())

    assert_same(habit)


def test_a_model_that_is_compiled_already() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(torch.compile(model, backend="fxwrap"), squares, optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            yield step(*batch())

    assert_same(habit)


def test_double_precision() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = Net().double()
        step = make(model, squares, optim.Adam(model.parameters(), lr=1e-2))
        for _ in range(4):
            yield step(*(value.double() for value in batch()))

    assert_same(habit)


# -- losses and batches ---------------------------------------------------------------------------------------------


def test_batches_of_a_loader_with_a_short_last_one() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        _, _, step = _made(make)
        data = DataLoader(TensorDataset(*batch(11)), batch_size=4)
        for x, y in itertools.chain(data, data, data):
            yield step(x, y)

    step = assert_same(habit)
    assert fxwrap.stats(step)["replays"] >= 3


def test_losses_that_are_kept() -> None:
    """A loss stays what it was while later steps run."""

    def habit(make: Maker) -> Iterator[Any]:
        _, _, step = _made(make)
        yield [step(*batch()) for _ in range(8)]

    assert_same(habit)


def test_what_a_loss_returns_beside_itself() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = model(x)
        return ((z - y) ** 2).mean(), z, z.argmax(-1)

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, loss, optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            outputs = step(*batch())
            yield outputs
            assert not any(output.requires_grad for output in outputs)

    assert_same(habit)


def test_arguments_by_name_and_classes_as_targets() -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(model: nn.Module, x: torch.Tensor, *, target: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return criterion(model(x), target) * scale

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, loss, optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            yield step(batch()[0], target=torch.tensor([0, 2, 1, 1, 0]))
        yield step(batch()[0], target=torch.tensor([0, 2, 1, 1, 0]), scale=0.5)

    assert_same(habit)


def test_a_batch_of_dictionaries() -> None:
    def loss(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(data["x"]), data["y"])

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, loss, optim.SGD(model.parameters(), lr=0.1))
        for seed in range(4):
            yield step(dict(zip("xy", batch(seed=seed), strict=True)))

    assert_same(habit)


def test_clipped_gradients() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, _, step = _made(make, clip_norm=0.05)
        for _ in range(5):
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_micro_batches() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, _, step = _made(make, accumulate=3, clip_norm=0.5)
        for seed in range(9):
            yield step(*batch(seed=seed))
            yield values(model)

    step = assert_same(habit)
    assert step.micro_batches == 0


def test_a_loss_that_is_not_finite() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, _, step = _made(make)
        x, y = batch()
        yield bool(step(x * float("nan"), y).isnan())
        yield all(bool(p.isnan().all()) for p in model.parameters())

    assert_same(habit)


# -- saving, loading, copying ----------------------------------------------------------------------------------------


def _through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def test_a_checkpoint_is_resumed_in_new_objects() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, optimizer, step = _made(make)
        for _ in range(3):
            yield step(*batch())
        saved = _through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        model, optimizer, step = _made(make)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for _ in range(3):
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_a_checkpoint_is_loaded_into_the_same_objects() -> None:
    """The optimizer has other tensors then, and the same program takes them."""

    def habit(make: Maker) -> Iterator[Any]:
        model, optimizer, step = _made(make)
        yield step(*batch())
        saved = _through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        for _ in range(3):
            yield step(*batch())
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for _ in range(3):
            yield step(*batch())
        yield values(model)

    assert fxwrap.stats(assert_same(habit))["programs"] == 1


def test_checkpoints_are_the_ordinary_ones() -> None:
    """What one kind of step has saved, the other loads."""
    for makers in ((OrdinaryStep, fxwrap.train_step), (fxwrap.train_step, OrdinaryStep)):
        torch.manual_seed(0)
        model, optimizer, step = _made(makers[0])
        step(*batch())
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        expected = [step(*batch()) for _ in range(3)]
        other, other_optimizer, other_step = _made(makers[1])
        other.load_state_dict(saved[0])
        other_optimizer.load_state_dict(saved[1])
        torch.testing.assert_close([other_step(*batch()) for _ in range(3)], expected, rtol=1e-5, atol=1e-5)


def test_ordinary_steps_between() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, optimizer, step = _made(make)
        for _ in range(3):
            yield step(*batch())
            yield OrdinaryStep(model, squares, optimizer)(*batch(seed=2))

    assert_same(habit)


def test_averages_of_parameters() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, _, step = _made(make)
        average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for _ in range(4):
            step(*batch())
            average.update_parameters(model)
            yield values(average)

    assert_same(habit)


def test_copies_and_parameters_that_are_written_between() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, _, step = _made(make)
        step(*batch())
        kept = copy.deepcopy(model)
        for _ in range(3):
            yield step(*batch())
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.3, 0.3)
        yield values(kept)
        model.first.weight.data = torch.zeros_like(model.first.weight)
        yield step(*batch()), values(model)

    assert_same(habit)


def test_state_that_is_changed_by_hand() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, optimizer, step = _made(make)
        for _ in range(2):
            step(*batch())
        state = optimizer.state[model.first.weight]
        state["exp_avg"].zero_()
        yield step(*batch()), values(model)
        state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])  # another tensor
        yield step(*batch()), values(model)
        optimizer.state[model.first.weight] = {name: value.clone() for name, value in state.items()}
        yield step(*batch()), values(model)
        optimizer.state.clear()
        yield step(*batch()), values(model)

    assert fxwrap.stats(assert_same(habit))["programs"] == 1


def test_zero_grad_stays_harmless() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model, optimizer, step = _made(make)
        for _ in range(3):
            optimizer.zero_grad()
            yield step(*batch())
        yield values(model)

    assert_same(habit)


def test_many_steps_in_one_process() -> None:
    """Dynamo compiles one function a few times only: each step is a function of its own."""
    for _ in range(10):
        _, _, step = _made(fxwrap.train_step)
        step(*batch())
        assert fxwrap.stats(step)["programs"] == 1


def test_a_step_is_a_compiled_function_to_the_rest_of_fxwrap() -> None:
    _, _, step = _made(fxwrap.train_step)
    for _ in range(4):
        step(*batch())
    assert "TrainStep of Net with AdamW" in repr(step)
    assert fxwrap.stats(step)["replays"] >= 1
    assert "inference" in str(fxwrap.report(step))
    assert fxwrap.release(step) >= 0
