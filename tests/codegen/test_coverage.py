"""A sample of benchmarks/coverage.py: whatever Inductor's own wrapper runs, fxwrap runs, with the same bits."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import torch

pytest.importorskip("expecttest", reason="torch's table of operators needs it")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "coverage.py"


@pytest.fixture(scope="module")
def coverage() -> Any:
    spec = importlib.util.spec_from_file_location("coverage_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# The script twice in one process: reading torch's table takes seconds.
TWICE = """
import json, re, sys
import coverage
results, *arguments = sys.argv[1:]
code = coverage.main([*arguments, "--results", results])
names = [re.escape(json.loads(line)["name"]) for line in open(results)]
print("again")
coverage.main(["--only", f"^({'|'.join(names)})$", "--results", results])
sys.exit(code)
"""


def test_a_sample_of_operators(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    cached = ("--cache", os.environ["TORCHINDUCTOR_CACHE_DIR"])
    sample = ("--seconds", "0.1", "--at-least", "8", "--seed", "1")
    done = processes.run("-c", TWICE, str(results), *sample, *cached, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(found) == 8 and [entry["verdict"] for entry in found].count("equal") >= 3
    # What is done is not done again.
    assert "8 entries" in done.stdout.partition("again\n")[2]


def case(module: Any, function: Any, *inputs: torch.Tensor) -> Any:
    return lambda: module.Case(function, lambda: (tuple(t.clone() for t in inputs), {}))


def test_a_difference_is_seen(coverage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script itself can fail: a pass that negates what the last kernel writes changes the numbers."""
    from fxwrap.codegen.emit import emission
    from fxwrap.host_graph.nodes import Kind, kind_of

    def negates_a_result(self: Any) -> Any:
        def negate(gm: torch.fx.GraphModule) -> None:
            launch = [n for n in gm.graph.nodes if kind_of(n) is Kind.LAUNCH][-1]
            with gm.graph.inserting_after(launch):
                gm.graph.call_function(torch.ops.aten.neg_.default, (launch.args[-1],))

        return [negate]

    entry = case(coverage, lambda x: x.sin().sum(), torch.ones(64))
    assert coverage.examine("sin", entry, None).verdict == "equal"
    monkeypatch.setattr(emission.FxwrapCodegen, "passes", negates_a_result)
    outcome = coverage.examine("sin", entry, None)
    assert outcome.verdict == "different" and "result of call 1" in outcome.reason


def test_a_fallback_and_a_failure_are_seen(coverage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fxwrap.codegen.emit import converter
    from fxwrap.errors import EmissionError

    def refuse(self: Any, line: Any) -> None:
        raise EmissionError("no kernels today")

    entry = case(coverage, torch.sin, torch.ones(4))
    monkeypatch.setattr(converter.HostGraphConverter, "_line_KernelCallLine", refuse)
    outcome = coverage.examine("sin", entry, None)
    assert outcome.verdict == "fell back" and "no kernels today" in outcome.reason

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not an operator")

    assert coverage.examine("broken", case(coverage, broken, torch.ones(4)), None).verdict == "Inductor failed"


def test_nan_equals_nan_and_nothing_else(coverage: Any) -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert coverage.compare([nan], [nan.clone()]) == ""
    assert "1 of 2" in coverage.compare([nan], [torch.tensor([1.0, 2.0])])
    assert "1 of 2" in coverage.compare([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 3.0])])
    assert "expected" in coverage.compare([nan], [nan.double()])
