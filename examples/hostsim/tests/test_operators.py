import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, capture, name, on_device
from torch.utils import _pytree as pytree

# Each gets a tensor of shape (4, 8) and makes everything else on its device. They run eagerly and from a graph.
DEFERRABLE = {
    "add": lambda x: x + 1,
    "number": lambda x: x.sum() * 2.5,
    "half": lambda x: x.half() * 2.5,
    "integer division": lambda x: x.long() // 2,
    "view": lambda x: x.view(2, 16)[:, 3:].t() + 1,
    "unfold": lambda x: x.unfold(1, 2, 2) * 2,
    "split": lambda x: torch.split(x, 3, 1)[1] + 1,
    "cat": lambda x: torch.cat([x, x[1:]], 0),
    "stack": lambda x: torch.stack([x, x]),
    "mm": lambda x: x @ x.t(),
    "addmm": lambda x: F.linear(x, x, x[:, 0]),
    "bmm": lambda x: torch.bmm(x.view(2, 2, 8), x.view(2, 8, 2)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "group norm": lambda x: F.group_norm(x.view(1, 4, 8), 2),
    "batch norm": lambda x: F.batch_norm(x, x.new_zeros(8), x.new_ones(8), training=True),
    "batch norm in evaluation": lambda x: F.batch_norm(x, x.new_zeros(8), x.new_ones(8), training=False),
    "convolution": lambda x: F.conv2d(x.view(1, 1, 4, 8), x.new_ones(2, 1, 3, 3), padding=1),
    "transposed convolution": lambda x: F.conv_transpose1d(x.view(1, 4, 8), x.new_ones(4, 2, 3)),
    "max pool": lambda x: F.max_pool2d(x.view(1, 1, 4, 8), 2, return_indices=True),
    "interpolate": lambda x: F.interpolate(x.view(1, 1, 4, 8), scale_factor=2.0, mode="bilinear"),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 8)] * 3, is_causal=True),
    "embedding": lambda x: F.embedding(torch.arange(1, 3, device=x.device), x),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(4, device=x.device)),
    "mse": lambda x: F.mse_loss(x, x * 2),
    "topk": lambda x: torch.topk(x, 3, 1),
    "sort": lambda x: torch.sort(x, 1, descending=True),
    "cumsum": lambda x: x.cumsum(1),
    "variance": lambda x: torch.var_mean(x, 1),
    "argmax": lambda x: x.argmax(1),
    "index": lambda x: x[torch.arange(0, 4, 2, device=x.device)],
    "index put": lambda x: x.clone().index_put_((torch.arange(2, device=x.device),), x[0], accumulate=True),
    "set item": lambda x: set_item(x.clone()),
    "scatter": lambda x: x.scatter_add(1, torch.zeros(4, 8, dtype=torch.long, device=x.device), x),
    "gather": lambda x: x.gather(1, torch.zeros(4, 1, dtype=torch.long, device=x.device)),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked fill": lambda x: x.masked_fill(x > 0, 2.0),
    "arange": lambda x: torch.arange(5, device=x.device) + torch.linspace(0, 1, 5, device=x.device),
    "tril": lambda x: (x.tril(), torch.tril_indices(3, 3, device=x.device)),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x).conj() * 2),
    "fourier": lambda x: torch.fft.rfft(x).abs(),
    "out": lambda x: torch.add(x, x, out=x.new_empty(0)),
    "out with strides": lambda x: torch.mm(x, x.t(), out=x.new_empty(4, 8)[:, ::2]),
    "foreach add": lambda x: torch._foreach_add([x, x[0]], 1.0),
    "foreach copy": lambda x: torch._foreach_copy_([x.new_zeros(4, 8), x.new_zeros(8)], [x, x[1]]),
    "foreach copy, with conversion": lambda x: torch._foreach_copy_([x.new_zeros(8, 4).t(), x.double()], [x, x + 1]),
    "in place": lambda x: x.clone().add_(1).mul_(x).relu_(),
    "resize": lambda x: x.clone().resize_(2, 2),
    "zero, fill": lambda x: (x.clone().zero_(), x.clone().fill_(3), torch.full((2,), 3, device=x.device)),
}

# Their results depend on values, or they have no kernel that tells the shape: they wait for the device.
WAITING = {
    "nonzero": lambda x: torch.nonzero(x > 0),
    "nonzero into out": lambda x: torch.nonzero(x > 0, out=x.new_empty(0, dtype=torch.long)),
    "masked select": lambda x: x[x > 0],
    "unique": lambda x: torch.unique((x * 2).round()),
    "bincount": lambda x: torch.bincount(x.abs().long().flatten()),
    "item": lambda x: x.sum().item(),
    "equal": lambda x: torch.equal(x, x.clone()),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "embedding bag": lambda x: F.embedding_bag(
        *[torch.arange(3, device=x.device), x], torch.arange(2, device=x.device)
    ),
}


