"""Every error fxwrap raises: what it is about, what was expected, what was found, what to do."""

from __future__ import annotations


class FxwrapError(Exception):
    """Base of all fxwrap errors.

    Args:
        subject: what the error is about, as the user knows it.
        expected: what would have been right.
        got: what was found instead.
        remedy: what the reader can do now.
    """

    def __init__(self, subject: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        self.subject, self.expected, self.got, self.remedy = subject, expected, got, remedy
        lines = [subject]
        lines += [
            f"  {name}: {text}"
            for name, text in (("expected", expected), ("got", got), ("what to do", remedy))
            if text
        ]
        super().__init__("\n".join(lines))


class OptionError(FxwrapError, ValueError):
    """An option has an unknown name or a wrong value."""


class UnsupportedModelError(FxwrapError):
    """The model asks for something no part of fxwrap can run (two accelerators, for one)."""


class InputError(FxwrapError, ValueError):
    """A program was called with inputs that do not fit the graph it was compiled from."""


class EmissionError(FxwrapError):
    """Inductor's wrapper IR holds lines that have no form in a host graph."""


class DeviceError(FxwrapError):
    """A device cannot be registered as asked."""


class PlanError(FxwrapError):
    """The verifier refused a schedule or a memory plan. A bug in fxwrap: the plan is not run."""


class PipelineError(FxwrapError):
    """A stage of the pipeline does not get what it requires, or does not provide what it declares."""


class CaptureError(FxwrapError):
    """A device graph could not capture a partition, or cannot exist on the device."""


class MemoryLimitError(FxwrapError):
    """A recording would need more memory than ``max_memory`` allows, or than the device has.

    In the latter case its cause is ``torch.OutOfMemoryError``.
    """


class StorageError(FxwrapError):
    """A program, or a part of one, has no form that can be stored; or what was stored is not what fxwrap wrote."""


class CheckError(FxwrapError):
    """Checked mode has found that a replay is wrong, or that it can be: see docs/checked.md.

    Args:
        fault: its name there.
        operator: the operator or kernel at which it was found; empty where nobody can tell.
        line: of the user's code that it comes from.
    """

    def __init__(
        self,
        subject: str,
        *,
        fault: str,
        operator: str = "",
        line: str = "",
        expected: str = "",
        got: str = "",
        remedy: str = "",
    ) -> None:
        self.fault, self.operator, self.line = fault, operator, line
        found_at = " from ".join(filter(None, (operator, line)))
        super().__init__(
            f"{fault}: {subject}" + (f"\n  found at: {found_at}" if found_at else ""),
            expected=expected,
            got=got,
            remedy=remedy,
        )
