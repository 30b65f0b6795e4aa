"""fxwrap's programs in Inductor's caches: their key, and which entries are misses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import shutil
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import codecache, config
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...devices import device_support
from ...host_graph.tensors import has_address
from ...options import Options


def caching() -> bool:
    """Whether Inductor stores what it compiles now."""
    return bool(config.fx_graph_cache and not config.force_disable_caches)


def without_uuid(codegen: type, base: type) -> list[str]:
    """What a codegen subclass defines that no ``uuid`` speaks for.

    One speaks for the class that has it, and for those that it inherits from.
    """
    found: list[str] = []
    for cls in codegen.__mro__[: codegen.__mro__.index(base)]:
        if vars(cls).get("uuid"):
            break
        names = (name for name in vars(cls) if name not in ("uuid", "supports_caching"))
        found += [name for name in names if not (name.startswith("__") and name.endswith("__"))]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def extended_cache_key(key: str) -> Iterator[None]:
    """Add ``key`` to the keys of Inductor's and AOTAutograd's caches; check entries before they are read."""
    settings: Any = torch.compiler.config
    tag = settings.cache_key_tag
    with settings.patch(cache_key_tag=f"{tag}|fxwrap {key}"), _entries_checked:
        yield


def cache_key(options: Options, devices: Iterable[torch.device], *others: Any) -> str:
    """The part of the key that Inductor does not know.

    It is made of fxwrap's sources and options, the number of threads, device registrations, and ``others``.
    """
    supports = [device_support(kind) for kind in sorted({device.type for device in devices})]
    parts = [_source_digest(), torch.get_num_threads(), *others, _fingerprint(options), _fingerprint(supports)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def shared_storages(inputs: Iterable[Any]) -> list[tuple[int, ...]]:
    """Positions of inputs that share a storage, one tuple per storage.

    If one of them is mutated, AOTAutograd compiles them as views of one base, but its key holds only offset and size
    of each (torch 2.15; pytorch/pytorch#184694).
    """
    known: dict[int, list[int]] = {}
    for position, value in enumerate(inputs):
        for tensor in _inner_tensors(value):
            known.setdefault(tensor.untyped_storage()._cdata, []).append(position)
    return [tuple(positions) for positions in known.values() if len(positions) > 1]


def _inner_tensors(value: Any) -> list[torch.Tensor]:
    """Tensors with memory: the tensor itself, or those that a wrapper subclass is made of."""
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return [tensor for name in names for tensor in _inner_tensors(getattr(value, name))]
    return [value] if isinstance(value, torch.Tensor) and has_address(value) else []


@functools.cache
def _source_digest() -> str:
    """Digest of fxwrap's sources. An entry is valid only for the code that wrote it."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _fingerprint(value: Any, inside: tuple[int, ...] = (), told: set[int] | None = None) -> Any:
    """A description that is equal in every process, and differs if the value behaves differently.

    Of a function: its code, defaults, what its closure has, and the globals that it names.

    Args:
        inside: what this is part of, by ``id``.
        told: functions that are described already. Many may name one, which is told of once.
    """
    told = set() if told is None else told
    if id(value) in inside:
        return "itself"
    inside = (*inside, id(value))

    def of(part: Any) -> Any:
        return _fingerprint(part, inside, told)

    if isinstance(value, functools.partial):
        return ["partial", of(value.func), of(value.args), of(dict(value.keywords))]
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, type):
        return ["type", value.__module__, value.__qualname__, getattr(value, "uuid", None)]
    if isinstance(value, types.MethodType):
        return ["method", of(value.__func__), of(value.__self__)]
    name = [getattr(value, "__module__", ""), getattr(value, "__qualname__", type(value).__qualname__)]
    if isinstance(value, types.FunctionType):
        if id(value) in told:
            return ["function", *name]
        told.add(id(value))
        known = str(name[0]).partition(".")[0] in _KNOWN_PACKAGES
        names = () if known else _names_in(value.__code__)
        used = {key: value.__globals__[key] for key in names if key in value.__globals__}
        kept = [cell.cell_contents for cell in value.__closure__ or ()]
        state = value.__defaults__, value.__kwdefaults__, kept, used
        return ["function", *name, _code(value.__code__), *map(of, state)]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, *([f.name, of(getattr(value, f.name))] for f in dataclasses.fields(value))]
    if isinstance(value, dict):
        return sorted([repr(key), of(item)] for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return list(map(of, value))
    if isinstance(value, (set, frozenset)):
        return sorted(repr(of(item)) for item in value)
    if callable(value) and type(value).__module__.partition(".")[0] not in _KNOWN_PACKAGES:
        return ["callable", *name, *map(of, _state(value))]
    return repr(value) if not callable(value) else ["callable", *name, str(value) if name[0] else ""]


def _state(instance: Any) -> Iterator[dict[str, Any]]:
    """What an object has, and what the classes define that are its own or come before torch's."""
    yield getattr(instance, "__dict__", {})
    for cls in type(instance).__mro__:
        if cls.__module__.partition(".")[0] in _KNOWN_PACKAGES:
            break
        slots = vars(cls).get("__slots__", ())
        yield {name: getattr(instance, name, None) for name in ([slots] if isinstance(slots, str) else slots)}
        plain = {name: of for name, of in vars(cls).items() if not isinstance(of, types.GetSetDescriptorType)}
        yield {name: of for name, of in plain.items() if name == "__call__" or not name.startswith("__")}


# What these define is known by the versions, which are in the key.
_KNOWN_PACKAGES = ("torch", "fxwrap", "builtins")


def _code(code: types.CodeType) -> Any:
    constants = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()


def _names_in(code: types.CodeType) -> list[str]:
    """Names that code and the functions in it look up."""
    inner = (name for c in code.co_consts if isinstance(c, types.CodeType) for name in _names_in(c))
    return sorted({*code.co_names, *inner})


# -- entries --------------------------------------------------------------------------------------------------------


_GuardedCache: Any = codecache.GuardedCache


class _EntryChecks:
    """Checks entries inside the context. All threads inside share one patch."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._original: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._original = _GuardedCache.__dict__["iterate_over_candidates"]
                _GuardedCache.iterate_over_candidates = classmethod(_candidates(self._original.__func__))
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _GuardedCache.iterate_over_candidates = self._original


_entries_checked = _EntryChecks()


def _candidates(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Remove damaged entries before they are read, and repair module files.

    Both caches name a file after its digest, but do not verify it.
    """

    def iterate(cls: Any, local: bool, remote_cache: Any, key: str) -> Iterator[Any]:
        folder = Path(cls._get_tmp_dir_for_key(key))
        for path in folder.iterdir() if local and folder.is_dir() else ():
            if not path.name.startswith(".") and codecache.sha256_hash(_read_bytes(path)) != path.name:
                warnings.warn(f"fxwrap: a cache entry is damaged, and is made again: {path}", stacklevel=2)
                path.unlink(missing_ok=True)
        for candidate in function(cls, local, remote_cache, key):
            if (source := getattr(candidate[0], "source_code", None)) is not None:
                write_module(source)
            yield candidate

    return iterate


def _read_bytes(path: Path) -> bytes:
    """The file's bytes; empty if another process has just removed it."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def write_module(text: str) -> None:
    """Write a module's file before Inductor loads it: Inductor trusts a file that exists."""
    path = codecache.PyCodeCache.write(text)[1]
    if _read_bytes(Path(path)) != text.encode():
        codecache.write_atomic(path, text.encode())


def remove_entry(compiled: Any) -> None:
    """Remove a compiled graph that must not be stored from the cache."""
    key = vars(compiled).pop("_fx_graph_cache_key", None)  # AOTAutograd stores nothing without it
    if key is not None:
        shutil.rmtree(codecache.FxGraphCache._get_tmp_dir_for_key(key), ignore_errors=True)
