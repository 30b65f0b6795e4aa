"""The package: what importing it does, who may touch private torch, and how stages may import one another."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fxwrap"
PRIVATE = (
    "torch._inductor", "torch._dynamo", "torch._functorch", "torch._guards", "torch._logging", "torch._C",
    "torch._library", "torch._higher_order_ops", "torch._subclasses", "torch.utils._sympy",
)  # fmt: skip


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def _imports(path: Path) -> list[str]:
    """Absolute names of what a file imports, wherever in the file."""
    here = ("fxwrap", *path.relative_to(PACKAGE).with_suffix("").parts)
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level]) if node.level else ""
            found.append(f"{base}.{node.module}".strip(".") if node.module else base)
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_torch_is_fenced(path: Path) -> None:
    if any(folder.name in ("codegen", "torch_private") for folder in path.parents):
        return
    assert not [name for name in _imports(path) if name.startswith(PRIVATE)]
    text = path.read_text()
    assert not [name for name in PRIVATE if f"{name}." in text]


# Imports go one way, in the order in which data flows.
# What users call.
_ACTS = ("fxwrap.api", "fxwrap.inspection", "fxwrap.features.ahead_of_time", "fxwrap.backend")
# What says how a program is made, and what makes and runs it.
_RULES = ("fxwrap.eager_rules", "fxwrap.options", "fxwrap.devices")
_RUNS = ("fxwrap.passes", "fxwrap.graphs", "fxwrap.pipeline", "fxwrap.codegen")
MAY_NOT_IMPORT = {
    "packing": ("torch", "fxwrap.host_graph", "fxwrap.plan", *_RUNS, *_ACTS),
    "errors.py": ("fxwrap.",),
    "limit.py": ("fxwrap.host_graph", *_RULES, "fxwrap.plan", *_RUNS, *_ACTS),
    "native_build.py": ("fxwrap.",),
    "torch_private": (
        "torch._inductor",
        "torch._dynamo",
        *_RULES,
        "fxwrap.plan",
        "fxwrap.host_graph",
        *_RUNS,
        *_ACTS,
    ),
    "host_graph": (*_RULES, "fxwrap.plan", *_RUNS, *_ACTS),
    "eager_rules.py": (*_RULES[1:], "fxwrap.plan", *_RUNS, *_ACTS),
    "options.py": ("fxwrap.plan", *_RUNS, *_ACTS),
    "devices.py": ("fxwrap.plan", *_RUNS, *_ACTS),
    "plan.py": (*_RUNS, *_ACTS),
    "passes": ("fxwrap.graphs", "fxwrap.pipeline", "fxwrap.codegen", *_ACTS),
    "graphs": ("fxwrap.passes", "fxwrap.pipeline", "fxwrap.codegen", *_ACTS),
    "pipeline.py": ("fxwrap.codegen", *_ACTS),
    "stages.py": (*_RULES, "fxwrap.plan", *_RUNS, *_ACTS),
    "codegen": _ACTS,
    "backend.py": _ACTS[:3],
    "inspection": _ACTS[:1] + _ACTS[2:],
    "hooks.py": ("fxwrap.plan", *_RUNS, *_ACTS),
    # Within graphs/: a recording is made of memory, by the record folder, for the policy, by the program.
    "graphs/devices": tuple(f"fxwrap.graphs.{room}" for room in ("memory", "replay", "record", "policy", "program")),
    "graphs/memory": tuple(f"fxwrap.graphs.{room}" for room in ("replay", "record", "policy", "program")),
    "graphs/replay": tuple(f"fxwrap.graphs.{room}" for room in ("record", "policy", "program")),
    "graphs/record": tuple(f"fxwrap.graphs.{room}" for room in ("policy", "program")),
    "graphs/policy": tuple(f"fxwrap.graphs.{room}" for room in ("record", "program")),
    # Within codegen/: what is emitted can be stored; Dynamo's side and the devices' know neither's inside.
    "codegen/emit": (
        "fxwrap.features.ahead_of_time.codegen.stored_triton",
        "fxwrap.codegen.dynamo",
        "fxwrap.codegen.devices",
    ),
    "codegen/dynamo": ("fxwrap.codegen.emit", "fxwrap.codegen.store", "fxwrap.codegen.devices"),
}


@pytest.mark.parametrize("part", MAY_NOT_IMPORT)
def test_imports_go_one_way(part: str) -> None:
    paths = [PACKAGE / part] if part.endswith(".py") else sorted((PACKAGE / part).rglob("*.py"))
    for path in paths:
        for name in _imports(path):
            assert not name.startswith(MAY_NOT_IMPORT[part]), f"{path.name} imports {name}"


# -- features: each is a folder that can be deleted -----------------------------------------------------------

FEATURES = sorted(folder.parent.name for folder in (PACKAGE / "features").glob("*/__init__.py"))
# The features whose code a feature uses.
USES = {
    "ahead_of_time": {"caller_outputs"},
    "bill": {"checked"},
    "command_line": {"ahead_of_time"},
}


def _with_users(feature: str) -> list[str]:
    """A feature, the features that use it, those that use these, and so on."""
    users = [name for name, uses in USES.items() if feature in uses]
    return [feature, *dict.fromkeys(name for user in users for name in _with_users(user))]


def _features_in(path: Path) -> set[str]:
    """The features that a file imports."""
    names = [name.split(".") for name in _imports(path) if name.startswith("fxwrap.features.")]
    return {name[2] for name in names}


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_line_imports_no_feature(path: Path) -> None:
    inside = path.relative_to(PACKAGE).parts
    if inside[0] == "features" and len(inside) > 2:
        assert _features_in(path) <= {inside[1], *USES.get(inside[1], ())}
    # These two name what users call.
    elif inside not in {("__init__.py",), ("__main__.py",)}:
        assert not _features_in(path)


def test_a_feature_uses_what_the_table_says() -> None:
    for name in FEATURES:
        used = set[str]().union(*map(_features_in, (PACKAGE / "features" / name).rglob("*.py")))
        assert used - {name} == USES.get(name, set())


def _without(feature: str, folder: Path) -> None:
    """Copy the package without a feature, those that use it, and their lines in ``__init__``."""
    package = folder / "fxwrap"
    shutil.copytree(PACKAGE, package)
    for name in _with_users(feature):
        shutil.rmtree(package / "features" / name)
        lines = (package / "__init__.py").read_text().splitlines()
        named = f".features.{name}.", f"from .features import {name} "
        kept = [line for line in lines if not any(text in line for text in named)]
        (package / "__init__.py").write_text("\n".join(kept))
        if name == "command_line":
            (package / "__main__.py").unlink()


# Torch is imported once, and each package without a feature in a process that is forked from it.
_WORKS_WITHOUT = """
import importlib, os, pkgutil, sys, traceback, torch, torch._inductor.compile_fx

