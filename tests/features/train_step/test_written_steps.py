"""Steps as they are written: each habit beside the same loop in eager mode, and what the form refuses."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from written_habits import HABITS, IN_BFLOAT16, Made, mlp, simple, xy

import fxwrap
from fxwrap.features.train_step.codegen import as_it_stands
from fxwrap.features.train_step.codegen.tracing_state import is_fake
from fxwrap.features.train_step.written.found import found_in

pytestmark = pytest.mark.compiler
CALLS = 8
# Run without being asked; the others in ``pytest -m sweep``.
SAMPLE = {
    "accumulate_outside", "batchnorm", "custom_optimizer", "gan", "heads_take_turns", "load_later", "maml",
    "module_hooks", "onecycle", "param_hooks", "rebinding_optimizer", "scaler", "set_data", "skip_if", "tied",
    "wgan_gp", "zero_not_none",
}  # fmt: skip
named = [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.sweep, id=name) for name in HABITS]


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def state_of(step: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """All tensors that the code of a step reaches: parameters, buffers, states, its own."""
    return {name: tensor.detach() for tensor, name in found_in(step, {}).tensors.items()}


def run(make: Callable[[], Made], wrap: Callable[[Any], Any]) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
    """Make a habit's step, and call it. Returns what it returned, what it left, and the step."""
    torch.manual_seed(0)
    written, batch = make()
    step, results = wrap(written), list[Any]()
    for number in range(CALLS):
        torch.manual_seed(100 + number)
        results.append(tensors_in(step(*batch(number))))
        getattr(written, "after", lambda: None)()
    return results, state_of(written), step


@pytest.mark.parametrize("name", named)
def test_a_step_is_what_the_loop_is(name: str) -> None:
    expected, expected_state, _ = run(HABITS[name], lambda step: step)
    got, state, step = run(HABITS[name], fxwrap.train_step)
    tolerance = 1e-2 if name in IN_BFLOAT16 else 1e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(state, expected_state, rtol=tolerance, atol=tolerance, equal_nan=True)
    stats = fxwrap.stats(step)
    assert stats["programs"] >= 1 and not stats["fallbacks"], stats


@pytest.mark.parametrize("name", ["accumulate_outside", "gan", "scaler"])
def test_a_step_on_other_devices(name: str, device: torch.device) -> None:
    def make() -> Made:
        with device:
            written, batch = HABITS[name]()
        return written, lambda number: tree_map_only(torch.Tensor, lambda one: one.to(device), batch(number))

    expected, expected_state, _ = run(make, lambda step: step)
    got, state, step = run(make, fxwrap.train_step)
    # A step's optimizers count on the device, as with ``capturable``.
    torch.testing.assert_close(
        (got, state), (expected, expected_state), rtol=1e-4, atol=1e-4, equal_nan=True, check_device=False
    )
    assert fxwrap.stats(step)["programs"] >= 1


