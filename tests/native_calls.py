"""Units of native replay in tests: operators to look through, recordings, and calls with and without units."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import Compiled, tensors_in
from hypothesis import settings
from random_graphs import PROPERTY

from fxwrap.graphs.replay.recording import Recording

# Only then: without a library where there should be one, they fail.
native = pytest.mark.skipif(os.environ.get("FXWRAP_NATIVE_REPLAY") == "0", reason="native replay is switched off")
# At the end of a listing's line: the step multiplies with the BLAS that ATen calls.
BLAS = "  # BLAS"
few = settings(PROPERTY, max_examples=min(20, PROPERTY.max_examples))


# -- operators that tests look through -----------------------------------------------------------------------

seen: list[Callable[[torch.Tensor], object]] = []  # what ``look`` calls

torch.library.define("fxwrap_units::look", "(Tensor x) -> Tensor")
torch.library.define("fxwrap_units::make", "(Tensor x) -> Tensor")
torch.library.define("fxwrap_units::plus", "(Tensor x, Tensor? y, str how, ScalarType dtype) -> Tensor")
torch.library.define("fxwrap_units::note", "(Tensor x) -> ()")
torch.library.define("fxwrap_units::two", "(Tensor x) -> (Tensor, Tensor)")
torch.library.define("fxwrap_units::many", "(Tensor x) -> Tensor[]")


@torch.library.impl("fxwrap_units::look", "CompositeExplicitAutograd")
def _look(x: torch.Tensor) -> torch.Tensor:
    for one in seen:
        one(x)
    return x * 2


@torch.library.impl("fxwrap_units::make", "CompositeExplicitAutograd")
def _make(x: torch.Tensor) -> torch.Tensor:
    made = x + 1
    for one in seen:
        one(made)
    return made


@torch.library.impl("fxwrap_units::plus", "CompositeExplicitAutograd")
def _plus(x: torch.Tensor, y: torch.Tensor | None, how: str, dtype: torch.dtype) -> torch.Tensor:
    assert how == "twice"
    return (x + x if y is None else x + y).to(dtype)


@torch.library.impl("fxwrap_units::note", "CompositeExplicitAutograd")
def _note(x: torch.Tensor) -> None:
    for one in seen:
        one(x)


@torch.library.impl("fxwrap_units::two", "CompositeExplicitAutograd")
def _two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x + 2


@torch.library.impl("fxwrap_units::many", "CompositeExplicitAutograd")
def _many(x: torch.Tensor) -> list[torch.Tensor]:
    made = [x + 1, x + 2]
    for one in seen:
        one(made)  # type: ignore[arg-type]
    return made


for _name in ("look", "make"):
    torch.library.register_fake(f"fxwrap_units::{_name}")(torch.empty_like)
torch.library.register_fake("fxwrap_units::plus")(lambda x, y, how, dtype: torch.empty_like(x, dtype=dtype))
torch.library.register_fake("fxwrap_units::two")(lambda x: (torch.empty_like(x), torch.empty_like(x)))
torch.library.register_fake("fxwrap_units::many")(lambda x: [torch.empty_like(x), torch.empty_like(x)])
torch.library.register_fake("fxwrap_units::note")(lambda x: None)
look, make, ops = torch.ops.fxwrap_units.look, torch.ops.fxwrap_units.make, torch.ops.fxwrap_units


@pytest.fixture(autouse=True)
def look_at_nothing() -> Iterator[None]:
    seen.clear()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    seen.clear()


# -- two ways to call ----------------------------------------------------------------------------------------


def recorded(f: Compiled, *inputs: Callable[[], Any], calls: int = 3) -> Recording:
    """Call with fresh inputs until the program replays; the recording."""
    for _ in range(calls):
        f(*(one() for one in inputs))
    (recording,) = f.program.specializations.recordings()
    assert recording.unit is not None, f.program.counters.to_dict()
    return recording


@contextlib.contextmanager
def in_python(*programs: Any) -> Iterator[None]:
    """Replay the same recordings without their units."""
    units = [program.specializations.units for program in programs]
    for program in programs:
        program.specializations.units = ()
    try:
        yield
    finally:
        for program, its_own in zip(programs, units, strict=True):
            program.specializations.units = its_own


@contextlib.contextmanager
def natively(*programs: Any) -> Iterator[None]:
    """Every program replays through a unit, once or more."""
    before = [_used(program) for program in programs]
    yield
    assert all(_used(program) > used for program, used in zip(programs, before, strict=True))


def _used(program: Any) -> int:
    return max((unit.used for unit in program.specializations.units), default=0)


def both_ways(f: Compiled, call: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``call`` returns through units, and what it returns in Python."""
    with natively(f.program):
        through_unit = call()
    before = _used(f.program)
    with in_python(f.program):
        through_python = call()
    assert _used(f.program) == before
    return through_unit, through_python


def run(program: Any, *inputs: Any) -> list[torch.Tensor]:
    """Call a program as compiled code does; its outputs."""
    return tensors_in(program.run(list(inputs)))


def listing(recording: Recording) -> str:
    """What a unit runs, but for what differs between builds of torch: looks at layouts, and the BLAS to call."""
    text = "".join(f"{line.removesuffix(BLAS)}\n" for line in recording.listing)
    looks_at_inputs = r"(v\d+) = r\[\d+\]\n(assert_.*\n)+del \1\n"
    return re.sub(r"assert_.*\n", "", re.sub(looks_at_inputs, "", text)).strip()


def drawn(text: str) -> str:
    return textwrap.dedent(text).strip()


class Odd(Exception):
    """No exception that anybody knows."""


def assert_clean(recording: Recording) -> None:
    """Locks are free, and regions and registers empty."""
    assert not any(lock.locked() for lock in recording._locks)
    assert recording._resources is not None and recording._replay is not None
    assert not any(storage.nbytes() for storage, _ in recording._resources.regions._sizes)
    assert not any(value is not None for value in recording._replay.registers)


def positions(f: Compiled, values: Sequence[torch.Tensor]) -> list[int]:
    """Which argument of the function each input of the program is."""
    found, its_own = list[int](), f.program.run
    addresses = [value.data_ptr() for value in values]

    def note(inputs: list[Any]) -> Any:
        found.extend(addresses.index(value.data_ptr()) for value in inputs)
        return its_own(inputs)

    f.program.run = note
    f(*values)
    del f.program.run
    return found


@contextlib.contextmanager
def missed(recording: Recording) -> Iterator[None]:
    """No call in here is replayed by this unit, which has done nothing."""
    before = recording.unit.used
    yield
    assert recording.unit.used == before
    assert not any(lock.locked() for lock in recording._locks)


COMPLEX = torch.complex64
