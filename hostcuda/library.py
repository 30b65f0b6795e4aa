"""The device's library, loaded into this process."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from . import build


@functools.cache
def runtime() -> Any:
    """The library, in the global scope before any of torch's: found first, by name and by symbol."""
    folder = build.libraries()
    # Triton links its launchers with it.
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    loaded = ctypes.CDLL(f"{folder}/{build.RUNTIME}", mode=ctypes.RTLD_GLOBAL)
    for name in (build.DRIVER, build.LIBRARIES, build.NVML):
        ctypes.CDLL(f"{folder}/{name}", mode=ctypes.RTLD_GLOBAL)
    loaded.hostcuda_counter.restype = ctypes.c_longlong
    loaded.hostcuda_identity.restype = ctypes.c_char_p
    loaded.hostcuda_identity.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
    loaded.hostcuda_set_callback.argtypes = [ctypes.c_void_p]
    return loaded
