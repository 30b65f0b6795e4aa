"""Step 2: streams and events. Work on one stream runs in order; between streams order needs a wait."""

from __future__ import annotations

import pytest
import torch

from .contract import Device, Suite


class Streams(Suite):
    """Tests with asynchronous streams, if the device has them: a missing wait gives a wrong number."""

    @pytest.fixture
    def mode(self) -> str:
        return "asynchronous"

    def test_streams_are_made_and_made_current(self, device: Device) -> None:
        default = device.current_stream()
        stream = device.new_stream()
        assert stream != default and stream.device == device.first
        with device.on(stream):
            assert device.current_stream() == stream
        assert device.current_stream() == default

    def test_work_on_one_stream_is_in_order(self, device: Device) -> None:
        stream = device.new_stream()
        with device.on(stream):
            x = torch.zeros(8, device=device.first)
            device.keep_busy(stream)
            for _ in range(5):
                x.add_(1).mul_(2)
        stream.synchronize()
        assert x.cpu().tolist() == [62.0] * 8

    def test_a_stream_waits_for_another(self, device: Device) -> None:
        first, second = device.new_stream(), device.new_stream()
        x = torch.zeros(8, device=device.first)
        torch.accelerator.synchronize()
        with device.on(first):
            device.keep_busy(first)
            x.fill_(3)
        second.wait_stream(first)
        with device.on(second):
            y = x * 2
        second.synchronize()
        assert y.cpu().tolist() == [6.0] * 8

    def test_events(self, device: Device) -> None:
        first, second = device.new_stream(), device.new_stream()
        x = torch.zeros(8, device=device.first)
        torch.accelerator.synchronize()
        event = torch.Event(device=device.type)
        with device.on(first):
            device.keep_busy(first)
            x.fill_(4)
            event.record(first)
        event.wait(second)
        with device.on(second):
            y = x + 1
        event.synchronize()
        assert event.query() and x.cpu().tolist() == [4.0] * 8
        second.synchronize()
        assert y.cpu().tolist() == [5.0] * 8

    def test_pinned_copies_are_in_the_order_of_their_stream(self, device: Device) -> None:
        host, back = torch.full((64,), 3.0).pin_memory(), torch.zeros(64).pin_memory()
        stream = device.new_stream()
        with device.on(stream):
            x = host.to(device.first, non_blocking=True)
            y = x * 2
            back.copy_(y + 1, non_blocking=True)
        stream.synchronize()
        assert back.tolist() == [7.0] * 64

    def test_reading_a_number_waits(self, device: Device) -> None:
        stream = device.current_stream()
        x = torch.zeros(8, device=device.first)
        device.keep_busy(stream)
        x.fill_(9)
        assert x.cpu().tolist() == [9.0] * 8

    def test_memory_is_not_reused_while_a_stream_uses_it(self, device: Device) -> None:
        """``record_stream`` protects memory that is freed while another stream still reads it."""
        side = device.new_stream()
        x = torch.full((1024,), 5.0, device=device.first)
        side.wait_stream(device.current_stream())
        with device.on(side):
            device.keep_busy(side)
            y = x + 1
        x.record_stream(side)
        del x
        for _ in range(4):
            torch.full((1024,), -1.0, device=device.first)
        side.synchronize()
        assert y.cpu().eq(6).all()


SUITE = Streams
