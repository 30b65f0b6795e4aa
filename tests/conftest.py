"""What all tests share: a cache of their own, fresh Dynamo state, and the comparison with Inductor."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# Parallel jobs on one cache disturb each other. Set before torch is imported.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="fxwrap-tests-"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from fxwrap.backend import fxwrap as backend
from fxwrap.graphs.device_graph import using_runtime
from fxwrap.graphs.simulated import SIMULATED
from fxwrap.owner import Owner


def _accelerator() -> str | None:
    for device_type in ("cuda", "xpu"):
        module = getattr(torch, device_type, None)
        if module is not None and module.is_available():
            return device_type
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _accelerator() is None:
        skip = pytest.mark.skip(reason="no GPU on this machine")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


# Where programs run: on the CPU, on the CPU as if it were hardware, and on a GPU where there is one.
DEVICES = ["cpu", "simulated", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of a test; "simulated" is the CPU with graphs that behave like hardware."""
    if request.param == "gpu":
        yield torch.device(_accelerator() or "cuda")
    elif request.param == "simulated":
        with using_runtime(SIMULATED):
            yield torch.device("cpu")
    else:
        yield torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Several threads add up an embedding's gradient in any order, in Inductor's own wrapper, too.
    torch.set_num_threads(1)
    yield
    torch._dynamo.reset()


@dataclass
class Compiled:
    """A function compiled with fxwrap, and its programs."""

    fn: Callable[..., Any]
    owner: Owner = field(default_factory=Owner)
    compile_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.call = torch.compile(
            self.fn, backend=functools.partial(backend, owner=self.owner), **self.compile_options
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def programs(self) -> list[Any]:
        return self.owner.programs

    @property
    def program(self) -> Any:
        (program,) = self.owner.programs
        return program

    def replays(self) -> list[int]:
        return [program.counters.replays for program in self.programs]


@pytest.fixture
def compiled() -> Callable[..., Compiled]:
    """``compiled(fn, options=..., dynamic=...)`` compiles with fxwrap and keeps hold of the programs."""

    def make(fn: Callable[..., Any], **compile_options: Any) -> Compiled:
        return Compiled(fn, compile_options=compile_options)

    return make


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a (nested) result, in order."""
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def assert_same(got: Any, expected: Any) -> None:
    """Bit for bit, layout included; NaN equals NaN."""
    mine, theirs = tensors_in(got), tensors_in(expected)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        assert a.stride() == b.stride()
        if a.is_floating_point() or a.is_complex():
            assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan())
        else:
            assert torch.equal(a, b)


def inductor(fn: Callable[..., Any], **compile_options: Any) -> Callable[..., Any]:
    """The same function through Inductor's own Python wrapper, on code of its own."""
    if isinstance(fn, torch.nn.Module):
        fn = copy.deepcopy(fn)
    return torch.compile(fn, backend="inductor", **compile_options)
