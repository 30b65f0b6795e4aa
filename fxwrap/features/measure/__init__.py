"""Where the time of a call goes: ``fxwrap.explain(..., measure=True)``."""

from __future__ import annotations

from ...hooks import EXPLAINERS, REPORT_SECTIONS

EXPLAINERS["measure"] = "fxwrap.features.measure.stopwatch:explain_times"
REPORT_SECTIONS["measured"] = "fxwrap.features.measure.section:MeasuredSection"
