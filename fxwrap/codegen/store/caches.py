"""fxwrap's programs in Inductor's and AOTAutograd's caches: the key of an entry, and the check for damage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import codecache, config
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ...devices import device_support
from ...graphs.memory.locks import lock_of_process
from ...host_graph.tensors import has_address
from ...options import Options


def caching() -> bool:
    """Whether Inductor's cache of compiled graphs is on."""
    return bool(config.fx_graph_cache and not config.force_disable_caches)


def without_uuid(codegen: type, base: type) -> list[str]:
    """Names that a codegen subclass defines and that no ``uuid`` covers.

    A ``uuid`` covers the class that defines it and the classes that it inherits from.
    """
    uncovered: list[str] = []
    for cls in codegen.__mro__[: codegen.__mro__.index(base)]:
        if vars(cls).get("uuid"):
            break
        names = (name for name in vars(cls) if name not in ("uuid", "supports_caching"))
        uncovered += [name for name in names if not (name.startswith("__") and name.endswith("__"))]
    return list(dict.fromkeys(uncovered))


@contextlib.contextmanager
def extended_cache_key(key: str) -> Iterator[None]:
    """Inside the context, add ``key`` to the keys of both caches, and check entries before they are read."""
    settings: Any = torch.compiler.config
    tag = settings.cache_key_tag
    with settings.patch(cache_key_tag=f"{tag}|fxwrap {key}"), _entries_checked:
        yield


def cache_key(options: Options, devices: Iterable[torch.device], *others: Any) -> str:
    """fxwrap's part of the key: a digest of sources, options, threads, device registrations, and ``others``."""
    supports = [device_support(kind) for kind in sorted({device.type for device in devices})]
    parts = [_source_digest(), torch.get_num_threads(), *others, _fingerprint(options), _fingerprint(supports)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def has_numbers(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's takes floats of Python's that vary.

    AOTAutograd makes tensors of them where it can. The others it compiles in and has Dynamo guard them; but neither
    key has their values, and what is read from a cache guards none (torch 2.11 to 2.15): the graph for 0.3 would be
    run for 0.4.
    """
    values = (node.meta.get("example_value", node.meta.get("val")) for node in gm.graph.nodes)
    expressions = [value.node._expr for value in values if isinstance(value, torch.SymFloat)]
    return any(symbol_is_type(symbol, SymT.FLOAT) for one in expressions for symbol in one.free_symbols)


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Inside the context, neither cache is read or written."""
    with functorch_config.patch(enable_autograd_cache=False), config.patch(fx_graph_cache=False):
        yield


def shared_storages(inputs: Iterable[Any]) -> list[tuple[tuple[int, str], ...]]:
    """Positions of inputs that share a storage, with their offsets in it, one tuple per storage.

    If one of them is mutated, AOTAutograd compiles them as views of one base, but its key does not have where they
    lie: the size of each alone, up to torch 2.15 (pytorch/pytorch#184694).
    """
    by_storage: dict[int, list[tuple[int, str]]] = {}
    for position, value in enumerate(inputs):
        for tensor in _inner_tensors(value):
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(
                (position, str(tensor.storage_offset()))
            )
    return [tuple(positions) for positions in by_storage.values() if len(positions) > 1]


def _inner_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors with memory: the tensor itself, or the parts of a wrapper subclass."""
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


def _fingerprint(value: Any, inside: tuple[int, ...] = (), described: set[int] | None = None) -> Any:
    """A description of a value that is the same in every process, and differs for a value that behaves differently.

    A function is described by its code, defaults, closure, and the globals that it names.

    Args:
        inside: ids of the values that contain this one.
        described: ids of the functions that are already described; each is described once.
    """
    described = set() if described is None else described
    if id(value) in inside:
        return "itself"
    inside = (*inside, id(value))

    def of(part: Any) -> Any:
        return _fingerprint(part, inside, described)

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
        if id(value) in described:
            return ["function", *name]
        described.add(id(value))
        names = () if str(name[0]).partition(".")[0] in _KEYED_PACKAGES else _names_in(value.__code__)
        used = _looked_up(names, value.__globals__)
        closure = [cell.cell_contents for cell in value.__closure__ or ()]
        state = value.__defaults__, value.__kwdefaults__, closure, used
        return ["function", *name, _code(value.__code__), *map(of, state)]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, *([f.name, of(getattr(value, f.name))] for f in dataclasses.fields(value))]
    if isinstance(value, dict):
        return sorted([repr(key), of(item)] for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return list(map(of, value))
    if isinstance(value, (set, frozenset)):
        return sorted(repr(of(item)) for item in value)
    if callable(value) and type(value).__module__.partition(".")[0] not in _KEYED_PACKAGES:
        return ["callable", *name, *map(of, _state(value))]
    return repr(value) if not callable(value) else ["callable", *name, str(value) if name[0] else ""]


def _state(instance: Any) -> Iterator[dict[str, Any]]:
    """The attributes of an object, and what its classes define, up to the first class of torch's or fxwrap's."""
    yield getattr(instance, "__dict__", {})
    for cls in type(instance).__mro__:
        if cls.__module__.partition(".")[0] in _KEYED_PACKAGES:
            break
        slots = vars(cls).get("__slots__", ())
        yield {name: getattr(instance, name, None) for name in ([slots] if isinstance(slots, str) else slots)}
        plain = {name: of for name, of in vars(cls).items() if not isinstance(of, types.GetSetDescriptorType)}
        yield {name: of for name, of in plain.items() if name == "__call__" or not name.startswith("__")}


def _looked_up(
    names: Iterable[str], scope: Mapping[str, Any], inside: tuple[types.ModuleType, ...] = ()
) -> dict[str, Any]:
    """What names in code may refer to: globals, and attributes of modules of the user's among them."""
    found = {name: scope[name] for name in names if name in scope}
    for name, module in list(found.items()):
        if not isinstance(module, types.ModuleType) or module in inside:
            continue
        if module.__name__.partition(".")[0] not in (*_KEYED_PACKAGES, *sys.stdlib_module_names):
            of_module = _looked_up(names, vars(module), (*inside, module))
            # A compiled function has no code to describe, and its text may have an address.
            described = (pair for pair in of_module.items() if not isinstance(pair[1], types.BuiltinFunctionType))
            found |= {f"{name}.{key}": value for key, value in described}
    return found


# Packages whose versions are in the key, which covers what they define.
_KEYED_PACKAGES = ("torch", "fxwrap", "builtins")


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
    """A context in which cache entries are checked. All threads in it share one patch."""

    def __init__(self) -> None:
        self._lock, self._inside = lock_of_process(), 0
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
    """Wrap the caches' lookup: remove damaged entries before they are read, and repair module files.

    Both caches name a file by its digest, and do not verify it.
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
    """Write a module's file before Inductor loads it. Inductor does not check a file that exists."""
    path = codecache.PyCodeCache.write(text)[1]
    if _read_bytes(Path(path)) != text.encode():
        codecache.write_atomic(path, text.encode())


def remove_entry(compiled: Any) -> None:
    """Remove the cache entry of a compiled graph that must not be stored."""
    key = vars(compiled).pop("_fx_graph_cache_key", None)  # AOTAutograd stores nothing without it
    if key is not None:
        shutil.rmtree(codecache.FxGraphCache._get_tmp_dir_for_key(key), ignore_errors=True)
