"""Tests that a device has to pass, for its vendor to run: ``TestMyDevice = device_contract("mydevice")``."""

from .contract import Device, device_contract

__all__ = ["Device", "device_contract"]
