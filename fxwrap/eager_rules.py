"""Rules that keep work out of device graphs: the table that users and devices extend."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .errors import OptionError
from .host_graph.nodes import operator_name, schema_of


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

    def __post_init__(self) -> None:
        names = self.operators
        # A string is a collection, too, of letters.
        listed = isinstance(names, Collection) and not isinstance(names, str)
        if not listed or not all(isinstance(name, str) for name in names):
            raise OptionError(
                f"wrong operators for the EagerRule {self.reason!r}",
                expected="a tuple of names, such as ('mylib::lookup',)",
                got=repr(names),
            )

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


def check_names(eager_ops: Sequence[str | EagerRule], registered: Iterable[str]) -> None:
    """Raise an OptionError at the first name that matches no operator.

    A name outside of the operators' namespaces may be a kernel's, and a rule for some devices may name what is
    registered only where they are: these are taken as they come.

    Args:
        registered: the operators that torch knows, as ``namespace::name`` or ``namespace::name.overload``.
    """
    names = [name for rule in as_rules(eager_ops) if not rule.devices for name in rule.operators]
    if not names:
        return
    spellings: dict[str, str] = {}
    for full in registered:
        packet = full.partition(".")[0]
        spellings |= {one.replace("::", "."): one for one in (packet, f"{packet}.default", full)}
    namespaces = {spelling.partition(".")[0] for spelling in spellings}
    for name in names:
        dotted = name.replace("::", ".")
        namespace, dot, _ = dotted.partition(".")
        is_operator = "::" in name or "*" in name or (dot and namespace in namespaces)
        if not is_operator or dotted in spellings:
            continue
        close = difflib.get_close_matches(dotted, spellings, n=1, cutoff=0.75)
        if "*" in name:
            remedy = "list each operator, or match many by an EagerRule with a predicate or tags"
        elif close:
            remedy = f"did you mean {spellings[close[0]]!r}?"
        else:
            remedy = "import what registers it before the first call"
        raise OptionError(
            f"no operator is called {name!r} (option 'eager_ops')",
            expected="the full name of a registered operator, as namespace::name or namespace::name.overload",
            got=repr(name),
            remedy=remedy,
        )
