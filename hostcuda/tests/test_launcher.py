"""``python -m hostcuda``: the program as it would run without it, with the device, in its children, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_NAME = "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_name())"


def launched(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [environment.pop("PYTHONPATH", ""), str(ROOT)]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given = {**own, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    command = [sys.executable, "-W", "ignore", "-m", "hostcuda", *args]
    return subprocess.run(command, capture_output=True, text=True, env=given, check=False)


def test_a_program_gets_its_arguments_and_options() -> None:
    done = launched("-c", "import sys; print(sys.argv, sys.warnoptions)", "a", "--b")
    assert done.stdout.strip() == "['-c', 'a', '--b'] ['ignore']"


def test_children_have_the_device_and_are_told_that_it_is_no_gpu() -> None:
    child = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {_NAME!r}]).returncode)"
    assert "no GPU" in launched("-c", child).stdout


def test_another_sitecustomize_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.another = 'ran'")
    assert launched("-c", "print(another)", PYTHONPATH=str(tmp_path)).stdout.strip() == "ran"


def test_switched_off_it_is_not_there() -> None:
    done = launched("-c", "import sys; print('hostcuda' in sys.modules)", HOSTCUDA="0")
    assert done.stdout.strip() == "False"


def test_a_torch_without_cuda_is_told_that_a_cuda_build_is_needed(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    done = launched("-c", "print(1)", PYTHONPATH=str(tmp_path), HOSTCUDA_LIB="")
    assert done.returncode == 2 and "2.13.0+cpu" in done.stderr and "is one without CUDA" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_driver_is_the_devices_own() -> None:
    maps = "import torch; torch.ones(1, device='cuda'); print(open('/proc/self/maps').read())"
    drivers = {line.split()[-1] for line in launched("-c", maps).stdout.splitlines() if "libcuda.so" in line}
    assert len(drivers) == 1 and Path(drivers.pop()).parent.name.startswith("lib")
