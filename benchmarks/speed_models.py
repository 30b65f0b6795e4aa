"""What benchmarks/speed.py times: small models whose calls cost more than their kernels, and some larger ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OVERHEAD, TRAINING, LARGE, LEAST = "overhead-bound", "training, overhead-bound", "large", "least"
THREADS = "default threads"
VOCABULARY = 512
# A module and its inputs.
Made = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Workload:
    """One row of the table: a call of a model, or a training step of it.

    Attributes:
        all_threads: whether the CPU has its default number of threads, as a newcomer's process has, and not
            ``--threads``.
    """

    make: Callable[[], Made]
    group: str
    training: bool = False
    all_threads: bool = False


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def mlp(blocks: int = 12, width: int = 32, batch: int = 4) -> Made:
    return nn.Sequential(*(Residual(width) for _ in range(blocks))), (torch.randn(batch, width),)


class Recurrent(nn.Module):
    """A GRU's cell in a loop, which is unrolled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, width)

    def forward(self, steps: Tensor) -> Tensor:
        state = torch.zeros_like(steps[0])
        for x in steps.unbind():
            state = self.cell(x, state)
        return self.head(state)


def gru(steps: int = 16, width: int = 32, batch: int = 4) -> Made:
    return Recurrent(width), (torch.randn(steps, batch, width),)


class CachedBlock(nn.Module):
    """Attention of one new token to all that a cache holds, and a feed-forward layer."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, heads, length, width // heads))

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        batch, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, 3, self.heads, 1, width // self.heads).unbind(1)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + self.out(mixed.reshape(batch, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DecoderStep(nn.Module):
    """The next token's scores; every layer writes the token's key and value to its cache in place."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(CachedBlock(width, heads, length) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        x = self.tokens(token) + self.positions(position)
        mask = (torch.arange(self.length, device=token.device) <= position).view(1, 1, 1, -1)
        for block in self.blocks:
            x = block(x, position, mask)
        return self.head(self.norm(x))


def decoder(layers: int = 4, width: int = 64, heads: int = 4, length: int = 128) -> Made:
    return DecoderStep(layers, width, heads, length), (torch.tensor([7]), torch.tensor([length // 2]))


class Tower(nn.Module):
    """Embedding bags and dense features, brought together by an MLP."""

    def __init__(self, bags: int, rows: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(bags))
        self.dense = nn.Sequential(nn.Linear(13, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((bags + 1) * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, *keys: Tensor) -> Tensor:
        found = [bag(those) for bag, those in zip(self.bags, keys, strict=True)]
        return self.top(torch.cat([self.dense(dense), *found], 1)).sigmoid()


def recommender(bags: int = 20, rows: int = 1000, width: int = 16, batch: int = 8) -> Made:
    keys = [torch.randint(0, rows, (batch, 4)) for _ in range(bags)]
    return Tower(bags, rows, width), (torch.randn(batch, 13), *keys)


class Experts(nn.Module):
    """A mixture of experts: the host asks which tokens each one has, and hands it as many."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.gate(x).softmax(1).max(1)
        result = x
        for number, expert in enumerate(self.experts):
            (mine,) = torch.nonzero(choice == number, as_tuple=True)
            result = result.index_add(0, mine, expert(x[mine]) * weights[mine, None])
        return result


def moe(layers: int = 2, width: int = 32, experts: int = 4, tokens: int = 16) -> Made:
    return nn.Sequential(*(Experts(width, experts) for _ in range(layers))), (torch.randn(tokens, width),)


class PlusOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def plus_one() -> Made:
    return PlusOne(), (torch.randn(8),)


class BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Sequential()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def resnet18(size: int = 64, batch: int = 1) -> Made:
    start = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [block for i, o, s in widths for block in (BasicBlock(i, o, s), BasicBlock(o, o, 1))]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*start, *blocks, *end), (torch.randn(batch, 3, size, size),)


def unet(width: int = 16, batch: int = 1) -> Made:
    from memory_peak import UNet

    return UNet(width), (torch.randn(batch, 3, 64, 64),)


class Logits(nn.Module):
    """A model of transformers, of whose outputs only the scores are asked for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def bert(layers: int = 4, width: int = 256, batch: int = 1, length: int = 64) -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=length, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Logits(BertForMaskedLM(config)), (_ids(batch, length),)


def vit(layers: int = 4, width: int = 192, size: int = 64, batch: int = 1) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=3, intermediate_size=4 * width,
        image_size=size, patch_size=8, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Logits(ViTForImageClassification(config)), (torch.randn(batch, 3, size, size),)


def gpt2(layers: int = 4, width: int = 256, batch: int = 1, length: int = 64) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=4, n_positions=length, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Logits(GPT2LMHeadModel(config)), (_ids(batch, length),)


def llama(layers: int = 4, width: int = 256, batch: int = 1, length: int = 64) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=4 * width, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config)), (_ids(batch, length),)


WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(mlp, OVERHEAD),
    "gru": Workload(gru, OVERHEAD),
    "decoder step": Workload(decoder, OVERHEAD),
    "recommender": Workload(recommender, OVERHEAD),
    "moe": Workload(moe, OVERHEAD),
    "mlp training": Workload(mlp, TRAINING, training=True),
    "gru training": Workload(gru, TRAINING, training=True),
    "recommender training": Workload(recommender, TRAINING, training=True),
    "vit": Workload(vit, LARGE),
    "bert": Workload(bert, LARGE),
    "unet": Workload(unet, LARGE),
    "resnet18": Workload(resnet18, LARGE),
    "gpt2 prefill": Workload(gpt2, LARGE),
    "bert training": Workload(lambda: bert(layers=2, width=128), LARGE, training=True),
    "gpt2 training": Workload(lambda: gpt2(layers=2, width=128), LARGE, training=True),
    "x + 1": Workload(plus_one, LEAST),
    "mlp, default threads": Workload(mlp, THREADS, all_threads=True),
    "decoder step, default threads": Workload(decoder, THREADS, all_threads=True),
    "gpt2 prefill, default threads": Workload(gpt2, THREADS, all_threads=True),
}


def step_of(
    module: nn.Module,
    inputs: tuple[Any, ...],
    training: bool,
    compiled: Callable[[Callable[..., Any]], Any],
    bound: Callable[[Any], Any],
) -> Callable[[], Any]:
    """A call of a model, or a training step with an optimizer: what it returns is compared.

    Args:
        compiled: makes a function of what is given, once for the model and once for the optimizer.
        bound: makes another function of the compiled model, or of the compiled loss in training.
    """
    if not training:
        call = bound(compiled(lambda *inputs: module(*inputs)))
        return lambda: call(*inputs)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    loss_of = bound(compiled(lambda *inputs: module(*inputs).square().mean()))
    # What is around it breaks the graph, and all that is compiled would hang on one code object of torch's.
    bare: Any = inspect.unwrap(torch.optim.AdamW.step)
    update = torch.no_grad()(compiled(lambda: bare(optimizer)))

    def step() -> Tensor:
        loss = loss_of(*inputs)
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