def works(folder):
    sys.path.insert(0, folder)
    import fxwrap
    assert fxwrap.__file__.startswith(folder)
    for module in pkgutil.walk_packages(fxwrap.__path__, "fxwrap."):
        if not module.name.startswith(("fxwrap.testing", "fxwrap.__main__")):
            importlib.import_module(module.name)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    f = torch.compile(model, backend="fxwrap", dynamic=True)
    for rows in (3, 5, 3, 5, 3, 5):
        x = torch.randn(rows, 8)
        assert torch.equal(f(x), model(x))
        f(x).sum().backward()
    counters = fxwrap.stats(f)
    assert counters["replays"] and sum(counters["recordings"].values()) >= 4 and not counters["fallbacks"], counters
    assert str(fxwrap.explain(model, x)) and str(fxwrap.report(f))
    with torch.no_grad():
        assert fxwrap.record(f, torch.randn(7, 8)) == 1
    assert fxwrap.release(f) >= 0 and fxwrap.plan_memory([]).size == 0
    print("works without", os.path.basename(folder), flush=True)

for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            works(folder)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.compiler
def test_the_line_works_without_a_feature(tmp_path: Path) -> None:
    """Every module imports; a model's training is compiled, recorded, replayed and explained."""
    for feature in FEATURES:
        _without(feature, tmp_path / feature)
    command = [sys.executable, "-c", _WORKS_WITHOUT, *(str(tmp_path / feature) for feature in FEATURES)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.stdout.split("\n")[:-1] == [f"works without {feature}" for feature in FEATURES], done.stderr


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.compiler
def test_backend_is_found_without_an_import() -> None:
    code = """
import sys, torch
assert "fxwrap" not in sys.modules
f = torch.compile(lambda x: x * 2 + 1, backend="fxwrap")
for _ in range(3):
    x = torch.randn(3)
    assert torch.equal(f(x), x * 2 + 1)
import fxwrap
print(fxwrap.stats(f)["replays"])
"""
    assert _run(code) == "1"


@pytest.mark.compiler
def test_importing_changes_nothing_and_other_backends_are_unaffected() -> None:
    code = """
import torch
import torch._inductor.codegen.common as common
import torch._inductor.config as config
common.init_backend_registration()
before = (dict(common.device_codegens), config.get_config_copy())
import fxwrap, fxwrap.backend, fxwrap.api.explain
assert before == (dict(common.device_codegens), config.get_config_copy())
f = torch.compile(lambda x: x.sin() @ x, backend="fxwrap")
g = torch.compile(lambda x: x.sin() @ x, backend="inductor")
for _ in range(3):
    x = torch.randn(4, 4, requires_grad=True)
    assert torch.equal(f(x), g(x))
    f(x).sum().backward()
assert before == (dict(common.device_codegens), config.get_config_copy())
try:
    torch.compile(lambda x: x + 1, backend="fxwrap", options={"wrong": 1})(x)
except Exception:
    pass
assert before == (dict(common.device_codegens), config.get_config_copy())
print("unchanged")
"""
    assert _run(code) == "unchanged"


def test_import_is_quick_and_does_not_load_inductor() -> None:
    assert _run("import sys, fxwrap; print('torch._inductor.compile_fx' in sys.modules)") == "False"


def test_programs_run_and_are_counted_without_rich() -> None:
    """It draws texts only: a machine that has torch and a checkout needs nothing else."""
    code = "import sys; sys.modules['rich'] = None; import fxwrap; fxwrap.release, fxwrap.stats, fxwrap.report"
    assert _run(f"{code}; import fxwrap.backend; print(len(fxwrap.report().to_dict()) > 0)") == "True"


def test_what_is_not_python_is_shipped() -> None:
    """Each file is named in the package's data."""
    named = (PACKAGE.parent / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^fxwrap = \[(.*)\]$", named, re.MULTILINE)
    patterns = re.findall(r'"([^"]+)"', listed)
    others = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.*") if path.suffix not in (".py", ".pyc")]
    assert Path("features/suspend/cuda_memory.cpp") in others
    assert not [path for path in others if not any(path.match(pattern) for pattern in patterns)]
