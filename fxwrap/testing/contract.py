"""Makes the tests that a device must pass: a pytest suite, in the order in which a device is built."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ..devices import device_function
from ..errors import CaptureError
from ..graphs.devices.runtime import runtime_for


@dataclass(frozen=True)
class Device:
    """The device under test.

    Attributes:
        type: as in ``torch.device(type)``.
        register: registers it with Inductor and fxwrap (``fxwrap.register_device``); returns the handle.
        asynchronous: a context in which streams run asynchronously; not needed for devices that always do.
        delay: ``delay(stream, seconds)`` keeps a stream busy. By default the stream computes matrix products.
        rtol, atol: tolerances of the comparison with the CPU's results.
    """

    type: str
    register: Callable[[], Any] | None = None
    asynchronous: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    delay: Callable[[Any, float], None] | None = None
    rtol: float = 1e-4
    atol: float = 1e-5

    @property
    def first(self) -> torch.device:
        return torch.device(self.type, 0)

    @property
    def module(self) -> Any:
        """``torch.<type>``."""
        return torch.get_device_module(self.type)

    def current_stream(self) -> Any:
        return device_function(self.type, "current_stream")(self.first)

    def new_stream(self) -> Any:
        return device_function(self.type, "Stream")(self.first)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which a stream is the current one."""
        return device_function(self.type, "stream")(stream)

    def synchronize(self) -> None:
        device_function(self.type, "synchronize")()

    @contextlib.contextmanager
    def side_stream(self, side: Any = None) -> Iterator[Any]:
        """A context with another current stream, by default a new one. It waits for the previous stream at the begin,
        and the previous stream waits for it at the end."""
        current, side = self.current_stream(), side or self.new_stream()
        side.wait_stream(current)
        with self.on(side):
            yield side
        current.wait_stream(side)

    def keep_busy(self, stream: Any, seconds: float = 0.2) -> None:
        """Issue work to a stream that takes about ``seconds``."""
        if self.delay is not None:
            self.delay(stream, seconds)
            return
        with self.on(stream):
            a = torch.randn(1024, 1024, device=self.first)
            for _ in range(int(seconds * 2000)):
                a = (a @ a).clamp(-1, 1)

    def assert_close(self, got: Any, expected: Any) -> None:
        """Check that a result on the device is close to the CPU's; both may be nested."""
        moved = torch.utils._pytree.tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, got)
        torch.testing.assert_close(moved, expected, rtol=self.rtol, atol=self.atol)


class Suite:
    """Base of the contract's classes. ``device_contract`` sets ``contract``."""

    contract: Device

    @pytest.fixture
    def mode(self) -> str:
        """How streams run: "synchronous" or "asynchronous"; a device need not be able to do both."""
        return "synchronous"

    @pytest.fixture
    def device(self, mode: str) -> Iterator[Device]:
        torch.manual_seed(0)
        with self.contract.asynchronous() if mode == "asynchronous" else contextlib.nullcontext():
            yield self.contract
            self.contract.synchronize()

    @pytest.fixture
    def registered(self, device: Device) -> Iterator[Device]:
        """The device, registered with Inductor and fxwrap."""
        torch.compiler.reset()
        gc.collect()  # arenas grow to what programs of earlier tests announced, and shrink when these are gone
        with device.register() if device.register is not None else contextlib.nullcontext():
            yield device
        torch.compiler.reset()


class GraphSuite(Suite):
    """Base of classes that need a device graph; they run in both modes.

    Attributes:
        unified: whether the graph has to be ``torch.accelerator.Graph``.
    """

    unified = False

    @pytest.fixture(autouse=True)
    def device_graph(self) -> None:
        """Skip where the required graph does not apply. A device without any graph fails."""
        unified, graph = "torch.accelerator.Graph", ""
        with contextlib.suppress(CaptureError):
            graph = runtime_for(self.contract.first).implementation
        if graph not in ("", unified) and self.unified:  # it may exist there, and raise when one is made
            pytest.skip(f"graphs on {self.contract.type} are {graph}, not {unified}")
        if not graph and not hasattr(torch.accelerator, "Graph"):
            pytest.skip(f"torch {torch.__version__} has no {unified}; 2.13 and later have it")

    @pytest.fixture(params=["synchronous", "asynchronous"])
    def mode(self, request: pytest.FixtureRequest) -> str:
        return request.param


# One module for each step, in the order in which a device is built.
STEPS = ("tensors", "streams", "registration", "compilation", "graphs", "programs")


def device_contract(
    device_type: str,
    *,
    register: Callable[[], Any] | None = None,
    asynchronous: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    delay: Callable[[Any, float], None] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> type:
    """Make the contract of a device, as a class that pytest collects.

    ::

        # test_mydevice.py
        import mydevice
        from fxwrap.testing import device_contract

        TestMyDevice = device_contract("mydevice", register=mydevice.register)

    It has one class for each step (``-k TestTensors``, ``TestStreams``, ``TestRegistration``, ``TestCompilation``,
    ``TestGraphs``, ``TestPrograms``); docs/devices.md says what to implement for each. A process can have one
    out-of-tree device only, so the file runs in a process of its own.

    Args:
        device_type, register, asynchronous, delay, rtol, atol: see ``Device``.
    """
    device = Device(device_type, register, asynchronous, delay, rtol, atol)
    members: dict[str, Any] = {}
    for step in STEPS:
        suite = importlib.import_module(f"{__package__}.{step}").SUITE
        name = f"Test{step.capitalize()}"
        members[name] = type(name, (suite,), {"contract": device, "__doc__": suite.__doc__})
    return type(f"Test{device_type.capitalize()}", (), members)
