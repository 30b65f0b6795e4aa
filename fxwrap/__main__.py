"""``python -m fxwrap``: save programs, look into them, run them."""

from __future__ import annotations

import sys

try:
    from .inspection.command_line import app
except ImportError as error:
    if error.name != "typer":
        raise
    sys.exit("python -m fxwrap needs the package typer: pip install 'fxwrap[cli]'")

if __name__ == "__main__":
    app(prog_name="python -m fxwrap")
