"""Other targets: the decisions for a device that this machine lacks (``fxwrap.explain(..., target="cuda:90")``)."""

from __future__ import annotations

from ...hooks import EXPLAINERS

EXPLAINERS["target"] = "fxwrap.features.target.explain:explain_for"