def set_item(x):
    x[0, 2:5] = 3.0
    x[1:2] = x[3]
    return x


def assert_all_equal(actual, expected):
    pairs = list(zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True))
    assert pairs
    for a, e in pairs:
        if isinstance(e, torch.Tensor):
            assert a.device.type == name() and a.dtype == e.dtype
            assert_equal(a, e, rtol=1e-5, atol=1e-6)
        else:
            assert a == pytest.approx(e)


@pytest.mark.parametrize("operator", [*DEFERRABLE, *WAITING])
def test_an_operator_gives_what_the_cpu_gives(mode, operator):
    function = (DEFERRABLE | WAITING)[operator]
    x = torch.randn(4, 8)
    assert_all_equal(function(x.to(name())), function(x))


@pytest.mark.parametrize("operator", DEFERRABLE)
def test_an_operator_can_be_captured(mode, operator):
    function, x, other = DEFERRABLE[operator], torch.randn(4, 8), torch.randn(4, 8)
    source = x.to(name())
    graph, result = capture(lambda: function(source))
    for refill in (other, x):
        source.copy_(refill)
        graph.replay()
        assert_all_equal(result, function(refill))


@pytest.mark.parametrize("operator", DEFERRABLE)
def test_deferred_work_waits_for_nothing(asynchronous, operator):
    source = on_device(4, 8)
    DEFERRABLE[operator](source)
    stream = asynchronous.current_stream()
    stream.synchronize()
    asynchronous.delay(stream, 0.1)
    DEFERRABLE[operator](source)
    assert not stream.query()


@pytest.mark.parametrize("operator", WAITING)
def test_an_operator_that_waits_cannot_be_captured_and_is_named(device, operator):
    source = on_device(4, 8)
    with pytest.raises(RuntimeError, match=r"'aten::\w+(\.\w+)?'.*while a graph is captured"):
        capture(lambda: WAITING[operator](source))
    assert_all_equal(WAITING[operator](source), WAITING[operator](source.cpu()))


def test_an_error_of_an_operator_is_its_own(mode, device):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        on_device(2, 3) @ on_device(2, 3)
    assert_equal(on_device(2) * 0, torch.zeros(2))


def test_cpu_operands(device):
    x = on_device(4)
    assert_equal(x + torch.tensor(1.0), x.cpu() + 1)
    assert_equal(x[torch.tensor([1, 2])], x.cpu()[1:3])
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4)


def test_numbers_are_taken_when_the_operator_is_called(mode, device):
    number, x = torch.tensor(1.0), on_device(4)
    device.delay(device.current_stream(), 0.05)
    result = x + number
    number.fill_(100)
    assert_equal(result, x.cpu() + 1)


def test_an_operator_of_ones_own_with_a_cpu_kernel_and_a_fake_one(mode, device):
    @torch.library.custom_op("hosttest::double", mutates_args=(), device_types="cpu")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x):
        return torch.empty_like(x)

    source = on_device(4)
    assert_equal(double(source), source.cpu() * 2)
    graph, result = capture(lambda: double(source))
    graph.replay()
    assert_equal(result, source.cpu() * 2)


def test_tensors_are_set_copied_and_saved(device, tmp_path):
    x = on_device(4, 8)
    other = torch.empty(0, device=name()).set_(x)
    assert other.is_set_to(x) and not other.is_set_to(x.clone())
    other.set_(x.untyped_storage(), 8, (8,), (1,))
    assert_equal(other, x[1])
    assert other.set_().numel() == 0
    assert_equal(copy.deepcopy(x), x)
    torch.save(x, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")
    assert loaded.device == x.device
    assert_equal(loaded, x)
    assert repr(x).count("\n") > 3 and str(x.device) in repr(x)


def test_mixed_precision(mode, device):
    x = on_device(4, 8)
    linear, convolution = torch.nn.Linear(8, 2).to(name()), torch.nn.Conv1d(4, 2, 3).to(name())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(name(), dtype=dtype):
            assert torch.is_autocast_enabled(name())
            assert (x @ x.t()).dtype == linear(x).dtype == convolution(x.view(1, 4, 8)).dtype == dtype
            assert F.softmax(linear(x), -1).dtype == torch.float32
            assert torch.cat([x, linear(x).repeat(1, 4)]).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.float32
    with torch.autocast(name(), dtype=torch.bfloat16):
        linear(x).sum().backward()
    assert linear.weight.grad.dtype == torch.float32
    reference = copy.deepcopy(linear).cpu()
    with torch.autocast(name(), dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(linear(x), reference(x.cpu()))
