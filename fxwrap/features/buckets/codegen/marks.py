"""``fxwrap.mark_bucket``: names a dimension of an input, for the option ``buckets``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import mark_dynamic
from torch.fx import GraphModule

from ....errors import InputError

# The attribute of a tensor with the names of its marked dimensions, by dimension.
_NAMES = "_fxwrap_bucket_names"


def mark_bucket(tensor: torch.Tensor, dim: int, name: str) -> None:
    """Mark a dimension of an input as dynamic, and name it for the option ``buckets``.

    Call it before the compiled function, outside of it, as ``torch._dynamo.mark_dynamic``. Only a call that compiles
    reads the mark; other calls need none.

    Args:
        tensor: an input of the compiled function, of any shape.
        dim: the dimension, which may count from the end.
        name: a key of ``options={"buckets": {name: sizes}}``.

    Raises:
        InputError: ``tensor`` is no tensor, has no such dimension, or ``name`` is no string.
    """
    if not isinstance(tensor, torch.Tensor) or not isinstance(name, str):
        got = f"{type(tensor).__name__} and {name!r}"
        raise InputError("fxwrap.mark_bucket", expected="a tensor, a dimension and a name", got=got)
    if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
        raise InputError(
            f"fxwrap.mark_bucket: dimension {dim!r}",
            expected=f"a dimension of a tensor that has {tensor.dim()}",
            got=repr(dim),
        )
    dim %= tensor.dim()
    mark_dynamic(tensor, dim)
    setattr(tensor, _NAMES, {**getattr(tensor, _NAMES, {}), dim: name})


@dataclass(frozen=True)
class Mark:
    """A marked dimension of an input of a graph of Dynamo's.

    Attributes:
        name: the name of its bucket.
        position: the position of the input.
        dim: the dimension.
        size: its size in the graph: a torch.SymInt, or an int if Dynamo has compiled for this size alone.
    """

    name: str
    position: int
    dim: int
    size: int | torch.SymInt


def marks_of(gm: GraphModule) -> list[Mark]:
    """The marked dimensions of the inputs of a graph that Dynamo is compiling."""
    marks = []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        fake = node.meta.get("example_value")
        # While Dynamo compiles, a placeholder knows the tensor that it was made for.
        names: dict[int, str] = getattr(_real_input(node.meta.get("grapharg")), _NAMES, {})
        if isinstance(fake, torch.Tensor):
            marks += [Mark(name, position, dim, fake.size(dim)) for dim, name in sorted(names.items())]
    return marks


def _real_input(argument: Any) -> Any:
    return getattr(argument, "example", None)
