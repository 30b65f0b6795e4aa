"""Run a program of Python on the device on host memory, which is no GPU. Its children have it, too.

    python -m hostcuda script.py [arguments]
    python -m hostcuda -m module [arguments]
    python -m hostcuda -c "import torch; print(torch.ones(3, device='cuda'))"
    python -m hostcuda --build                  # its libraries only, which are built when they are first needed

The environment (HOSTCUDA_LAZY, HOSTCUDA_POISON, ...) is in README.md; HOSTCUDA=0 runs the program without it.
"""

from __future__ import annotations

import os
import sys

from .build import BuildError, libraries
from .imports import environment, wanted


def main() -> int:
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if given else 2
    if wanted():
        try:
            libraries()
        except BuildError as error:
            print(error, file=sys.stderr)
            return 2
        if given[0] == "--build":
            return 0
        os.environ.update(environment(os.environ))
    # A new Python: it starts with the program as it would without us, and finds startup/sitecustomize.py as every
    # child does.
    options = sys.orig_argv[1 : -len(sys.argv) - 1]
    os.execv(sys.executable, [sys.executable, *options, *given])


if __name__ == "__main__":
    sys.exit(main())
