"""``python -m fxwrap``: explain, diff, doctor; ``test_command_line.py`` has the commands for files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import processes
import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from fxwrap.features.command_line.command_line import app

MODULE = """
import torch
from fxwrap import FxwrapError

class Scaled(torch.nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.linear = torch.nn.Linear(size, 3)
    def forward(self, x, scale=1):
        return self.linear(x).relu() * scale

def example():
    return (torch.randn(2, 4),)

def fails(x):
    raise ValueError("no such thing")

scaled = Scaled()
"""

SCRIPT = """
import sys, torch

def main():
    model = torch.nn.Linear(4, 4)
    fast = torch.compile(model, backend="fxwrap")
    with torch.no_grad():
        for _ in range(3):
            fast(torch.randn(2, 4))

for rows in range(2, 6):
    torch.compile(lambda x: x.sin(), backend="fxwrap", dynamic=False)(torch.randn(rows, 3))
main()
print("said", sys.argv[1:], __name__)
if "--fail" in sys.argv:
    raise ValueError("on purpose")
if "--exit" in sys.argv:
    sys.exit(5)
"""


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "of_explain.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_function_is_explained(folder: Path) -> None:
    code, said, _ = command("explain", "of_explain:scaled", "--args", "*example(), scale=3", "--no-grad")
    assert code == 0 and "inference on cpu" in said and "aten.addmm.out" in said
    assert "launch cpp_fused" in said, "the function was given its keyword"
    code, said, _ = command("explain", "of_explain:Scaled(8).forward", "--args", "torch.randn(5, 8)")
    assert code == 0 and "forward on cpu" in said and "float32[5, 8]" in said


def test_options_reach_the_compilation(folder: Path) -> None:
    arguments = ("explain", "of_explain:scaled", "--args", "*example()", "--option")
    assert "captured" in command(*arguments, "capture=always")[1]
    code, said, _ = command(*arguments, "capture=never")
    assert code == 0 and "captured" not in said.replace("to have more captured", "")
    code, said, _ = command(*arguments, "eager_ops=('aten::addmm',)", "--option", "min_launches=1")
    assert code == 0 and "eager" in said and "aten::addmm" in said


def test_pages_and_data_are_written(folder: Path) -> None:
    arguments = ("--args", "*example()", "--html", "page.html", "--json", "data.json")
    code, said, told = command("explain", "of_explain:scaled", *arguments)
    assert code == 0 and not said and "page.html: " in told and "data.json: " in told
    assert "aten.addmm" in Path("page.html").read_text()
    (graph,) = json.loads(Path("data.json").read_text())["graphs"]
    assert graph["phase"] == "forward"


def test_the_folder_of_what_is_written_is_made(folder: Path) -> None:
    arguments = ("--args", "*example()", "--html", "a/b/page.html", "--json", "c/data.json")
    assert command("explain", "of_explain:scaled", *arguments)[0] == 0
    assert Path("a/b/page.html").exists() and Path("c/data.json").exists()


@pytest.mark.parametrize(
    "arguments, missing",
    [
        (("explain",), "MODULE:FUNCTION|SCRIPT.py"),
        (("diff",), "before"),
        (("save",), "source"),
        (("save", "torch:nothing"), "--output"),
        (("inspect",), "file"),
        (("run",), "file"),
        (("run", "train.py"), "method"),
    ],
)
def test_what_is_missing_is_named(folder: Path, arguments: tuple[str, ...], missing: str) -> None:
    code, said, told = command(*arguments)
    assert code == 2 and not said and missing.lower() in told.lower().partition("missing")[2]


def test_that_nothing_was_compiled_is_said_whatever_is_written(folder: Path) -> None:
    code, said, told = command("explain", "torch.nn:LSTM(2, 3)", "--args", "torch.ones(1, 2)", "--json", "data.json")
    assert code == 0 and not said and "nothing was compiled" in told and "LSTM" in told
    assert json.loads(Path("data.json").read_text())["graphs"] == []


def test_a_picture_is_drawn(folder: Path) -> None:
    code, said, told = command("explain", "of_explain:scaled", "--args", "*example()", "--picture", "memory.svg")
    assert code == 0 and not said and "memory.svg: " in told and Path("memory.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("nowhere:f",), "No module named 'nowhere'"),
        (("of_explain:nobody",), "name 'nobody' is not defined"),
        (("of_explain:Scaled('a')", "--args", "*example()"), "of_explain.py:8"),
        (("of_explain",), "package.module:function"),
        (("of_explain:scaled", "--args", "torch.rand(2"), "SyntaxError"),
        (("of_explain:scaled", "--args", "1 / 0"), "ZeroDivisionError: division by zero"),
        (("of_explain:fails", "--args", "*example()"), "of_explain:fails cannot run with (*example())"),
        (
            ("of_explain:scaled", "--args", "scale=2"),
            "argument: 'x' what to do: --args is what stands between the brackets",
        ),
        (("of_explain:scaled", "--args", "*example(), size=2"), "unexpected keyword argument 'size'"),
        (("of_explain:scaled", "--option", "capture"), "--option capture"),
        (("of_explain:scaled", "--option", "captures=always"), "capture"),
        (("of_explain:scaled", "--option", "warmup=often"), "warmup"),
        (("of_explain:fails", "--args", "*example()", "--html", "."), ". cannot be written"),
        (("of_explain:fails", "--args", "*example()", "--json", "train.py/x"), "train.py"),
        (("missing.py",), "no script missing.py"),
        (("--no-grad", "train.py"), "are for functions"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(folder: Path, arguments: tuple[str, ...], expected: str) -> None:
    code, said, told = command("explain", *arguments)
    assert code == 1 and not said
    assert expected in " ".join(told.split()) and "Traceback" not in told


def test_a_script_is_run_and_all_that_it_compiled_is_shown(folder: Path) -> None:
    """The compiled model is gone by the end of the script."""
    done = processes.run("-m", "fxwrap", "explain", "train.py", "--args", "x", "--exit", cwd=folder)
    assert done.returncode == 5, done.stderr
    said, _, shown = done.stdout.partition("\n")
    assert said == "said ['--args', 'x', '--exit'] __main__"
    assert shown.count("inference on cpu") == 5 and shown.count("replays: 1") == 1
    inputs = re.findall(r": (.*) on cpu \(arg0_1\)", shown)
    assert inputs == [*(f"float32[{rows}, 3]" for rows in range(2, 6)), "float32[4, 4]"], "in order"


def test_an_error_of_a_script_is_shown_as_python_shows_it(folder: Path) -> None:
    done = processes.run("-m", "fxwrap", "explain", "--json", "data.json", "train.py", "--fail", cwd=folder)
    assert done.returncode == 1
    traceback = done.stderr[done.stderr.index("Traceback") :]
    assert traceback.splitlines()[1].startswith('  File "train.py", line 16')
    assert "ValueError: on purpose" in traceback and "runpy" not in traceback
    assert len(json.loads((folder / "data.json").read_text())["graphs"]) == 5


def test_a_script_that_compiles_nothing(folder: Path) -> None:
    (folder / "idle.py").write_text("import other; print(other.value)")
    (folder / "other.py").write_text("value = 'beside the script'")
    done = processes.run("-m", "fxwrap", "explain", str(folder / "idle.py"))
    assert done.returncode == 0 and done.stdout.startswith("beside the script")
    assert "the script compiles nothing" in done.stderr


def test_two_reports_are_compared(folder: Path) -> None:
    arguments = ("explain", "of_explain:scaled", "--args", "*example()", "--no-grad")
    for name, more in (("a", ()), ("b", ()), ("c", ("--option", "capture=never")), ("d", ("--calls", "3"))):
        assert command(*arguments, *more, "--json", f"{name}.json")[0] == 0
    code, said, _ = command("diff", "a.json", "b.json")
    assert code == 0 and said.startswith("no difference")
    code, said, _ = command("diff", "a.json", "c.json")
    assert (
        code == 1
        and "aten::addmm: captured: 1" in said
        and "+ graph 0, aten::addmm: eager: capture='never': 1" in said
    )
    code, said, _ = command("diff", "a.json", "c.json", "--json")
    assert code == 1 and json.loads(said)["different"] is True
    code, said, _ = command("diff", "a.json", "d.json")
    assert code == 1 and "replays: 0 -> 1" in said


def test_what_is_no_report_cannot_be_compared(folder: Path) -> None:
    (folder / "empty.json").write_text("{}")
    (folder / "torn.json").write_text('{"schema":')
    (folder / "parts.json").write_text('{"schema": "fxwrap.report/1"}')
    (folder / "binary.json").write_bytes(b"\xff\xfe")
    for file, expected in (
        ("empty.json", "not a report"),
        ("torn.json", "torn.json is no report"),
        ("parts.json", "without versions"),
        ("binary.json", "binary.json is no report"),
    ):
        code, said, told = command("diff", file, file)
        assert code == 2 and not said and expected in told and "Traceback" not in told
    assert command("diff", "empty.json", "missing.json")[0] == 2


def test_a_terminal_that_lacks_letters_gets_them_escaped(folder: Path) -> None:
    (folder / "letters.py").write_text("def step(größe):\n    return größe + 0.37\n", encoding="utf-8")
    result = CliRunner(charset="ascii").invoke(app, ["explain", "letters:step", "--args", "torch.ones(4)"])
    assert result.exit_code == 0 and "inference on cpu" in result.stdout
    assert r"gr\xf6\xdfe" in result.stdout


def test_every_command_has_help_with_an_example() -> None:
    names = [str(one.name or one.callback.__name__) for one in app.registered_commands if one.callback is not None]
    assert {"explain", "doctor", "diff"} <= set(names)
    for name in names:
        code, said, _ = command(name, "--help")
        assert code == 0 and f"python -m fxwrap {name}" in said


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = command("doctor")
    assert code == 0 and "device cpu" in said and "C++ compiler" in said
    monkeypatch.setattr("torch.__version__", "2.9.0")
    assert command("doctor")[0] == 1
