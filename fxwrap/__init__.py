"""fxwrap: plans, captures and replays what TorchInductor emits, as a backend for ``torch.compile``.

torch.compile(model, backend="fxwrap")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .devices import CaptureCost, KernelCall, KernelKind, SuspendableMemory, cpp_kernels
from .eager_rules import EagerRule
from .errors import (
    BindError,
    CaptureError,
    CheckError,
    DeviceError,
    EmissionError,
    FxwrapError,
    InputError,
    MemoryLimitError,
    OptionError,
    PlanError,
    StorageError,
    SuspendError,
    UnsupportedModelError,
)
from .options import Options
from .packing import plan_memory

if TYPE_CHECKING:
    from .api.bind import bind
    from .api.doctor import Diagnosis, doctor
    from .api.explain import explain
    from .api.memory.bill import Bill
    from .api.memory.release import release
    from .api.memory.suspend import resume, suspend
    from .api.record import record
    from .api.report import report
    from .api.stats import stats
    from .artifacts.aot_compile import aot_compile
    from .artifacts.aot_program import AotProgram
    from .artifacts.load import load
    from .artifacts.save import save
    from .codegen.devices.registration import DeviceRegistration, register_device
    from .codegen.dynamo.marks import mark_bucket
    from .codegen.emit.emission import FxwrapCodegen
    from .inspection.explanation import Explanation

__version__ = "0.1.0"
__all__ = [
    "AotProgram",
    "Bill",
    "BindError",
    "CaptureCost",
    "CaptureError",
    "CheckError",
    "DeviceError",
    "DeviceRegistration",
    "Diagnosis",
    "EagerRule",
    "EmissionError",
    "Explanation",
    "FxwrapCodegen",
    "FxwrapError",
    "InputError",
    "KernelCall",
    "KernelKind",
    "MemoryLimitError",
    "OptionError",
    "Options",
    "PlanError",
    "StorageError",
    "SuspendError",
    "SuspendableMemory",
    "UnsupportedModelError",
    "aot_compile",
    "bind",
    "cpp_kernels",
    "doctor",
    "explain",
    "load",
    "mark_bucket",
    "plan_memory",
    "record",
    "register_device",
    "release",
    "report",
    "resume",
    "save",
    "stats",
    "suspend",
]

# Inductor takes seconds to import, so names that need it are imported at their first use.
_LAZY = {
    "AotProgram": ".artifacts.aot_program",
    "aot_compile": ".artifacts.aot_compile",
    "load": ".artifacts.load",
    "save": ".artifacts.save",
    "FxwrapCodegen": ".codegen.emit.emission",
    "DeviceRegistration": ".codegen.devices.registration",
    "register_device": ".codegen.devices.registration",
    "mark_bucket": ".codegen.dynamo.marks",
    "bind": ".api.bind",
    "Diagnosis": ".api.doctor",
    "doctor": ".api.doctor",
    "Explanation": ".inspection.explanation",
    "explain": ".api.explain",
    "report": ".api.report",
    "Bill": ".api.memory.bill",
    "record": ".api.record",
    "release": ".api.memory.release",
    "stats": ".api.stats",
    "resume": ".api.memory.suspend",
    "suspend": ".api.memory.suspend",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fxwrap' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name], __name__), name)
