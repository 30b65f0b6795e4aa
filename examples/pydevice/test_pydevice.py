"""The contract on a device without C++: registration and compilation hold before there are streams or graphs.

Run in a process of its own: ``python -m pytest examples/pydevice``.
"""

import pydevice
import pytest
import torch

import fxwrap
from fxwrap.testing import device_contract

_first = [pydevice.register()]


def register():
    """The device itself can be made once only in a process."""
    return (
        _first.pop()
        if _first
        else fxwrap.register_device(pydevice.NAME, scheduling="cpp", kernels=[fxwrap.cpp_kernels(pydevice.launch)])
    )


TestPydevice = device_contract(pydevice.NAME, register=register)


def test_capture_says_what_is_missing():
    from fxwrap.graphs.devices.runtime import runtime_for

    with pytest.raises(fxwrap.CaptureError, match="GraphImplInterface registered for it in C\\+\\+"):
        runtime_for(torch.device(pydevice.NAME, 0))
