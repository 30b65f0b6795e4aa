"""Has every test begin and end with no capture under way, and no error left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostcuda

sys.path.insert(0, str(Path(__file__).parent))
hostcuda.install()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    import cuda

    yield
    left = hostcuda.counter("active_captures")
    cuda.end_all()
    hostcuda.runtime().cudaGetLastError()
    assert left == 0, "the test has left a capture"
