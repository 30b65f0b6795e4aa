"""What the documents say was measured, and that the benchmark runs. (``test_wheel.py`` runs their programs.)"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import processes
import pytest

ROOT = Path(__file__).parent.parent


def _run(*arguments: str) -> str:
    done = processes.run(*arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_figures_of_the_readme_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratios and the picture are those of the newest file of results."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    drawing = importlib.import_module("speed_picture")
    found = json.loads(max((ROOT / "benchmarks" / "results").glob("*-cpu.json")).read_text())
    text, means = (ROOT / "README.md").read_text(), found["means"]["overhead-bound"]
    assert re.search(r"\*\*(0\.\d\d) of the time\*\*", text)[1] == f"{means['inductor']:.2f}"
    assert re.search(r"and (0\.\d\d)\s+of its C\+\+ wrapper", text)[1] == f"{means['cpp_wrapper']:.2f}"
    drawn = drawing.picture(drawing.of_group(found, "overhead-bound"))
    assert (ROOT / "docs" / "speed-overhead.svg").read_text() == drawn


def test_the_host_time_of_the_readme_is_that_of_the_table() -> None:
    (row,) = re.findall(r"^\| 12 blocks \|(.*)\|$", (ROOT / "docs" / "speed.md").read_text(), re.MULTILINE)
    trees_over, fxwrap_over = (cell.strip() for cell in row.split("|")[5:7])
    assert f"| {trees_over} µs | {fxwrap_over} µs (12 blocks," in (ROOT / "README.md").read_text()


def test_the_status_of_cuda_is_the_same_everywhere() -> None:
    """Every page that says where CUDA has run names the GPU of the results, and its version of torch."""
    (results,) = (ROOT / "benchmarks" / "results").glob("*-h200.txt")
    gpu, torch_version = re.findall(r"^NVIDIA (\w+), torch (\d+\.\d+)", results.read_text())[0]
    readme = (ROOT / "README.md").read_text()
    (status,) = re.findall(r"^\*\*Status\.\*\*.*?(?=^$)", readme, re.MULTILINE | re.DOTALL)
    (limit,) = re.findall(r"^- One GPU has run fxwrap.*$", readme, re.MULTILINE)
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("cuda", "limits", "comparison")}
    for text in (status, limit, *pages.values()):
        assert re.search(rf"\b{gpu}\b,?\s+with\s+torch\s+{re.escape(torch_version)}", text), text[:200]
    everywhere = "\n".join([readme, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))])
    assert not re.search(r"CUDA[^.|]*\bnot\s+yet\s+on\s+a\s+GPU", everywhere)


def test_every_option_is_in_the_reference() -> None:
    from dataclasses import fields

    from fxwrap.options import ADDED, Options

    text = (ROOT / "docs" / "reference.md").read_text()
    for name in ({option.name for option in fields(Options)} - {"added"}) | ADDED.keys():
        assert f"| `{name}` |" in text, name


def test_the_versions_of_torch_are_the_same_everywhere() -> None:
    from fxwrap.features.command_line.doctor import _TORCH

    (bounds,) = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    oldest, end = map(int, bounds)
    assert ((2, oldest), (2, end)) == _TORCH
    assert f"torch 2.{oldest} to 2.{end - 1}" in (ROOT / "README.md").read_text()
    tried = [path.stem.split("-")[1].split(".") for path in (ROOT / "constraints").glob("torch-*.txt")]
    assert sorted(int(minor) for _, minor, _ in tried) == list(range(oldest, end))


def test_the_guide_names_every_step_of_the_contract() -> None:
    from fxwrap.testing.contract import STEPS

    text = (ROOT / "docs" / "devices.md").read_text()
    for step in STEPS:
        assert f"| `Test{step.capitalize()}` |" in text, step


def test_speed_in_short(tmp_path: Path) -> None:
    """A short run, for correctness; what it measures is read by people, not by tests."""
    written, drawn = tmp_path / "speed.json", tmp_path / "speed.svg"
    sides = ["eager", "inductor", "fxwrap"]
    text = _run(
        "benchmarks/speed.py", "--models", "mlp", "x + 1", "--alternatives", *sides, "--seconds", "0.1",
        "--device", "cpu", "--json", str(written), "--picture", str(drawn),
    )  # fmt: skip
    assert "geometric mean" not in text and text.count("bit for bit") == 2  # each is alone in its group
    found = json.loads(written.read_text())
    assert set(found["models"]) == {"mlp", "x + 1"} and set(found["means"]) == {"overhead-bound", "least"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]) and found["threads"] == 1
    for row in found["models"].values():
        assert list(row["alternatives"]) == [*sides, "itself"] and not row["failed"] and not row["not_replayed"]
        for name, one in row["alternatives"].items():
            low, middle, high = one["us_quartiles"]
            assert 0 < low <= middle <= high and ("ratio" in one) == (name != "fxwrap")
        assert row["alternatives"]["fxwrap"]["difference"] == 0
        assert set(row["parts"]["fxwrap"]) == {"call", "dynamo", "aot", "wrapper"}
    parts = found["models"]["mlp"]["parts"]
    assert (parts["operators"]["calls"], parts["kernels"]["calls"]) == (24, 25)
    dots = ElementTree.parse(drawn).findall(".//{*}circle")
    assert len(dots) == 2 + 2 * 2  # Inductor and fxwrap itself: the legend, and each model
