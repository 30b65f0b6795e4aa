"""What the environment makes the device tell, and what it leaves out; README.md has the list."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import LATER_RULES
from scripts import run, start

WORK = """
    import torch
    values, matrix = torch.ones(1000, device="cuda"), torch.ones(4, 4, device="cuda")
    before = torch.cuda.memory_allocated()
    made, graph = [], torch.cuda.CUDAGraph()
    torch.mm(matrix, matrix)
    with torch.cuda.graph(graph):
        made.append(values + 1)
    graph.replay()
    print(made[0].tolist()[0], torch.mm(matrix, matrix).tolist()[0][0], torch.cuda.memory_allocated() > before)
    print(hostcuda.counter("graph_launches"), hostcuda.counter("nodes_captured"), hostcuda.counter("nodes_run"))
"""


def test_nothing_is_computed() -> None:
    """HOSTCUDA_COMPUTE=0: allocations, workspaces, launches and captures are real, numbers are not."""
    computed, nothing = run(WORK), run(WORK, HOSTCUDA_COMPUTE="0")
    assert computed == ["2.0 4.0 True", "1 1 1"]
    assert nothing == ["0.0 0.0 True", "1 1 1"]


@pytest.mark.parametrize("setting", ["HOSTCUDA_COMPUTE", "HOSTCUDA_OPERATORS"])
def test_what_was_compiled_without_numbers_is_found_by_nobody_else(setting: str, tmp_path: Path) -> None:
    """Inductor computes constants on the device, and its cache has kernels with what came out."""
    script = """
        import torch
        blend = torch.compile(lambda x, y: torch._foreach_lerp([x], [y], 0.25))
        print(blend(torch.ones(4, device="cuda"), torch.full((4,), 5.0, device="cuda"))[0].tolist()[0])
    """
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run(script, **cache, **{setting: "0"})
    assert run(script, **cache) == ["2.0"]


def test_torchs_own_kernels_are_launched_and_counted() -> None:
    """HOSTCUDA_OPERATORS=0: host time. What was not computed is listed."""
    lines = run(
        """
        import torch
        values = torch.ones(1000, device="cuda")
        result = values + 1
        print(result.tolist()[0], hostcuda.counter("host_ops"), hostcuda.counter("kernels_skipped") >= 2)
        print(any("elementwise" in name for name in hostcuda.skipped()))
        """,
        HOSTCUDA_OPERATORS="0",
    )
    assert lines == ["0.0 0 True", "True"]


def test_products_are_there_without_a_library() -> None:
    """HOSTCUDA_OPERATORS=0: products are issued, and are nodes of graphs, though there is no cuBLAS."""
    lines = run(
        """
        import torch
        matrix, row = torch.ones(4, 4, device="cuda"), torch.ones(4, device="cuda")
        torch.nn.functional.linear(matrix, matrix, row)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            matrix @ matrix, torch.addmm(row, matrix, matrix)
        print(hostcuda.counter("nodes_captured"), torch.mm(matrix, matrix).shape)
        """,
        HOSTCUDA_OPERATORS="0",
    )
    assert lines == ["2 torch.Size([4, 4])"]


def test_functions_that_are_not_there_are_listed() -> None:
    """What torch looks up when it starts, and what nobody has ever heard of."""
    script = """
        import ctypes, torch
        torch.ones(1, device="cuda")
        before = hostcuda.missing()
        print(any(name.startswith("cuMulticast") for name in before), "cudaMalloc" in before, "cuMemMap" in before)
        found, what = ctypes.c_void_p(), ctypes.c_int()
        for _ in range(2):
            hostcuda.runtime().cudaGetDriverEntryPointByVersion(
                b"cuIsNotThere", ctypes.byref(found), 13000, ctypes.c_ulonglong(0), ctypes.byref(what)
            )
        print(found.value, what.value, hostcuda.missing()["cuIsNotThere"], "cuIsNotThere" in before)
    """
    ended = start(script)
    multicast = str(LATER_RULES)  # 2.11 does not ask for it
    assert ended.stdout.splitlines() == [f"{multicast} False False", "None 1 2 False"], ended.stderr
    assert ended.stderr.splitlines() == ["hostcuda: cuIsNotThere is asked for, and this device does not have it"]


def test_report_and_trace() -> None:
    ended = start(
        """
        one, place = stream(), memory()
        begin(one)
        fill(place, 1, one)
        malloc()
        end(one)
        """,
        HOSTCUDA_REPORT="1",
        HOSTCUDA_TRACE="1",
    )
    assert ended.returncode == 0
    assert "hostcuda: captures_failed 1" in ended.stderr
    assert "refused, 1 times: cudaMalloc -> cudaErrorStreamCaptureUnsupported" in ended.stderr
    assert "invalidated by cudaMalloc" in ended.stderr
    assert run("memory()") == []  # and says nothing unless it is asked
    assert start("memory()").stderr == ""
