"""Limits of memory after compiling: ``fxwrap.limit_memory``, and the picture of them, ``Explanation.limits``."""

from __future__ import annotations

from ...hooks import REPORT_METHODS

REPORT_METHODS["limits"] = "fxwrap.features.limits.picture:limits"
