"""The example of docs/serving.md runs on every device, and says what the guide says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import freezes

from fxwrap.features.suspend.memory import memory_class

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_the_example(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "serving", raising=False)
    import serving

    with torch.inference_mode():
        suspendable = freezes(device) and memory_class(device) is not None
        serving.serve(str(device), suspendable=suspendable)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines] == ["1.", "2.", "3.", "4.", "5."]
    assert lines[0].startswith("1. 3 recordings") and lines[1].startswith("2. after 7 sizes: 3 recordings")
    assert lines[2].endswith("True") and lines[3].endswith(": 0")
    if suspendable:
        (given_back,) = re.findall(r"5\. ([\d,]+) bytes", lines[4])
        assert int(given_back.replace(",", "")) > 0
