"""``pytest -p hostcuda.plugin``: torch's CUDA is the device on host memory in this run, in its workers, too."""

from __future__ import annotations

from .build import BuildError, libraries
from .imports import install, wanted

# At import: -p is read before the first conftest.py, which may import torch.
if wanted():
    import pytest

    try:
        libraries()
        install()
    except (BuildError, RuntimeError) as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header() -> str:
    return "CUDA: a device on host memory (hostcuda), no GPU" if wanted() else "hostcuda: off"
