"""Step 5: graphs. ``torch.accelerator.Graph`` on the device does what torch documents; fxwrap is not used here."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .contract import Device, GraphSuite


def capture(device: Device, work: Callable[[], Any], stream: Any = None, **options: Any) -> tuple[Any, Any]:
    """Capture ``work`` on a side stream; returns the graph and what ``work`` returned."""
    graph = torch.accelerator.Graph(**options)
    with device.side_stream(stream), capturing(graph):
        result = work()
    return graph, result


@contextlib.contextmanager
def capturing(graph: Any, lost: bool | None = False) -> Iterator[None]:
    """Capture the work that the block issues. The capture ends even if the test fails: otherwise later tests could
    not wait for the device.

    Args:
        lost: whether the capture has to end with an error; None if it may.
    """
    try:
        graph.capture_begin()
        yield
        with contextlib.suppress(RuntimeError) if lost is None else _ends(lost):
            graph.capture_end()
    except BaseException:
        with contextlib.suppress(Exception):
            graph.capture_end()
        raise


def _ends(lost: bool) -> contextlib.AbstractContextManager[Any]:
    return pytest.raises(RuntimeError) if lost else contextlib.nullcontext()


def record_and_wait(event: torch.Event) -> None:
    event.record()
    event.synchronize()


class Graphs(GraphSuite):
    """Capture, replay, pools, random numbers, streams, and the errors that a capture must raise."""

    unified = True

    # -- capture and replay -----------------------------------------------------------------------------

    def test_replay_reads_refilled_inputs(self, device: Device) -> None:
        x, w = torch.randn(8, 8, device=device.first), torch.randn(8, 8, device=device.first)
        graph, y = capture(device, lambda: (x @ w).relu() + x[2:3])
        for _ in range(3):
            new = torch.randn(8, 8)
            x.copy_(new)
            graph.replay()
            device.assert_close(y, (new @ w.cpu()).relu() + new[2:3])

    def test_captured_work_runs_at_replay_only(self, device: Device) -> None:
        count = torch.zeros(4, device=device.first)
        graph, _ = capture(device, lambda: count.add_(1))
        assert count.cpu().tolist() == [0.0] * 4
        for expected in (1.0, 2.0, 3.0):
            graph.replay()
            assert count.cpu().tolist() == [expected] * 4

    def test_every_captured_operation_is_replayed(self, device: Device) -> None:
        x = torch.zeros(4, device=device.first)
        steps = torch.zeros(6, device=device.first)

        def work() -> None:
            x.add_(1)
            for i in range(6):
                steps[i : i + 1].copy_(x[:1] * (i + 1))

        graph, _ = capture(device, work)
        graph.replay()
        graph.replay()
        assert steps.cpu().tolist() == [2.0 * (i + 1) for i in range(6)]

    def test_views_and_offsets(self, device: Device) -> None:
        base = torch.zeros(32, device=device.first)
        x = base[8:24].view(4, 4)
        out = torch.zeros(40, device=device.first)
        graph, _ = capture(device, lambda: out[4:20].view(4, 4).copy_(x.t()))
        base.copy_(torch.arange(32.0))
        graph.replay()
        expected = torch.zeros(40)
        expected[4:20] = torch.arange(8.0, 24.0).view(4, 4).t().reshape(-1)
        assert torch.equal(out.cpu(), expected)

    def test_a_training_step(self, device: Device) -> None:
        twin = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        model = copy.deepcopy(twin).to(device.first)
        x = torch.randn(5, 6, device=device.first)

        def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss, parameters)  # on autograd's own thread
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p.sub_(g, alpha=0.1)
            return loss.detach()

        graph, loss = capture(device, lambda: step(model, x))
        for _ in range(3):
            new = torch.randn(5, 6)
            x.copy_(new)
            graph.replay()
            device.assert_close(loss, step(twin, new))
        device.assert_close([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])

    def test_replay_runs_on_the_current_stream(self, device: Device) -> None:
        x = torch.zeros(8, device=device.first)
        graph, y = capture(device, lambda: x + 1)
        torch.accelerator.synchronize()
        stream = device.new_stream()
        with device.on(stream):
            device.keep_busy(stream)
            x.fill_(6)
            graph.replay()
            z = y * 2
        stream.synchronize()
        assert z.cpu().tolist() == [14.0] * 8

    def test_work_forks_to_another_stream_and_joins(self, device: Device) -> None:
        x = torch.zeros(8, device=device.first)
        graph = torch.accelerator.Graph()
        with device.side_stream() as main:
            other = device.new_stream()
            with capturing(graph):
                y = x + 1
                other.wait_stream(main)
                with device.on(other):
                    z = y * 3
                main.wait_stream(other)
                result = z - x
        x.fill_(4)
        graph.replay()
        assert result.cpu().tolist() == [11.0] * 8

    def test_pinned_copies_are_captured(self, device: Device) -> None:
        host, back = torch.zeros(8).pin_memory(), torch.zeros(8).pin_memory()

        def work() -> None:
            x = host.to(device.first, non_blocking=True)
            back.copy_(x * 2, non_blocking=True)

        graph, _ = capture(device, work)
        for value in (3.0, 5.0):
            host.fill_(value)
            graph.replay()
            torch.accelerator.synchronize()
            assert back.tolist() == [2 * value] * 8

    def test_keep_graph_and_instantiate(self, device: Device) -> None:
        x = torch.zeros(4, device=device.first)
        graph, y = capture(device, lambda: x + 1, keep_graph=True)
        graph.instantiate()
        x.fill_(1)
        graph.replay()
        assert y.cpu().tolist() == [2.0] * 4

    def test_reset_and_capture_again(self, device: Device) -> None:
        x = torch.zeros(4, device=device.first)
        graph, _ = capture(device, lambda: x + 1)
        graph.reset()
        with device.side_stream(), capturing(graph):
            y = x + 2
        graph.replay()
        assert y.cpu().tolist() == [2.0] * 4

    def test_debug_dump(self, device: Device, tmp_path: Path) -> None:
        graph = torch.accelerator.Graph(keep_graph=True)
        graph.enable_debug_mode()
        x = torch.zeros(4, device=device.first)
        with device.side_stream(), capturing(graph):
            x.add_(1)
        graph.debug_dump(str(tmp_path / "graph.txt"))
        assert (tmp_path / "graph.txt").stat().st_size

    # -- memory -----------------------------------------------------------------------------------------

    def test_results_keep_their_memory(self, device: Device) -> None:
        """The memory of a graph's results is not reused while the graph lives."""
        x = torch.ones(256, device=device.first)
        graph, y = capture(device, lambda: (x + 1) * 2)
        address = y.data_ptr()
        graph.replay()
        others = [torch.full((256,), -1.0, device=device.first) for _ in range(16)]
        graph.replay()
        assert y.data_ptr() == address and y.cpu().eq(4).all()
        assert all(other.cpu().eq(-1).all() for other in others)

    def test_graphs_share_a_pool(self, device: Device) -> None:
        size = 1 << 21
        x = torch.ones(size, device=device.first)
        pool = device.module.graph_pool_handle()
        stream = device.new_stream()  # memory is reused in the order of one stream

        def work() -> torch.Tensor:
            return ((x + 1) * 2)[:8].clone()  # two large temporaries, a small result

        reserved = [torch.accelerator.memory_reserved(0)]
        graphs = []
        for _ in range(3):
            graphs.append(capture(device, work, stream, pool=pool))
            assert tuple(graphs[-1][0].pool()) == tuple(graphs[0][0].pool())
            reserved.append(torch.accelerator.memory_reserved(0))
        assert reserved[1] - reserved[0] >= size * 4
        assert reserved[3] - reserved[1] < size * 4
        for graph, y in graphs:
            graph.replay()
            assert y.cpu().tolist() == [4.0] * 8

    # -- random numbers ---------------------------------------------------------------------------------

    def test_every_replay_draws_new_numbers(self, device: Device) -> None:
        graph, y = capture(device, lambda: torch.rand(64, device=device.first))
        torch.manual_seed(11)
        first, second = (graph.replay(), y.cpu())[1], (graph.replay(), y.cpu())[1]
        assert not torch.equal(first, second)
        torch.manual_seed(11)
        assert torch.equal(first, (graph.replay(), y.cpu())[1])
        torch.manual_seed(11)
        torch.rand(64, device=device.first)
        assert torch.equal(second, (graph.replay(), y.cpu())[1])  # eager draws and replays advance one generator

    # -- errors -----------------------------------------------------------------------------------------

    def usable(self, device: Device) -> None:
        """Check that after an error the device works, and a new capture as well."""
        x = torch.ones(4, device=device.first)
        assert (x + 1).cpu().tolist() == [2.0] * 4
        graph, y = capture(device, lambda: x * 3)
        graph.replay()
        assert y.cpu().tolist() == [3.0] * 4

    @pytest.mark.parametrize(
        "what",
        ["item", "copy to pageable memory", "nonzero", "synchronize", "stream synchronize", "event synchronize"],
    )
    def test_capture_refuses_to_wait(self, device: Device, what: str) -> None:
        x = torch.ones(4, device=device.first)
        event = torch.Event(device=device.type)
        forbidden: dict[str, Callable[[], Any]] = {
            "item": x.sum().item,
            "copy to pageable memory": x.cpu,
            "nonzero": lambda: torch.nonzero(x),
            "synchronize": torch.accelerator.synchronize,
            "stream synchronize": lambda: device.current_stream().synchronize(),
            "event synchronize": lambda: record_and_wait(event),
        }
        graph = torch.accelerator.Graph()
        # torch refuses this copy on CUDA before it asks the device, which knows nothing of it.
        lost = None if what == "copy to pageable memory" else True
        with device.side_stream(), capturing(graph, lost), pytest.raises(RuntimeError):
            forbidden[what]()
        self.usable(device)

    def test_capture_refuses_the_default_stream(self, device: Device) -> None:
        graph = torch.accelerator.Graph()
        with pytest.raises(RuntimeError):
            graph.capture_begin()
        self.usable(device)

    def test_capture_needs_a_reset_in_between(self, device: Device) -> None:
        x = torch.ones(4, device=device.first)
        graph, _ = capture(device, lambda: x + 1)
        with device.side_stream(), pytest.raises(RuntimeError):
            graph.capture_begin()
        self.usable(device)

    def test_replay_needs_a_capture(self, device: Device) -> None:
        graph = torch.accelerator.Graph()
        with pytest.raises(RuntimeError):
            graph.replay()
        x = torch.ones(4, device=device.first)
        captured, _ = capture(device, lambda: x + 1)
        captured.reset()
        with pytest.raises(RuntimeError):
            captured.replay()
        self.usable(device)

    def test_end_needs_a_begin(self, device: Device) -> None:
        with pytest.raises(RuntimeError):
            torch.accelerator.Graph().capture_end()
        self.usable(device)

    def test_forked_work_must_join(self, device: Device) -> None:
        x = torch.ones(4, device=device.first)
        graph = torch.accelerator.Graph()
        with device.side_stream() as main:
            other = device.new_stream()
            with capturing(graph, lost=True):
                other.wait_stream(main)
                with device.on(other):
                    x.add_(1)
        self.usable(device)

    def test_an_operator_that_fails_under_capture(self, device: Device) -> None:
        graph = torch.accelerator.Graph()
        with device.side_stream(), capturing(graph), pytest.raises(RuntimeError):
            torch.ones(2, 3, device=device.first) @ torch.ones(2, 3, device=device.first)
        self.usable(device)


SUITE = Graphs
