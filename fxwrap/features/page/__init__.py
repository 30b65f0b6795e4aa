"""The page of a report, and pictures of its memory: ``Explanation.to_html`` and ``memory_picture``."""

from __future__ import annotations

from ...hooks import REPORT_METHODS

REPORT_METHODS["to_html"] = "fxwrap.features.page.methods:to_html"
REPORT_METHODS["memory_picture"] = "fxwrap.features.page.methods:memory_picture"
