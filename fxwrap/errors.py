"""The errors that fxwrap raises. A message says its subject, what was expected, what was found, and what to do.

``packing``, which stands by itself, raises ValueError and RuntimeError.
"""

from __future__ import annotations

from collections.abc import Iterator


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
    """The model needs something that fxwrap cannot run, such as two accelerators."""


class InputError(FxwrapError, ValueError):
    """A program was called with inputs that do not fit the graph it was compiled from."""


class EmissionError(FxwrapError):
    """Inductor's wrapper IR holds lines that have no form in a host graph."""


class DeviceError(FxwrapError):
    """A device cannot be registered with these arguments, or a target device is unknown or unsupported."""


class PlanError(FxwrapError):
    """The verifier refused a schedule or a memory plan. This is a bug in fxwrap; the plan does not run."""


class PipelineError(FxwrapError):
    """A stage of the pipeline returns nothing or leaves an invalid graph, or a pass of the user's raises."""


class CaptureError(FxwrapError):
    """A device graph could not capture a partition, or cannot exist on the device."""


class MemoryLimitError(FxwrapError):
    """A call would need more than ``memory_limit``, or a recording more than ``max_memory`` or than the device has.

    In the last case its cause is ``torch.OutOfMemoryError``.

    Attributes:
        least: the lowest ``memory_limit`` that fits, in bytes; 0 where the error is about something else.
    """

    least = 0


class SuspendError(FxwrapError):
    """The memory of recordings cannot be suspended or resumed now."""


class BindError(FxwrapError):
    """A compiled function cannot be called without Dynamo's frame evaluation."""


class TrainStepError(FxwrapError):
    """A model, its loss or its optimizer needs something that cannot be part of one program."""


class StorageError(FxwrapError):
    """A method is not compiled ahead of time, a program cannot be stored, or a file is damaged or does not fit."""


class CheckError(FxwrapError):
    """Checked mode has found a replay that is wrong, or that can be wrong (docs/checked.md).

    Args:
        fault: the name of the fault in docs/checked.md.
        operator: the operator or kernel at which it was found; empty if that is unknown.
        line: the line of the user's code that the operator comes from.
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


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, the error that caused it (for Dynamo's errors ``inner_exception``), and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        inner = getattr(cause, "inner_exception", None)
        cause = inner if isinstance(inner, BaseException) else cause.__cause__


def limit_among(error: BaseException) -> MemoryLimitError | None:
    """The error of a limit that an error was caused by; None if there is none."""
    return next((cause for cause in causes(error) if isinstance(cause, MemoryLimitError)), None)
