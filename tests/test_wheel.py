"""A wheel holds all of the package, and what the documents show runs where there is nothing but it.

Each page runs in an environment that has the extras that the page names; see ``pages.py``.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import traceback
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import pytest
from environments import environment, run_in
from pages import blocks, run

from fxwrap.torch_private.native_library import native_replay

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.compiler

# What users ask for. "test" is this environment, "rivals" what a benchmark compares with, "trainers" of examples.
EXTRAS = ("cli", "save", "page", "triton")

SMOKE = """
import pathlib, sys, torch, fxwrap
from importlib.metadata import version
from fxwrap.packing import Buffer

where = pathlib.Path(fxwrap.__file__)
assert where.is_relative_to(sys.prefix), where
assert version("fxwrap") == fxwrap.__version__

def f(x, w):
    return (x @ w).relu() + 1

fast = torch.compile(f, backend="fxwrap")
slow = torch.compile(lambda x, w: (x @ w).relu() + 1, backend="inductor")
with torch.no_grad():
    for _ in range(4):
        x, w = torch.randn(3, 8), torch.randn(8, 8)
        assert torch.equal(fast(x, w), slow(x, w))
    stats = fxwrap.stats(fast)
    assert stats["replays"] == 2 and not stats["fallbacks"], stats
    report = fxwrap.report(fast)
    assert report.to_dict()["graphs"][0]["unit"], "native replay"
buffers = [Buffer("a", 64, 0, 2), Buffer("b", 128, 1, 3)]
assert fxwrap.plan_memory(buffers).size == 192

# What needs an extra says so, and compiling ahead of time in memory needs none.
def refused(act):
    try:
        act()
    except fxwrap.FxwrapError as error:
        return error.remedy

