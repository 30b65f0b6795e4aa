"""Promise 2: an output is never overwritten while anyone can still read it. Footguns as tests."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Compiled


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
    # A loop that collects keeps replaying: small outputs are copied as they are handed out.
    assert f.program.counters.replays == 8
    assert f.program.counters.eager == {"warm-up": 1}


def test_collecting_late_changes_ways_once(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    for _ in range(3):
        f(torch.randn(16, device=device))
    assert f.program.counters.recordings == {"first": 1}
    kept = [f(torch.randn(16, device=device)) for _ in range(5)]
    values = [output.clone() for output in kept]
    assert f.program.counters.recordings == {"first": 1, "small outputs held": 1}
    assert f.program.counters.events == {"an output was still held at the next call": 1}
    f(torch.randn(16, device=device))
    assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))


def test_large_outputs_get_a_second_recording_and_are_not_copied(
    compiled: Any, device: torch.device, own_arenas: Any
) -> None:
    """The arena grows for it, so that the first one has to be made again."""
    f: Compiled = compiled(_large, options={"copy_outputs_below": 64})
    previous = None
    addresses = set()
    for call in range(8):
        x = torch.randn(256, device=device)
        output = f(x)  # the previous output is still held here, as in any plain loop
        assert previous is None or torch.equal(previous[0], previous[1])
        torch.testing.assert_close(output, _large(x))
        previous = (output, output.clone())
        if call >= 3:
            addresses.add(output.data_ptr())
    assert len(addresses) == 2
    assert f.program.counters.recordings == {"first": 1, "large outputs held": 2}
    assert f.program.counters.replays == 4


def test_many_large_outputs_held_fall_back_to_copies(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(_large, options={"copy_outputs_below": 64, "max_output_sets": 2})
    inputs = [torch.randn(256, device=device) for _ in range(8)]
    outputs = [f(x) for x in inputs]
    for x, output in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(output, _large(x))
    assert f.program.counters.eager == {"warm-up": 1}
    assert f.program.counters.replays >= 3


@pytest.mark.parametrize("how", ["view", "detach", "numpy", "autograd"])
def test_whatever_holds_an_output_counts(compiled: Any, how: str) -> None:
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    for _ in range(3):
        f(torch.randn(8))
    x = torch.randn(8)
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
        weight = torch.ones(8, requires_grad=True)
        product = output * weight  # autograd keeps the output
        held = None
    del output
    for _ in range(3):
        f(torch.randn(8))
    expected = torch.sin(x) + 1
    if how == "autograd":
        product.sum().backward()
        torch.testing.assert_close(weight.grad, expected)
    else:
        torch.testing.assert_close(torch.as_tensor(held), expected[2:])


def test_steady_state_copies_nothing(compiled: Any) -> None:
    f: Compiled = compiled(_large)
    addresses = {f(torch.randn(64)).data_ptr() for _ in range(8)}
    gc.collect()
    assert f.program.counters.replays == 6
    recording = f.program.families[None].recordings[0]
    assert not recording.request.copied
    assert not recording.held()
    assert len(addresses) <= 2  # one eager run, then always the same memory


def test_two_forwards_before_two_backwards(compiled: Any, device: torch.device) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(device)
    f: Compiled = compiled(model)
    for _ in range(4):
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
    f: Compiled = compiled(lambda x: torch.sin(x) + 0.5, options={"copy_outputs_below": 0})
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
    """Shared with another process (a data loader's worker does it): the old recording is given up.

    An output lies in memory that programs share, so that torch lets nobody grow or free its storage.
    """
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    for _ in range(3):
        f(torch.randn(16))
    shared = f(x := torch.randn(16))
    shared.share_memory_()
    handle = shared.untyped_storage()
    address = handle.data_ptr()
    del shared
    for _ in range(3):
        y = torch.randn(16)
        torch.testing.assert_close(f(y), torch.sin(y) + 1)
    assert handle.data_ptr() == address
    torch.testing.assert_close(torch.empty(0).set_(handle)[:16], torch.sin(x) + 1)
    assert f.program.counters.recordings["an output's holder moved its memory"] >= 1


def test_moved_memory_is_seen_whatever_is_recorded_meanwhile(compiled: Any) -> None:
    """Slices of an arena are counted: one that moved away must not pass for one that is new."""
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    others = [compiled(function) for function in (torch.cos, torch.tanh)]
    for _ in range(3):
        f(torch.randn(16))
    for other in others:
        shared = f(x := torch.randn(16))
        shared.share_memory_()
        handle = shared.untyped_storage()
        del shared
        for _ in range(3):
            other(torch.randn(16))
        y = torch.randn(16)
        torch.testing.assert_close(f(y), torch.sin(y) + 1)
        torch.testing.assert_close(torch.empty(0).set_(handle)[:16], torch.sin(x) + 1)


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


def test_an_output_cannot_be_grown_and_everything_stays_usable(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: torch.sin(x) + 1)
    for _ in range(3):
        f(torch.randn(16))
    output = f(torch.randn(16))
    for grow in (lambda: output.resize_(4096), lambda: output.untyped_storage().resize_(0)):
        with pytest.raises(RuntimeError, match="resiz"):
            grow()
    y = torch.randn(16)
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
        options={"copy_outputs_below": 0},
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
        for family in program.families.values():
            for recording in family.recordings:
                lent = recording._lent
                before = list(lent.unheld)
                gc.collect()
                assert lent._counts() == lent.unheld == before
