"""The only place in Python that knows what the device is called; C++ has its own in csrc/name.h."""

import re

NAME = "hostsim"
ENVIRONMENT_PREFIX = "HOSTSIM_"


def library_name(torch_version: str) -> str:
    """With torch's version in it: a library that was built for another one would fail in ways hard to understand."""
    return "_C_" + re.sub(r"\W", "_", torch_version)
