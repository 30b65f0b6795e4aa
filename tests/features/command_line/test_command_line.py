"""``python -m fxwrap``: save, inspect, run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from fxwrap.features.command_line.command_line import app

MODULE = """
import torch

def methods():
    rows = torch.export.Dim("rows", min=2, max=8)
    model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    return {"forward": torch.export.export(model, (x,), dynamic_shapes={"input": {0: rows}})}
"""


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_save_inspect_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, said = command("save", "of_a_user:methods", "-o", "linear.fxw")
    assert code == 0 and "linear.fxw" in said and Path("linear.fxw").exists()
    code, said = command("inspect", "linear.fxw")
    assert code == 0 and "float32[" in said and "compile: object" in said and "2 tensors, " in said
    code, said = command("run", "linear.fxw", "forward", "--random", "--trust", "--calls", "3")
    assert code == 0 and "forward: float32[2, 3]" in said
    code, said = command("run", "linear.fxw", "forward", "--random", "--trust", "--size", "nobody=8")
    assert code == 1 and "--size nobody=8" in said
    code, said = command("run", "linear.fxw", "forward", "--random")
    assert code == 1 and "expected: --trust" in said and "trust=True" not in said


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("save", "nowhere:methods", "-o", "x.fxw"), "cannot be imported"),
        (("save", "torch:nothing", "-o", "x.fxw"), "cannot be imported"),
        (("save", "torch:nothing", "-o", "."), ". cannot be written"),
        (("inspect", "README.md"), "cannot be loaded"),
        (("inspect", "missing.fxw"), "does not exist"),
        (("run", "README.md", "decode", "--random", "--trust"), "cannot be loaded"),
        (("run", "README.md", "decode"), "--random"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(arguments: tuple[str, ...], expected: str) -> None:
    code, said = command(*arguments)
    assert code != 0 and expected in said and "Traceback" not in said
