"""The shared libraries of C++ kernels in saved files: one for each content in a process, closed after its last user.

What uses a kernel has its function, also if it calls the machine code by address: so the number of references to the
function tells whether anything does. A finalizer could not close a library: what belongs to the same garbage may be
freed later, and a function of Python's reads the library's memory then.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ....graphs.memory.locks import lock_of_process
from ....hooks import AFTER_RELEASE

_close: Any = getattr(sys.modules["_ctypes"], "dlclose", lambda handle: None)


class _Library:
    """An open library. Python's import of extension modules would keep it for ever, and more with every import.

    Raises:
        OSError, AttributeError: it is no library of Inductor's.
    """

    def __init__(self, data: bytes) -> None:
        # The library reads the address of a function that returns a tensor's data pointer.
        address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
        with tempfile.TemporaryDirectory(prefix="fxwrap-") as folder:
            path = Path(folder, "kernel.so")
            path.write_bytes(data)
            library = ctypes.PyDLL(str(path))
        self._handle = library._handle
        library.PyInit_kernel.restype = ctypes.py_object
        module = library.PyInit_kernel()
        self.function: Any = vars(module).pop("kernel")  # or they would refer to each other
        module.address = ctypes.cast(library.kernel, ctypes.c_void_p).value
        self._unused = sys.getrefcount(self.function)

    def is_unused(self) -> bool:
        return sys.getrefcount(self.function) <= self._unused

    def close(self) -> None:
        del self.function
        _close(self._handle)


_libraries: dict[bytes, _Library] = {}
_lock = lock_of_process()


def kernel_in(data: bytes) -> Callable[..., Any]:
    """The function of the kernel in a shared library that Inductor has built.

    Raises:
        OSError, AttributeError: it is none.
    """
    digest = hashlib.sha256(data).digest()
    with _lock:
        if digest not in _libraries:
            _libraries[digest] = _Library(data)
        return _libraries[digest].function  # type: ignore[no-any-return]


def close_unused() -> None:
    """Close the libraries whose kernels nothing uses any more."""
    with _lock:
        for digest in [digest for digest, library in _libraries.items() if library.is_unused()]:
            _libraries.pop(digest).close()


AFTER_RELEASE.append(close_unused)
