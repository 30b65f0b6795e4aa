"""Triton kernels: what Inductor emits for the device, launched on its streams, captured by its graphs and replayed.

They run in Triton's interpreter, on the device's memory, behind the interfaces of a vendor's own Triton backend.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from conftest import UNSUPPORTED
from helpers import assert_equal, capture, name, on_device, zeros

if UNSUPPORTED:
    pytest.skip(UNSUPPORTED, allow_module_level=True)
pytest.importorskip("fxwrap", reason="needs fxwrap, which compiles for the device")
pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("numpy", reason="needs NumPy, with which Triton interprets")

import triton
import triton.language as tl
from triton_interpreter import interpreted_triton

import fxwrap
from fxwrap.backend import fxwrap as backend
from fxwrap.graphs.compilation import Compilation
from fxwrap.host_graph.nodes import kernel_of


@pytest.fixture
def launches(device):
    """Triton kernels for the device, in the place of C++ ones; yields the launches that have run."""
    torch._dynamo.reset()
    with (
        interpreted_triton(name(), launch=device.launch, current_device=device.current_device) as launches,
        # The interpreter cannot be reached from the processes in which Inductor compiles side by side.
        fxwrap.register_device(name(), scheduling="triton", config={"compile_threads": 1}),
    ):
        # Torch keeps kernels by their source; those from before know other launches.
        torch._inductor.codecache.PyCodeCache.cache_clear()
        yield launches
        device.synchronize()
    torch._dynamo.reset()


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + tl.load(y_ptr + offsets, mask=mask), mask=mask)


def block(x, weight, bias):
    hidden = torch.softmax(F.linear(x, weight, bias), 1)
    return F.layer_norm(hidden * 2 + bias, (hidden.size(1),)).sum(0)


def users(x, weight, bias):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 16),)](x, weight, out, x.numel(), BLOCK=16, num_warps=8)
    return out * bias


@pytest.mark.parametrize("fn", [block, users])
def test_a_host_graph_is_captured_once_and_replayed(fn, mode, device, launches):
    compilation = Compilation()
    mine = torch.compile(
        fn, backend=functools.partial(backend, compilation=compilation), options={"capture": "always"}
    )
    theirs = torch.compile(fn, backend="inductor", options={"compile_threads": 1})
    device.reset_graph_counters()
    for _ in range(5):
        arguments = [on_device(7, 7), on_device(7, 7), on_device(7)]
        got, expected = mine(*arguments), theirs(*arguments)
        assert_equal(got, expected)
        torch.testing.assert_close(expected.cpu(), EXPECTED[fn](*(argument.cpu() for argument in arguments)))
        del got  # an output that is live at the next call would be copied from then on, by another recording
    (program,) = compilation.programs
    kernels = [kernel for node in program.plan.graph.graph.nodes if (kernel := kernel_of(node))]
    assert kernels and {kernel.language for kernel in kernels} == {"triton"}
    counters = program.counters
    assert (counters.eager, counters.recordings, counters.replays) == ({"warm-up": 1}, {"first": 1}, 3)
    # One more, if there was no arena yet, holds the pool.
    assert 1 <= device.graph_counters()["captures"] <= 2 and not compilation.fallbacks
    warps = {launch.options["num_warps"] for launch in launches if launch.kernel == "add_kernel"}
    assert warps == ({8} if fn is users else set())


EXPECTED = {block: block, users: lambda x, weight, bias: (x + weight) * bias}


def test_gradients(mode, device, launches):
    compilation = Compilation()
    mine = torch.compile(
        block, backend=functools.partial(backend, compilation=compilation), options={"capture": "always"}
    )
    for _ in range(5):
        arguments = [on_device(7, 7), on_device(7, 7), on_device(7)]
        on_cpu = [argument.cpu().requires_grad_() for argument in arguments]
        for argument in arguments:
            argument.requires_grad_()
        got, expected = mine(*arguments), block(*on_cpu)
        weights = torch.randn(7)
        got.backward(weights.to(name()))
        expected.backward(weights)
        for argument, other in zip(arguments, on_cpu, strict=True):
            torch.testing.assert_close(argument.grad.cpu(), other.grad)
        del got
    assert not compilation.fallbacks and [bool(program.counters.replays) for program in compilation.programs] == [
        True,
        True,
    ]


def test_a_captured_launch_runs_at_replay_with_the_inputs_of_that_time(mode, device, launches):
    compilation = Compilation()
    torch.compile(torch.sin, backend=functools.partial(backend, compilation=compilation))(on_device(5))
    (kernel,) = [kernel for node in compilation.programs[0].plan.graph.graph.nodes if (kernel := kernel_of(node))]
    source, result = on_device(5), zeros(5)
    device.synchronize()
    launches.clear()
    graph, _ = capture(lambda: kernel.call(source, result, 5))
    device.synchronize()
    assert not launches
    assert_equal(result, torch.zeros(5))
    for step in range(1, 3):
        refill = torch.randn(5)
        source.copy_(refill)
        graph.replay()
        torch.testing.assert_close(result.cpu(), refill.sin())
        assert [launch.kernel for launch in launches] == [kernel.name] * step


def test_a_kernel_that_is_launched_without_a_compiler_is_captured(mode, device, launches):
    x, y, out = on_device(40), on_device(40), zeros(40)
    kernel = triton.jit(add_kernel.fn)  # of its own, for it keeps what it was compiled to
    graph, _ = capture(lambda: kernel[(3,)](x, y, out, 40, BLOCK=16))
    assert not launches
    for _ in range(2):
        refill = torch.randn(40)
        x.copy_(refill)
        graph.replay()
        assert_equal(out, refill + y.cpu())
    assert [launch.grid for launch in launches] == [(3, 1, 1)] * 2


def test_dynamo_is_told_whether_kernels_are_tritons(device):
    for scheduling, kernels in (("triton", []), ("cpp", [fxwrap.cpp_kernels(device.launch)])):
        with fxwrap.register_device(name(), scheduling=scheduling, kernels=kernels):
            interface = torch._dynamo.device_interface.get_interface_for_device(name())
            assert interface.is_triton_capable() == (scheduling == "triton")
