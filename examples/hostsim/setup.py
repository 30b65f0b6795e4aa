"""Builds the C++ part into the wheel, for the torch that is installed: pip wheel --no-build-isolation ."""

import runpy
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

PACKAGE = Path("hostsim")
library_name = runpy.run_path(str(PACKAGE / "name.py"))["library_name"]

setup(
    ext_modules=[
        CppExtension(
            f"{PACKAGE}.{library_name(torch.__version__)}",
            sorted(str(path) for path in PACKAGE.glob("csrc/*.cpp")),
            extra_compile_args=["-O2", "-Wall"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
