"""Step 6: programs. What fxwrap compiles is captured and replayed on the device, with right results."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxwrap

from ..codegen.devices.for_testing import numbers_in_graphs
from ..graphs.devices.runtime import runtime_for
from .contract import Device, GraphSuite

_serial = itertools.count()  # each operator needs a new name: a registration is permanent

# The tests' programs are small: with "auto", the cost model would not capture them.
CAPTURED: Any = {"backend": "fxwrap", "options": {"capture": "always"}}


def _reading_operator() -> tuple[str, Any]:
    """A new operator that reads a number on the host, so that it cannot be captured, and its name."""
    name = f"fxwrap_contract::reads_{next(_serial)}"

    @torch.library.custom_op(name, mutates_args=())
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    reads.register_fake(torch.empty_like)
    return name, reads


class Programs(GraphSuite):
    """Recordings: new inputs, live outputs, shapes, host work in between, streams, random numbers, training."""

    def check_calls(
        self,
        device: Device,
        function: Callable[..., Any],
        *shapes: tuple[int, ...],
        calls: int = 5,
    ) -> Any:
        """Compile a function, call it with new inputs, and check results and replays. Returns the compiled one."""
        compiled = torch.compile(function, **CAPTURED)
        for _ in range(calls):
            inputs = [torch.randn(shape) for shape in shapes]
            device.assert_close(compiled(*(x.to(device.first) for x in inputs)), function(*inputs))
        assert fxwrap.stats(compiled)["replays"] == calls - 2
        return compiled

    def test_replays_with_refilled_inputs(self, registered: Device) -> None:
        f = self.check_calls(registered, lambda x, w: (x @ w).relu().softmax(-1), (8, 8), (8, 8))
        (graph,) = fxwrap.report(f).graphs
        assert [p.verdict.value for p in graph.partitions] == ["captured"]
        assert set(graph.counters["eager"]) == {"warm-up"} and len(graph.counters["recordings"]) == 1

    def test_held_outputs_keep_their_values(self, registered: Device) -> None:
        f = torch.compile(lambda x: (x @ x).sin(), **CAPTURED)
        inputs = [torch.randn(8, 8) for _ in range(10)]
        outputs = [f(x.to(registered.first)) for x in inputs]
        registered.assert_close(outputs, [(x @ x).sin() for x in inputs])
        assert fxwrap.stats(f)["replays"] > 0

    def test_suspended_memory_comes_back(self, registered: Device) -> None:
        """For a device with ``suspendable_memory``: bytes go and come, and the same graphs replay."""
        if runtime_for(registered.first).suspendable_memory is None or not hasattr(fxwrap, "suspend"):
            pytest.skip("the device has no suspendable memory")
        f = torch.compile(
            lambda x, w: (x @ w).relu() @ w, options={**CAPTURED["options"], "suspendable": True}, backend="fxwrap"
        )
        w = torch.randn(8, 8)
        w_there, given = w.to(registered.first), list[int]()
        for turn in range(8):
            x = torch.randn(8, 8)
            registered.assert_close(f(x.to(registered.first), w_there), (x @ w).relu() @ w)
            given.append(fxwrap.suspend(f) if turn > 2 else 0)
        assert all(given[3:]) and len(set(given[3:])) == 1
        assert fxwrap.resume(f) == given[-1]
        assert sum(fxwrap.stats(f)["recordings"].values()) == 1

    def test_operators_allocate_where_it_was_planned(self, registered: Device) -> None:
        """For a device with ``placements``: a convolution's result, and what it works in, lie in the arena."""
        if runtime_for(registered.first).placements is None:
            pytest.skip("the device's allocator takes no addresses")

        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.conv2d(torch.nn.functional.conv2d(x, w).relu(), w)

        f = self.check_calls(registered, function, (2, 3, 8, 8), (3, 3, 3, 3))
        (graph,) = fxwrap.report(f).graphs
        assert not graph.counters["events"]
        (recording,) = graph.program.specializations.recordings()
        assert recording.request.sized.operators

    def test_inputs_are_updated_in_place(self, registered: Device) -> None:
        def function(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            total.add_(x.sum())
            x.mul_(2)
            return x + total

        f = torch.compile(function, **CAPTURED)
        total, expected_total = torch.zeros((), device=registered.first), torch.zeros(())
        for _ in range(5):
            x = torch.randn(8)
            moved = x.to(registered.first)
            registered.assert_close(f(moved, total), function(x, expected_total))
            registered.assert_close([moved, total], [x, expected_total])
        assert fxwrap.stats(f)["replays"] >= 3

    def test_inputs_with_an_offset_and_strides(self, registered: Device) -> None:
        f = torch.compile(lambda x, w: torch.mm(x.view(4, 4), w), **CAPTURED)
        for _ in range(5):
            base, w = torch.randn(64), torch.randn(4, 8)
            on_device = base.to(registered.first)
            result = f(on_device[16:32], w.to(registered.first)[:, ::2])
            registered.assert_close(result, torch.mm(base[16:32].view(4, 4), w[:, ::2]))

    def test_each_shape_is_recorded_once(self, registered: Device) -> None:
        f = torch.compile(lambda x: (x @ x.t()).relu(), dynamic=True, **CAPTURED)
        for _ in range(4):
            for size in (3, 5, 9):
                x = torch.randn(size, 4)
                registered.assert_close(f(x.to(registered.first)), (x @ x.t()).relu())
        recordings = fxwrap.stats(f)["recordings"]
        assert sum(recordings.values()) == 3, recordings

    def test_host_work_splits_the_program(self, registered: Device) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = (x @ w).relu()
            n = (y > 0).sum().item()
            return (y * n) @ w

        with numbers_in_graphs():
            f = self.check_calls(registered, function, (6, 6), (6, 6))
        (graph,) = fxwrap.report(f).graphs
        assert [p.verdict.value for p in graph.partitions] == ["captured", "eager", "captured"]
        assert "aten::item" in graph.partitions[1].reason

    def test_a_part_on_the_cpu(self, registered: Device) -> None:
        """A table in host memory, dense layers on the device."""
        table, w = torch.randn(32, 8), torch.randn(8, 8)
        w_there = w.to(registered.first)

        def function(index: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (table[index] * 2).to(w.device).relu() @ w

        f = torch.compile(function, **CAPTURED)
        for _ in range(5):
            index = torch.randint(32, (4,))
            registered.assert_close(f(index, w_there), function(index, w))
        assert fxwrap.stats(f)["replays"] >= 3

    def test_programs_share_memory(self, registered: Device) -> None:
        """Two programs run in turn in one arena, and neither sees the other's values."""
        f = torch.compile(lambda x: ((x @ x).sin() @ x).cos() @ x, **CAPTURED)
        g = torch.compile(lambda x: ((x @ x).cos() @ x).sin() @ x, **CAPTURED)
        for _ in range(5):
            for h, first, second in ((f, torch.sin, torch.cos), (g, torch.cos, torch.sin)):
                x = torch.randn(8, 8) / 4
                registered.assert_close(h(x.to(registered.first)), second(first(x @ x) @ x) @ x)
        assert fxwrap.stats(f)["replays"] >= 3 and fxwrap.stats(g)["replays"] >= 3

    def test_another_stream(self, registered: Device) -> None:
        """A program that is called on a busy stream runs in the order of that stream."""
        f = torch.compile(lambda x: (x @ x).relu(), **CAPTURED)
        for _ in range(4):
            x = torch.randn(8, 8)
            with registered.side_stream() as stream:
                on_device = torch.zeros(8, 8, device=registered.first)
                source = x.to(registered.first)
                registered.keep_busy(stream, 0.01)
                on_device.copy_(source)
                result = f(on_device) + 1
                stream.synchronize()
            registered.assert_close(result, (x @ x).relu() + 1)

    def test_random_numbers_are_new_at_every_replay(self, registered: Device) -> None:
        f = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), **CAPTURED)
        x = torch.ones(256, device=registered.first)
        draws = [f(x).cpu() for _ in range(6)]
        assert all(not torch.equal(a, b) for a, b in itertools.pairwise(draws))
        assert all(0.3 < draw.ne(0).float().mean() < 0.7 for draw in draws)
        torch.manual_seed(4)
        again = [f(x).cpu() for _ in range(2)]
        torch.manual_seed(4)
        assert all(map(torch.equal, again, [f(x).cpu() for _ in range(2)]))
        assert fxwrap.stats(f)["replays"] >= 6

    def test_training(self, registered: Device) -> None:
        twin = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
        model = copy.deepcopy(twin).to(registered.first)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        f = torch.compile(model, **CAPTURED)
        for _ in range(6):
            x = torch.randn(5, 6)
            for call, optimizer, where in ((f, ours, registered.first), (twin, theirs, torch.device("cpu"))):
                optimizer.zero_grad()
                call(x.to(where)).square().mean().backward()
                optimizer.step()
        registered.assert_close([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])
        stats = fxwrap.stats(f)
        assert stats["programs"] == 2 and stats["replays"] >= 8

    def test_two_forwards_before_two_backwards(self, registered: Device) -> None:
        twin = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        model = copy.deepcopy(twin).to(registered.first)
        f = torch.compile(model, **CAPTURED)
        for _ in range(4):
            xs = [torch.randn(5, 6) for _ in range(2)]
            for call, m, where in ((f, model, registered.first), (twin, twin, torch.device("cpu"))):
                m.zero_grad()
                losses = [call(x.to(where)).square().mean() for x in xs]
                for loss in losses:
                    loss.backward()
            registered.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])

    def test_an_operator_that_cannot_be_captured(self, registered: Device) -> None:
        """An operator turns out to read a number on the host: the program is partitioned again around it."""
        name, reads = _reading_operator()
        f = torch.compile(lambda x, w: (reads((x @ w).relu()) @ w).sin(), **CAPTURED)
        for _ in range(6):
            x, w = torch.randn(6, 6) / 4, torch.randn(6, 6) / 4  # larger numbers would make the sine inexact
            y = (x @ w).relu()
            registered.assert_close(f(x.to(registered.first), w.to(registered.first)), (y * y.sum() @ w).sin())
        (graph,) = fxwrap.report(f).graphs
        assert [p.verdict.value for p in graph.partitions] == ["captured", "eager", "captured"]
        assert f"{name}: a capture failed at it" in graph.partitions[1].reason
        assert graph.counters["replays"] == 3 and set(graph.counters["eager"]) == {"warm-up"}
        assert any("capture failed" in event for event in graph.counters["events"])
        assert graph.counters["recordings"] == {"first": 1, "cut again around what could not be captured": 1}

    def test_a_capture_that_failed_spoils_nothing(self, registered: Device) -> None:
        """After a failed capture other programs replay, random numbers can be drawn, and the cache can be emptied."""
        _, reads = _reading_operator()
        first, refused, innocent = (
            torch.compile(fn, **CAPTURED)
            for fn in (lambda x: x.sin() @ x, lambda x: reads(x.sin()) * 2, lambda x: x.cos() @ x)
        )
        for f in (first, refused, innocent, first):
            for _ in range(4):
                f(torch.randn(8, 8).to(registered.first))
        x = torch.randn(8, 8)
        registered.assert_close(innocent(x.to(registered.first)), x.cos() @ x)
        assert fxwrap.stats(innocent)["replays"] >= 2 and fxwrap.stats(first)["replays"] >= 5
        torch.rand(4, device=registered.first)
        torch.accelerator.empty_cache()

    def test_an_error_in_an_eager_partition(self, registered: Device) -> None:
        """The call raises what the operator raised, and the next one is right."""
        failing = [False]
        name = f"fxwrap_contract::may_fail_{next(_serial)}"

        @torch.library.custom_op(name, mutates_args=())
        def may_fail(x: torch.Tensor) -> torch.Tensor:
            if failing[0]:
                raise ValueError("on purpose")
            return x.clone()

        may_fail.register_fake(torch.empty_like)
        f = torch.compile(
            lambda x: (may_fail(x.sin()) @ x).cos(),
            backend="fxwrap",
            options={"capture": "always", "eager_ops": name},
        )
        for call in range(6):
            x = torch.randn(4, 4)
            failing[0] = call == 3
            if failing[0]:
                with pytest.raises(ValueError, match="on purpose"):
                    f(x.to(registered.first))
            else:
                registered.assert_close(f(x.to(registered.first)), (x.sin() @ x).cos())


SUITE = Programs
