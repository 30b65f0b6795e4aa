"""``python -m fxwrap``: see what is compiled, and whether all is there for it; save programs and run them."""

from __future__ import annotations

import sys

try:
    from .api.command_line import app
except ImportError as error:
    if error.name != "typer":
        raise
    if sys.argv[1:] == ["doctor"]:  # says what is missing, so that it needs nothing itself
        from .api.doctor import doctor

        found = doctor()
        print(found)
        sys.exit(not found.ok)
    sys.exit("python -m fxwrap needs the package typer: pip install 'fxwrap[cli]'")

if __name__ == "__main__":
    app(prog_name="python -m fxwrap")
