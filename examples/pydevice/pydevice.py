"""A device in plain Python: what fxwrap does for an accelerator before a line of C++ is written for it.

Its tensors are handles: the numbers lie in CPU tensors beside them. Models compile for it: Inductor lowers and fuses
them; fxwrap emits, cuts and plans the host graph, and explains what it did. Only a device graph needs C++: programs
run eagerly, and the counters say why.

    python examples/pydevice/pydevice.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import fxwrap

NAME = "pydevice"


class Runtime:
    """The module ``torch.pydevice``: what torch and Inductor ask a device. There is one, without streams."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers come from the CPU's generator, which has its seed from torch.manual_seed itself."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: Any = None) -> int:
        return 0

    class device:
        def __init__(self, device: Any) -> None:
            self.index = device

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass


def host_tensor(handle: torch.Tensor) -> torch.Tensor:
    """The CPU tensor behind a handle: the same view of the bytes that lie beside the handle's storage."""
    bytes_ = handle.untyped_storage().host  # type: ignore[attr-defined]
    typed = torch.empty(0, dtype=handle.dtype).set_(bytes_)
    return typed.as_strided(handle.size(), handle.stride(), handle.storage_offset())


def new_handle(host: torch.Tensor) -> torch.Tensor:
    """A handle on a CPU tensor that nothing else refers to."""
    handle = torch._C._acc.create_empty_tensor((0,), host.dtype)
    handle.untyped_storage().host = host.untyped_storage()  # type: ignore[attr-defined]
    return view_of(handle, host)


def view_of(handle: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """A handle over the storage of another one, with the layout of ``host``."""
    if host.dtype is not handle.dtype:
        raise NotImplementedError(f"{NAME}: a view of {handle.dtype} memory as {host.dtype}")
    offset = host.storage_offset() - handle.storage_offset()
    return torch._C._dynamo.guards._reinterpret_tensor(handle, tuple(host.size()), host.stride(), offset)


def run_on_host(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Every operator of the device: the CPU's, on the CPU tensors behind the handles."""
    operands: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or value.device.type != NAME:
            return value
        operands.append((value, host_tensor(value)))
        return operands[-1][1]

    def to_handle(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for handle, host in operands:
            if value is host:
                return handle
            if value.untyped_storage()._cdata == host.untyped_storage()._cdata:
                return view_of(handle, value)
        return new_handle(value)

    result = operator(*tree_map(to_host, args), **tree_map(to_host, kwargs))
    for handle, host in operands:
        if host.size() != handle.size():  # an out= argument that the operator has resized
            handle.data = view_of(handle, host)
    return tree_map(to_handle, result)


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copies to, from and on the device."""
    behind = [host_tensor(t) if t.device.type == NAME else t for t in (source, target)]
    behind[1].copy_(behind[0])
    return target


def launch(kernel: Callable[..., Any], *args: Any) -> None:
    """Run one of Inductor's C++ kernels."""
    kernel(*(host_tensor(a) if isinstance(a, torch.Tensor) and a.device.type == NAME else a for a in args))


_libraries: list[torch.library.Library] = []  # operators last as long as these do


def register() -> fxwrap.DeviceRegistration:
    """Make the device, and tell Inductor and fxwrap about it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Runtime())
    rest, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    rest.fallback(run_on_host, "PrivateUse1", with_keyset=False)
    own.impl("_copy_from", copy_from, "PrivateUse1")
    # Factories by name: under fake tensors torch does not find the fallback for them.
    for factory in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
        own.impl(factory.name(), functools.partial(run_on_host, factory), "PrivateUse1")
    _libraries[:] = [rest, own]
    return fxwrap.register_device(NAME, scheduling="cpp", kernels=[fxwrap.cpp_kernels(launch)])


def main() -> None:
    register()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8), torch.nn.Softmax(-1))
    x = torch.randn(4, 8)
    with torch.no_grad():
        expected = model(x)
        model.to(NAME)
        print(fxwrap.explain(model, x.to(NAME)))
        compiled = torch.compile(model, backend="fxwrap")
        for _ in range(3):
            torch.testing.assert_close(compiled(x.to(NAME)).cpu(), expected)
    print(fxwrap.stats(compiled))


if __name__ == "__main__":
    main()
