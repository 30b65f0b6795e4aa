"""A full disk, and a killed process, while caches and saved programs are written: the next call is right.

``-m sweep`` tries every point at which a cache is written to.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import processes
import pytest

from fxwrap import native_build
from fxwrap.errors import StorageError
from fxwrap.features.ahead_of_time import package

# Compiles a model and trains it, in processes that are forked from one that has done so before: the next call after a
# fault is one of the same process, or of another.
SCRIPT = """
import errno, json, os, signal, sys, warnings
import torch
import fxwrap
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor import codecache

folder, points = sys.argv[1], json.loads(sys.argv[2])
training = points is None
cache, fault, at, reached = "", "", -1, 0
usual = codecache.get_path
codecache.get_path = lambda name, ending, there="": usual(name, ending, cache if ending == "py" else there)
codecache.FxGraphCache._get_tmp_dir = staticmethod(lambda: cache + "/fxgraph")
AOTAutogradCache._get_tmp_dir = classmethod(lambda cls: cache + "/aotautograd")
torch.set_num_threads(1)


def look(event, arguments):
    global reached
    writes = event in ("os.mkdir", "os.rename", "os.remove", "os.truncate")
    if event == "open":
        writes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if not (writes and cache and str(arguments[0]).startswith(cache)):
        return
    reached += 1
    if reached > at >= 0:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "full" and event != "os.remove":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))


sys.addaudithook(look)


def run():
    torch._dynamo.reset()
    codecache.PyCodeCache.cache_clear()
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()), torch.randn(4, 16)
    f, found = torch.compile(model, backend="fxwrap"), []
    for _ in range(3):
        with torch.set_grad_enabled(training):
            y = f(x)
        found.append(y.tolist())
        if training:
            model.zero_grad()
            y.sum().backward()
            found += [p.grad.tolist() for p in model.parameters()]
    assert fxwrap.stats(f)["fallbacks"] == {}, fxwrap.stats(f)
    return found


def is_right():
    assert run() == expected


def while_full():
    global fault
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "fxwrap: a .* graph runs through Inductor's own wrapper")
            is_right()
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    except torch._dynamo.exc.BackendCompilerFailed as error:
        assert "No space left on device" in str(error) and "own wrapper" not in str(error), error
    else:
        os._exit(7)
    finally:
        fault = ""
        is_right()


def in_a_child(work, what, where):
    global cache, fault, at
    child = os.fork()
    if child == 0:
        cache, fault, at = f"{folder}/{where}", what, int(where.split()[-1])
        try:
            work()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


cache = folder + "/whole"
expected = run()
cache, writes, right = "", reached, 0
tried = range(writes) if points is None else [int(part * writes) for part in points]
for k in tried:
    killed, full = f"killed {k}", f"full {k}"
    assert in_a_child(is_right, "killed", killed) == -signal.SIGKILL, k
    assert in_a_child(is_right, "", killed) == 0, k
    done = in_a_child(while_full, "full", full)
    assert done in (0, 7), k
    right += done == 7
    assert in_a_child(is_right, "", full) == 0, k
print(json.dumps([writes, len(tried), right]))
"""


@pytest.mark.parametrize("points", [[0.7], pytest.param(None, marks=pytest.mark.sweep)], ids=["a sample", "all"])
def test_a_cache_that_is_cut_short(tmp_path: Path, points: list[float] | None) -> None:
    """
    ::

        process   compiles: killed at its k-th write  |  compiles: the disk is full from its k-th write on, ... not
        call                                                        an error, or right                        right
        process   then another:  right                                                    then another:  right
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = processes.run(str(script), str(tmp_path / "caches"), json.dumps(points))
    assert done.returncode == 0, done.stderr
    writes, tried, right = json.loads(done.stdout.splitlines()[-1])
    assert writes > 10
    print(f"{writes} writes, {tried} tried; {right} calls were right while the disk was full, and the others raised")


@contextlib.contextmanager
def files_end_after(nbytes: int, killed: bool = False) -> Iterator[None]:
    """What is written beyond so many bytes of a file is an error, as on a full disk; or the end of the process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_DFL if killed else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def in_a_child(nbytes: int, write: Callable[[], object]) -> int:
    """How a process ends that is killed when it writes beyond so many bytes."""
    child = os.fork()
    if child == 0:
        try:
            with files_end_after(nbytes, killed=True):
                write()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_saved_program_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path, members = tmp_path / "model.fxwrap", {"a.json": b"{}" * 200, "b.so": os.urandom(300)}
    package.write(path, {"old": True}, members)
    old, new = path.read_bytes(), {**members, "c.so": os.urandom(500)}
    sizes = 0
    for nbytes in range(0, len(old) + 3000, 7):
        with files_end_after(nbytes), contextlib.suppress(OSError):
            package.write(path, {"old": False}, new)
        if path.read_bytes() != old:
            break
        sizes += 1
        assert [one.name for one in tmp_path.iterdir()] == [path.name]
        if nbytes % 70 == 0:
            assert in_a_child(nbytes, lambda: package.write(path, {"old": False}, new)) == -signal.SIGXFSZ
            assert path.read_bytes() == old
            package.write(path, {"old": True}, members)  # over what the killed process has left
            assert [one.name for one in tmp_path.iterdir()] == [path.name]
            old = path.read_bytes()
    else:
        pytest.fail("it is never written")
    assert sizes > 100
    written = package.Package(path)
    assert written.manifest["old"] is False
    written.check_all()
    written.close()
    path.write_bytes(old[: len(old) // 2])
    with pytest.raises(StorageError):
        package.Package(path)


def test_a_library_that_is_not_written_to_its_end_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "one.cpp"
    # Larger than any linker writes at once, whatever it leaves out.
    source.write_text('extern "C" { int one() { return 1; } char data[8192] = "data"; }')

    def build() -> Path:
        return native_build.built_library("one", source, ["-shared", "-fPIC", "-nostdlib"], patience_s=60)

    for nbytes in (0, 1, 100, 1000, 8000):
        with files_end_after(nbytes), pytest.raises((OSError, subprocess.SubprocessError)):
            build()
        assert not list((tmp_path / "cache").rglob("*"))[1:], "something is left"
        child = in_a_child(nbytes, build)
        assert child != 0 and not native_build.library_path("one", source, ["-shared", "-fPIC", "-nostdlib"]).exists()
    assert build().stat().st_size > 8192
