"""fxwrap: plans, captures and replays what TorchInductor emits, as a backend for ``torch.compile``.

torch.compile(model, backend="fxwrap")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .devices import (
    CaptureCost,
    ConditionalNodes,
    KernelCall,
    KernelKind,
    Placements,
    SuspendableMemory,
    cpp_kernels,
)
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
    TrainStepError,
    UnsupportedModelError,
)
from .features import buckets as _buckets  # noqa: F401 (adds an option)
from .features import checked as _checked  # noqa: F401 (adds options)
from .features import difference as _difference  # noqa: F401 (adds a method of reports)
from .features import limits as _limits  # noqa: F401 (adds a method of reports)
from .features import measure as _measure  # noqa: F401 (adds to explain, and a section of reports)
from .features import page as _page  # noqa: F401 (adds methods of reports)
from .features import suspend as _suspendable  # noqa: F401 (adds an option)
from .features import target as _target  # noqa: F401 (adds to explain)
from .options import Options

if TYPE_CHECKING:
    from .api.explain import explain
    from .api.release import release
    from .api.report import report
    from .api.stats import stats
    from .codegen.devices.registration import DeviceRegistration, register_device
    from .codegen.emit.emission import FxwrapCodegen
    from .features.ahead_of_time.aot_compile import aot_compile
    from .features.ahead_of_time.aot_program import AotProgram
    from .features.ahead_of_time.load import load
    from .features.ahead_of_time.save import save
    from .features.bill.bill import Bill
    from .features.bill.record import record
    from .features.bind.bind import bind
    from .features.buckets.codegen.marks import mark_bucket
    from .features.command_line.doctor import Diagnosis, doctor
    from .features.limits.limit_memory import limit_memory
    from .features.suspend.suspend import resume, suspend
    from .features.train_step.loss_step import TrainStep
    from .features.train_step.train_step import train_step
    from .features.train_step.written.averaged import no_sync
    from .features.train_step.written.sharding import shard_parameters
    from .features.train_step.written.step_if import step_if
    from .features.train_step.written.written_step import WrittenStep
    from .inspection.explanation import Explanation

__version__ = "0.1.0"
__all__ = [
    "AotProgram",
    "Bill",
    "BindError",
    "CaptureCost",
    "CaptureError",
    "CheckError",
    "ConditionalNodes",
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
    "Placements",
    "PlanError",
    "StorageError",
    "SuspendError",
    "SuspendableMemory",
    "TrainStep",
    "TrainStepError",
    "UnsupportedModelError",
    "WrittenStep",
    "aot_compile",
    "bind",
    "cpp_kernels",
    "doctor",
    "explain",
    "limit_memory",
    "load",
    "mark_bucket",
    "no_sync",
    "plan_memory",
    "record",
    "register_device",
    "release",
    "report",
    "resume",
    "save",
    "shard_parameters",
    "stats",
    "step_if",
    "suspend",
    "train_step",
]

# Inductor takes seconds to import, so names that need it are imported at their first use.
_LAZY = {
    "DeviceRegistration": ".codegen.devices.registration",
    "Explanation": ".inspection.explanation",
    "FxwrapCodegen": ".codegen.emit.emission",
    "explain": ".api.explain",
    "plan_memory": ".packing",
    "record": ".api.record",
    "register_device": ".codegen.devices.registration",
    "release": ".api.release",
    "report": ".api.report",
    "stats": ".api.stats",
}
# What features add, or extend: without a feature and its line the function above stands.
_LAZY.update(aot_compile=".features.ahead_of_time.aot_compile", AotProgram=".features.ahead_of_time.aot_program")
_LAZY.update(load=".features.ahead_of_time.load", save=".features.ahead_of_time.save")
_LAZY.update(bind=".features.bind.bind")
_LAZY.update(Bill=".features.bill.bill", record=".features.bill.record")
_LAZY.update(mark_bucket=".features.buckets.codegen.marks")
_LAZY.update(Diagnosis=".features.command_line.doctor", doctor=".features.command_line.doctor")
_LAZY.update(limit_memory=".features.limits.limit_memory")
_LAZY.update(resume=".features.suspend.suspend", suspend=".features.suspend.suspend")
_LAZY.update(TrainStep=".features.train_step.loss_step", train_step=".features.train_step.train_step")
_LAZY.update(WrittenStep=".features.train_step.written.written_step")
_LAZY.update(step_if=".features.train_step.written.step_if", no_sync=".features.train_step.written.averaged")
_LAZY.update(shard_parameters=".features.train_step.written.sharding")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fxwrap' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name], __name__), name)
