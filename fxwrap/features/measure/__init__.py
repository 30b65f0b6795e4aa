"""Where the time of a call goes: ``fxwrap.explain(..., measure=True)``."""

from __future__ import annotations

from ...hooks import REPORT_SECTIONS

REPORT_SECTIONS["measured"] = "fxwrap.features.measure.section:MeasuredSection"
