"""Rules that keep work out of device graphs: the table that users and devices extend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .host_graph import operator_name, schema_of


@dataclass(frozen=True)
class EagerRule:
    """A cause for running outside of captured partitions: what it matches, why, and what one would have to change.

    A call matches if its operator is listed, has one of the tags, or satisfies the predicate.

    ::

        torch.compile(model, backend="fxwrap", options={"eager_ops": [
            "mylib::lookup",
            fxwrap.EagerRule("reads a table on the host", tags=(torch.Tag.nondeterministic_bitwise,)),
        ]})

    Attributes:
        reason: shown where the verdict is.
        operators: operators or kernels, as ``namespace::name``, ``namespace.name`` or ``namespace::name.overload``.
        tags: tags of operators.
        predicate: asked for every launch and extern call of a host graph; a text that it returns is the reason.
        devices: types of the device whose graphs capture the program; empty for every device.
        remedy: what would have to change for the call to be captured.
    """

    reason: str
    operators: tuple[str, ...] = ()
    tags: tuple[torch.Tag, ...] = ()
    predicate: Callable[[Node], bool | str | None] | None = None
    devices: tuple[str, ...] = ()
    remedy: str = ""

    def why(self, node: Node) -> str | None:
        """Why a launch or extern call is to run eagerly; None if the rule says nothing about it."""
        overload = schema_of(node)
        if self.tags and overload is not None and not set(self.tags).isdisjoint(overload.tags):
            return self.reason
        if self.predicate is not None and (found := self.predicate(node)):
            return found if isinstance(found, str) else self.reason
        names = (name.replace("::", ".") for name in self.operators)
        return self.reason if self.operators and not _spellings(node).isdisjoint(names) else None


def _spellings(node: Node) -> set[str]:
    name = operator_name(node).replace("::", ".")
    found = {name, str(node.target), f"{name}.default"}
    overload = schema_of(node)
    if overload is not None:
        found.add(f"{overload._schema.name.replace('::', '.')}.{overload._overloadname}")
    return found


def as_rules(eager_ops: Sequence[str | EagerRule]) -> list[EagerRule]:
    """Names of operators and rules, as rules."""
    names = tuple(item for item in eager_ops if isinstance(item, str))
    rules = [item for item in eager_ops if isinstance(item, EagerRule)]
    if names:
        rules.insert(0, EagerRule("listed in eager_ops", names, remedy="take it out of eager_ops"))
    return rules
