"""Step 1: tensors. Memory, copies, views, operators and random numbers work on the device."""

from __future__ import annotations

import pytest
import torch

from ..torch_private.functions import use_counter
from .contract import Device, Suite


class Tensors(Suite):
    """The basics that every program on the device needs."""

    def test_the_device_is_known(self, device: Device) -> None:
        assert device.module.is_available() and device.module.device_count() >= 1
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None and accelerator.type == device.type
        assert torch.empty(2, device=device.type).device == device.first

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16])
    def test_copies_there_and_back(self, device: Device, dtype: torch.dtype) -> None:
        x = (torch.randn(4, 6) * 3).to(dtype)
        for source in (x, x.t(), x[1:, ::2], x[2:3].expand(4, 6)):
            assert torch.equal(source.to(device.first).cpu(), source)
        target = torch.zeros(4, 6, dtype=dtype, device=device.first)
        target[1:, ::2].copy_(x[1:, ::2])
        assert torch.equal(target.cpu()[1:, ::2], x[1:, ::2]) and not target.cpu()[0].any()
        other = torch.zeros(4, 6, dtype=dtype, device=device.first)
        other[2:].copy_(target[:2])  # on the device, from one offset to another
        assert torch.equal(other.cpu()[2:], target.cpu()[:2])

    def test_dtype_and_layout_change_on_the_way(self, device: Device) -> None:
        x = torch.randn(3, 4)
        assert torch.equal(x.to(device.first, torch.float64).cpu(), x.double())
        assert torch.equal(torch.empty(3, 4).copy_(x.t().contiguous().to(device.first).t()), x)

    def test_pinned_memory(self, device: Device) -> None:
        x = torch.randn(64).pin_memory()
        assert x.is_pinned() and not torch.randn(64).is_pinned()
        y = x.to(device.first, non_blocking=True)
        back = torch.empty(64).pin_memory()
        back.copy_(y, non_blocking=True)
        torch.accelerator.synchronize()
        assert torch.equal(back, x)

    def test_views_share_memory(self, device: Device) -> None:
        x = torch.zeros(4, 4, device=device.first)
        x.view(16)[5:7] = 1
        x.t()[3].add_(2)
        x[2:].as_strided((2,), (1,), 0).mul_(10)  # offsets of as_strided count from the storage's start
        expected = torch.zeros(4, 4)
        expected.view(16)[5:7] = 1
        expected.t()[3].add_(2)
        expected[2:].as_strided((2,), (1,), 0).mul_(10)
        assert torch.equal(x.cpu(), expected)
        assert x.t().untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

    def test_operators(self, device: Device) -> None:
        a, b = torch.randn(5, 5), torch.randn(5, 5)
        index = torch.tensor([4, 0, 2])
        for f in (
            lambda a, b, index: (a @ b).relu() + a.softmax(-1),
            lambda a, b, index: torch.where(a > 0, a, b).sum(0, keepdim=True),
            lambda a, b, index: torch.cat([a[index], b]).topk(2),
            lambda a, b, index: torch.nn.functional.embedding(index, a),
            lambda a, b, index: torch.nn.functional.layer_norm(a, (5,)),
            lambda a, b, index: a.clone().index_put_((index,), b[:3], accumulate=True),
            lambda a, b, index: torch.addmm(a[0], a, b, out=torch.empty_like(a)),
            lambda a, b, index: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], a[None]),
            lambda a, b, index: torch.nn.functional.conv2d(a[None, None], b[:3, :3][None, None]),
            lambda a, b, index: torch.linalg.vector_norm(a),
        ):
            device.assert_close(f(*(t.to(device.first) for t in (a, b, index))), f(a, b, index))

    def test_gradients(self, device: Device) -> None:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(12, 4)
        )
        x = torch.randn(2, 2, 4, 4)
        gradients = []
        for where in (torch.device("cpu"), device.first):
            model.to(where).zero_grad()
            model(x.to(where)).square().mean().backward()
            # Cloned: Module.to moves the gradients of parameters that stay the same objects.
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        device.assert_close(gradients[1], gradients[0])

    def test_numbers_can_be_read(self, device: Device) -> None:
        x = torch.tensor([3.0, 4.0], device=device.first)
        assert x[1].item() == 4.0 and x.tolist() == [3.0, 4.0] and bool((x > 0).all())
        assert torch.nonzero(x > 3).cpu().tolist() == [[1]]
        assert "3." in repr(x) and device.type in repr(x)

    def test_memory_is_given_back(self, device: Device) -> None:
        before = torch.accelerator.memory_allocated(0)
        x = torch.empty(1 << 20, dtype=torch.uint8, device=device.first)
        assert torch.accelerator.memory_allocated(0) >= before + (1 << 20)
        del x
        assert torch.accelerator.memory_allocated(0) == before

    def test_storage_use_count(self, device: Device) -> None:
        """The use count tells fxwrap whether an output is live."""
        x = torch.empty(8, device=device.first)
        counts = use_counter([x.untyped_storage()])
        (before,) = counts()
        view = x[2:]
        assert counts() == [before + 1]
        del view
        assert counts() == [before]

    def test_random_numbers_follow_the_seed(self, device: Device) -> None:
        def draw() -> list[torch.Tensor]:
            return [
                torch.rand(8, device=device.first).cpu(),
                torch.randn(8, device=device.first).cpu(),
                torch.randint(1000, (8,), device=device.first).cpu(),
                torch.nn.functional.dropout(torch.ones(64, device=device.first), 0.5).cpu(),
            ]

        torch.manual_seed(7)
        first, second = draw(), draw()
        torch.manual_seed(7)
        again = draw()
        assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, second))
        state = device.module.get_rng_state(0)
        third = draw()
        device.module.set_rng_state(state, 0)
        assert all(map(torch.equal, third, draw()))

    def test_a_generator_of_ones_own(self, device: Device) -> None:
        generator = torch.Generator(device=device.first).manual_seed(5)
        first = torch.rand(8, device=device.first, generator=generator).cpu()
        assert torch.equal(first, torch.rand(8, device=device.first, generator=generator.manual_seed(5)).cpu())


SUITE = Tensors
