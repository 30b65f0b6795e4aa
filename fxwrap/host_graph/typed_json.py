"""Conversion of dataclasses (plans, reports) to JSON data and back, driven by their types.

A plan is cached, saved and compared in this form, so a stored plan has exactly the fields of the one that runs. The
metadata of a field may say: ``stored=False`` (who reads the data gives the value to ``from_data``), ``key`` (its name
in JSON), ``added`` (older data lacks it: the value that it gets then). Properties named in a class's ``SHOWN`` are
written, too, so that who reads the JSON need not compute them.
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

Record = TypeVar("Record")


def to_data(value: Any) -> Any:
    """Convert a value to JSON data: a dataclass becomes a dictionary of its fields. Equal values give equal data.

    Raises:
        TypeError: the value contains an object that has no JSON form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = {key: field.name for key, (field, _) in _stored(type(value), foreign=False).items()}
        names |= {name: name for name in getattr(value, "SHOWN", ())}
        return {key: to_data(getattr(value, name)) for key, name in names.items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: to_data(item) for key, item in value.items()}
        return [[to_data(key), to_data(item)] for key, item in value.items()]
    if isinstance(value, frozenset):
        return sorted(map(to_data, value))
    if isinstance(value, (tuple, list)):
        return list(map(to_data, value))
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TypeError(f"{value!r} is no data: a plan holds names and numbers")


def from_data(kind: type[Record], data: Any, *, foreign: bool = False, **missing: Any) -> Record:
    """Rebuild a dataclass from what ``to_data`` returned.

    Args:
        kind: the class to build.
        foreign: whether another version or machine may have written the data. Then unknown keys are passed over, and
            a device that is unknown here stays a name. Otherwise they are errors: a plan without a decision would be
            another plan.
        missing: values of the fields that are not stored (``graph`` of a ProgramPlan).

    Raises:
        TypeError, ValueError, KeyError: the data does not fit the class.
    """
    return typing.cast(Record, _record(kind, foreign, data, **missing))


Reader = Callable[[Any], Any]


@functools.cache
def _reader(kind: Any, foreign: bool) -> Reader:
    """The function that converts JSON data to a type. Cached by type: a plan has thousands of values."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    reader = functools.partial(_reader, foreign=foreign)
    if origin in (typing.Union, types.UnionType):
        (only,) = [reader(member) for member in inner if member is not type(None)]
        return lambda value: None if value is None else only(value)
    if kind is Any:
        return lambda value: value
    if dataclasses.is_dataclass(kind):
        return functools.partial(_record, kind, foreign)
    if kind is torch.device:
        return functools.partial(_device, foreign)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if origin is not None and issubclass(origin, Mapping):
        read_key, read_item = map(reader, inner)
        if inner[0] is str:
            return lambda value: {key: read_item(item) for key, item in _mapping(value).items()}
        return lambda value: {read_key(key): read_item(item) for key, item in value}
    if origin is frozenset or (origin is tuple and inner[-1] is Ellipsis):
        read_item = reader(inner[0])
        return lambda value: origin(map(read_item, value))
    if origin is tuple:
        readers = tuple(map(reader, inner))
        return lambda value: tuple(read(item) for read, item in zip(readers, value, strict=True))
    return functools.partial(_atom, kind)


def _record(kind: Any, foreign: bool, value: Any, **missing: Any) -> Any:
    fields, value, arguments = _stored(kind, foreign), _mapping(value), {}
    needed = (key for key, (field, _) in fields.items() if "added" not in field.metadata)
    wrong = [f"without {key}" for key in needed if key not in value]
    if not foreign:
        known = {*fields, *getattr(kind, "SHOWN", ())}
        wrong += [f"with {key}" for key in value if key not in known]
    if wrong:
        raise ValueError(f"a {kind.__name__} {', '.join(wrong)}")
    for key, (field, read) in fields.items():
        try:
            added = field.metadata.get("added")
            arguments[field.name] = read(value[key]) if key in value else added
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}: {error}") from error
    return kind(**arguments, **missing)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected names with values, got {value!r:.100}")
    return value


def _device(foreign: bool, value: Any) -> Any:
    try:
        return torch.device(value)
    except RuntimeError as error:
        if foreign:
            return value
        raise ValueError(str(error)) from error


def _atom(kind: Any, value: Any) -> Any:
    if kind not in (str, int, float, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"expected {kind.__name__}, got {value!r:.100}")
    return value


@functools.cache
def _stored(kind: Any, foreign: bool) -> dict[str, tuple[dataclasses.Field[Any], Reader]]:
    """The stored fields of a dataclass by key, and what reads each."""
    types_of, stored = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        if field.metadata.get("stored", True):
            stored[field.metadata.get("key", field.name)] = field, _reader(types_of[field.name], foreign)
    return stored
