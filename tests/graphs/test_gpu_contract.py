"""The contract on a GPU: it is written for devices out of the tree, and has to be right there, too."""

from __future__ import annotations

import pytest
import torch
from conftest import on_gpu

from fxwrap.testing import device_contract

pytestmark = pytest.mark.gpu

with on_gpu() as GPU:
    CONTRACT = device_contract(GPU.type)


class TestTensors(CONTRACT.TestTensors):  # type: ignore[name-defined, misc]
    pass


class TestGraphs(CONTRACT.TestGraphs):  # type: ignore[name-defined, misc]
    """Skipped where ``torch.accelerator.Graph`` exists and cannot be made."""


class TestPrograms(CONTRACT.TestPrograms):  # type: ignore[name-defined, misc]
    """They take whatever graph the device has."""


def test_the_device_has_an_index() -> None:
    assert torch.zeros(1, device=GPU).device == GPU
