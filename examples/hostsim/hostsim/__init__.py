"""A PyTorch device on host memory, with streams, an allocator and graphs: to copy, and to test without hardware.

Importing it registers `torch.hostsim`; where it is installed, `import torch` does that.
"""


def _autoload() -> None:
    """Called by `import torch`. Importing this package has done everything; it stands first, because torch may call
    it while the import below is still under way."""


import warnings  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

import torch  # noqa: E402

from .name import NAME  # noqa: E402

_SUPPORTED = hasattr(torch.accelerator, "Graph")
_UNSUPPORTED = f"{NAME} needs torch >= 2.13 with torch.accelerator.Graph; this is torch {torch.__version__}"


def _register() -> None:
    import atexit
    import os

    from . import device

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    os.register_at_fork(after_in_child=device._note_fork)
    # Before the interpreter ends: queues may hold Python objects.
    atexit.register(device._C.shut_down)


if _SUPPORTED:
    _register()
else:
    # Not an error yet: this may be part of `import torch`, which others need.
    warnings.warn(_UNSUPPORTED, stacklevel=2)

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    def _refuse() -> NoReturn:
        raise RuntimeError(_UNSUPPORTED)
