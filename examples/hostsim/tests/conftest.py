"""These tests run in a process of their own: a process has one PrivateUse1 device, under one name."""

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # On a torch without graphs, importing it warns; the tests say so below.
    import hostsim

DEVICE = hostsim.name.NAME


UNSUPPORTED = None if hasattr(torch.accelerator, "Graph") else f"{DEVICE} needs torch >= 2.13 with accelerator graphs"


def pytest_collection_modifyitems(items):
    if UNSUPPORTED:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=UNSUPPORTED))


def pytest_terminal_summary(terminalreporter):
    if UNSUPPORTED:
        terminalreporter.write_line(f"all skipped: {UNSUPPORTED}; this is torch {torch.__version__}")


@pytest.fixture(autouse=True)
def kind():
    """Captures fail in these tests, and nobody puts right what CUDA leaves behind; test_rules.py is about that."""
    if UNSUPPORTED:
        yield
        return
    module = getattr(torch, DEVICE)
    for rule in ("failed_capture_holds_its_pool", "failed_capture_holds_generators"):
        module.relax(rule)
    yield
    module.enforce_all_rules()


@pytest.fixture(scope="session")
def warm():
    """Torch imports parts of itself at the first calls, which takes longer than tests of asynchrony would wait."""
    tensor = torch.ones(2, device=DEVICE)
    (tensor.add_(1) * 2).clone()
    tensor[None] @ tensor[:, None]  # makes the handle of a library, which a capture refuses


@pytest.fixture
def device(warm):
    """torch.hostsim, as it was after the import."""
    module = getattr(torch, DEVICE)
    torch.manual_seed(0)
    yield module
    module.clear_faults()
    module.set_asynchronous(False)
    module.set_poison(False)
    module.set_device(0)
    module.set_stream(module.default_stream(1))
    module.set_stream(module.default_stream(0))
    module.reset_graph_counters()


@pytest.fixture(params=["synchronous", "asynchronous"])
def mode(device, request):
    """The device in both modes."""
    device.set_asynchronous(request.param == "asynchronous")
    return request.param


@pytest.fixture
def asynchronous(device):
    device.set_asynchronous(True)
    return device
