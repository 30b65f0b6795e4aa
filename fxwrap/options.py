"""The options of ``torch.compile(..., backend="fxwrap", options={...})``."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_origin

from .eager_rules import EagerRule, check_names
from .errors import OptionError
from .hooks import ARENAS, PROGRAMS


def _option(
    default: Any,
    doc: str,
    *,
    minimum: int | None = None,
    choices: tuple[str, ...] = (),
    compiling: bool = False,
    is_bytes: bool = False,
) -> Any:
    """A field of ``Options``.

    Args:
        compiling: whether only compiling reads the option; a saved program does not keep such a one.
        is_bytes: whether it is a number of bytes, which may be given as text.
    """
    metadata = {"doc": doc, "minimum": minimum, "choices": choices, "compiling": compiling, "is_bytes": is_bytes}
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
        is_bytes=True,
    )
    memory_limit: int = _option(
        0,
        "the most bytes that a call may take beside its inputs: work is repeated to stay below, and what "
        "does not fit is an error; 0 is no limit",
        minimum=0,
        is_bytes=True,
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
    lanes: int = _option(
        0,
        "how much of a call may run at the same time, on threads of the CPU: 1 for one node after the other, 0 for "
        "as much as torch has threads, up to four",
        minimum=0,
    )
    inputs_apart: bool = _option(
        False,
        "inputs that a program writes share no memory with others, so that more of its work can change places; a "
        "call for which that is wrong is an error",
    )
    copy_outputs: bool = _option(
        False,
        "copy what the caller gets, and would lie in an arena, to memory of torch's allocator: for outputs that "
        "another stream still reads when they are dropped (record_stream)",
    )
    codegen: type | None = _option(
        None, "a subclass of fxwrap.FxwrapCodegen to emit and compile with", compiling=True
    )
    added: tuple[tuple[str, Any], ...] = field(default=(), metadata={"compiling": True})  # see AddedOption

    def at_run(self) -> dict[str, Any]:
        """The options that a compiled program reads when it runs, by name."""
        own = {spec.name: getattr(self, spec.name) for spec in fields(self) if not spec.metadata["compiling"]}
        added = [(name, value) for name, value in self.added if not ADDED[name].compiling]
        return {**own, "added": added} if added else own

    @classmethod
    def from_run(cls, data: Mapping[str, Any]) -> Options:
        """Options from what ``at_run`` returned, also as JSON; options of features that are not here are left out."""
        added = [(name, ADDED[name].parse(value)) for name, value in data.get("added", ()) if name in ADDED]
        return cls(**{**data, "added": tuple(added)})

    @property
    def moves_work(self) -> bool:
        """Whether the work of a program changes places to take less memory."""
        return self.inputs_apart or bool(self.memory_limit)

    def is_set(self, name: str) -> bool:
        """Whether the user asks for an option that a feature adds."""
        return name in dict(self.added)

    def value(self, name: str) -> Any:
        """The value of an option that a feature adds; its default where the user gives none."""
        return dict(self.added).get(name, ADDED[name].default if name in ADDED else None)


@dataclass(frozen=True)
class AddedOption:
    """An option of a feature. Its value is in ``Options.added`` if it is not the default.

    Attributes:
        doc: its description.
        expected: what a value must be.
        parse: returns the value that is kept, which can be hashed; None for a wrong one.
        default: what stands for a value that was not given.
        compiling: whether only compiling reads it; a saved program does not keep such a one.
    """

    doc: str
    expected: str
    parse: Callable[[Any], Any]
    default: Any
    compiling: bool = True


# By name. A feature adds its options when it is imported.
ADDED: dict[str, AddedOption] = {}


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
    added: dict[str, Any] = {}
    specs = {spec.name: spec for spec in fields(Options) if spec.name != "added"}
    for name, value in (user or {}).items():
        key = str(name).replace("-", "_")
        if key in specs:
            own_options[key] = _checked(key, value, specs[key])
        elif key in ADDED:
            added[key] = _parsed(key, value, ADDED[key])
        elif key in inductor_options:
            patches[key] = _checked_inductor(key, value, *inductor_options[key])
        else:
            names = sorted([*specs, *ADDED])
            close = difflib.get_close_matches(key, [*names, *inductor_options], n=1)
            raise OptionError(
                f"unknown option {name!r}",
                expected=f"one of {', '.join(names)}, or an option of Inductor",
                got=repr(name),
                remedy=f"did you mean {close[0]!r}?" if close else "see the table of options in docs/reference.md",
            )
    given = sorted((name, value) for name, value in added.items() if value != ADDED[name].default)
    parsed = Options(**own_options, added=tuple(given))
    check_names(parsed.eager_ops, operators)
    for made, classes in (("programs", PROGRAMS), ("arenas", ARENAS)):
        _check_one_class(parsed, made, classes)
    return parsed, patches


def option_value(name: str, given: Any) -> Any:
    """What a value that the user gives for one of fxwrap's own options stands for.

    Raises:
        OptionError: it is no value of this option.
    """
    return _checked(name, given, next(spec for spec in fields(Options) if spec.name == name))


def refuse_unknown(names: Iterable[str], of: Callable[..., Any]) -> None:
    """Refuse arguments that a function does not have, as Python does, and say which one may be meant.

    Raises:
        TypeError: there is one.
    """
    known = [name for name, p in inspect.signature(of).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in names:
        close = difflib.get_close_matches(name, known, n=1)
        help = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
        raise TypeError(f"{of.__name__}() got an unexpected keyword argument {name!r}; {help}")


def _check_one_class(options: Options, made: str, classes: Mapping[str, str]) -> None:
    """Check that no two features are asked for that make programs, or arenas, of different classes.

    Raises:
        OptionError: naming the options.
    """
    asking = {where: name for name, where in classes.items() if options.is_set(name)}
    if len(asking) > 1:
        names = " and ".join(map(repr, sorted(asking.values())))
        raise OptionError(
            f"the options {names} cannot be set together",
            expected=f"one option whose {made} are of a class of their own",
            got=", ".join(f"{name!r}: {options.value(name)!r}" for name in sorted(asking.values())),
            remedy="leave one of them out",
        )


def _wrong(name: str, value: Any, doc: str, expected: str, default: Any) -> OptionError:
    return OptionError(
        f"wrong value for option {name!r} ({doc})",
        expected=expected,
        got=repr(value),
        remedy=f"leave it out for the default, {default!r}",
    )


def _parsed(name: str, value: Any, option: AddedOption) -> Any:
    parsed = option.parse(value)
    if parsed is None:
        raise _wrong(name, value, option.doc, option.expected, option.default)
    return parsed


def _checked(name: str, value: Any, spec: Any) -> Any:
    default, doc = spec.default, spec.metadata["doc"]
    expected = _expectation(name, default, spec.metadata)
    error = _wrong(name, value, doc, expected, default)
    if name == "codegen":
        if value is not None and not (isinstance(value, type) and hasattr(value, "compile_graph")):
            raise error
        return value
    if isinstance(default, tuple):
        items = (value,) if isinstance(value, (str, EagerRule)) else value
        if not isinstance(items, (tuple, list, set, frozenset)) or not all(
            isinstance(item, (str, EagerRule)) for item in items
        ):
            raise error
        return tuple(items)
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if spec.metadata["is_bytes"] and isinstance(value, str):
        value = _bytes(value)
    # A bool is an int in Python, but strict=3 and warmup=True are mistakes.
    if type(value) is not type(default):
        raise error
    if spec.metadata["minimum"] is not None and not value >= spec.metadata["minimum"]:
        raise error
    if spec.metadata["choices"] and value not in spec.metadata["choices"]:
        raise error
    return value


def _bytes(text: str) -> int | str:
    """The bytes that a size such as "6GiB", "512 mb" or "1048576" stands for; the text itself if it is none."""
    if text.strip().isdecimal():  # a number of bytes from a command line
        return int(text)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", text.strip().upper())
    if found is None:
        return text
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


def _expectation(name: str, default: Any, metadata: Mapping[str, Any]) -> str:
    if metadata["choices"]:
        return "one of " + ", ".join(map(repr, metadata["choices"]))
    if name == "codegen":
        return "a subclass of fxwrap.FxwrapCodegen"
    if isinstance(default, tuple):
        return "a string, a fxwrap.EagerRule, or a sequence of these"
    size = "bytes, or a size such as '6GiB' or '512 MB' (kB, MB, GB, TB; KiB, MiB, GiB, TiB),"
    kind = size if metadata["is_bytes"] else type(default).__name__
    return f"{kind} of at least {metadata['minimum']}" if metadata["minimum"] is not None else kind


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
