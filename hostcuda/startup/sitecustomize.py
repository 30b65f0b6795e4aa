"""Switches the device on in a process whose PYTHONPATH has this folder, and goes on to the other sitecustomize.

The package is loaded from where it lies: the folder that it lies in would shadow modules of the program's.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).absolute().parent


def _install() -> None:
    package = _HERE.parent
    spec = importlib.util.spec_from_file_location(
        "hostcuda", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hostcuda"] = module
    spec.loader.exec_module(module)
    module.install()


def _go_on() -> None:
    elsewhere = [path for path in sys.path if Path(path).absolute() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_install()
_go_on()
