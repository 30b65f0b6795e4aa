"""The package: what importing it does, who may touch private torch, and how stages may import one another."""

from __future__ import annotations

import ast
import functools
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
def test_private_torch_is_fenced_to_codegen(path: Path) -> None:
    if PACKAGE / "codegen" in path.parents:
        return
    assert not [name for name in _imports(path) if name.startswith(PRIVATE)]
    text = path.read_text()
    assert not [name for name in PRIVATE if f"{name}." in text]


# Imports go one way, in the order in which data flows.
# What users call.
_ACTS = ("fxwrap.api", "fxwrap.inspection", "fxwrap.artifacts", "fxwrap.backend")
# What says how a program is made, and what makes and runs it.
_RULES = ("fxwrap.eager_rules", "fxwrap.options", "fxwrap.devices")
_RUNS = ("fxwrap.passes", "fxwrap.graphs", "fxwrap.pipeline", "fxwrap.codegen")
MAY_NOT_IMPORT = {
    "packing": ("torch", "fxwrap.host_graph", "fxwrap.plan", *_RUNS, *_ACTS),
    "errors.py": ("fxwrap.",),
    "native_build.py": ("fxwrap.",),
    "host_graph": (*_RULES, "fxwrap.plan", *_RUNS, *_ACTS),
    "eager_rules.py": (*_RULES[1:], "fxwrap.plan", *_RUNS, *_ACTS),
    "options.py": ("fxwrap.plan", *_RUNS, *_ACTS),
    "devices.py": ("fxwrap.plan", *_RUNS, *_ACTS),
    "plan.py": (*_RUNS, *_ACTS),
    "passes": ("fxwrap.graphs", "fxwrap.pipeline", "fxwrap.codegen", *_ACTS),
    "graphs": ("fxwrap.passes", "fxwrap.checked", "fxwrap.pipeline", "fxwrap.codegen", *_ACTS),
    "checked": ("fxwrap.passes", "fxwrap.pipeline", "fxwrap.codegen", *_ACTS),
    "pipeline.py": ("fxwrap.codegen", *_ACTS),
    "codegen": _ACTS,
    "backend.py": _ACTS[:3],
    "inspection": _ACTS[:1] + _ACTS[2:],
    "artifacts": _ACTS[:1],
    # Within graphs/: a recording is made of memory, by the record folder, for the policy, by the program.
    "graphs/devices": tuple(f"fxwrap.graphs.{room}" for room in ("memory", "replay", "record", "policy", "program")),
    "graphs/memory": tuple(f"fxwrap.graphs.{room}" for room in ("replay", "record", "policy", "program")),
    "graphs/replay": tuple(f"fxwrap.graphs.{room}" for room in ("record", "policy", "program")),
    "graphs/record": tuple(f"fxwrap.graphs.{room}" for room in ("policy", "program")),
    "graphs/policy": tuple(f"fxwrap.graphs.{room}" for room in ("record", "program")),
    # Within codegen/: what is emitted can be stored; Dynamo's side and the devices' know neither's inside.
    "codegen/emit": ("fxwrap.codegen.store.stored_triton", "fxwrap.codegen.dynamo", "fxwrap.codegen.devices"),
    "codegen/dynamo": ("fxwrap.codegen.emit", "fxwrap.codegen.store", "fxwrap.codegen.devices"),
}


@pytest.mark.parametrize("part", MAY_NOT_IMPORT)
def test_imports_go_one_way(part: str) -> None:
    paths = [PACKAGE / part] if part.endswith(".py") else sorted((PACKAGE / part).rglob("*.py"))
    for path in paths:
        for name in _imports(path):
            assert not name.startswith(MAY_NOT_IMPORT[part]), f"{path.name} imports {name}"


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


def test_what_is_not_python_is_shipped() -> None:
    """Each file is there, and named in the package's data."""
    named = (PACKAGE.parent / "pyproject.toml").read_text()
    for name in ("py.typed", "packing/exact.cpp"):
        assert (PACKAGE / name).exists()
        assert f'"{name}"' in named
