"""A script, run as Python runs it, and everything that it compiled."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from unittest import mock

from ..compilation import all_kept
from .report import Explanation, report


def explain_script(script: str, arguments: Sequence[str]) -> tuple[Explanation, SystemExit | None]:
    """What a script compiled with ``backend="fxwrap"``, also in functions that are gone by its end.

    Args:
        arguments: of the script.

    Returns:
        The explanation, and how the script ended, if not at its last line. An error in it is printed as Python does.
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
        return report(), ended


def _in_script(error: BaseException, script: str) -> TracebackType | None:
    """Its traceback without what runs the script; all of it where the script does not even begin."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != script:
        frame = frame.tb_next
    return frame
