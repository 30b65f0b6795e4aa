"""Facts for ``fxwrap.doctor``: what Inductor finds on this machine."""

from __future__ import annotations

from torch._inductor.codegen import common
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ...devices import registered_devices


def cpp_compiler() -> str:
    """The compiler of Inductor's C++ kernels. Raises Inductor's error where there is none."""
    return get_cpp_compiler()


def inductors_cache() -> str:
    """The folder of Inductor's caches, which is made if it is not there."""
    return cache_dir()


def has_kernels(device_type: str) -> bool:
    """Whether Inductor can write kernels for a device."""
    common.init_backend_registration()
    return device_type in registered_devices() or common.get_scheduling_for_device(device_type) is not None
