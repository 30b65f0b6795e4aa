"""Python's garbage collection rests while a host graph is made, and goes on afterwards."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import Compiled

import fxwrap
from fxwrap.codegen.garbage import no_garbage_collection


def test_collection_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError), no_garbage_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_within_another_one() -> None:
    with no_garbage_collection():
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_the_user_has_switched_off_stays_so() -> None:
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_host_graph_is_compiled_without_collections(compiled: Any) -> None:
    class Looks(fxwrap.FxwrapCodegen):
        def compile_graph(self, gm: Any) -> Any:
            seen.append(gc.isenabled())
            return super().compile_graph(gm)

    seen: list[bool] = []
    f: Compiled = compiled(lambda x: x + 1, options={"codegen": Looks})
    x = torch.randn(4)
    assert torch.equal(f(x), x + 1)
    assert seen == [False] and gc.isenabled()
