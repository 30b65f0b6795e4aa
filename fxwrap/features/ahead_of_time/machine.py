"""The machine that a saved program needs: versions, processor, devices and their architectures."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ... import __version__
from .codegen.stored_triton import target_of, triton_version
from .package import Package

# Entries that may differ on the loading machine; "cpu_capability" matters for compiled kernels only.
_MAY_DIFFER = ("fxwrap", "cpu_capability")


def versions() -> dict[str, str]:
    """The versions of this machine, by their names in a manifest."""
    return {
        "fxwrap": __version__,
        "torch": torch.__version__,
        "python": str(sys.implementation.cache_tag),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def check_machine(package: Package) -> None:
    """Check that a file can be loaded on this machine.

    Raises:
        StorageError: the file is for another machine; the message names both.
    """
    manifest, here = package.manifest, versions()
    for name, version in here.items():
        if name not in _MAY_DIFFER and manifest.get(name) != version:
            raise package.error(f"{name} {version} here", f"{name} {manifest.get(name)}, for which it was saved")
    compiled = manifest["compile"] == "object"
    saved, capability = manifest["cpu_capability"], here["cpu_capability"]
    if compiled and saved != capability:
        raise package.error(f"a processor with {capability}", f"one with {saved}", _AS_SOURCE)
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
            present = target_of(torch.device(name))
        except RuntimeError as error:
            raise package.error(f"no driver of Triton for {name}: {error}", target_text(saved)) from error
        if present != saved:
            raise package.error(f"{name} is {target_text(present)}", target_text(saved), _AS_SOURCE)


_AS_SOURCE = 'save it with compile="source"'


def target_text(target: Sequence[Any]) -> str:
    """A target of Triton's compiler, in words."""
    backend, architecture, _ = target
    if backend == "cuda":
        return f"compute capability {architecture // 10}.{architecture % 10}"
    return f"{backend} {architecture}".strip()


def _missing(name: str) -> str:
    """Why a device is missing; empty if it is present."""
    kind = name.partition(":")[0]
    try:
        device = torch.device(name)
        module = torch.get_device_module(device.type)
        names: Mapping[str, Any] = vars(module)
        count = names["device_count"]() if names.get("is_available", lambda: True)() else 0
    except (RuntimeError, KeyError):
        return f"no device of the type {kind}"
    return "" if (device.index or 0) < count else f"{count or 'no'} {kind} device{'s'[: count != 1]}"
