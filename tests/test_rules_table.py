"""docs/hardware_rules.md says of simulated devices what their code says; hostcuda/tests compare the other columns."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fxwrap.testing.simulated import Rules

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "hostsim"


def table(title: str) -> dict[str, list[str]]:
    """The rows below a title: by the first cell, the others."""
    section = (ROOT / "docs" / "hardware_rules.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


SIMULATED = {field.name for field in fields(Rules)}
HOSTSIM = set(re.findall(r'^    \{"(\w+)",', (EXAMPLE / "hostsim" / "csrc" / "rules.cpp").read_text(), re.MULTILINE))


def test_every_rule_has_a_row() -> None:
    assert len(HOSTSIM) == 7
    assert set(table("Pools, generators and libraries")) == SIMULATED | HOSTSIM


@pytest.mark.parametrize("rule", sorted(SIMULATED | HOSTSIM))
def test_a_row_names_who_has_the_rule(rule: str) -> None:
    simulated, hostsim, *_ = table("Pools, generators and libraries")[rule]
    assert simulated == ("yes" if rule in SIMULATED else "no")
    assert (hostsim == "`relax`") == (rule in HOSTSIM)
    assert hostsim in ("`relax`", "always", "no")


def test_the_guide_of_devices_has_the_same_rules() -> None:
    text = (ROOT / "docs" / "devices.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| ", text, re.MULTILINE)) >= SIMULATED | HOSTSIM


def test_what_hostsim_refuses_in_a_capture_is_tested_there() -> None:
    ways = re.findall(
        r"^    def (\w+)\(self\):", (EXAMPLE / "tests" / "test_capture_errors.py").read_text(), re.MULTILINE
    )
    named = {row[1] for row in table("What a thread does while it captures").values()} - {"allowed"}
    assert named <= {f"`{way}`" for way in ways}
    # The rest is in the first table, or hostsim's own.
    assert {f"`{way}`" for way in ways} - named == {
        "`branches_on_a_value`",
        "`replays_a_graph`",
        "`empties_the_cache`",
        "`ends_on_another_stream`",
    }
