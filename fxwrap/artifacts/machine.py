"""What a saved program is for: versions, a kind of processor, devices and their architectures."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import __version__
from ..codegen.store.stored_triton import target_of, triton_version
from .package import Package

# What may be another one where a program is loaded; "cpu_capability" counts for compiled kernels alone.
_MAY_DIFFER = ("fxwrap", "cpu_capability")


def versions() -> dict[str, str]:
    """Of this machine, by the names that they have in a manifest."""
    return {
        "fxwrap": __version__,
        "torch": torch.__version__,
        "python": str(sys.implementation.cache_tag),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def check_machine(package: Package) -> None:
    """
    Raises:
        StorageError: the file is for another machine than this one; both are named.
    """
    manifest, here = package.manifest, versions()
    for what, own in here.items():
        if what not in _MAY_DIFFER and manifest.get(what) != own:
            raise package.error(f"{what} {own} here", f"{what} {manifest.get(what)}, for which it was saved")
    compiled = manifest["compile"] == "object"
    saved, own = manifest["cpu_capability"], here["cpu_capability"]
    if compiled and saved != own:
        raise package.error(f"a processor with {own}", f"one with {saved}", _AS_SOURCE)
    triton = manifest["triton"]
    for name in manifest["devices"]:
        if why := _missing(name):
            target = triton["targets"].get(name)
            expected = f"the device {name}" + (f", {target_text(target)}" if target else "")
            raise package.error(f"{why} here", expected, "load it where the device is")
    if triton["version"] and not triton_version():
        raise package.error("no Triton here", f"triton {triton['version']}, for kernels", "pip install triton")
    if triton["targets"] and triton["version"] != triton_version():
        got = f"triton {triton_version()} here"
        raise package.error(got, f"triton {triton['version']}, for which it was saved", _AS_SOURCE)
    for name, saved in triton["targets"].items():
        try:
            found = target_of(torch.device(name))
        except RuntimeError as error:
            raise package.error(f"no driver of Triton for {name}: {error}", target_text(saved)) from error
        if found != saved:
            raise package.error(f"{name} is {target_text(found)}", target_text(saved), _AS_SOURCE)


_AS_SOURCE = 'save it with compile="source"'


def target_text(target: Sequence[Any]) -> str:
    """What Triton compiles for, in words."""
    backend, architecture, _ = target
    if backend == "cuda":
        return f"compute capability {architecture // 10}.{architecture % 10}"
    return f"{backend} {architecture}".strip()


def _missing(name: str) -> str:
    """Why a device is not to be had; empty if it is."""
    kind = name.partition(":")[0]
    try:
        device = torch.device(name)
        module = torch.get_device_module(device.type)
        known: Mapping[str, Any] = vars(module)
        count = known["device_count"]() if known.get("is_available", lambda: True)() else 0
    except (RuntimeError, KeyError):
        return f"no device of the type {kind}"
    return "" if (device.index or 0) < count else f"{count or 'no'} {kind} device{'s'[: count != 1]}"
