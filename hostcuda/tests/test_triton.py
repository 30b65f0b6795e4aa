"""Triton's kernels: compiled and launched by Triton, computed by its interpreter, arguments unpacked as packed."""

from __future__ import annotations

import pytest
import torch
from graphs import capture
from scripts import run

import hostcuda

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

BLOCK = 64


@triton.jit
def scaled(result, source, factor, shift, count, optional, block: tl.constexpr, square: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(source + at, mask=at < count, other=0.0)
    if square:
        value = value * value
    value = value * factor + shift
    if optional is not None:
        value += tl.load(optional + at, mask=at < count, other=0.0)
    tl.store(result + at, value, mask=at < count)


@triton.jit
def sums(result, source, columns: tl.constexpr):
    row = tl.program_id(0)
    tl.store(result + row, tl.sum(tl.load(source + row * columns + tl.arange(0, columns)), 0))


def launch(result: torch.Tensor, source: torch.Tensor, factor: float, shift: int, **more: object) -> None:
    arguments = {"optional": None, "square": False, **more}
    grid = (triton.cdiv(source.numel(), BLOCK),)
    scaled[grid](result, source, factor, shift, source.numel(), block=BLOCK, **arguments)


@pytest.mark.parametrize(
    "case",
    [
        {"factor": 2.5, "shift": 3},
        {"factor": 1.0, "shift": 1},  # 1 is made a constant, and is no parameter of the cubin
        {"factor": -0.5, "shift": 1 << 40},  # a 64-bit integer
        {"factor": 2.0, "shift": -7, "square": True, "optional": True},
    ],
)
def test_arguments(case: dict[str, object]) -> None:
    source, result = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    extra = torch.randn(1000, device="cuda") if case.get("optional") else None
    launches = hostcuda.counter("triton_launches")
    launch(result, source, **{**case, "optional": extra})  # type: ignore[arg-type]
    assert hostcuda.counter("triton_launches") == launches + 1
    expected = (source**2 if case.get("square") else source) * case["factor"] + case["shift"]
    torch.testing.assert_close(result, expected if extra is None else expected + extra)
    assert not any("scaled" in name for name in hostcuda.skipped())


def test_tensors_that_are_not_aligned_and_other_types() -> None:
    source = torch.randn(1001, device="cuda", dtype=torch.float64)[1:]
    result = torch.zeros(1000, device="cuda", dtype=torch.float64)
    launch(result, source, 2.0, 0)
    torch.testing.assert_close(result, source * 2)


def test_a_reduction() -> None:
    source, result = torch.randn(8, 128, device="cuda"), torch.zeros(8, device="cuda")
    sums[(8,)](result, source, columns=128)
    torch.testing.assert_close(result, source.sum(1))


def test_a_graph_keeps_the_arguments_of_the_capture() -> None:
    """Numbers and addresses are those of the capture; what lies at the addresses is that of the replay."""
    source, result = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    launch(result, source, 1.5, 0)  # compiled outside of the capture
    result.zero_()
    factor = 3.5
    graph = capture(lambda: launch(result, source, factor, 0))
    factor = 100.0
    assert result.sum().item() == 0
    source.mul_(2)
    graph.replay()
    assert result[0].item() == 7


def test_a_kernel_that_is_first_loaded_in_a_capture_is_refused() -> None:
    """PLANTED: cuModuleLoadData in a global capture (CUDA Runtime API: it is unsafe, as cudaMalloc is)."""
    source, result = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    with pytest.raises(RuntimeError, match=r"capturing|previous error"):
        capture(lambda: launch(result, source.double(), 1.5, 0, optional=result, square=True))


def test_a_freed_argument() -> None:
    """PLANTED: a graph launches a kernel over memory that is gone; it is named."""
    script = f"""
        import importlib.util, torch
        from graphs import replay_error
        spec = importlib.util.spec_from_file_location("kernels", {__file__!r})
        kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        source, result = torch.ones(32 << 20, device="cuda"), torch.zeros(1000, device="cuda")
        def launch():
            kernels.scaled[(1,)](result, source, 1.5, 0, 10, None, block=64, square=False)
        launch()
        graph = kernels.capture(launch)
        graph.replay()
        print(result[0].item())
        del source
        torch.cuda.empty_cache()
        print(replay_error(graph))
    """
    assert run(script) == ["1.5", "CUDA error: an illegal memory access was encountered"]


def test_several_reductions_in_one_kernel() -> None:
    """Its programs are those of a kernel with few rows after those of one with more."""

    def reduce(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x.relu().sum(1), x.relu().mean(), x.std(1)

    compiled = torch.compile(reduce, options={"combo_kernels": True})
    for _ in range(2):
        x = torch.randn(4, 1 << 12).cuda()
        torch.testing.assert_close(compiled(x), reduce(x))
