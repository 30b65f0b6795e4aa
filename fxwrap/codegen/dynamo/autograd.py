"""Lets Dynamo trace ``torch.autograd.grad`` and ``backward()`` into the graph that calls them."""

from __future__ import annotations

import contextlib

from torch._dynamo import config


def tracing_autograd() -> contextlib.AbstractContextManager[None]:
    """A context for compilations. Torch has the setting from 2.11 on, and leaves it off."""
    return config.patch(trace_autograd_ops=True)
