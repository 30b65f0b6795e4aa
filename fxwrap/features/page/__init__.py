"""The page of a report, also in notebooks, and pictures of its memory: ``Explanation.to_html`` and the like."""

from __future__ import annotations

from ...hooks import REPORT_METHODS

REPORT_METHODS["to_html"] = "fxwrap.features.page.methods:to_html"
REPORT_METHODS["_repr_html_"] = "fxwrap.features.page.methods:in_notebook"
REPORT_METHODS["memory_picture"] = "fxwrap.features.page.methods:memory_picture"
