"""A wheel holds all of the package, and works where there is torch and no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.compiler

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
    report.to_html("report.html")
assert pathlib.Path("report.html").stat().st_size > 10_000
buffers = [Buffer("a", 64, 0, 2), Buffer("b", 128, 1, 3)]
assert fxwrap.plan_memory(buffers, exact=True, budget_s=1).size == 192
print("works")
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


def test_it_works_in_an_environment_that_has_torch_and_no_checkout(wheel: Path, tmp_path: Path) -> None:
    """A path file brings torch; the path files beside torch, and what they say of a checkout, are not read."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    site = next((environment / "lib").glob("python*")) / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "torch.pth").write_text(sysconfig.get_paths()["purelib"])
    program = tmp_path / "smoke.py"
    program.write_text(SMOKE)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [environment / "bin" / "python", program]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "works", done.stderr
