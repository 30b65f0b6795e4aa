"""Programs in the documents print what the documents say, and the benchmarks run."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import processes
import pytest
import torch

ROOT = Path(__file__).parent.parent


def _run(*arguments: str) -> str:
    done = processes.run(*arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_of_the_readme_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "captured" in _run("-c", code)


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


def test_the_smallest_program_prints_what_the_guide_shows() -> None:
    text = (ROOT / "docs" / "explain.md").read_text()
    code, shown = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)\n```", text, re.DOTALL).groups()
    assert _run("-c", code).strip() == shown.strip()


def test_every_option_is_in_the_reference() -> None:
    from dataclasses import fields

    from fxwrap.options import Options

    text = (ROOT / "docs" / "reference.md").read_text()
    for option in fields(Options):
        assert f"| `{option.name}` |" in text, option.name


def test_the_examples_of_subclassing_run() -> None:
    text = _run("examples/subclassing.py")
    # How many asserts stand for the three inputs is each torch's own affair.
    assert re.search(
        r"2 allocation, [13] check, 1 constant, 2 extern, 1 launch, 1 output, 3 placeholder, 1 view", text
    )
    assert "partition 0: 4 inputs, of which it writes buf2" in text
    assert "aten::addmm" in text.splitlines()[-2] + text.splitlines()[-1]


def test_the_example_of_saving_says_the_same_as_eager(tmp_path: Path) -> None:
    text = _run("examples/save_and_load.py", str(tmp_path / "decoder.fxw"))
    eager, saved = re.findall(r"(?:eager|saved): .* a second: (\[.*\])", text)
    assert eager == saved and "prefill(tokens: int64[1, s" in text


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


def test_demo_in_short() -> None:
    text = _run("examples/demo.py", "--device", "cpu", "--steps", "6", "--tokens", "6")
    assert "DIFFERENT" not in text
    losses = next(line for line in text.splitlines() if "losses like Inductor's" in line)
    assert "bit for bit" in losses.split("│")[-2]


# The examples of questions, in reading order, and what their answers have in them.
QUESTIONS = {
    "why_eager": ["aten::nonzero runs eagerly", "chosen = torch.nonzero(scores > 0.5)", "torch.nonzero_static"],
    "what_holds_the_peak": ["36% buf1, temporary", "scores = (q @ k.transpose(-1, -2)).softmax(-1)"],
    "why_recorded_again": ["4 recordings for 12 replays", "=7): took"],
    "which_copy_costs_most": [
        "a cache made anew: every replay copies\n  131,072 bytes of input",
        "a cache that stays: every replay copies\n    1,024 bytes of input",
    ],
    "what_changed": ["launch cpp_fused_div_gelu", "+ aten.cumsum.out", "library calls: 2 -> 3"],
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_are_answered_by_reports(
    question: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.syspath_prepend(ROOT / "examples" / "questions")
    importlib.import_module(question).main()
    text = capsys.readouterr().out
    for answer in QUESTIONS[question]:
        assert answer in text
    if question == "what_holds_the_peak":
        predicted, measured = re.search(r"predicted ([\d,]+), a call was measured to take ([\d,]+)", text).groups()
        assert predicted == measured


def test_every_question_is_asked() -> None:
    assert {path.stem for path in (ROOT / "examples" / "questions").glob("*.py")} == set(QUESTIONS)
