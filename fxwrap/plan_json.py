"""Data by its types, to JSON and back: dataclasses (plans) and typed dictionaries (reports).

What is cached, saved and compared of a plan is the very data that runs.
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
    """What JSON can hold: of a dataclass, its fields. Equal values give equal data.

    Raises:
        TypeError: there is something in it that is no data.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_data(getattr(value, name)) for name in _stored(type(value))}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, Mapping):
        # JSON's keys are text. The order is that of the mapping: a schedule is one.
        return [[to_data(key), to_data(item)] for key, item in value.items()]
    if isinstance(value, frozenset):
        return sorted(map(to_data, value))
    if isinstance(value, (tuple, list)):
        return list(map(to_data, value))
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TypeError(f"{value!r} is no data: a plan holds names and numbers")


def from_data(kind: type[Record], data: Any, **missing: Any) -> Record:
    """What ``to_data`` has made data of, or a typed dictionary.

    Args:
        kind: its class.
        missing: the fields that are not stored (``graph`` of a ProgramPlan).

    Raises:
        TypeError, ValueError, KeyError: the data is nothing of this kind.
    """
    return typing.cast(Record, _record(kind, data, **missing))


Reader = Callable[[Any], Any]


@functools.cache
def _reader(kind: Any) -> Reader:
    """What makes a value of a type of what JSON holds. Types are looked at once: a plan has thousands of values."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (only,) = [_reader(one) for one in inner if one is not type(None)]
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
        item_of = _reader(inner[1])
        return lambda value: {key: item_of(item) for key, item in _mapping(value).items()}
    if origin is not None and issubclass(origin, Mapping):
        key_of, item_of = map(_reader, inner)
        return lambda value: {key_of(key): item_of(item) for key, item in value}
    if origin in (frozenset, list) or (origin is tuple and inner[-1] is Ellipsis):
        item_of = _reader(inner[0])
        return lambda value: origin(map(item_of, value))
    if origin is tuple:
        readers = tuple(map(_reader, inner))
        return lambda value: tuple(of(item) for of, item in zip(readers, value, strict=True))
    return functools.partial(_atom, kind)


def _record(kind: Any, value: Any, **missing: Any) -> Any:
    """A dataclass has its fields and no others; a typed dictionary may have other keys, which are left out."""
    known, value, found = _stored(kind), _mapping(value), {}
    wrong = [f"without {name}" for name, (_, needed) in known.items() if needed and name not in value]
    if dataclasses.is_dataclass(kind):
        wrong += [f"with {name}" for name in value if name not in known]
    if wrong:
        raise ValueError(f"a {getattr(kind, '__name__', kind)} {', '.join(wrong)}")
    for name, (of, _) in known.items():
        try:
            if name in value:
                found[name] = of(value[name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
    return kind(**found, **missing)


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
    """The fields that are stored: what reads each, and whether it has to be there."""
    types_of = typing.get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        types_of = {f.name: types_of[f.name] for f in dataclasses.fields(kind) if f.metadata.get("stored", True)}
    return {name: (_reader(of), typing.get_origin(of) is not NotRequired) for name, of in types_of.items()}
