"""The tests that an out-of-tree device has to pass; its vendor runs them: ``T = device_contract("mydevice")``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contract import Device, device_contract

__all__ = ["Device", "device_contract"]


def __getattr__(name: str) -> Any:
    # The tests import pytest, which the simulated device beside them does without.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import contract

    return getattr(contract, name)
