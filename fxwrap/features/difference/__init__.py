"""The changes from one report to another: ``Explanation.diff``."""

from __future__ import annotations

from ...hooks import REPORT_METHODS

REPORT_METHODS["diff"] = "fxwrap.features.difference.difference:diff"