@pytest.mark.parametrize("kind", ["not reentrant", "reentrant", "none"])
def test_a_checkpoint_repeats_its_random_numbers(kind: str) -> None:
    """The mask of the gradient is the one of the loss, and another one at each call."""
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], 0.0)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * weight, 0.5)

    def written(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        x.requires_grad_()
        result = dropped(x) if kind == "none" else checkpoint(dropped, x, use_reentrant=kind == "reentrant")
        result.sum().backward()
        gradient = weight.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
        return result.detach(), gradient

    step, masks = fxwrap.train_step(written), []
    for _ in range(5):
        result, gradient = step(torch.ones(64))
        torch.testing.assert_close(result, gradient)
        masks.append(result != 0)
    assert fxwrap.stats(step)["replays"] >= 2
    assert not any(torch.equal(one, next_one) for one, next_one in itertools.pairwise(masks))


@pytest.mark.parametrize("name", named)
def test_numbers_are_those_of_inductors_wrapper_bit_for_bit(name: str) -> None:
    from torch._inductor.compile_fx import compile_fx

    def inductor(gm: Any, examples: Any, **_: Any) -> Any:
        return compile_fx(gm, list(examples))

    with mock.patch.object(as_it_stands, "fxwrap", inductor):
        expected, expected_state, _ = run(HABITS[name], fxwrap.train_step)
    got, state, _ = run(HABITS[name], fxwrap.train_step)
    torch.testing.assert_close((got, state), (expected, expected_state), rtol=0, atol=0, equal_nan=True)


# -- p.grad ------------------------------------------------------------------------------------------------------


def test_gradients_that_a_step_leaves_are_not_copied(device: torch.device) -> None:
    """Those of the call before are let go of first, unless somebody holds them."""
    with device:
        model, x = nn.Linear(3, 2), torch.randn(4, 3)
    twin, kept = copy.deepcopy(model), list[tuple[Any, Any]]()

    def written(x: torch.Tensor) -> None:
        model.zero_grad()
        (model(x) ** 2).sum().backward()

    step = fxwrap.train_step(written)
    for number in range(12):
        step(x + number)
        twin.zero_grad()
        (twin(x + number) ** 2).sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        if number == 7:
            (report,) = fxwrap.report(step).graphs
            specializations = list(report.program.specializations.values())
            assert specializations and not any(one.output_copies.copied for one in specializations)
        if number >= 7:  # held
            kept.append((model.weight.grad, twin.weight.grad))
    assert fxwrap.stats(step)["replays"] >= 3
    for got, expected in kept:
        torch.testing.assert_close(got, expected)


def test_a_gradient_that_the_step_clears_first_is_none_after_a_call() -> None:
    model = mlp()
    step = fxwrap.train_step(simple(model, torch.optim.SGD(model.parameters(), 0.1)))
    for _ in range(4):
        step(*xy())
    assert all(p.grad is None for p in model.parameters())


def test_stale_gradients_are_added_where_the_loop_adds_them() -> None:
    def one(wrap: Callable[[Any], Any]) -> Iterator[torch.Tensor]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = wrap(written)
        for number in range(7):
            if number in (3, 5):
                F.mse_loss(model(xy()[0]), xy()[1]).backward()
            yield step(*xy())
        yield from model.parameters()

    torch.testing.assert_close(list(one(fxwrap.train_step)), list(one(lambda step: step)), rtol=1e-5, atol=1e-5)


# -- what Python decides ----------------------------------------------------------------------------------------


def test_what_a_step_names_is_compared_at_each_call() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.scale = mlp(), 1.0
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
            self.settings = {"clip": 1.0}

        def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.scale * F.mse_loss(self.model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings["clip"])
            self.optimizer.step()
            return loss.detach()

    torch.manual_seed(0)
    trainer = Trainer()
    twin = copy.deepcopy(trainer)
    step, x, y = fxwrap.train_step(trainer.training_step), *xy()
    changes: list[Callable[[Trainer], object]] = [
        lambda t: setattr(t, "scale", 3.0),
        lambda t: t.settings.update(clip=0.01),
        lambda t: t.model.append(nn.Tanh()),
        lambda t: t.model[0].register_forward_hook(lambda module, args, result: 2 * result),
        lambda t: t.model[2].weight.register_hook(lambda gradient: -gradient),
        lambda t: t.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    ]
    for number in range(2 + 2 * len(changes)):
        if number >= 2 and number % 2 == 0:
            for one in (trainer, twin):
                changes[number // 2 - 1](one)
        torch.testing.assert_close(step(x, y), twin.training_step(x, y))
    assert sum(step.traced.values()) == 1 + len(changes)
    assert any("self.scale is 3.0, was 1.0" in reason for reason in step.traced), step.traced


def test_arguments_that_are_no_tensors_are_compared() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def written(x: torch.Tensor, y: torch.Tensor, kind: str, weight: float = 1.0) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = weight * (F.l1_loss if kind == "l1" else F.mse_loss)(model(x), y)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "kind": kind}

    step, batch = fxwrap.train_step(written), xy()
    for _ in range(2):
        for kind, weight in (("l1", 1.0), ("l2", 1.0), ("l1", 2.0)):
            result = step(*batch, kind, weight=weight)
            assert result["kind"] == kind and not result["loss"].requires_grad
            torch.testing.assert_close(result["loss"], written(*batch, kind, weight=weight)["loss"].detach())


def test_a_number_that_is_another_at_each_call_is_told_and_not_compiled_for_ever() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    twin = copy.deepcopy(model)
    of_twin = torch.optim.SGD(twin.parameters(), 0.1)

    def annealed(x: torch.Tensor, y: torch.Tensor, weight: float, model: Any, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight * F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, (x, y) = fxwrap.train_step(lambda x, y, weight: annealed(x, y, weight, model, optimizer)), xy()
    with torch.compiler.config.patch(recompile_limit=3), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in (0, 0, 1, 2, 3, 4, 2):
            torch.testing.assert_close(step(x, y, number / 4), annealed(x, y, number / 4, twin, of_twin))
    assert fxwrap.stats(step)["programs"] == 3 and sum(step.ordinary_calls.values()) == 3
    (warning,) = (str(one.message) for one in told if "programs" in str(one.message))
    assert (
        "traced for: first trace (1), argument 2 is 0.25, was 0.0 (1), argument 2 is 0.5, was 0.25 (1)" in warning
    ), warning


@pytest.mark.parametrize(("dynamic", "traces"), [(None, 3), (True, 2), (False, 5)])
def test_sizes_that_vary(dynamic: bool | None, traces: int) -> None:
    """A size of 1 is a trace of its own, as for any compiled function."""
    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y, reduction="sum") / x.shape[0]

    step = fxwrap.train_step(simple(model, torch.optim.Adam(model.parameters()), loss), dynamic=dynamic)
    loop = simple(twin, torch.optim.Adam(twin.parameters()), loss)
    for rows in (5, 5, 7, 9, 7, 1, 300, 5):
        batch = xy(rows)
        torch.testing.assert_close(step(*batch), loop(*batch), rtol=1e-5, atol=1e-5)
    assert sum(step.traced.values()) == traces, step.traced


# -- what is refused --------------------------------------------------------------------------------------------


def _refusal(written: Callable[..., Any], *batch: Any) -> str:
    step = fxwrap.train_step(written)
    before = {name: tensor.clone() for name, tensor in state_of(written).items()}
    step(*batch)
    after_one = {name: tensor.clone() for name, tensor in state_of(written).items()}
    with pytest.raises(fxwrap.TrainStepError) as error:
        step(*batch)
    left = state_of(written)
    assert left.keys() == after_one.keys() >= before.keys()
    for name, tensor in after_one.items():
        assert torch.equal(left[name], tensor), f"{name} was changed by a call that raised"
        assert not is_fake(left[name])
    return str(error.value)


def test_a_decision_on_data_is_an_error_with_its_line() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
        return loss

    message = _refusal(written, *xy())
    assert "if torch.isfinite(loss):" in message and "fxwrap.step_if" in message and __file__ in message


@pytest.mark.parametrize(
    "log", [lambda loss: f"{loss:.3f}", lambda loss: f"{loss.item():.3f}", lambda loss: loss.detach().numpy()]
)
def test_logging_of_a_loss_is_an_error_that_says_what_to_do(log: Callable[[torch.Tensor], Any]) -> None:
    model = mlp()

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        log(loss)
        return loss

    message = _refusal(written, *xy())
    assert "lambda loss" in message and "read numbers outside of the step" in message


def test_a_number_that_is_only_printed_is_told() -> None:
    model = mlp()

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        print(loss.item())
        return loss

    step, (x, y) = fxwrap.train_step(written), xy()
    step(x, y)
    with pytest.warns(UserWarning, match=r"print\(loss.item\(\)") as told:
        step(x, y)
    assert len([one for one in told if "what to do: return the tensor" in str(one.message)]) == 1
    torch.testing.assert_close(step(x, y), F.mse_loss(model(x), y).detach())


def test_a_number_that_is_computed_with_is_not_told() -> None:
    model = mlp()

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y) * x.sum().item()

    step, (x, y) = fxwrap.train_step(written), xy()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for scale in (1, 1, 2, 3):
            torch.testing.assert_close(step(scale * x, y), written(scale * x, y).detach())


