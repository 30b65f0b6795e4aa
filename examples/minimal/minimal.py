"""A device brought up in an afternoon: memory, copies and graphs in minimal.cpp, and no kernel of its own.

Every operator is the CPU's, every operation of a compiled program a call of one (``scheduling="none"``), and programs
are planned, captured and replayed. Kernels come later, by another word in ``register``.

    python examples/minimal/minimal.py
"""

import itertools
import os
from pathlib import Path

import torch
from torch.utils import cpp_extension

import fxwrap

NAME = "minimal"
_pools = itertools.count(1)


class Runtime:
    """The module ``torch.minimal``: there is one device. Streams are torch's own, which ask the guard in minimal.cpp;
    random numbers are the CPU's, which torch itself seeds."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = manual_seed_all = staticmethod(lambda number: None)
    _lazy_init = staticmethod(lambda: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    device = staticmethod(lambda device: torch.accelerator.device_index(0))
    is_current_stream_capturing = staticmethod(lambda: torch.accelerator.current_stream().is_capturing())
    graph_pool_handle = staticmethod(lambda: (0, next(_pools)))
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


def load():
    """Build the library, once for each torch, and make the device known to torch."""
    source, torch_version = Path(__file__).with_suffix(".cpp"), "".join(filter(str.isalnum, torch.__version__))
    folder = Path(os.environ.get("MINIMAL_CACHE", Path.home() / ".cache" / NAME)) / torch_version
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(NAME + torch_version, str(source), build_directory=str(folder), is_python_module=False)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Runtime())


def register():
    """Have ``torch.compile(model, backend="fxwrap")`` capture and replay on the device."""
    return fxwrap.register_device(NAME, scheduling="none")


if __name__ == "__main__":
    load()
    register()
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)), torch.randn(4, 8)
    expected = model(x).detach()
    compiled = torch.compile(model.to(NAME), backend="fxwrap")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x.to(NAME)).cpu(), expected)
    print(fxwrap.report(compiled))
