"""fxwrap's contract for devices, run against this one: what a vendor's test file looks like."""

import contextlib

import hostsim
import pytest
from conftest import UNSUPPORTED

if UNSUPPORTED:
    pytest.skip(UNSUPPORTED, allow_module_level=True)
pytest.importorskip("fxwrap", reason="the contract is a part of fxwrap")

from hostsim.inductor import register

from fxwrap.testing import device_contract


@contextlib.contextmanager
def asynchronous():
    """Streams behind the host, where missing waits show."""
    hostsim.device.set_asynchronous(True)
    try:
        yield
    finally:
        hostsim.device.synchronize()
        hostsim.device.set_asynchronous(False)


TestHostsim = device_contract(hostsim.NAME, register=register, asynchronous=asynchronous, delay=hostsim.device.delay)
