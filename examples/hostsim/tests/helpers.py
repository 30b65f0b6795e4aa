import contextlib

import torch

DELAY = 0.3  # Seconds: long enough for anything that does not wait to be too early.


def name():
    return torch.accelerator.current_accelerator().type


def on_device(*size, **options):
    return torch.randn(*size, device=name(), **options)


def zeros(*size, **options):
    return torch.zeros(*size, device=name(), **options)


@contextlib.contextmanager
def limited(device, more, index=0):
    """So many bytes more than are in use now, and nothing is cached."""
    device.empty_cache()
    allowed = device.memory_reserved(index) + more + 0.5
    device.set_per_process_memory_fraction(allowed / device.mem_get_info(index)[1], index)
    try:
        yield
    finally:
        device.set_per_process_memory_fraction(1.0, index)


def capture(function, *, stream=None, **options):
    """A graph of what the function does, and what it returned."""
    graph = torch.accelerator.Graph(**options)
    with stream or torch.Stream(), graph:
        result = function()
    return graph, result


def assert_equal(actual, expected, **tolerance):
    """To the last bit, unless told otherwise."""
    torch.accelerator.synchronize()
    torch.testing.assert_close(
        actual.detach().cpu(), expected.detach().cpu(), **(tolerance or {"rtol": 0, "atol": 0})
    )