model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), torch.randn(3, 8)
program = fxwrap.aot_compile({"call": (model, (x,))}, options={"freezing": True})
torch.testing.assert_close(program.call(x), model(x))
assert refused(lambda: fxwrap.save("model.fxw", program)) == "pip install 'fxwrap[save]'"
assert refused(lambda: report.to_html("report.html")).startswith("pip install 'fxwrap[page]'")
"""

DOCTOR = """
import json, fxwrap
print(json.dumps({one.subject: one.state for one in fxwrap.doctor().findings if one.subject.startswith("extra ")}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what an earlier build has left in build/ would be packed, too."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "fxwrap", source / "fxwrap", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)
    (built,) = folder.glob("fxwrap-*.whl")
    return built


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    """Python, C++, the page's parts, and the mark that the package has types."""
    names = {path for path in (ROOT / "fxwrap").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fxwrap/")}
    assert packed == {str(path.relative_to(ROOT)) for path in names}
    assert {Path(name).suffix for name in packed} >= {".py", ".cpp", ".h", ".css", ".html", ".js", ".typed"}


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``python("cli,page")`` is that of an environment with these extras."""
    assert not isinstance(native_replay(), str)  # built now, so that no page has to wait for it and says so

    @functools.cache
    def made(extras: str) -> Path:
        return environment(tmp_path_factory.mktemp("environment"), wheel, extras)

    return made


def test_it_works_where_there_is_torch_and_no_checkout(python: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "smoke.py").write_text(SMOKE)
    done = run_in(python(""), "smoke.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_in(python(""), "-m", "fxwrap", "inspect", cwd=tmp_path)
    assert done.returncode == 1 and "pip install 'fxwrap[cli]'" in done.stderr


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_an_environment_has_what_its_extra_brings_and_no_more(
    extra: str, python: Callable[[str], Path], tmp_path: Path
) -> None:
    """As the doctor sees it, which imports all."""
    done = run_in(python(extra), "-c", DOCTOR, cwd=tmp_path)
    others = {f"extra {one}": "ok" if one == extra else "missing" for one in EXTRAS}
    if any(one.startswith("triton") for one in metadata.requires("torch") or ()):  # a build for a GPU
        others["extra triton"] = "ok"
    assert json.loads(done.stdout) == others, done.stderr


# -- pages and examples ---------------------------------------------------------------------------------------------


def by_extras(names: Iterable[str]) -> dict[str, list[str]]:
    """Pages, or calls of examples, by the extras that their text has the reader install."""
    found = defaultdict(list)
    for name in names:
        named = " ".join(re.findall(r"(?:fxwrap|\.)\[([\w,]+)\]", (ROOT / name.split()[0]).read_text()))
        found[",".join(extra for extra in EXTRAS if extra in re.findall(r"\w+", named))].append(name)
    return dict(found)


# What each example prints.
EXAMPLES = {
    "examples/demo.py --device cpu --steps 6 --tokens 6": [
        r"losses like Inductor's .*│ bit for bit *│ (bit for bit|within \de-0\d) *│\n",
        r"tokens like Inductor's .*│ bit for bit *│ - *│\n",
        r"bytes kept between calls .*(│ [\d,]+ *){2}│\n"
        r".*bytes at the peak of a call .*│ [\d,]+( \+ [\d,]+){2} *│ [\d,]+ *│\n",
    ],
    "examples/save_and_load.py": [
        r"prefill\(tokens: int64\[1, s", r"eager: .* a second: (\[.*\]) ...\nsaved: .* a second: \1 ...\n",
    ],
    "examples/train.py --steps 4 --every 2 --layers 1 --memory-limit 64MiB": [
        r"step 4: loss [\d.]+, held out [\d.]+, [\d.]+ ms a step\n",
        r"fxwrap: 2 replays, eager runs \{'warm-up': 1\}, fallbacks \{\}\nfxwrap: a step takes [\d,]+ bytes",
    ],
    "examples/decode.py --prompts 2": [
        r"(?m)\A( *\d+ -> [\d ]+( \.\.\.)?\n){2}", r"3 replays of 1 partition\nmicroseconds a token: [\d.]+ inside",
    ],
    "examples/serving.py": [r"1\. 3 recordings", r"2\. after 7 sizes: 3 recordings"],
    "examples/subclassing.py": [
        # How many asserts stand for the three inputs is each torch's own affair.
        r"2 allocation, [13] check, 1 constant, 2 extern, 1 launch, 1 output, 3 placeholder, 1 view",
        r"partition 0: 4 inputs, of which it writes buf2",
        r"aten::addmm.*\n?.*\n\Z",
    ],
    "examples/questions/why_eager.py": [
        r"aten::nonzero runs eagerly", r"chosen = torch\.nonzero\(scores > 0\.5\)", r"torch\.nonzero_static",
    ],
    "examples/questions/what_holds_the_peak.py": [
        r"36% buf1, temporary", r"scores = \(q @ k\.transpose\(-1, -2\)\)\.softmax\(-1\)",
        r"predicted ([\d,]+), a call was measured to take \1",
    ],
    "examples/questions/why_recorded_again.py": [r"4 recordings for 12 replays", r"=7\): took"],
    "examples/questions/which_copy_costs_most.py": [
        r"a cache made anew: every replay copies\n  131,072 bytes of input",
        r"a cache that stays: every replay copies\n    1,024 bytes of input",
    ],
    "examples/questions/what_changed.py": [
        r"launch cpp_fused_div_gelu", r"\+ aten\.cumsum\.out", r"extern_calls: 2 -> 3",
    ],
}  # fmt: skip
PAGES = [
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if not all(block.untested for block in blocks(page.read_text()))
]
READ, TRIED = by_extras(PAGES), by_extras(EXAMPLES)


@pytest.mark.parametrize("extras", READ)
def test_pages_print_what_they_show(extras: str, python: Callable[[str], Path], tmp_path: Path) -> None:
    """All of their programs and commands, each page where there are the extras that it names."""
    done = run_in(python(extras), ROOT / "tests" / "pages.py", tmp_path, *READ[extras], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("extras", TRIED)
def test_examples_run_and_print_their_answers(extras: str, python: Callable[[str], Path], tmp_path: Path) -> None:
    done = run_in(python(extras), ROOT / "tests" / "pages.py", tmp_path, *TRIED[extras], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = dict(re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", done.stdout, re.MULTILINE))
    assert list(printed) == TRIED[extras]
    for example, text in printed.items():
        for answer in EXAMPLES[example]:
            assert re.search(answer, text), (example, answer, text)


def test_every_example_is_tried() -> None:
    examples = {path for folder in (".", "questions") for path in (ROOT / "examples" / folder).glob("*.py")}
    assert {ROOT / name.split()[0] for name in EXAMPLES} == examples


# -- how pages are run ----------------------------------------------------------------------------------------------

PAGE = """
```python
x = [1,
     2]
```

<!-- untested: needs a moon -->
```bash
exit 1
```

<!-- python
print(x, "and", "more")
-->

```text
[1, 2] and ...
```
"""
FAULTS = {
    "another output": (("[1, 2] and", "[1, 3] and"), "page.md:17: the page shows\n[1, 3]"),
    "a program that raises": (("     2]", "     1 / 0]"), 'page.md", line 4'),
    "commands that fail": (("<!-- untested: needs a moon -->\n", ""), "page.md:8: exit code 1"),
    "a block of no kind": (("```text", "```toml"), "nobody knows how to run 'toml'"),
    "a block without a kind": (("```text", "```"), "nobody knows how to run ''"),
}


def test_a_page_that_is_right(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    run(tmp_path / "page.md")
    found = [(block.line, block.untested) for block in blocks(PAGE)]
    assert found == [(3, ""), (9, "needs a moon"), (13, ""), (17, "")]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_page_that_is_wrong(fault: str, tmp_path: Path) -> None:
    (old, new), said = FAULTS[fault]
    (tmp_path / "page.md").write_text(PAGE.replace(old, new))
    with pytest.raises((AssertionError, ZeroDivisionError)) as caught:
        run(tmp_path / "page.md")
    assert said in "".join(traceback.format_exception(caught.value))
