"""The options of ``torch.compile(..., backend="fxwrap", options={...})``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_origin

from .eager_rules import EagerRule, check_names
from .errors import OptionError


def _option(
    default: Any, doc: str, *, minimum: int | None = None, choices: tuple[str, ...] = (), compiling: bool = False
) -> Any:
    """A field of ``Options``.

    Args:
        compiling: whether only compiling reads the option; a saved program does not keep such a one.
    """
    metadata = {"doc": doc, "minimum": minimum, "choices": choices, "compiling": compiling}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """fxwrap's own options. Each field has a default, a description, and the values that it allows.

    Options of other names are passed to Inductor's configuration.
    """

    strict: bool = _option(False, "raise instead of falling back when a graph cannot be emitted, planned or captured")
    warmup: int = _option(1, "eager runs of each new shape before it is recorded", minimum=0)
    max_recordings: int = _option(
        64,
        "recordings one program may keep; at the limit, a new shape that is called more often replaces the least "
        "recently used one, and others run eagerly",
        minimum=1,
    )
    max_memory: int = _option(
        0,
        "bytes that arenas of a device, and what recordings keep outside them, may take: for more, the least "
        "recently used recordings end, and a program that needs more by itself runs eagerly (on the CPU it keeps "
        "nothing between calls); 0 is no limit",
        minimum=0,
    )
    eager_ops: tuple[str | EagerRule, ...] = _option(
        (),
        "operators that must not be captured, such as 'aten::nonzero' or 'mylib::lookup', and fxwrap.EagerRule",
        compiling=True,
    )
    capture: str = _option(
        "auto",
        "'auto' captures partitions that are estimated to pay, 'always' all that can be, 'never' none",
        choices=("auto", "always", "never"),
        compiling=True,
    )
    min_launches: int = _option(
        1,
        "launches and library calls that a captured partition has at least; smaller ones run eagerly",
        minimum=1,
        compiling=True,
    )
    peak_budget: float = _option(
        1.1,
        "how many times the memory of program order fewer partitions may take, at the sizes compiled for",
        minimum=1,
        compiling=True,
    )
    copy_outputs: bool = _option(
        False,
        "copy what the caller gets, and would lie in an arena, to memory of torch's allocator: for outputs that "
        "another stream still reads when they are dropped (record_stream)",
    )
    buckets: tuple[tuple[str, tuple[int, ...]], ...] = _option(
        (),
        "sizes by name, such as {'batch': (1, 2, 4, 8)}: dimensions marked with fxwrap.mark_bucket are padded to the "
        "next of these sizes, so that one recording serves many",
        minimum=1,
        compiling=True,
    )
    suspendable: bool = _option(
        False,
        "keep the memory of recordings where fxwrap.suspend can give it back to the device, while graphs and "
        "addresses stay",
    )
    checked: bool | int = _option(
        False,
        "compare replays with eager work, bit for bit, and look for what can make them wrong, after each recording "
        "and at every tenth call (True), or at every so many calls; fxwrap.CheckError says what was found",
        minimum=1,
    )
    through_capture: bool = _option(
        False, "run what a recording would capture at every call, in the recording's memory, without a device graph"
    )
    codegen: type | None = _option(
        None, "a subclass of fxwrap.FxwrapCodegen to emit and compile with", compiling=True
    )

    def at_run(self) -> dict[str, Any]:
        """The options that a compiled program reads when it runs, by name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if not spec.metadata["compiling"]}


