"""The cache of kernels between runs: what a killed run left behind half is made again."""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import threading
from pathlib import Path

import pytest
import torch
from kernel_cache import end_of_sections, is_whole, kernel_cache, remove_halves

SOME_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A whole library, one that was cut, and one of which there is next to nothing."""
    (tmp_path / "ab").mkdir()
    shutil.copy(SOME_LIBRARY, tmp_path / "ab" / "whole.main.so")
    content = SOME_LIBRARY.read_bytes()
    (tmp_path / "ab" / "cut.main.so").write_bytes(content[: end_of_sections(content[:64]) - 1])
    (tmp_path / "ab" / "short.so").write_bytes(content[:32])
    return tmp_path


def test_halves_are_removed_and_nothing_else(cache: Path) -> None:
    with pytest.raises(OSError, match="file too short"):
        ctypes.CDLL(str(cache / "ab" / "short.so"))
    assert {path.name for path in remove_halves(cache)} == {"cut.main.so", "short.so"}
    assert [path.name for path in cache.glob("*/*.so")] == ["whole.main.so"]
    assert remove_halves(cache) == []


def test_one_that_is_being_built_is_waited_for(cache: Path) -> None:
    (cache / "ab" / "short.so").unlink()
    (cache / "locks").mkdir()
    with open(cache / "locks" / "cut.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        looking = threading.Thread(target=remove_halves, args=[cache])
        looking.start()
        looking.join(0.05)
        assert looking.is_alive()
        shutil.copy(SOME_LIBRARY, cache / "ab" / "cut.main.so")
    looking.join()
    assert is_whole(cache / "ab" / "cut.main.so")


def test_the_cache_lies_outside_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache().parent == tmp_path / "fxwrap-tests"
    assert torch.__version__.startswith(kernel_cache().name.removeprefix("torch-"))
