"""Environments as a new user has them: Python, torch, the wheel, and what the wheel asks for; nothing else.

Packages come from this environment: those, and only those, that the wheel and its extras name, and what these name in
turn. So nothing is downloaded, and kernels that were compiled once are found again, for torch stays where it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

# A module is found if its package was asked for. (pip does not look here, but for the folders beside it.)
_FINDER = """
import sys
from importlib.machinery import PathFinder

class Shared:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, FOLDERS, target) if path is None and name in NAMES else None

sys.meta_path.append(Shared)
"""


def environment(folder: Path, wheel: Path, extras: str = "") -> Path:
    """The Python of a new environment in ``folder``, in which pip has installed the wheel with extras ("cli,page").

    Raises:
        importlib.metadata.PackageNotFoundError: a package that the wheel asks for is not installed here.
        subprocess.CalledProcessError: pip misses a package that the wheel asks for.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*")) / "site-packages"
    names, folders = set(), set()
    for package in _asked_for(wheel, frozenset(extras.split(","))):
        for file in package.files or ():
            top = file.parts[0]
            if top.endswith(".dist-info") and not (site / top).exists():
                (site / top).symlink_to(str(package.locate_file(top)))
            elif top not in ("..", "__pycache__"):
                names.add(top.partition(".")[0])
                folders.add(str(package.locate_file("")))
    (site / "shared.py").write_text(f"NAMES, FOLDERS = {names!r}, {sorted(folders)!r}\n{_FINDER}")
    (site / "shared.pth").write_text("import shared\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--isolated", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, str(wheel) + (f"[{extras}]" if extras else "")], check=True)
    return python


def _asked_for(wheel: Path, extras: frozenset[str]) -> list[metadata.Distribution]:
    """The packages that a wheel with these extras brings, and what they bring in turn."""
    (info,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    found: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    to_do = [(text, extras) for text in metadata.PathDistribution(info).requires or ()]  # type: ignore[arg-type]
    while to_do:
        text, asked = to_do.pop()
        one = Requirement(text)
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in asked or {""}):
            continue
        key = one.name.lower(), frozenset(one.extras)
        if key not in found:
            found[key] = metadata.distribution(one.name)
            to_do += [(text, key[1]) for text in found[key].requires or ()]
    return list(found.values())


def run_in(python: Path, *arguments: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ``python *arguments`` prints, and its exit code. The checkout is not on its path."""
    around = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = os.pathsep.join((str(python.parent), around["PATH"]))
    quiet = "ignore:Failed to initialize NumPy:UserWarning"  # which torch works without
    around |= {"PATH": path, "PYTHONWARNINGS": quiet, **variables}
    return subprocess.run([python, *arguments], cwd=cwd, env=around, capture_output=True, text=True, check=False)
