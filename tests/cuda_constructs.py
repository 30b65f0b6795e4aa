"""What Inductor makes for CUDA and not for a CPU, or makes otherwise: one small program for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from cuda_lane import Case
from models import MODELS
from torch._inductor import config
from torch.nn.attention import flex_attention as flex
from triton.tools.tensor_descriptor import TensorDescriptor

HALF = torch.bfloat16
Make = Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


def on(function: Callable[..., Any], *sizes: Any, dtype: torch.dtype = torch.float32) -> Make:
    """Call ``function`` with random tensors of these sizes; what is no size is passed as it is."""

    def make() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        args = [torch.randn(size).to(dtype) if isinstance(size, tuple) else size for size in sizes]
        if torch.is_grad_enabled():
            args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return function, tuple(args), {}

    return make


def case(make: Make, *constructs: str, **settings: Any) -> Case:
    """Settings are fields of the case; the others are Inductor's, with ``__`` for a dot."""
    own = {name: settings.pop(name) for name in ("training", "dynamic", "around", "without") if name in settings}
    inductor = {name.replace("__", "."): value for name, value in settings.items()}
    return Case(make, constructs=frozenset(constructs), inductor=inductor, **own)


def dependent_launches() -> contextlib.AbstractContextManager[Any]:
    """The process asks for them; fxwrap compiles without."""
    return (
        config.patch({"triton.enable_pdl": True})
        if hasattr(config.triton, "enable_pdl")
        else contextlib.nullcontext()
    )


def layer_norms(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def normalised_batch() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A batch whose size may vary."""
    function, args, kwargs = on(layer_norms, (8192, 768), (768,), (768,), dtype=HALF)()
    torch._dynamo.mark_dynamic(args[0], 0)
    return function, args, kwargs


def linear_relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.relu(F.linear(x, w, b))


def several(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three kernels that have nothing to do with each other."""
    return x.sin(), y.sum(-1), torch.softmax(z, -1)


def foreach(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
    return torch._foreach_mul(torch._foreach_add([x, y, z], 1.0), 2.0)


def attention(score_mod: Any, block_mask: Any = None) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)


def _biased(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score + (query - key)


def _causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def causal_attention() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    mask = flex.create_block_mask(_causal, None, None, 256, 256, device="cpu")
    return on(attention(None, mask), *[(1, 2, 256, 64)] * 3, dtype=torch.bfloat16)()


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(32)
        self.second = torch.nn.Conv2d(32, 32, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.norm(self.first(x))))


def convolutions() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    model = Convolutions().to(memory_format=torch.channels_last)
    return model, (torch.randn(4, 16, 32, 32).to(memory_format=torch.channels_last),), {}


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = tl.load(x_ptr + offsets, mask=inside) + tl.load(y_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, total, mask=inside)


tuned_add = triton.autotune(
    configs=[triton.Config({"BLOCK": 128}, num_warps=4), triton.Config({"BLOCK": 1024}, num_warps=8)], key=["count"]
)(add_kernel)


@triton.jit
def scale_kernel(x_ptr, BLOCK: tl.constexpr, count, scale):  # type: ignore[no-untyped-def]
    """A constant amid the arguments, and a number that is no integer."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=inside) * scale, mask=inside)


@triton.jit
def double_kernel(source, target, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Takes descriptors, by which the hardware copies whole tiles."""
    row = tl.program_id(0) * ROWS
    target.store([row, 0], source.load([row, 0]) * 2)


def users_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    tuned_add[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out * 2


def users_scale(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    scale_kernel[(triton.cdiv(y.numel(), 256),)](y, 256, y.numel(), 2.5)
    return y.sum()


def users_descriptors(x: torch.Tensor) -> torch.Tensor:
    source = x + 1
    target = torch.empty_like(source)
    descriptors = [TensorDescriptor.from_tensor(tensor, [16, 64]) for tensor in (source, target)]
    double_kernel[(triton.cdiv(x.size(0), 16),)](*descriptors, ROWS=16)
    return target + 1


def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x[index] + 1


def asserted(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x > -100).all(), "too small")
    return x * 2


def scatter(x: torch.Tensor, index: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.index_put((index,), y, accumulate=True)


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(x @ w, 0.3).relu()


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 0, 9)


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))


def loop(x: torch.Tensor) -> torch.Tensor:
    count = torch.zeros((), dtype=torch.int64)
    return torch._higher_order_ops.while_loop(
        lambda count, x: count < 3, lambda count, x: (count + 1, torch.softmax(x, -1)), (count, x)
    )[1]


def matches(x: torch.Tensor) -> torch.Tensor:
    return (x.sin()[torch.nonzero(x > 0).squeeze(-1)] * 2).sum()


@contextlib.contextmanager
def sizes_from_data() -> Iterator[None]:
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(settings):
        yield


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (*torch.var_mean(x, -1), x.argmax(-1), x.sort(-1).values, x.cumsum(-1), x.logsumexp(-1))


