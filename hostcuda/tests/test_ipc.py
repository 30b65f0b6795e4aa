"""Memory that processes share: the same bytes, at addresses of their own."""

from __future__ import annotations

import ctypes
from pathlib import Path

from cuda import answer, byte, do, fill, memory, stream
from scripts import run, run_file, start

import hostcuda


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)  # c_char would end at the first zero


OPENED = """
    class Handle(ctypes.Structure):
        _fields_ = (("reserved", ctypes.c_ubyte * 64),)
    handle, place = Handle.from_buffer_copy(bytes.fromhex("{handle}")), ctypes.c_void_p()
    open_memory = hostcuda.runtime().cudaIpcOpenMemHandle
    open_memory.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    print(open_memory(ctypes.byref(place), handle, 1))
"""


def handle_of(place: ctypes.c_void_p) -> str:
    handle = Handle()
    do("cudaIpcGetMemHandle", ctypes.byref(handle), place)
    return bytes(handle).hex()


def test_another_process_reads_and_writes() -> None:
    one, place = stream(), memory()
    fill(place, 5, one)
    do("cudaStreamSynchronize", one)
    script = (
        OPENED
        + """
    one = stream()
    print(byte(place), fill(place, 6, one), byte(place, one))
    do("cudaIpcCloseMemHandle", place)
    """
    )
    assert run(script.format(handle=handle_of(place))) == ["0", "5 Success 6"]
    assert byte(place) == 6


def test_after_it_was_closed() -> None:
    """PLANTED: work on memory of another process, which this one has closed."""
    place = memory()
    script = (
        OPENED
        + """
    one = stream()
    do("cudaIpcCloseMemHandle", place)
    print(fill(place, 6, one))
    print(answer("cudaIpcCloseMemHandle", place))
    """
    )
    ended = start(script.format(handle=handle_of(place)))
    assert ended.stdout.splitlines()[1] == "IllegalAddress"
    assert byte(place) == 0


def test_what_is_no_allocation_has_no_handle() -> None:
    place = memory()
    do("cudaFree", place)
    assert answer("cudaIpcGetMemHandle", ctypes.byref(Handle()), place) == "InvalidValue"
    assert hostcuda.counter("active_captures") == 0


def test_torchs_tensors_between_processes(tmp_path: Path) -> None:
    file = tmp_path / "share.py"
    file.write_text(
        "import torch\n"
        "import torch.multiprocessing as mp\n"
        "def work(tensor, answers):\n"
        "    tensor.mul_(2)\n"
        "    torch.cuda.synchronize()\n"
        "    answers.put(tensor.sum().item())\n"
        "if __name__ == '__main__':\n"
        "    context = mp.get_context('spawn')\n"
        "    tensor, answers = torch.ones(1000, device='cuda'), context.SimpleQueue()\n"
        "    child = context.Process(target=work, args=(tensor, answers))\n"
        "    child.start()\n"
        "    print(answers.get())\n"
        "    child.join()\n"
        "    print(tensor.sum().item(), child.exitcode)\n"
    )
    assert run_file(file) == ["2000.0", "2000.0 0"]
