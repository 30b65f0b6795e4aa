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

from ..devices import device_support
from ..graphs.arenas import has_address
from ..options import Options

# Overriding one of these changes what is compiled.
_HOOKS = ("compile_graph", "compile_partition", "passes", "stages", "writeline", "_generate")


def caching() -> bool:
    """Whether Inductor stores what it compiles now."""
    return bool(config.fx_graph_cache and not config.force_disable_caches)


def without_uuid(codegen: type, base: type) -> list[str]:
    """What a codegen subclass overrides without declaring a ``uuid``; empty if it has one."""
    uuid = getattr(codegen, "uuid", None)
    return [] if uuid else [name for name in _HOOKS if getattr(codegen, name, None) is not getattr(base, name)]


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
    root, digest = Path(__file__).resolve().parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _fingerprint(value: Any) -> Any:
    """A description that is equal in every process, and differs if the value behaves differently."""
    if isinstance(value, functools.partial):
        return ["partial", _fingerprint(value.func), _fingerprint(value.args), _fingerprint(dict(value.keywords))]
    if isinstance(value, types.FunctionType):
        return ["function", value.__module__, value.__qualname__, _code(value.__code__), _closure(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [type(value).__name__, *([f.name, _fingerprint(getattr(value, f.name))] for f in fields)]
    if isinstance(value, type):
        return ["type", value.__module__, value.__qualname__, getattr(value, "uuid", None)]
    if isinstance(value, dict):
        return sorted([repr(key), _fingerprint(item)] for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return list(map(_fingerprint, value))
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_fingerprint(item)) for item in value)
    if callable(value):
        return [
            "callable",
            getattr(value, "__module__", ""),
            getattr(value, "__qualname__", type(value).__qualname__),
        ]
    return repr(value)


def _code(code: types.CodeType) -> Any:
    constants = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()


def _closure(function: types.FunctionType) -> Any:
    cells = function.__closure__ or ()
    return [_fingerprint(cell.cell_contents) for cell in cells if cell.cell_contents is not function]


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
