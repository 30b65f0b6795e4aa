"""Virtual memory: addresses are reserved once, and bytes come and go beneath them.

::

    reserve        |----------------|      addresses
    create, map    |####            |      bytes, at a part of them
    unmap          |----------------|      addresses stay: a graph that has them can run when bytes are there again
"""

from __future__ import annotations

import ctypes

from cuda import byte, captured, do, fill, launch, stream
from scripts import start

import hostcuda

PAGE = 2 << 20
OK, INVALID = 0, 1


class Memory:
    """Bytes at addresses that were reserved for them."""

    def __init__(self, reserved: int = PAGE) -> None:
        self.place, self.reserved = ctypes.c_uint64(), reserved
        assert (
            self._call("cuMemAddressReserve", ctypes.byref(self.place), _size(reserved), _size(0), None, None) == OK
        )

    def _call(self, function: str, *args: object) -> int:
        return int(getattr(hostcuda.runtime(), function)(*args))

    def map(self, size: int = PAGE, offset: int = 0) -> int:
        handle = ctypes.c_uint64()
        assert self._call("cuMemCreate", ctypes.byref(handle), _size(size), None, None) == OK
        answer = self._call("cuMemMap", self.at(offset), _size(size), _size(0), handle, None)
        assert self._call("cuMemRelease", handle) == OK  # what is mapped stays until it is unmapped
        return answer

    def access(self, size: int = PAGE) -> int:
        return self._call("cuMemSetAccess", self.place, _size(size), None, _size(0))

    def unmap(self, size: int = PAGE, offset: int = 0) -> int:
        return self._call("cuMemUnmap", self.at(offset), _size(size))

    def free(self) -> int:
        return self._call("cuMemAddressFree", self.place, _size(self.reserved))

    def at(self, offset: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(self.place.value + offset)


def _size(size: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(size)


def test_bytes_come_and_go_beneath_addresses_that_stay() -> None:
    memory, one, used = Memory(), stream(), hostcuda.counter("used_bytes")
    for value in (7, 8):
        assert (memory.map(), memory.access()) == (OK, OK)
        assert hostcuda.counter("used_bytes") == used + PAGE
        assert byte(memory.place.value) == 0  # nothing of the bytes before
        fill(memory.place, value, one)
        assert byte(memory.place.value, one) == value
        assert memory.unmap() == OK
        assert hostcuda.counter("used_bytes") == used
    assert memory.free() == OK


def test_what_is_not_reserved_or_is_mapped_cannot_be_mapped() -> None:
    memory = Memory(2 * PAGE)
    assert memory.map(offset=2 * PAGE) == INVALID
    assert memory.map(offset=PAGE, size=2 * PAGE) == INVALID  # runs over the end
    assert memory.map() == OK
    assert memory.map() == INVALID
    assert memory.map(offset=PAGE) == OK
    assert memory.unmap(2 * PAGE) == OK


def test_ranges_are_whole_mappings() -> None:
    memory = Memory(2 * PAGE)
    assert memory.access() == INVALID  # nothing is mapped
    assert memory.map(2 * PAGE) == OK
    assert memory.unmap(PAGE) == INVALID  # a part
    assert memory.free() == INVALID  # still mapped
    assert memory.unmap(2 * PAGE) == OK
    assert memory.unmap(2 * PAGE) == INVALID
    assert memory.free() == OK
    assert memory.map() == INVALID  # freed


def test_a_graph_runs_again_when_bytes_are_there_again() -> None:
    memory, one = Memory(), stream()
    assert (memory.map(), memory.access()) == (OK, OK)
    graph = captured(one, lambda: fill(memory.place, 5, one))
    memory.unmap()
    assert (memory.map(), memory.access()) == (OK, OK)
    launch(graph, one)
    assert byte(memory.place.value, one) == 5
    do("cudaStreamSynchronize", one)
    memory.unmap()


def test_a_graph_that_runs_while_no_bytes_are_there() -> None:
    """PLANTED: the launch comes between. The error is sticky."""
    ended = start("""
        from test_virtual_memory import Memory
        memory, one = Memory(), stream()
        memory.map(), memory.access()
        graph = captured(one, lambda: fill(memory.place, 5, one))
        memory.unmap()
        launch(graph, one)
        print(answer("cudaStreamSynchronize", one))
    """)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["IllegalAddress"]
