"""The tests that an out-of-tree device has to pass; its vendor runs them: ``T = device_contract("mydevice")``."""

from .contract import Device, device_contract

__all__ = ["Device", "device_contract"]
