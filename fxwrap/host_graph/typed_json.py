"""Conversion of dataclasses (plans) and typed dictionaries (reports) to JSON data and back, driven by their types.

A plan is cached, saved and compared in this form, so a stored plan has exactly the fields of the one that runs.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from typing_extensions import NotRequired

Record = TypeVar("Record")


def to_data(value: Any) -> Any:
    """Convert a value to JSON data: a dataclass becomes a dictionary of its fields. Equal values give equal data.

    Raises:
        TypeError: the value contains an object that has no JSON form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_data(getattr(value, name)) for name in _stored(type(value))}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, Mapping):
        # A list of pairs: JSON's keys are text only, and the order of a mapping counts (a schedule is one).
        return [[to_data(key), to_data(item)] for key, item in value.items()]
    if isinstance(value, frozenset):
        return sorted(map(to_data, value))
    if isinstance(value, (tuple, list)):
        return list(map(to_data, value))
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TypeError(f"{value!r} is no data: a plan holds names and numbers")


def from_data(kind: type[Record], data: Any, **missing: Any) -> Record:
    """Rebuild a dataclass or a typed dictionary from what ``to_data`` returned.

    Args:
        kind: the class to build.
        missing: values of the fields that are not stored (``graph`` of a ProgramPlan).

    Raises:
        TypeError, ValueError, KeyError: the data does not fit the class.
    """
    return typing.cast(Record, _record(kind, data, **missing))


Reader = Callable[[Any], Any]


@functools.cache
def _reader(kind: Any) -> Reader:
    """The function that converts JSON data to a type. Cached by type: a plan has thousands of values."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (only,) = [_reader(member) for member in inner if member is not type(None)]
        return lambda value: None if value is None else only(value)
    if kind is Any:
        return lambda value: value
    if origin is NotRequired:
        return _reader(inner[0])
    if typing.is_typeddict(kind) or (dataclasses.is_dataclass(kind) and isinstance(kind, type)):
        return functools.partial(_record, kind)
    if kind is torch.device or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return typing.cast(Reader, kind)
    if origin is dict:
        read_item = _reader(inner[1])
        return lambda value: {key: read_item(item) for key, item in _mapping(value).items()}
    if origin is not None and issubclass(origin, Mapping):
        read_key, read_item = map(_reader, inner)
        return lambda value: {read_key(key): read_item(item) for key, item in value}
    if origin in (frozenset, list) or (origin is tuple and inner[-1] is Ellipsis):
        read_item = _reader(inner[0])
        return lambda value: origin(map(read_item, value))
    if origin is tuple:
        readers = tuple(map(_reader, inner))
        return lambda value: tuple(read(item) for read, item in zip(readers, value, strict=True))
    return functools.partial(_atom, kind)


def _record(kind: Any, value: Any, **missing: Any) -> Any:
    """Build a record. Unknown keys are an error for a dataclass, and are ignored for a typed dictionary."""
    fields, value, arguments = _stored(kind), _mapping(value), {}
    wrong = [f"without {name}" for name, (_, needed) in fields.items() if needed and name not in value]
    if dataclasses.is_dataclass(kind):
        wrong += [f"with {name}" for name in value if name not in fields]
    if wrong:
        raise ValueError(f"a {getattr(kind, '__name__', kind)} {', '.join(wrong)}")
    for name, (read, _) in fields.items():
        try:
            if name in value:
                arguments[name] = read(value[name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
    return kind(**arguments, **missing)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected names with values, got {value!r:.100}")
    return value


def _atom(kind: Any, value: Any) -> Any:
    if kind not in (str, int, float, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"expected {kind.__name__}, got {value!r:.100}")
    return value


@functools.cache
def _stored(kind: Any) -> dict[str, tuple[Reader, bool]]:
    """The stored fields of a record by name: the reader of each, and whether it is required."""
    types_of = typing.get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        types_of = {f.name: types_of[f.name] for f in dataclasses.fields(kind) if f.metadata.get("stored", True)}
    return {name: (_reader(hint), typing.get_origin(hint) is not NotRequired) for name, hint in types_of.items()}
