"""The device's memory: addresses are never used twice, freed memory is gone, and new memory can be poisoned."""

from __future__ import annotations

from cuda import answer, byte, do, fill, memory, stream
from scripts import run, start

import hostcuda


def test_addresses_are_never_used_twice() -> None:
    seen = set()
    for size in (1, 512, 4096, 1 << 20) * 8:
        place = memory(size)
        assert place.value not in seen
        seen.add(place.value)
        do("cudaFree", place)


def test_new_memory_holds_nothing_of_the_old() -> None:
    one, place = stream(), memory()
    fill(place, 7, one, 4096)
    do("cudaStreamSynchronize", one)
    do("cudaFree", place)
    assert byte(memory()) == 0


def test_freeing_what_is_not_there() -> None:
    place = memory()
    do("cudaFree", place)
    assert answer("cudaFree", place) == "InvalidValue"
    assert answer("cudaFree", None) == "Success"


def test_memory_is_counted() -> None:
    used = hostcuda.counter("used_bytes")
    place = memory(1000)
    assert hostcuda.counter("used_bytes") == used + 1024  # in units of 512 bytes
    do("cudaFree", place)
    assert hostcuda.counter("used_bytes") == used
    assert hostcuda.counter("peak_bytes") >= used + 1024


def test_a_graph_over_a_freed_buffer() -> None:
    """PLANTED: the buffer is freed between capture and launch. The error is sticky, and the work is named."""
    ended = start("""
        one, place, other = stream(), memory(), memory()
        graph = captured(one, lambda: copy(other, place, one, 16))
        print(launch(graph, one))
        do("cudaFree", place)
        launch(graph, one)
        print(answer("cudaStreamSynchronize", one))
        print(answer("cudaGetLastError"), malloc(), fill(other, 1, one), begin(one), answer("cudaDeviceSynchronize"))
        print(hostcuda.counter("wild"))
        hostcuda.clear_sticky()
        print(malloc())
    """)
    assert ended.returncode == 0, ended.stderr
    sticky = "IllegalAddress"
    assert ended.stdout.splitlines() == ["Success", sticky, " ".join([sticky] * 5), "1", "Success"]
    assert "cudaMemcpy (source) touches 16 bytes" in ended.stderr
    assert "is not allocated" in ended.stderr


def test_beyond_the_end_of_a_buffer() -> None:
    """PLANTED: one byte too many."""
    ended = start("""
        one, place = stream(), memory(512)
        print(fill(place, 1, one, 512))
        fill(place, 1, one, 513)
        print(answer("cudaStreamSynchronize", one))
    """)
    assert ended.stdout.splitlines() == ["Success", "IllegalAddress"]
    assert "exceeds its allocation" in ended.stderr


def test_the_host_cannot_read_freed_memory_either() -> None:
    ended = start("""
        place = memory()
        print(byte(place), flush=True)
        do("cudaFree", place)
        byte(place)
    """)
    assert ended.stdout == "0\n"
    assert ended.returncode < 0  # a segmentation fault: nothing is mapped there


def test_poison() -> None:
    """HOSTCUDA_POISON=1. PLANTED: memory is read before anybody has written it."""
    script = """
        import struct
        place = memory(8)
        print(struct.unpack("<f", ctypes.string_at(place, 4))[0], struct.unpack("<d", ctypes.string_at(place, 8))[0])
    """
    assert run(script, HOSTCUDA_POISON="1") == ["nan nan"]
    assert run(script) == ["0.0 0.0"]


def test_out_of_memory() -> None:
    script = """
        places = [memory(30 << 20) for _ in range(3)]
        print(free_memory() >> 20)
        too_much = ctypes.c_void_p()
        print(answer("cudaMalloc", ctypes.byref(too_much), ctypes.c_size_t(30 << 20)), too_much.value)
        print(malloc())  # no error that stays
        do("cudaFree", places.pop())
        places.append(memory(30 << 20))
        print(hostcuda.counter("peak_bytes") >> 20)
    """
    assert run(script, HOSTCUDA_MEMORY="100M") == ["10", "MemoryAllocation None", "Success", "90"]