def narrow(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).to(torch.float8_e4m3fn).to(torch.float32) + x.to(torch.float8_e5m2).to(torch.float32)


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return torch.softmax(x, -1)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A view that is not aligned goes to a kernel."""
    y = (x.sin().reshape(-1)[1:] @ torch.ones(x.numel() - 1)).reshape(1)
    return torch.cat([y, x.reshape(-1)[3:] * 2])


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], w)


def cross_entropy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ w, torch.arange(x.size(0)))


def embedding(w: torch.Tensor) -> torch.Tensor:
    return F.embedding(torch.arange(640).reshape(32, 20) % 100, w).sum(1)


def optimizer_step() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Adam's arithmetic on lists of tensors, which are written."""

    def step(
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        means: list[torch.Tensor],
        squares: list[torch.Tensor],
    ) -> None:
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_mul_(squares, 0.99)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.01)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, 1e-8)
        torch._foreach_addcdiv_(parameters, means, roots, -1e-3)

    def tensors() -> list[torch.Tensor]:
        return [torch.ones(64, 64), torch.ones(100), torch.ones(7, 9)]

    return step, (tensors(), tensors(), tensors(), tensors()), {}


def more_than_32_bits() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """More elements than an int32 counts; nobody touches the memory."""
    return (lambda x: x + 1), (torch.empty(2**31 + 64, dtype=torch.int8),), {}


softmax_of_sine = torch.compiler.nested_compile_region(lambda x: torch.softmax(x.sin(), -1))


def nested_regions(x: torch.Tensor) -> torch.Tensor:
    return softmax_of_sine(softmax_of_sine(x)) + 1


def grouped_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flex.flex_attention(q, k, v, enable_gqa=True, return_lse=True)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous() + y


TEMPLATES = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
MATMUL = ((512, 512), (512, 512), (512,))

