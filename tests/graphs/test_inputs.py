"""Inputs: updated in place, moved, refilled, laid out in every way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, freezes, inductor, on_simulated, tensors_in

from fxwrap.graphs.replay.ranges import copies_to_inputs


def test_in_place_update_is_seen_by_the_caller(compiled: Any, device: torch.device) -> None:
    def g(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        x.mul_(2)
        return x.sum() + counter

    f: Compiled = compiled(g)
    counter, expected = torch.zeros(3, device=device), torch.zeros(3, device=device)
    for _ in range(5):
        x = torch.randn(4, device=device)
        twin = x.clone()
        got, want = f(x, counter), g(twin, expected)
        torch.testing.assert_close(got, want)
        assert torch.equal(x, twin) and torch.equal(counter, expected)
    assert f.program.counters.replays == 3


def test_batch_norm_keeps_its_statistics(compiled: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    twin = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    twin.load_state_dict(model.state_dict())
    ours, theirs = compiled(model), torch.compile(twin, backend="inductor")
    for _ in range(5):
        x = torch.randn(2, 3, 8, 8)
        a, b = ours(x), theirs(x)
        assert_same(a, b)
        a.sum().backward()
        b.sum().backward()
    for p, q in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(p, q)


def test_an_optimizer_step_between_calls(compiled: Any) -> None:
    model, twin = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    twin.load_state_dict(model.state_dict())
    ours, theirs = compiled(model), torch.compile(twin, backend="inductor")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    for _ in range(6):
        x = torch.randn(4, 8)
        for compiled_model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            compiled_model(x).square().sum().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_swapped_parameter_memory(compiled: Any, device: torch.device) -> None:
    """``p.data = new`` moves a parameter: a recording that relied on its address must not be used."""
    model = torch.nn.Linear(8, 8).to(device)
    f: Compiled = compiled(model)
    x = torch.randn(2, 8, device=device)
    with torch.no_grad():
        for call in range(12):
            if call % 4 == 3:
                model.weight.data = torch.randn(8, 8, device=device)
            torch.testing.assert_close(f(x), model(x))
    counters = f.program.counters
    assert 1 <= counters.events["a static input has moved"] <= 3
    assert counters.recordings["inputs moved"] == counters.events["a static input has moved"]
    assert counters.replays >= 4


def _set_data(model: torch.nn.Linear, value: torch.Tensor) -> None:
    model.weight.data = value


def _load(model: torch.nn.Linear, value: torch.Tensor) -> None:
    model.load_state_dict({"weight": value, "bias": model.bias.detach()}, assign=True)


def _set_parameter(model: torch.nn.Linear, value: torch.Tensor) -> None:
    model.weight = torch.nn.Parameter(value)


_REPLACE = [_set_data, _load, _set_parameter]


def _call(f: Callable[..., Any], model: torch.nn.Linear, x: torch.Tensor, training: bool) -> None:
    """Compare with eager; in training the gradients, too."""
    if not training:
        with torch.no_grad():
            torch.testing.assert_close(f(x), model(x))
        return
    model.zero_grad()
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    f(x).square().sum().backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def _recordings(f: Compiled) -> int:
    """Of the program that was recorded most often; a recompilation counts as a program of its own."""
    return max(sum(program.counters.recordings.values()) for program in f.programs)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("replace", _REPLACE)
def test_a_parameter_replaced_once(
    compiled: Any, device: torch.device, own_arenas: Any, replace: Any, training: bool
) -> None:
    """Recorded for the new address, and replayed from then on."""
    model = torch.nn.Linear(16, 16).to(device)
    f: Compiled = compiled(model)
    for _ in range(8):
        _call(f, model, torch.randn(4, 16, device=device), training)
    before = {program: sum(program.counters.recordings.values()) for program in f.programs}
    replace(model, torch.randn(16, 16, device=device))
    for _ in range(20):
        _call(f, model, torch.randn(4, 16, device=device), training)
    for program in f.programs:
        assert sum(program.counters.recordings.values()) <= before.get(program, 1) + 2, program.counters.to_dict()
    assert sum(f.replays()) >= (8 - 4 + 20 - 3) * (1 + training), [p.counters.to_dict() for p in f.programs]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_parameter_swapped_in_turn(
    compiled: Any, device: torch.device, own_arenas: Any, training: bool, count: int
) -> None:
    """Between a few addresses: each has its recording. Among more: it is taken to stay nowhere."""
    model = torch.nn.Linear(16, 16).to(device)
    f: Compiled = compiled(model)
    values = [torch.randn(16, 16, device=device) for _ in range(count)]
    for value in itertools.islice(itertools.cycle(values), 30):
        model.weight.data = value
        _call(f, model, torch.randn(4, 16, device=device), training)
    assert _recordings(f) <= 4, [program.counters.to_dict() for program in f.programs]
    assert all(replays >= 20 for replays in f.replays()), [program.counters.to_dict() for program in f.programs]


def _update(cache: torch.Tensor, position: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(0, position, row)
    return cache.sum(0)


def _rows(device: torch.device, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([call % 256], device=device), torch.randn(1, 1024, device=device)


def test_a_cache_that_is_updated_where_it_is(compiled: Any, device: torch.device, own_arenas: Any) -> None:
    """An argument of 1 MiB at one address: nobody copies it to a place and back."""
    f: Compiled = compiled(_update)
    cache = torch.zeros(256, 1024, device=device)
    twin = cache.clone()
    for call in range(8):
        position, row = _rows(device, call)
        torch.testing.assert_close(f(cache, position, row), _update(twin, position, row))
        assert torch.equal(cache, twin)
        if call == 1:
            (recording,) = f.program.specializations.recordings()
            placeholders = [n for n in f.program.plan.graph.graph.nodes if n.op == "placeholder"]
            where = [i for i, node in enumerate(placeholders) if node.meta["val"].numel() == 256 * 1024]
            assert (recording.request.static_inputs == where) == freezes(device)
            names = [part.name for part in recording._replay.parts]
            assert copies_to_inputs(recording.request.name) not in names, "nothing is copied back"
        assert own_arenas.kept(device) < 64 << 10
    assert sum(f.program.counters.recordings.values()) <= 2 and f.program.counters.replays >= 5


def test_a_cache_swapped_in_turn(compiled: Any, device: torch.device, own_arenas: Any) -> None:
    f: Compiled = compiled(_update)
    caches = [torch.zeros(256, 1024, device=device) for _ in range(3)]
    twins = [cache.clone() for cache in caches]
    for call in range(24):
        position, row = _rows(device, call)
        cache, twin = caches[call % 3], twins[call % 3]
        torch.testing.assert_close(f(cache, position, row), _update(twin, position, row))
        assert all(map(torch.equal, caches, twins))
    assert sum(f.program.counters.recordings.values()) <= 4 and f.program.counters.replays >= 18


def test_a_freed_parameter_is_not_kept_alive(compiled: Any) -> None:
    """A recording knows addresses; it does not hold the tensors there."""
    import gc
    import weakref

    model = torch.nn.Linear(8, 8)
    f: Compiled = compiled(model)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(4):
            f(x)
        old = model.weight.untyped_storage()._cdata
        assert old
        storage = torch.multiprocessing.reductions.StorageWeakRef(model.weight.untyped_storage())
        model.weight.data = torch.randn(8, 8)
        gc.collect()
        assert storage.expired()
    assert weakref.ref(model)() is model


@pytest.mark.parametrize("layout", ["offset", "transposed", "expanded", "channels_last", "strided"])
def test_layouts_of_inputs(compiled: Any, device: torch.device, layout: str) -> None:
    def g(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.reshape(-1, 4) @ w).sum(0) + x.flatten()[:4]

    def make() -> torch.Tensor:
        if layout == "offset":
            return torch.randn(48, device=device)[16:32].view(4, 4)
        if layout == "transposed":
            return torch.randn(4, 4, device=device).t()
        if layout == "expanded":
            return torch.randn(1, 4, device=device).expand(4, 4)
        if layout == "strided":
            return torch.randn(4, 8, device=device)[:, ::2]
        return torch.randn(2, 4, 2, 2, device=device).to(memory_format=torch.channels_last)

    f: Compiled = compiled(g)
    theirs = inductor(g)
    w = torch.randn(4, 4, device=device)
    for _ in range(4):
        x = make()
        assert_same(f(x, w), theirs(x, w))
    assert f.program.counters.replays == 2


def test_storage_offset_in_a_library_call(compiled: Any, device: torch.device) -> None:
    """Stock FX conversion counts view offsets from the start of the storage and is wrong here."""
    f: Compiled = compiled(lambda x, w: torch.mm(x.view(4, 4), w))
    w = torch.randn(4, 4, device=device)
    for _ in range(4):
        base = torch.randn(64, device=device)
        x = base[16:32]
        torch.testing.assert_close(f(x, w), x.view(4, 4) @ w)


def test_refilled_input(compiled: Any, device: torch.device) -> None:
    """The same tensor object with new contents: replay reads what is there now."""
    f: Compiled = compiled(lambda x: x.sin() @ x)
    x = torch.empty(4, 4, device=device)
    for _ in range(5):
        x.normal_()
        torch.testing.assert_close(f(x), x.sin() @ x)


@pytest.mark.parametrize("where", ["one tensor", "memory that is used again"])
def test_an_input_that_stays_is_not_copied(compiled: Any, device: torch.device, where: str) -> None:
    """
    ::

        call      1          2                     3 ... 24     25                   26 ...
        input     warm-up    there still: static   read         recorded anew for    copied to its buffer
                                                   where it is  another: it moves
    """
    f: Compiled = compiled(lambda x, y: (x.sin() @ x + y).cos())
    x, y = torch.randn(2, 8, 8, device=device)
    for _ in range(24):
        x.copy_(torch.randn(8, 8))
        torch.testing.assert_close(f(x, y), (x.sin() @ x + y).cos())
        if where != "one tensor":
            y = y.clone()  # this one moves
    (recording,) = f.program.specializations.recordings()
    static = recording.request.static_inputs
    assert len(static) == (0 if not freezes(device) else 2 if where == "one tensor" else 1)
    assert f.program.counters.recordings == {"first": 1}
    # It moves after all: copied for good.
    for _ in range(24):
        x = torch.randn(8, 8, device=device)
        kept = x  # noqa: F841
        torch.testing.assert_close(f(x, y), (x.sin() @ x + y).cos())
    assert f.program.counters.recordings.get("inputs moved", 0) == int(freezes(device))
    assert f.program.counters.replays == 46 - int(freezes(device))


def test_another_dtype_rank_and_grad_recompile(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: (x * 2).sum(-1))
    for make in (
        lambda: torch.randn(4, 4),
        lambda: torch.randn(4, 4, dtype=torch.float64),
        lambda: torch.randn(2, 4, 4),
        lambda: torch.randn(4, 4, requires_grad=True),
    ):
        # Programs share an arena. One that needs more has it grow, and then what is in it is recorded again.
        for _ in range(5):
            x = make()
            out = f(x)
            torch.testing.assert_close(out, (x * 2).sum(-1))
            if x.requires_grad:
                out.sum().backward()
                torch.testing.assert_close(x.grad, torch.full_like(x, 2))
    assert len(f.programs) == 5  # the last one has a backward
    assert all(program.counters.replays for program in f.programs)


def test_inference_mode_and_back(compiled: Any) -> None:
    model = torch.nn.Linear(4, 4)
    f: Compiled = compiled(model)
    for _ in range(3):
        x = torch.randn(2, 4)
        with torch.inference_mode():
            torch.testing.assert_close(f(x), model(x))
        with torch.no_grad():
            torch.testing.assert_close(f(x), model(x))
        out = f(x)
        out.sum().backward()


@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("model", ["planned", "of an operator", "of eager work", "a view"])
def test_outputs_of_inference_mode(compiled: Any, device: torch.device, keep: bool, model: str) -> None:
    """Inference tensors while it is on, whoever made them: warm-up, the call that records, replays, copies."""
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "planned": lambda x: (x.sin() @ x + 1, x.sum()),
        "of an operator": lambda x: x.sin().cumsum(0).sort(),
        "of eager work": lambda x: torch.nn.functional.conv2d(x.sin()[None, None], x[None, None, :3, :3]),
        "a view": lambda x: (x.sin() @ x).t()[1:],
    }
    options = {"eager_ops": "aten::convolution"} if model == "of eager work" else {}
    f: Compiled = compiled(functions[model], options=options)
    kept = []
    for on in (True, False, True, False, True):
        for _ in range(5):
            with torch.inference_mode(on):
                x = torch.randn(8, 8, device=device)
                outputs = tensors_in(f(x))
                expected = tensors_in(functions[model](x))
            for output, value in zip(outputs, expected, strict=True):
                assert output.is_inference() == on
                torch.testing.assert_close(output, value)
            if keep:
                kept += zip(outputs, expected, strict=True)
            del output, outputs
    for output, value in kept:
        torch.testing.assert_close(output, value)
    assert all(f.replays())


def test_random_numbers_follow_the_seed(compiled: Any) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    f: Compiled = compiled(g)
    theirs = inductor(g)
    for seed in range(5):
        x = torch.randn(32)
        torch.manual_seed(seed)
        a = f(x)
        torch.manual_seed(seed)
        b = theirs(x)
        assert_same(a, b)
        c = f(x)
        assert not torch.equal(a, c)


def test_an_input_that_lands_where_another_was_freed_is_not_taken_to_stay(compiled: Any) -> None:
    """Equal addresses in two calls are often chance: the allocator gives again what was just freed."""
    f: Compiled = compiled(lambda w, x: x @ w)
    w, memory = torch.randn(8, 8), bytearray(64)
    f(w, torch.randn(2, 8))
    f.program.specializations.clear()
    # AOTAutograd calls all saved activations static, in the hope that the forward program makes them so.
    object.__setattr__(f.program.plan.inputs, "static", frozenset({0, 1}))
    for _ in range(5):
        x = torch.frombuffer(memory, dtype=torch.float32).view(2, 8)  # another storage, the same address
        x.normal_()
        torch.testing.assert_close(f(w, x), x @ w)
        del x
    (recording,) = f.program.specializations.values()[0].recordings
    assert len(recording.request.static_inputs) == 1  # w
    assert f.program.counters.events == {}


def test_conjugated_parameters(compiled: Any) -> None:
    """Their memory alone does not say what they are: they are not static."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randn(4, 4, dtype=torch.complex64).conj())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    model = Model()
    f: Compiled = compiled(model)
    for _ in range(5):
        x = torch.randn(4, 4, dtype=torch.complex64)
        torch.testing.assert_close(f(x), model(x))


