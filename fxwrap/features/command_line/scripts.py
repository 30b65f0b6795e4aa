"""``python -m fxwrap explain SCRIPT.py``: runs a script as Python does, and reports everything that it compiled."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from unittest import mock

from ...graphs.compilation import all_kept, live_compilations
from ...inspection.explanation import Explanation


def explain_script(script: str, arguments: Sequence[str]) -> tuple[Explanation, SystemExit | None]:
    """Run a script, and explain everything that it compiled with ``backend="fxwrap"``.

    Functions that do not exist any more when the script ends are included.

    Args:
        arguments: the command line of the script.

    Returns:
        The explanation, and the exit of the script unless it reached its last line. An error is printed as Python
        prints it.
    """
    path = [os.path.dirname(os.path.abspath(script)), *sys.path]
    with all_kept(), mock.patch.multiple(sys, argv=[script, *arguments], path=path):
        ended = None
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            ended = end
        except BaseException as error:
            traceback.print_exception(error.with_traceback(_in_script(error, script)))
            ended = SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1)
        return Explanation.of(live_compilations(), os.path.basename(script)), ended


def _in_script(error: BaseException, script: str) -> TracebackType | None:
    """The traceback from the script's first frame on; the whole one if the script has not begun."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != script:
        frame = frame.tb_next
    return frame
