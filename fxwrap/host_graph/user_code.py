"""Where a node comes from in the user's code: its line, its module, and what the code calls an input."""

from __future__ import annotations

import itertools
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node


def user_line(node: Node) -> str:
    """The line of user code that a node comes from, as ``file, line 3: code``.

    Where only torch's code is traced (a model of plain ``torch.nn``), it is the path of the module, as ``module 0``;
    outside of modules torch's own line; empty where torch has no trace.
    """
    return place_of(node.meta.get("stack_trace") or "", module_path(node))


def place_of(trace: str, module: str) -> str:
    """``user_line`` of a stack trace, and the path of a module."""
    line = last_frame(trace)
    return in_module(module) if module and not is_of_user(line) else line


def last_frame(trace: str) -> str:
    """The innermost line of user code in a stack trace, as ``file, line 3: code``; torch's if there is no other."""
    lines = [line.strip() for line in trace.strip().splitlines()]
    frames = []
    for line, code in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        if line.startswith("File "):
            frames.append(f"{line[5:].split(', in ')[0].replace(chr(34), '')}: {code}")
    frames = [frame for frame in reversed(frames) if owner_of(frame) != "fxwrap"]  # it calls what is explained
    return next(filter(is_of_user, frames), frames[0] if frames else "")


def is_of_user(line: str) -> bool:
    """Whether a line, as ``last_frame`` returns it, is in code of the user's."""
    return bool(line) and owner_of(line) == "user"


def owner_of(file: str) -> str:
    """Whose code a file has: "user", "fxwrap", or "torch", which stands for Python's own library, too."""
    if file.startswith(_FXWRAP):
        return "fxwrap"
    of_python = file.startswith(_PYTHON) and not file.removeprefix(_PYTHON).startswith(("site-", "dist-"))
    return "torch" if of_python or file.startswith((_TORCH, "<frozen ")) else "user"


_FXWRAP, _TORCH, _PYTHON = (
    os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__, os.__file__)
)


def described(error: BaseException) -> str:
    """An error with the innermost line of the user's that it passed: ``ValueError: too few (/me/train.py:3)``."""
    places = [f" ({file}:{line})" for file, line in of_user(traceback.walk_tb(error.__traceback__))]
    return f"{type(error).__name__}: {error}{places[-1] if places else ''}"


def of_user(frames: Iterable[tuple[Any, int]]) -> Iterator[tuple[str, int]]:
    """The files and lines of those frames that are in code of the user's, in files."""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if owner_of(file) == "user" and not file.startswith("<"):
            yield file, line


def module_path(node: Node) -> str:
    """The path of the innermost ``torch.nn.Module`` that a node comes from, as ``transformer.h.0.attn``.

    It is empty outside of modules, and in the outermost one.
    """
    if stack := module_stack(node):
        # L['self']._modules['layers'].0 in some versions, L['self'].layers.0 in others
        path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", [*stack.values()][-1][0])
        return re.sub(_ROOT_MODULE, "", path.replace("._modules", ""))
    return str(node.meta.get("module", ""))


def module_stack(node: Node) -> Mapping[Any, Any]:
    """The modules that a node of torch's graphs is in, of a forward or a backward, the innermost last."""
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


# Dynamo's expression for the outermost module: a variable, an explained module, one that an explained function uses.
_ROOT_MODULE = r"^(L\.\w+(\.__self__|\.__closure__\.\d+\.cell_contents)?|G)\.?"


def in_module(path: str) -> str:
    """What stands in place of a line of user code for work of a module of torch's."""
    return f"module {path}"


def shown_name(node: Node) -> str:
    """The name of a node in reports: what the user's code calls an input (``emit/converter.py``), if that is short.

    Sizes keep the names of their symbols, which stand in other sizes.
    """
    name = str(node.meta.get("user_name", ""))
    is_size = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))
    return name if name and not is_size and len(name) <= _LONGEST_NAME else node.name


_LONGEST_NAME = 48
