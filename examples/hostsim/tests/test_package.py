"""The package from outside: autoloading, processes that end or fork, other torches, copies under another name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hostsim
import pytest
import torch

FOLDER = Path(hostsim.__file__).parents[1]
NAME = hostsim.name.NAME
PREFIX = hostsim.name.ENVIRONMENT_PREFIX


def run(code, *paths, timeout=60, **environment):
    """A process of its own; without autoloading unless asked for."""
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment}
    path = os.pathsep.join(str(path) for path in paths or (FOLDER,))
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": path} | environment,
        cwd="/",
    )


def output(code, *paths, **options):
    process = run(code, *paths, **options)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def installed(folder, package, to):
    """What pip would leave behind besides the package: that torch is to load it."""
    metadata = to / f"{package}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    project = (folder / "pyproject.toml").read_text()
    assert f'[project.entry-points."torch.backends"]\n{package} = "{package}:_autoload"' in project
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{package} = {package}:_autoload\n")
    return to


USE = "print((torch.ones(2, device='{}') + 1).sum().item())"


@pytest.mark.parametrize("first", ["torch", NAME])
def test_torch_loads_it_where_it_is_installed(tmp_path, first):
    path = installed(FOLDER, NAME, tmp_path)
    code = f"import {first}, torch; {USE.format(NAME)}"
    assert output(code, path, FOLDER, TORCH_DEVICE_BACKEND_AUTOLOAD="1") == "4.0"


def test_autoloading_can_be_turned_off(tmp_path):
    path = installed(FOLDER, NAME, tmp_path)
    assert output(f"import torch; print(hasattr(torch, '{NAME}'))", path, FOLDER) == "False"
    assert output(f"import torch, {NAME}; {USE.format(NAME)}", path, FOLDER) == "4.0"


def test_the_environment_sets_it_up():
    code = (
        f"import torch, {NAME}; d = torch.{NAME}; "
        f"print(d.device_count(), d.is_asynchronous(), torch.empty(4, device='{NAME}').isnan().all().item())"
    )
    values = {f"{PREFIX}DEVICES": "3", f"{PREFIX}ASYNC": "1", f"{PREFIX}POISON": "1"}
    assert output(code, **values) == "3 True True"


def test_the_process_ends_with_work_in_its_queues():
    code = f"""
import torch, {NAME}, time
device = torch.{NAME}
device.set_asynchronous(True)
side, x = torch.Stream(), torch.ones(4, device="{NAME}")
device.delay(side, 1000)
torch.accelerator.current_stream().wait_stream(side)
device.launch(lambda t: time.sleep(0.1), x)
graph = torch.accelerator.Graph()
with torch.Stream():
    graph.capture_begin()
    device.launch(lambda t: None, x)
    y = x + 1
    graph.capture_end()
graph.replay()
print("done")
"""
    assert output(code, timeout=30) == "done"


def test_the_process_ends_while_it_captures():
    code = f"""
import torch, {NAME}
torch.{NAME}.set_stream(torch.Stream("{NAME}"))
graph = torch.accelerator.Graph()
graph.capture_begin()
x = torch.ones(4, device="{NAME}") + 1
print("done")
"""
    assert output(code, timeout=30) == "done"


def test_a_forked_process_knows():
    code = f"""
import os, torch, {NAME}
torch.ones(4, device="{NAME}")
pid = os.fork()
if pid == 0:
    torch.manual_seed(0)
    os._exit(3 if torch.{NAME}._is_in_bad_fork() else 4)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), torch.{NAME}._is_in_bad_fork())
"""
    assert output(code, timeout=30) == "3 False"


def test_data_is_loaded_by_other_processes():
    code = f"""
import torch, {NAME}
data = torch.utils.data.TensorDataset(torch.arange(8.0))
for batch, in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, pin_memory=True):
    assert batch.is_pinned()
    print(batch.to("{NAME}", non_blocking=True).sum().item())
"""
    assert output(code) == "6.0\n22.0"


def test_without_a_compiler_it_says_what_to_do(tmp_path):
    process = run(f"import {NAME}", CXX="no-such-compiler", **{f"{PREFIX}CACHE": str(tmp_path)})
    assert process.returncode != 0
    assert "there is no C++ compiler ('no-such-compiler')" in process.stderr.splitlines()[-1]


def test_on_a_torch_without_graphs_it_warns_once_and_fails_when_used(tmp_path):
    path = installed(FOLDER, NAME, tmp_path)
    # A torch that has everything but graphs, from before anything else is imported.
    (tmp_path / "sitecustomize.py").write_text("""
import importlib.abc, importlib.util, sys
class NoGraphs(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.accelerator":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def without_graphs(module):
            load(module)
            del module.Graph
        spec.loader.exec_module = without_graphs
        return spec
sys.meta_path.insert(0, NoGraphs())
""")
    process = run(f"import torch; print(torch.ones(2).sum().item())\nimport {NAME}\n{NAME}.device", path, FOLDER,
                  TORCH_DEVICE_BACKEND_AUTOLOAD="1")  # fmt: skip
    message = f"{NAME} needs torch >= 2.13 with torch.accelerator.Graph; this is torch {torch.__version__}"
    assert process.stdout.strip() == "2.0"
    assert process.stderr.count(f"Warning: {message}") == 1
    assert process.stderr.splitlines()[-1] == f"RuntimeError: {message}"


@pytest.mark.slow
def test_a_copy_under_another_name_is_a_device_that_keeps_the_contract(tmp_path):
    """What a vendor does first, by the commands of the README. The copy is built once, into the same cache."""
    mine, copy = "mydev", tmp_path / "mydev"
    shutil.copytree(
        FOLDER, tmp_path / NAME, ignore=shutil.ignore_patterns("__pycache__", "*.so", "build", "*.egg-info")
    )
    commands = (FOLDER / "README.md").read_text().split("## Make it yours")[1].split("```")[1]
    subprocess.run(["bash", "-e", "-c", commands], cwd=tmp_path, check=True)
    (tmp_path / "metadata").mkdir()
    path = installed(copy, mine, tmp_path / "metadata")
    code = """
import torch
graph = torch.accelerator.Graph()
x = torch.ones(2, device="mydev")
with torch.Stream(), graph:
    y = x + 1
graph.replay()
print(torch.accelerator.current_accelerator(), y.sum().item(), torch.mydev.get_device_name())
"""
    cache = os.environ.get(f"{PREFIX}CACHE") or str(
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / NAME
    )
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "MYDEV_CACHE": cache}
    assert output(code, path, copy, timeout=600, **environment) == "mydev 4.0 mydev:0"
    contract = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(copy / "tests" / "test_contract.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment},
    )
    assert contract.returncode == 0, contract.stdout
    assert " passed" in contract.stdout and " failed" not in contract.stdout
