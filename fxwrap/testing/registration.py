"""Step 3: registration. One call registers the device with Inductor and fxwrap, and its handle undoes that."""

from __future__ import annotations

import pytest
import torch

from ..codegen.devices.for_testing import known_to_inductor
from ..devices import registered_devices
from ..errors import DeviceError
from .contract import Device, Suite


class Registration(Suite):
    """The effects of ``register``."""

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

    def test_the_handle_takes_it_back(self, device: Device) -> None:
        if device.register is None:
            pytest.skip("the device registers itself")
        before = dict(registered_devices())
        handle = device.register()
        assert device.type in registered_devices()
        handle.unregister()
        assert registered_devices() == before


SUITE = Registration
