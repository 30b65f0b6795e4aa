"""Rules that keep operators out of device graphs: the option ``eager_ops``, and what a device registers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .errors import OptionError
from .host_graph.nodes import operator_name, schema_of


@dataclass(frozen=True)
class EagerRule:
    """A rule that makes matching calls run eagerly, with the reason that reports show.

    A call matches if its operator is listed, has one of the tags, or satisfies the predicate.

    ::

        torch.compile(model, backend="fxwrap", options={"eager_ops": [
            "mylib::lookup",
            fxwrap.EagerRule("reads a table on the host", tags=(torch.Tag.nondeterministic_bitwise,)),
        ]})

    Attributes:
        reason: shown in reports beside the verdict.
        operators: operators or kernels, as ``namespace::name``, ``namespace.name`` or ``namespace::name.overload``.
        tags: tags of operators.
        predicate: called with every launch and extern call of a host graph; a string that it returns is the reason.
        devices: the rule holds for programs that are captured on these types of device; empty for every device.
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
        # A string is also a collection (of letters).
        listed = isinstance(names, Collection) and not isinstance(names, str)
        if not listed or not all(isinstance(name, str) for name in names):
            raise OptionError(
                f"wrong operators for the EagerRule {self.reason!r}",
                expected="a tuple of names, such as ('mylib::lookup',)",
                got=repr(names),
            )

    def why(self, node: Node) -> str | None:
        """Why a launch or extern call has to run eagerly; None if the rule does not match."""
        overload = schema_of(node)
        if self.tags and overload is not None and not set(self.tags).isdisjoint(overload.tags):
            return self.reason
        if self.predicate is not None and (answer := self.predicate(node)):
            return answer if isinstance(answer, str) else self.reason
        names = (name.replace("::", ".") for name in self.operators)
        return self.reason if self.operators and not _spellings(node).isdisjoint(names) else None


def _spellings(node: Node) -> set[str]:
    """The names by which a rule may list the operator of a call, with dots."""
    name = operator_name(node).replace("::", ".")
    spellings = {name, str(node.target), f"{name}.default"}
    overload = schema_of(node)
    if overload is not None:
        spellings.add(f"{overload._schema.name.replace('::', '.')}.{overload._overloadname}")
    return spellings


def as_rules(eager_ops: Sequence[str | EagerRule]) -> list[EagerRule]:
    """The option ``eager_ops`` as a list of rules: the operator names in it become one rule."""
    names = tuple(item for item in eager_ops if isinstance(item, str))
    rules = [item for item in eager_ops if isinstance(item, EagerRule)]
    if names:
        rules.insert(0, EagerRule("listed in eager_ops", names, remedy="take it out of eager_ops"))
    return rules


def check_names(eager_ops: Sequence[str | EagerRule], registered: Iterable[str]) -> None:
    """Check that every name matches a registered operator, or can be that of a kernel or a function.

    Kernels have a number at the end. A function that a user's pass calls may have any name but one like that of an
    operator without its namespace. A rule for certain devices is not checked: it may name an operator that is
    registered only where the device is.

    Args:
        registered: the operators that torch knows, as ``namespace::name`` or ``namespace::name.overload``.

    Raises:
        OptionError: a name matches no operator; the message suggests the closest one.
    """
    names = [name for rule in as_rules(eager_ops) if not rule.devices for name in rule.operators]
    if not names:
        return
    spellings: dict[str, str] = {}
    alone: dict[str, str] = {}  # by their names without namespaces; torch's own operators come first
    for full in sorted(registered, key=lambda name: not name.startswith("aten::")):
        packet = full.partition(".")[0]
        spellings |= {name.replace("::", "."): name for name in (packet, f"{packet}.default", full)}
        alone.setdefault(packet.partition("::")[2], packet)
    for name in names:
        dotted = name.replace("::", ".")
        if dotted in spellings or re.fullmatch(r"\w*_\d+", name):
            continue
        known = alone if name.isidentifier() else spellings
        close = difflib.get_close_matches(dotted, known, n=1, cutoff=0.75)
        if name.isidentifier() and not close:
            continue
        last = name.rpartition(".")[2]  # of torch.mm
        if "*" in name:
            remedy = "list each operator, or match many by an EagerRule with a predicate or tags"
        elif close or last in alone:
            remedy = f"did you mean {known[close[0]] if close else alone[last]!r}?"
        else:
            remedy = "import what registers it before the first call"
        raise OptionError(
            f"no operator is called {name!r} (option 'eager_ops')",
            expected="the full name of a registered operator, as namespace::name or namespace::name.overload",
            got=repr(name),
            remedy=remedy,
        )
