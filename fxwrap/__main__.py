"""``python -m fxwrap``: commands that show what is compiled, check the installation, and save and run programs."""

from __future__ import annotations

import sys

try:
    from .features.command_line.command_line import app
except ImportError as error:
    if error.name != "typer":
        raise
    if sys.argv[1:] == ["doctor"]:  # it reports missing packages, so it needs no optional package itself
        from .features.command_line.doctor import doctor

        diagnosis = doctor()
        print(diagnosis)
        sys.exit(not diagnosis.ok)
    sys.exit("python -m fxwrap needs the package typer: pip install 'fxwrap[cli]'")

if __name__ == "__main__":
    app(prog_name="python -m fxwrap")
