"""Promise 2: an output is never overwritten while anyone can still read it. Footguns as tests."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Compiled, freezes

# What is done about live outputs where their memory is the recording's own.
_LIVE, _COPIED = "an output of an earlier call is live", "live outputs are copied from now on"


def _large(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + 1


def test_first_output_survives_the_second_call(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    for _ in range(4):
        x, y = torch.randn(2, 8, device=device)
        a = f(x)
        kept = a.clone()
        b = f(y)
        assert torch.equal(a, kept)
        torch.testing.assert_close(b, torch.sin(y) + 1)


def test_ten_outputs_in_a_list_all_keep_their_values(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    inputs = [torch.randn(8, device=device) for _ in range(10)]
    outputs = [f(x) for x in inputs]
    for x, output in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(output, torch.sin(x) + 1)
    # A loop that collects keeps replaying: outputs are new tensors, or copied as they are handed out.
    assert f.program.counters.replays == 8
    assert f.program.counters.eager == {"warm-up": 1}


def test_collecting_late_changes_ways_once(compiled: Any, device: torch.device) -> None:
    """
    ::

        call        1        2       3       4        5        6        7 ...
                    warm-up  first   replay  replay   eager    copied   replay
        kept                                 x        x        x        x         4 is live in 5, for once, and in 6
    """
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    for _ in range(3):
        f(torch.randn(16, device=device))
    assert f.program.counters.recordings == {"first": 1}
    kept = [f(torch.randn(16, device=device)) for _ in range(5)]
    values = [output.clone() for output in kept]
    counters, live = f.program.counters, freezes(device)
    assert counters.recordings == ({"first": 1, _COPIED: 1} if live else {"first": 1})
    assert counters.eager == ({"warm-up": 1, _LIVE: 1} if live else {"warm-up": 1})
    assert counters.events == ({"an output was still live at the next call": 2} if live else {})
    f(torch.randn(16, device=device))
    assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
    assert sum(counters.recordings.values()) == 1 + live


@pytest.mark.parametrize("length", [16, 1 << 20])
def test_a_plain_loop(compiled: Any, device: torch.device, length: int) -> None:
    """``y = f(x)``: the output of the warm-up is live when the program is recorded, so that it is copied at once."""
    f: Compiled = compiled(lambda x: torch.relu(x) * 2 + 1)
    for _ in range(10):
        x = torch.randn(length, device=device)
        y = f(x)
        torch.testing.assert_close(y, torch.relu(x) * 2 + 1)
    counters = f.program.counters
    assert counters.recordings == {"first": 1} and counters.eager == {"warm-up": 1}
    assert counters.replays == 8


def test_pieces_of_an_operators_result_that_come_to_be_kept(compiled: Any, device: torch.device) -> None:
    """Each piece is an output of its own, not only the first."""

    def g(x: torch.Tensor) -> torch.Tensor:
        return torch.split_copy(x.sin(), 2)[1]

    f: Compiled = compiled(g)
    for _ in range(3):
        f(torch.randn(4, 4, device=device))
    for _ in range(10):
        x = torch.randn(4, 4, device=device)
        y = f(x)
        torch.testing.assert_close(y, g(x))
    counters = f.program.counters
    assert counters.eager in ({"warm-up": 1}, {"warm-up": 1, _LIVE: 1}), counters.to_dict()
    assert counters.replays >= 9


def _sizes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """256 KiB, 1 KiB and 4 bytes."""
    y = torch.sin(x) + 1
    return y, y.sum(0), y.sum()


@pytest.mark.parametrize("window", [1, 2, 3, 5, 24], ids=lambda window: f"the last {window}")
def test_outputs_kept_in_windows(compiled: Any, device: torch.device, window: int) -> None:
    f: Compiled = compiled(_sizes)
    kept = deque[Any](maxlen=window)
    for _ in range(24):
        x = torch.randn(256, 256, device=device)
        kept.append((f(x), _sizes(x)))
        for got, expected in kept:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    counters = f.program.counters
    if freezes(device):
        assert sum(counters.recordings.values()) <= 4 and counters.replays >= 18
    else:
        assert counters.recordings == {"first": 1} and counters.replays == 22


def test_outputs_that_come_to_be_kept_one_after_another(compiled: Any, device: torch.device) -> None:
    """Small ones are copied together, and when there is another, all are: so there are no more recordings.

    ::

        kept    nothing    4 KiB       4 B    2 MiB       1 MiB + 4    all
                recorded   recorded           recorded
    """

    def g(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.sin(x) + 1
        return y.mean(0), y.mean(), y[:512] * 2, F.pad(y[:256].flatten(), (0, 1))

    f: Compiled = compiled(g)
    for which in ((), (0,), (1,), (2,), (3,), (0, 1, 2, 3)):
        kept = []
        for _ in range(6):
            x = torch.randn(1024, 1024, device=device)
            got, expected = f(x), g(x)
            kept += [(got[i], expected[i]) for i in which]
            del got
        for output, value in kept:
            torch.testing.assert_close(output, value, rtol=1e-4, atol=1e-5)
    assert f.program.counters.recordings == ({"first": 1, _COPIED: 2} if freezes(device) else {"first": 1})


@pytest.mark.parametrize("count", [2, 3, 4])
def test_programs_in_one_thread_and_outputs_kept_at_random(
    compiled: Any, device: torch.device, count: int, own_arenas: Any
) -> None:
    """What one hands out may lie where another works."""

    def make(number: int) -> Callable[[torch.Tensor], Any]:
        return lambda x: ((x.sin() + number).cos() @ x, x.sum(0) * number)

    functions = [make(number) for number in range(1, count + 1)]
    programs: list[Compiled] = [compiled(function) for function in functions]
    draw, kept = random.Random(count), list[tuple[torch.Tensor, torch.Tensor]]()
    for call in range(200):
        which = draw.randrange(count)
        x = torch.randn(16 << which, 16 << which, device=device)
        for got, expected in zip(programs[which](x), functions[which](x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            if draw.random() < 0.4:
                kept.append((got, got.clone()))
        del got
        kept = [pair for pair in kept if draw.random() < 0.8]
        assert all(torch.equal(output, value) for output, value in kept), f"call {call}"
    for f in programs:
        counters = f.program.counters
        assert set(counters.eager) <= {"warm-up", _LIVE, "an output of another program is live in its memory"}
        made = counters.recordings
        # Each program is larger than the one before, and the arena grows with it.
        assert made.pop("the arena moved", 0) < count
        assert sum(made.values()) <= (4 if freezes(device) else 1), counters.to_dict()
        assert counters.replays >= 0.6 * 200 / count, counters.to_dict()


@pytest.mark.parametrize("how", ["view", "detach", "numpy", "autograd"])
def test_whatever_holds_an_output_counts(compiled: Any, device: torch.device, how: str) -> None:
    if how == "numpy" and device.type != "cpu":
        pytest.skip("NumPy is for memory of the CPU")
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    for _ in range(3):
        f(torch.randn(8, device=device))
    x = torch.randn(8, device=device)
    output = f(x)
    held: Any
    if how == "view":
        held = output[2:]
    elif how == "detach":
        held = output.detach()[2:]
    elif how == "numpy":
        pytest.importorskip("numpy")
        held = output.numpy()[2:]
    else:
        weight = torch.ones(8, device=device, requires_grad=True)
        product = output * weight  # autograd keeps the output
        held = None
    del output
    for _ in range(3):
        f(torch.randn(8, device=device))
    expected = torch.sin(x) + 1
    if how == "autograd":
        product.sum().backward()
        torch.testing.assert_close(weight.grad, expected)
    else:
        torch.testing.assert_close(torch.as_tensor(held), expected[2:])


def test_steady_state_copies_nothing(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(_large)
    addresses = {f(torch.randn(64, device=device)).data_ptr() for _ in range(8)}
    gc.collect()
    assert f.program.counters.replays == 6
    (recording,) = f.program.specializations.values()[0].recordings
    assert not recording.request.copied and not recording.live()
    if freezes(device):
        assert len(addresses) <= 2  # one eager run, then always the same memory
    else:
        assert recording.request.arenas == {} and len(recording.request.memory.per_call) == 1


def test_two_forwards_before_two_backwards(compiled: Any, device: torch.device) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(device)
    f: Compiled = compiled(model)
    for _ in range(8):
        x, y = torch.randn(2, 3, 16, device=device)
        model.zero_grad()
        (model(x).square().sum() + model(y).sum()).backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        a, b = f(x).square().sum(), f(y).sum()
        a.backward()
        b.backward()
        for p, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-5, atol=1e-5)
    for program in f.programs:
        assert program.counters.replays, program.counters.to_dict()
        assert set(program.counters.eager) == {"warm-up"}


def test_gradient_accumulation(compiled: Any) -> None:
    model = torch.nn.Linear(8, 8)
    f: Compiled = compiled(model)
    xs = [torch.randn(2, 8) for _ in range(6)]
    for x in xs:
        model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for x in xs:
        f(x).square().sum().backward()  # the first gradient becomes p.grad itself and is added to in place
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_output_fed_back_as_input(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: torch.sin(x) + 0.5)
    x = expected = torch.randn(32, device=device)
    for _ in range(8):
        x, expected = f(x), torch.sin(expected) + 0.5
        torch.testing.assert_close(x, expected)


def test_an_output_that_is_an_input_is_the_callers_tensor(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: (x, x.t(), x + 1))
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        same, transposed, more = f(x)
        assert same.data_ptr() == x.data_ptr() and transposed.data_ptr() == x.data_ptr()
        torch.testing.assert_close(more, x + 1)


def test_one_storage_behind_two_outputs_stays_one(compiled: Any, device: torch.device) -> None:
    def g(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y.view(-1)

    f: Compiled = compiled(g)
    kept = []
    for _ in range(5):
        x = torch.randn(4, 4, device=device)
        y, flat = f(x)
        kept.append((y, flat, x))
        y.add_(1)
        assert torch.equal(y.view(-1), flat)
    for y, _, x in kept:
        torch.testing.assert_close(y, x * 2 + 1)


def test_an_output_whose_memory_its_holder_moves(compiled: Any) -> None:
    """Shared with another process (a data loader's worker does it): what the caller gets is the caller's own."""
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    others = [compiled(function) for function in (torch.cos, torch.tanh)]
    for _ in range(3):
        f(torch.randn(16))
    for other in others:
        shared = f(x := torch.randn(16))
        shared.share_memory_()
        handle = shared.untyped_storage()
        address = handle.data_ptr()
        del shared
        for _ in range(3):
            other(torch.randn(16))
            y = torch.randn(16)
            torch.testing.assert_close(f(y), torch.sin(y) + 1)
        assert handle.data_ptr() == address
        torch.testing.assert_close(torch.empty(0).set_(handle)[:16], torch.sin(x) + 1)
    assert f.program.counters.recordings == {"first": 1} and f.program.counters.events == {}


def test_a_view_that_is_handed_out_is_a_tensor_of_its_own(compiled: Any, device: torch.device) -> None:
    """Nothing relates it to the memory but its storage, though it is laid over it directly."""
    f: Compiled = compiled(lambda x: (torch.sin(x) + 1).transpose(0, 1))
    for _ in range(4):
        y = f(x := torch.randn(3, 5, device=device))
        torch.testing.assert_close(y, (torch.sin(x) + 1).transpose(0, 1))
        assert y._base is None
        assert y._version == 0
        y.unsqueeze_(0).add_(1)
    assert f.program.counters.replays


@pytest.mark.parametrize("how", ["grows", "frees"])
def test_an_output_that_its_holder_resizes(compiled: Any, device: torch.device, how: str) -> None:
    """Like any tensor's, the memory is its holder's; in an arena it is not, and torch lets nobody resize it."""
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    for _ in range(3):
        f(torch.randn(16, device=device))
    output = f(x := torch.randn(16, device=device))
    with pytest.raises(RuntimeError, match="resiz") if freezes(device) else contextlib.nullcontext():
        output.resize_(4096) if how == "grows" else output.untyped_storage().resize_(0)
    if how == "grows":
        torch.testing.assert_close(output[:16], torch.sin(x) + 1)
    del output
    for _ in range(3):
        y = torch.randn(16, device=device)
        torch.testing.assert_close(f(y), torch.sin(y) + 1)


def test_results_of_operators_survive_other_shapes(compiled: Any, device: torch.device) -> None:
    """What one capture frees in the pool of the graphs, the next may get for its results.

    ::

        pool    1st shape captured  [ temporary of conv ][ result ]
                2nd shape captured  [ result ]           ^ kept            replaying the 1st overwrites it
    """
    weights = [torch.randn(4, 3, 3, 3), torch.randn(4, 4, 3, 3)]
    f: Compiled = compiled(
        lambda x, a, b: F.conv2d(F.conv2d(x, a, padding=1), b, padding=1),
        dynamic=False,
    )
    there = [weight.to(device) for weight in weights]
    inputs = [torch.randn(1, 3, 8, width) for width in (8, 7, 9)]
    expected = [F.conv2d(F.conv2d(x, weights[0], padding=1), weights[1], padding=1) for x in inputs]
    with torch.no_grad():
        for x in inputs * 3:
            f(x.to(device), *there)
        for first, second in itertools.permutations(range(3), 2):
            kept = f(inputs[first].to(device), *there)
            other = f(inputs[second].to(device), *there)
            torch.testing.assert_close(other.cpu(), expected[second], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(kept.cpu(), expected[first], rtol=1e-4, atol=1e-4)


def test_nothing_but_holders_counts_as_holding(compiled: Any, device: torch.device) -> None:
    """What a recording needs while it is made is gone when watching begins, without a garbage collection."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)).to(device)
    f = compiled(model)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            f(torch.randn(4, 8, device=device)).sum().backward()
    finally:
        gc.enable()
    for program in f.programs:
        assert program.counters.replays == 2, program.counters.to_dict()
        for recording in program.specializations.recordings() if freezes(device) else ():
            live = recording._watched_outputs
            before = list(live.baseline)
            gc.collect()
            assert live._counts() == live.baseline == before


# -- what autograd saves ----------------------------------------------------------------------------------------


def _trained() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4), torch.nn.Tanh()
    )


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("hooks", ["that keep", "save_on_cpu", "none", "now and then"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_saved_activations_that_others_have(
    compiled: Any, device: torch.device, hooks: str, backwards: int, own_arenas: Any
) -> None:
    """Hooks get the very tensors that are saved, and may keep them; a second backward needs them once more.

    ::

        forward --> saved --+--> hook ..................... has them as they were, for as long as it likes
                            +--> backward ... backward      may write over them after their last use
    """
    model = _trained().to(device)
    twin, packed = copy.deepcopy(model), list[tuple[torch.Tensor, torch.Tensor]]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append((tensor, tensor.detach().clone()))
        return tensor

    def hooked(step: int) -> Any:
        if hooks == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu()
        if hooks == "that keep" or (hooks == "now and then" and step % 3 == 1):
            return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        return contextlib.nullcontext()

    def step(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, number: int) -> list[torch.Tensor]:
        with hooked(number):
            loss = call(x).square().sum()
        found = []
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
            found += _gradients(model) or _gradients(twin)
        return found

    with torch._functorch.config.patch(donated_buffer=False) if backwards > 1 else contextlib.nullcontext():
        f: Compiled = compiled(model)
        for number in range(18):
            if number == 12:
                before = f.replays()
            x = torch.randn(8, 16, device=device)
            got, expected = step(f, x, number), step(twin, x, number)
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            each = len(got) // backwards
            assert all(torch.equal(a, b) for a, b in zip(got[:each], got[-each:], strict=True))
            assert all(torch.equal(tensor, value) for tensor, value in packed), f"step {number}"
    forward, backward = f.replays()
    assert (forward, backward) == (before[0] + 6, before[1] + 6 * backwards), "in the end every call is replayed"
    # Activations that are copied are new tensors at every call: a recording is made for some of them, and for all.
    assert f.programs[-1].counters.recordings.get("inputs moved", 0) <= 2


def test_a_saved_view_that_a_hook_has(compiled: Any, device: torch.device) -> None:
    """Every second column: the copy that the backward may write to has the gaps, as its kernels expect."""

    def g(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ x)[:, ::2] @ y

    f: Compiled = compiled(g)
    for _ in range(5):
        x, y = torch.randn(8, 8, device=device), torch.randn(4, 4, device=device)
        results = []
        for call in (f, g):
            leaves = [leaf.clone().requires_grad_() for leaf in (x, y)]
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                out = call(*leaves)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert all(f.replays())


@pytest.fixture
def as_is() -> Iterator[Callable[..., Any]]:
    """An operator that returns its operand, or a part of it, although it declares new memory."""
    library = torch.library.Library("returns_its_operand", "FRAGMENT")
    library.define("same(Tensor x, bool new) -> Tensor")
    library.impl("same", lambda x, new: x.clone() if new else x, "CompositeExplicitAutograd")
    torch.library.register_fake("returns_its_operand::same", lambda x, new: torch.empty_like(x), lib=library)
    library.define("sometimes(Tensor x) -> Tensor")
    calls = iter(range(1 << 30))
    library.impl("sometimes", lambda x: x if next(calls) % 2 else x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("returns_its_operand::sometimes", torch.empty_like, lib=library)
    # With CI in the environment AOTAutograd raises where it warns elsewhere.
    with torch._functorch.config.patch(error_on_custom_op_aliasing=False):
        yield torch.ops.returns_its_operand.same
    library._destroy()


@pytest.mark.filterwarnings("ignore:.*may not alias any inputs")
@pytest.mark.parametrize("kept", [True, False], ids=["static", "new"])
def test_an_operator_returns_its_operand_and_does_not_say_so(
    compiled: Any, device: torch.device, as_is: Any, kept: bool
) -> None:
    """What the caller gets is the caller's own tensor, as without fxwrap: also where graphs work on a copy of it."""
    f: Compiled = compiled(lambda x, y: (as_is(x, False), as_is(y, True) + 1))
    x, y = torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)
    with torch.no_grad():
        for call in range(8):
            x = x if kept else torch.randn(3, 4, device=device)
            given, made = f(x, y)
            assert torch.equal(given, x) and torch.equal(made, y + 1)
            given.add_(1)
            assert torch.equal(given, x), call
    assert f.program.counters.replays >= 4
    expected = x.clone()
    del x
    torch.randn(1000, device=device)
    assert torch.equal(given, expected), "it is held by what was returned"


@pytest.mark.filterwarnings("ignore:.*may not alias any inputs")
def test_an_operator_returns_its_operand_now_and_then(compiled: Any, as_is: Any) -> None:
    """On the CPU every call asks anew."""
    f: Compiled = compiled(torch.ops.returns_its_operand.sometimes)
    x, own = torch.randn(3, 4), list[bool]()
    with torch.no_grad():
        for _ in range(8):
            y = f(x)
            assert torch.equal(x, y)
            own.append(y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())
    assert f.program.counters.replays >= 4 and own in ([False, True] * 4, [True, False] * 4)


@torch.library.custom_op("fxwrap_outputs::counted", mutates_args=())
def counted(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, int((x > 0).sum())


@counted.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return torch.empty_like(x), torch.library.get_ctx().new_dynamic_size(min=0, max=100)


@pytest.mark.parametrize("changed", [False, True], ids=["as it is", "changed in a graph"])
def test_a_tensor_that_is_made_beside_a_number_that_varies(
    compiled: Any, device: torch.device, changed: bool
) -> None:
    """The operator runs eagerly. A graph that changes its tensor needs that one element at a fixed address."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        f: Compiled = compiled(
            lambda x: (counted(x)[0] + 1, x.sin()) if changed else (counted(x)[0], x.sin() + 1),
            options={"capture": "always"},
        )
        held = []
        for _ in range(5):
            x = torch.randn(4, 4, device=device)
            held.append((f(x), x))
        for (made, sine), x in held:
            torch.testing.assert_close(made, x * 2 + 1 if changed else x * 2)
            torch.testing.assert_close(sine, x.sin() if changed else x.sin() + 1)
