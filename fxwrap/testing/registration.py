"""Step 3: registration. One call tells Inductor and fxwrap about the device, and its handle takes everything back."""

from __future__ import annotations

import itertools

import pytest
import torch

from ..codegen.devices.for_testing import known_to_inductor
from ..devices import registered_devices
from ..errors import DeviceError
from .contract import Device, Suite


class Registration(Suite):
    """What ``register`` has to have done."""

    def test_the_backend_is_found_by_name(self, registered: Device) -> None:
        assert "fxwrap" in torch.compiler.list_backends(exclude_tags=())

    def test_fxwrap_knows_the_device(self, registered: Device) -> None:
        assert registered_devices()[registered.type].device_type == registered.type

    def test_dynamo_and_inductor_know_the_device(self, registered: Device) -> None:
        interface, op_overrides, scheduling = known_to_inductor(registered.type)
        assert interface.is_available() and interface.device_count() == registered.module.device_count()
        assert interface.current_device() == registered.module.current_device()
        properties = interface.get_device_properties(registered.first)
        assert properties.multi_processor_count >= 1
        assert scheduling is not None and registered.type in op_overrides.device_guard(0)

    def test_a_second_registration_is_refused(self, registered: Device) -> None:
        if registered.register is None:
            pytest.skip("the device registers itself")
        with pytest.raises(DeviceError, match="registered already"):
            registered.register()

    def test_the_allocator_places_what_it_is_told_to(self, registered: Device) -> None:
        """Each place holds one allocation at a time, of exactly so many bytes, and its memory stays its owner's."""
        place = registered_devices()[registered.type].place_allocations
        if place is None:
            pytest.skip("the device's allocator cannot be told: place_allocations was not registered")

        def empty(count: int) -> torch.Tensor:
            return torch.empty(count, device=registered.first)

        whole = torch.zeros(64, device=registered.first)
        at = whole.data_ptr()
        place([(at, 64), (at + 128, 128)])
        try:
            one, other, large, small = empty(16), empty(16), empty(32), empty(8)
            assert (one.data_ptr(), large.data_ptr()) == (at, at + 128)
            assert not any(at <= tensor.data_ptr() < at + 256 for tensor in (other, small))
            one.fill_(1)
            large.fill_(2)
            registered.synchronize()
            assert whole.cpu().tolist() == [1.0] * 16 + [0.0] * 16 + [2.0] * 32
            del one, large
            again = empty(16)
            assert again.data_ptr() == at
        finally:
            in_use = place(())
        assert empty(16).data_ptr() != at
        assert in_use is None or at in in_use
        del again
        assert at not in (place(()) or ())

    def test_the_allocator_keeps_workspace_apart(self, registered: Device) -> None:
        """It may use spans of workspace, or not: what it puts there lies within one, and alone."""
        place = registered_devices()[registered.type].place_allocations
        if place is None:
            pytest.skip("the device's allocator cannot be told: place_allocations was not registered")
        whole = torch.zeros(256, device=registered.first)
        at = whole.data_ptr()
        place([(at, 64)], [(at + 64, 448), (at + 512, 512)])
        try:
            tensors = [torch.empty(count, device=registered.first) for count in (16, 32, 40, 24, 100)]
        finally:
            place(())
        spans = sorted((t.data_ptr() - at, t.data_ptr() - at + t.untyped_storage().nbytes()) for t in tensors)
        inside = [(low, high) for low, high in spans if 0 <= low < 1024]
        assert all(high <= 64 or 64 <= low < high <= 512 or 512 <= low < high <= 1024 for low, high in inside)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))

    def test_the_handle_takes_it_back(self, device: Device) -> None:
        if device.register is None:
            pytest.skip("the device registers itself")
        before = dict(registered_devices())
        handle = device.register()
        assert device.type in registered_devices()
        handle.unregister()
        assert registered_devices() == before


SUITE = Registration
