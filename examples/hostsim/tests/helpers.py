import torch

DELAY = 0.3  # Seconds: long enough for anything that does not wait to be too early.


def name():
    return torch.accelerator.current_accelerator().type


def on_device(*size, **options):
    return torch.randn(*size, device=name(), **options)


def zeros(*size, **options):
    return torch.zeros(*size, device=name(), **options)


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
