"""Facts for ``fxwrap.doctor``: what Inductor and torch find on this machine, and their settings."""

from __future__ import annotations

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.codegen import common
from torch._inductor.cpp_builder import get_cpp_compiler

from ...devices import registered_devices


def cpp_compiler() -> str:
    """The compiler of Inductor's C++ kernels. Raises Inductor's error where there is none."""
    return get_cpp_compiler()


def caches_switched_off() -> list[str]:
    """Inductor's and AOTAutograd's caches of compiled graphs that are off."""
    if config.force_disable_caches:
        return ["all of Inductor's caches"]
    on = {"Inductor's": config.fx_graph_cache, "AOTAutograd's": functorch_config.enable_autograd_cache}
    return [name for name, value in on.items() if not value]


def device_out_of_the_tree() -> str | None:
    """The name under which a PrivateUse1 device is registered with torch."""
    name = torch._C._get_privateuse1_backend_name()
    return name if name != "privateuseone" and hasattr(torch, name) else None


def has_kernels(device_type: str) -> bool:
    """Whether Inductor can write kernels for a device."""
    common.init_backend_registration()
    return device_type in registered_devices() or common.get_scheduling_for_device(device_type) is not None
