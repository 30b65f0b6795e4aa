"""Step 4: compilation. ``torch.compile(backend="fxwrap")`` gives the right results on the device, captured or not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ..backend import fxwrap
from ..codegen.devices.for_testing import fake_tensors
from .contract import Device, Suite


class CompileCounter:
    """fxwrap's backend with a count of its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.count += 1
        return fxwrap(gm, example_inputs)


class CompiledFunctions(Suite):
    """The behaviour that PyTorch requires of every out-of-tree device under ``torch.compile``."""

    def test_compiles_and_runs(self, registered: Device) -> None:
        f = torch.compile(lambda x, y: (x @ y).relu() + x.sum(-1, keepdim=True), backend="fxwrap")
        for _ in range(3):
            x, y = torch.randn(8, 8), torch.randn(8, 8)
            result = f(x.to(registered.first), y.to(registered.first))
            assert result.device == registered.first
            registered.assert_close(result, (x @ y).relu() + x.sum(-1, keepdim=True))

    def test_fake_tensors_carry_the_device(self, registered: Device) -> None:
        seen: list[Any] = []

        def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
            seen.extend(n.meta["example_value"].device for n in gm.graph.nodes if "example_value" in n.meta)
            return gm

        torch.compile(lambda x: (x + 1).sin(), backend=backend)(torch.randn(4, device=registered.first))
        assert seen and set(seen) == {registered.first}
        with fake_tensors():
            fake = torch.empty(4, device=registered.first)
            assert (fake * 2).device == registered.first and fake.cpu().device.type == "cpu"

    def test_no_recompilation_for_the_same_shape_and_one_for_another(self, registered: Device) -> None:
        counter = CompileCounter()
        f = torch.compile(lambda x: (x * 2).sum(), backend=counter, dynamic=False)
        for size, compiled in ((4, 1), (4, 1), (6, 2), (4, 2), (6, 2)):
            x = torch.randn(size)
            registered.assert_close(f(x.to(registered.first)), (x * 2).sum())
            assert counter.count == compiled

    def test_recompiles_for_another_device(self, registered: Device) -> None:
        counter = CompileCounter()
        f = torch.compile(lambda x: x.sin(), backend=counter)
        x = torch.randn(4)
        registered.assert_close(f(x.to(registered.first)), x.sin())
        assert torch.allclose(f(x), x.sin())
        assert counter.count == 2

    def test_gradients(self, registered: Device) -> None:
        f = torch.compile(lambda x, w: (x @ w).sigmoid().sum(), backend="fxwrap")
        for _ in range(4):
            x, w = torch.randn(4, 8), torch.randn(8, 8)
            gradients = []
            for function, where in ((lambda x, w: (x @ w).sigmoid().sum(), "cpu"), (f, registered.first)):
                leaves = [t.detach().to(where).requires_grad_() for t in (x, w)]
                function(*leaves).backward()
                gradients.append([leaf.grad for leaf in leaves])
            registered.assert_close(gradients[1], gradients[0])

    def test_modules_with_parameters(self, registered: Device) -> None:
        twin = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        model = copy.deepcopy(twin).to(registered.first)
        f = torch.compile(model, backend="fxwrap")
        for _ in range(4):
            x = torch.randn(8, 8)
            registered.assert_close(f(x.to(registered.first)), twin(x))
        registered.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))

    @pytest.mark.parametrize("dynamic", [True, None])
    def test_dynamic_shapes(self, registered: Device, dynamic: bool | None) -> None:
        f = torch.compile(lambda x: (x @ x.t()).softmax(-1), backend="fxwrap", dynamic=dynamic)
        for _ in range(3):
            for size in (3, 5, 8, 13):
                x = torch.randn(size, 4)
                registered.assert_close(f(x.to(registered.first)), (x @ x.t()).softmax(-1))

    def test_graph_breaks_at_transfers(self, registered: Device) -> None:
        @torch.compiler.disable
        def on_the_host(y: torch.Tensor) -> torch.Tensor:
            return y * 2

        def function(x: torch.Tensor) -> torch.Tensor:
            return on_the_host(x.sin().cpu()).to(registered.first).cos()

        f = torch.compile(function, backend="fxwrap")
        for _ in range(4):
            x = torch.randn(8)
            result = f(x.to(registered.first))
            assert result.device == registered.first
            registered.assert_close(result, (x.sin() * 2).cos())

    def test_transfers_inside_a_graph(self, registered: Device) -> None:
        f = torch.compile(lambda x: (x.sin().cpu() * 2).to(registered.first).cos(), backend="fxwrap", fullgraph=True)
        for _ in range(4):
            x = torch.randn(8)
            registered.assert_close(f(x.to(registered.first)), (x.sin() * 2).cos())

    def test_autocast(self, registered: Device) -> None:
        w = torch.randn(8, 8)

        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, w).relu()

        f = torch.compile(function, backend="fxwrap")
        for _ in range(3):
            x = torch.randn(4, 8)
            with torch.autocast(registered.type, dtype=torch.bfloat16):
                result = f(x.to(registered.first), w.to(registered.first))
            assert result.dtype is torch.bfloat16
            torch.testing.assert_close(result.float().cpu(), function(x, w), rtol=0.05, atol=0.05)
        # Without autocast the same code is compiled again.
        assert f(x.to(registered.first), w.to(registered.first)).dtype is torch.float32

    def test_default_device(self, registered: Device) -> None:
        f = torch.compile(lambda x: x + torch.ones(4), backend="fxwrap")
        with torch.device(registered.first):
            result = f(torch.zeros(4))
        assert result.device == registered.first and result.cpu().tolist() == [1.0] * 4

    def test_random_numbers_follow_the_seed(self, registered: Device) -> None:
        f = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x), backend="fxwrap")
        x = torch.ones(64, device=registered.first)
        f(x)
        drawn = []
        for _ in range(2):
            torch.manual_seed(3)
            drawn.append([f(x).cpu() for _ in range(3)])
        assert all(map(torch.equal, *drawn))
        assert not torch.equal(drawn[0][0], drawn[0][1])


SUITE = CompiledFunctions