def test_an_offset_that_counts_from_the_start_of_a_planned_storage(compiled: Any, device: torch.device) -> None:
    """``as_strided`` finds its elements by their place in the storage, and a planned one is a part of an arena."""

    def g(x: torch.Tensor) -> torch.Tensor:
        first, second = x * 2j, x * 3j
        return torch.view_as_real(torch.as_strided_copy(second, (2, 2), (6, 1), 3) + first[:2, :2])

    f: Compiled = compiled(g)
    for _ in range(4):
        x = torch.randn(6, 6, dtype=torch.complex64, device=device)
        torch.testing.assert_close(f(x), g(x))
    assert f.program.counters.replays == 2


@pytest.mark.parametrize("operator", [torch.as_strided, torch.as_strided_copy])
def test_an_offset_that_counts_from_the_start_of_an_inputs_storage(
    compiled: Any, device: torch.device, operator: Any
) -> None:
    """It may reach what lies before the input itself, of which a recording with fixed addresses has no copy."""
    f: Compiled = compiled(lambda x: torch.view_as_real(operator(x, (2, 2), (6, 1), 3) * 1j))
    for _ in range(4):
        x = torch.randn(8, 6, dtype=torch.complex64, device=device)[2:]
        torch.testing.assert_close(f(x), torch.view_as_real(torch.as_strided(x, (2, 2), (6, 1), 3) * 1j))
    counters = f.program.counters
    assert counters.replays == 2 or any("storage outside of the input" in reason for reason in counters.eager)


#   arena   | w0 | w1 | ... | w7 |      weight.data = w0, w1, ... in turn; recordings for four addresses are kept
@torch.no_grad()
def test_a_parameter_that_lies_at_many_places_of_an_arena_in_turn(compiled: Any, own_arenas: Any) -> None:
    """Weights that another program makes: after a few moves the parameter is copied like any other input."""
    with on_simulated() as device:
        make: Compiled = compiled(lambda x: tuple((x + k).cos() @ x for k in range(8)))
        model, x = torch.nn.Linear(8, 8).to(device), torch.ones(8, 8, device=device)
        f: Compiled = compiled(lambda x: model(x).relu())
        for _ in range(6):
            weights = None
            weights = make(x)
        assert weights is not None
        for call in range(60):
            model.weight.data = weights[call % 8]
            expected = torch.nn.functional.linear(x, weights[call % 8], model.bias).relu()
            torch.testing.assert_close(f(x), expected, rtol=1e-4, atol=1e-4)
        counters = f.program.counters
        assert sum(counters.recordings.values()) <= 10 and counters.replays >= 45, counters.to_dict()