def parse_options(
    user: Mapping[str, Any] | None, inductor_options: Mapping[str, tuple[Any, Any]], operators: Iterable[str]
) -> tuple[Options, dict[str, Any]]:
    """Split the user's options into fxwrap's and Inductor's, and check both.

    Args:
        user: the ``options`` dictionary that ``torch.compile`` got.
        inductor_options: the present value and the declared type of each of Inductor's options.
        operators: the names of all registered operators.

    Returns:
        fxwrap's options, and the patches for Inductor's configuration.

    Raises:
        OptionError: a name is neither fxwrap's nor Inductor's, a value is wrong, or ``eager_ops`` names no operator.
    """
    if user is not None and not isinstance(user, Mapping):
        raise OptionError(
            "wrong type of options",
            expected="a dictionary of names and values, such as {'strict': True}",
            got=f"{user!r} of type {type(user).__name__}",
            remedy='torch.compile(model, backend="fxwrap", options={...})',
        )
    own_options: dict[str, Any] = {}
    patches: dict[str, Any] = {}
    specs = {spec.name: spec for spec in fields(Options)}
    for name, value in (user or {}).items():
        key = str(name).replace("-", "_")
        if key in specs:
            own_options[key] = _checked(key, value, specs[key])
        elif key in inductor_options:
            patches[key] = _checked_inductor(key, value, *inductor_options[key])
        else:
            close = difflib.get_close_matches(key, [*specs, *inductor_options], n=1)
            raise OptionError(
                f"unknown option {name!r}",
                expected=f"one of {', '.join(sorted(specs))}, or an option of Inductor",
                got=repr(name),
                remedy=f"did you mean {close[0]!r}?" if close else "see the table of options in docs/reference.md",
            )
    parsed = Options(**own_options)
    check_names(parsed.eager_ops, operators)
    return parsed, patches


def _checked(name: str, value: Any, spec: Any) -> Any:
    default, doc = spec.default, spec.metadata["doc"]
    error = OptionError(
        f"wrong value for option {name!r} ({doc})",
        expected=_expectation(name, default, spec.metadata["minimum"], spec.metadata["choices"]),
        got=repr(value),
        remedy=f"leave it out for the default, {default!r}",
    )
    if name == "codegen":
        if value is not None and not (isinstance(value, type) and hasattr(value, "compile_graph")):
            raise error
        return value
    if name == "buckets":
        sizes = {key: _sizes(value[key]) for key in value} if isinstance(value, Mapping) else {}
        if not isinstance(value, Mapping) or not all(isinstance(key, str) and sizes[key] for key in sizes):
            raise error
        return tuple(sorted(sizes.items()))
    if isinstance(default, tuple):
        items = (value,) if isinstance(value, (str, EagerRule)) else value
        if not isinstance(items, (tuple, list, set, frozenset)) or not all(
            isinstance(item, (str, EagerRule)) for item in items
        ):
            raise error
        return tuple(items)
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if name == "checked" and type(value) is int and value >= spec.metadata["minimum"]:
        return value
    # A bool is an int in Python, but strict=3 and warmup=True are mistakes.
    if type(value) is not type(default):
        raise error
    if spec.metadata["minimum"] is not None and name != "checked" and not value >= spec.metadata["minimum"]:
        raise error
    if spec.metadata["choices"] and value not in spec.metadata["choices"]:
        raise error
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Sizes of buckets in ascending order; empty if they are none."""
    sizes = tuple(value) if isinstance(value, (tuple, list, set, frozenset, range)) else ()
    return tuple(sorted(set(sizes))) if all(type(size) is int and size >= 1 for size in sizes) else ()


def _expectation(name: str, default: Any, minimum: int | None, choices: tuple[str, ...]) -> str:
    if choices:
        return "one of " + ", ".join(map(repr, choices))
    if name == "codegen":
        return "a subclass of fxwrap.FxwrapCodegen"
    if name == "checked":
        return "a bool, or an int of at least 1"
    if name == "buckets":
        return "a dictionary of names and sequences of sizes of at least 1, such as {'batch': (1, 2, 4, 8)}"
    if isinstance(default, tuple):
        return "a string, a fxwrap.EagerRule, or a sequence of these"
    kind = type(default).__name__
    return f"{kind} of at least {minimum}" if minimum is not None else kind


def _checked_inductor(name: str, value: Any, current: Any, declared: Any) -> Any:
    # torch.compile's own rule: an option keeps the type of its value, unless it is declared to take several types.
    plain = isinstance(current, (bool, int, float, str)) and get_origin(declared) is None
    if plain and type(value) is not type(current):
        raise OptionError(
            f"wrong value for Inductor's option {name!r}",
            expected=type(current).__name__,
            got=f"{value!r} of type {type(value).__name__}",
            remedy=f"its present value is {current!r}",
        )
    return value