@pytest.mark.parametrize("name", ["random", "numpy.random"])
def test_numbers_of_other_generators_are_refused(name: str) -> None:
    generator: Any = pytest.importorskip(name)
    generator.seed(0)
    model = mlp()

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y) * (generator.random() if name == "random" else generator.rand())

    first = fxwrap.train_step(written)
    first(*xy())
    drawn = generator.random() if name == "random" else generator.rand()
    generator.seed(0)
    assert "draws from" in _refusal(written, *xy())
    assert (generator.random() if name == "random" else generator.rand()) == drawn, "the trace has drawn"


def test_a_number_that_is_read_is_an_error() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    message = _refusal(written, *xy())
    assert "reads a number from a tensor" in message or "return the tensor" in message


def test_values_of_python_that_a_step_changes_are_named() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[Any] = []
    count = 0

    def appends(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = simple(model, optimizer)(x, y)
        losses.append(loss)
        return loss

    def counts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return simple(model, optimizer)(x, y)

    assert "adds to losses" in _refusal(appends, *xy())
    assert len(losses) == 1
    assert "the variable count" in _refusal(counts, *xy())
    assert count == 1


def test_a_tensor_that_is_not_found_is_named() -> None:
    model, hidden = mlp(), iter([torch.ones(3), torch.ones(3)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return simple(model, optimizer, lambda model, x, y: F.mse_loss(model(x) * next(hidden), y))(x, y)

    message = _refusal(written, *xy())
    assert "found in no module" in message and "float32[3]" in message and "next(hidden)" in message


def test_an_argument_gets_no_gradient() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = xy()
    assert "gradient of an argument" in _refusal(simple(model, optimizer), x.requires_grad_(), y)


def test_an_attribute_that_a_step_adds_is_named() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if model.training and hasattr(model, "seen"):
            model.hidden = model[0](x)
        model.seen = True
        return simple(model, optimizer)(x, y)

    assert "adds to model" in _refusal(written, *xy())
    assert not hasattr(model, "hidden")


def test_as_a_decorator() -> None:
    model = mlp()

    @fxwrap.train_step
    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    @fxwrap.train_step(dynamic=False, options={"capture": "always"})
    def with_options(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    batch = xy()
    for _ in range(5):
        assert torch.equal(plain(*batch), with_options(*batch))
    assert fxwrap.stats(plain)["replays"] and fxwrap.stats(with_options)["replays"]


def test_a_step_that_is_made_at_each_call_is_told() -> None:
    model, (x, y) = mlp(), xy()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(12):

            @fxwrap.train_step
            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return F.mse_loss(model(x), y)

            step(x, y)
    (warning,) = (one for one in told if "make the step once" in str(one.message))
    assert warning.filename == __file__


def test_wrong_arguments() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = simple(model, optimizer)
    for wrong in ({"clip_norm": 1.0}, {"accumulate": 2}, {"modules": [optimizer]}, {"optimizers": [model]}):
        with pytest.raises(fxwrap.TrainStepError):
            fxwrap.train_step(step, **wrong)
    with pytest.raises(fxwrap.TrainStepError, match="leave them out"):
        fxwrap.train_step(model, lambda model, x: model(x).sum(), optimizer, modules=[model])
    with pytest.raises(fxwrap.TrainStepError, match=r"train_step\(step, optimizers=\[...\]\)"):
        fxwrap.train_step(step, optimizer=optimizer)  # type: ignore[call-overload]
    with pytest.raises(fxwrap.TrainStepError, match="clip_norm"):
        fxwrap.train_step(clip_norm=1.0)(step)  # type: ignore[call-overload]
    with pytest.raises(fxwrap.TrainStepError, match="expected: a function"):
        fxwrap.train_step(3)  # type: ignore[call-overload]
    with pytest.raises(fxwrap.OptionError):
        fxwrap.train_step(step, options={"no such option": 1})
    with pytest.raises(fxwrap.TrainStepError, match=r"condition\.all"):
        fxwrap.step_if(torch.ones(2), optimizer)
    with pytest.raises(fxwrap.TrainStepError, match="modules and its optimizers"):
        copy.deepcopy(fxwrap.train_step(step))


# -- beside calls -----------------------------------------------------------------------------------------------


def test_sizes_that_are_recorded_may_be_more_than_the_limit_of_programs() -> None:
    """A recording asks for them; a call of another size runs as it is written."""
    model = mlp()
    step = fxwrap.train_step(simple(model, torch.optim.SGD(model.parameters(), 0.1)), dynamic=False)
    x, y = xy()
    step(x, y)
    with torch.compiler.config.patch(recompile_limit=1):
        for rows in (2, 3):
            fxwrap.record(step, (x[:rows], y[:rows]))
        for rows in (2, 3, 2):
            step(x[:rows], y[:rows])
        assert fxwrap.stats(step)["programs"] == 2 and sum(step.ordinary_calls.values()) == 1
        with pytest.warns(UserWarning, match="2 programs"):
            step(x[:4], y[:4])
    assert sum(step.ordinary_calls.values()) == 2


def test_reports_records_and_dry_runs_change_nothing() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    step, batch = fxwrap.train_step(simple(model, optimizer)), xy()
    for calls in range(2):
        before, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        fxwrap.record(step, batch)
        fxwrap.record(step, batch, dry_run=True)
        assert "float32[8, 6]" in str(fxwrap.explain(step, *batch))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert optimizer.state_dict()["param_groups"] == states["param_groups"]
        torch.testing.assert_close(optimizer.state_dict()["state"], states["state"], rtol=0, atol=0)
        for _ in range(3 * (1 - calls)):
            step(*batch)
    assert fxwrap.stats(step)["replays"] >= 1 and "model.0.weight" in str(fxwrap.report(step))


def test_a_limit_of_bytes_holds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with pytest.raises(fxwrap.MemoryLimitError) as error:
        step = fxwrap.train_step(written, memory_limit=1000)
        for _ in range(2):
            step(torch.randn(128, 64))
    free = fxwrap.train_step(written)
    for _ in range(3):
        free(torch.randn(128, 64))
    limited = fxwrap.train_step(written, memory_limit=error.value.least)
    for _ in range(5):
        limited(torch.randn(128, 64))
    assert fxwrap.stats(limited)["replays"] >= 1


def test_threads_take_turns() -> None:
    import threading

    torch.manual_seed(0)
    model = mlp()
    step, batch = fxwrap.train_step(simple(model, torch.optim.SGD(model.parameters(), 0.0))), xy()
    expected, wrong = step(*batch), list[Any]()

    def calls() -> None:
        for _ in range(20):
            got = step(*batch)
            if not torch.allclose(got, expected):
                wrong.append(got)

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_batch_is_not_kept() -> None:
    model = mlp()
    step = fxwrap.train_step(simple(model, torch.optim.SGD(model.parameters(), 0.1)))
    x, y = xy()
    import weakref

    for _ in range(3):
        step(x, y)
    gone = weakref.ref(x)
    del x
    assert gone() is None