CONSTRUCTS: dict[str, Case] = {
    "split reduction": case(on(lambda x: x.sum(), (2**20,)), "reduction"),
    "split reduction, dynamic": case(on(lambda x: x.sum(), (2**20,)), "reduction", dynamic=True),
    "cooperative reduction": case(
        on(lambda x: x.sum(), (2**20,)), "cooperative", "semaphores", "workspace",
        triton__force_cooperative_reductions=True,
    ),
    "cooperative reduction, dynamic": case(
        on(lambda x: torch.softmax(x, -1), (2, 2**16)), "cooperative", "semaphores", "workspace",
        triton__force_cooperative_reductions=True, dynamic=True,
    ),
    "split scan": case(on(lambda x: x.cumsum(0), (2**18,)), "split scan", "workspace"),
    "mix-order reduction": case(
        on(layer_norms, (8192, 768), (768,), (768,)), "workspace", training=True
    ),
    "mix-order reduction, dynamic": case(normalised_batch, "workspace", training=True),
    "mix-order reduction, RMS norm": case(
        on(rms_norm, (16384, 512), (512,), dtype=HALF), "workspace", training=True
    ),
    "cooperative reduction, training": case(
        on(layer_norms, (16, 2**15), (2**15,), (2**15,)), "cooperative", "semaphores", "workspace", training=True,
        triton__force_cooperative_reductions=True,
    ),
    "statistics": case(on(statistics, (64, 512))),
    "cross entropy, training": case(on(cross_entropy, (512, 64), (64, 8192)), training=True),
    "embedding, training": case(on(embedding, (100, 64)), "atomic", training=True),
    "64-bit sizes": case(more_than_32_bits),
    "nested regions, training": case(on(nested_regions, (64, 64)), training=True),
    "attention, training": case(on(plain_attention, *[(1, 2, 256, 64)] * 3, dtype=HALF), training=True),
    "NaN asserts": case(on(gather, (100, 64), torch.arange(50)), nan_asserts=True),
    "matmul template": case(on(linear_relu, *MATMUL, dtype=HALF), "template", **TEMPLATES),
    "matmul template, training": case(on(linear_relu, *MATMUL, dtype=HALF), "template", training=True, **TEMPLATES),
    "matmul template, dynamic": case(on(linear_relu, *MATMUL, dtype=HALF), "template", dynamic=True, **TEMPLATES),
    "persistent TMA matmul": case(
        on(linear_relu, *MATMUL, dtype=HALF), "template", "descriptor",
        triton__enable_persistent_tma_matmul=True,
        test_configs__autotune_choice_name_regex="tma", **TEMPLATES,
    ),
    "persistent TMA matmul, stores": case(
        on(torch.mm, (512, 512), (512, 512), dtype=HALF), "template", "descriptor",
        triton__enable_persistent_tma_matmul=True, triton__enable_template_tma_store=True,
        test_configs__autotune_choice_name_regex="tma", **TEMPLATES,
    ),
    "batched matmul template": case(on(torch.bmm, (4, 256, 256), (4, 256, 256), dtype=HALF), "template", **TEMPLATES),
    "convolution template": case(
        convolutions, "template", max_autotune=True, max_autotune_conv_backends="TRITON",
    ),
    "decomposed k": case(
        on(torch.mm, (32, 8192), (8192, 32), dtype=HALF), max_autotune_gemm=True,
        test_configs__autotune_choice_name_regex="decompose_k|bmm",
    ),
    "flex attention": case(on(attention(_biased), *[(1, 2, 256, 64)] * 3, dtype=HALF), "template"),
    "flex attention, training": case(
        on(attention(_biased), *[(1, 2, 256, 64)] * 3, dtype=HALF), "template", training=True,
    ),
    "flex attention, block mask": case(causal_attention, "template"),
    "flex attention, block mask, training": case(
        causal_attention, "template", training=True
    ),
    "flex attention, grouped queries, training": case(
        on(grouped_queries, (1, 4, 256, 64), *[(1, 2, 256, 64)] * 2, dtype=HALF), "template", training=True,
    ),
    "flex decoding": case(on(attention(_biased), (1, 2, 1, 64), *[(1, 2, 256, 64)] * 2, dtype=HALF), "template"),
    "combo kernels": case(on(several, (64, 64), (128, 256), (32, 128)), "combo", combo_kernels=True),
    "combo kernels, dynamic": case(
        on(several, (64, 64), (128, 256), (32, 128)), "combo", combo_kernels=True, dynamic=True
    ),
    "combo kernels, blocks of their own": case(
        on(several, (64, 64), (128, 256), (32, 128)), "combo", combo_kernels=True,
        combo_kernel_per_subkernel_blocks=True,
    ),
    "foreach": case(on(foreach, (100,), (64, 64), (7, 9)), "combo"),
    "optimizer step": case(optimizer_step, "combo"),
    "combo kernels and cooperative reductions": case(
        on(several, (64, 64), (4, 2**17), (32, 128)), "cooperative", triton__cooperative_reductions=True,
        combo_kernels=True,
    ),
    "max-autotune": case(
        on(lambda x: torch.softmax(x.t() + 1, -1), (512, 512)), "several configurations", max_autotune=True,
        coordinate_descent_tuning=True,
    ),
    "user's kernel, autotuned": case(
        on(users_add, (1000,), (1000,)), "user's", "several configurations"
    ),
    "user's kernel, dynamic": case(
        on(users_add, (1000,), (1000,)), "user's", "several configurations", dynamic=True
    ),
    "user's kernel, in place": case(on(users_scale, (1000,)), "user's"),
    "user's kernel, descriptors": case(
        on(users_descriptors, (64, 64)), "user's", "descriptor argument"
    ),
    "convolutions, channels last": case(convolutions),
    "convolutions, channels last, training": case(convolutions, training=True),
    "device assert": case(on(gather, (100, 64), torch.arange(50)), "device assert"),
    "assert on data": case(on(asserted, (100,))),
    "atomics": case(on(scatter, (100, 64), torch.arange(50), (50, 64)), "atomic"),
    "dropout": case(on(dropped, (64, 64), (64, 64)), "random", training=True),
    "random numbers": case(on(noise, (1000,)), "random"),
    "random numbers, dynamic": case(on(noise, (1000,)), "random", dynamic=True),
    "branches": case(on(branches, (64,))),
    "loop": case(on(loop, (64, 64))),
    "data-dependent sizes": case(on(matches, (64,)), around=sizes_from_data),
    "8-bit floats": case(on(narrow, (1000,))),
    "input written": case(on(in_place, (64, 64), (64, 64))),
    "unaligned views": case(on(shifted, (64, 65))),
    "transposed": case(on(outer, (512, 512), (512, 512))),
    "block pointers": case(on(outer, (512, 512), (512, 512)), triton__use_block_ptr=True),
    "tensor descriptors": case(
        on(outer, (512, 512), (512, 512)), "descriptor", "scratch memory", triton__use_tensor_descriptor=True,
        assume_aligned_inputs=True,
    ),
    "dependent launches": case(
        on(layer_norms, (64, 512), (512,), (512,)), around=dependent_launches, without=frozenset({"dependent launch"})
    ),
    "dynamic sizes": case(on(lambda x, y: torch.softmax(x @ y, -1), (64, 48), (48, 32)), dynamic=True),
    "dynamic sizes, training": case(
        on(lambda x, y: torch.softmax(x @ y, -1), (64, 48), (48, 32)), dynamic=True, training=True
    ),
}  # fmt: skip


def model(name: str, training: bool) -> Case:
    """One of the ten models, for inference or for training."""

    def make() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        module, fresh_inputs = MODELS[name]()
        return module.train(training), (), fresh_inputs()

    return Case(make, training)


CASES: dict[str, Case] = {
    **{f"{name}, {mode}": model(name, mode == "training") for name in MODELS for mode in ("inference", "training")},
    **CONSTRUCTS,
}
