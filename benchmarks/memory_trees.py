"""Memory beside CUDA graph trees and Inductor's wrapper, by torch's own allocator.

    python -m hostcuda benchmarks/memory_trees.py                     # torch's CUDA build, no GPU
    python -m hostcuda benchmarks/memory_trees.py --models gpt2 unet --modes training

Ten models of a real small model's size, so that the allocator's segments (20 MiB) do not decide, inference and
training. Each side runs in a process of its own until it replays, with the device's kernels not computed
(``HOSTCUDA_COMPUTE=0``): what is allocated does not depend on numbers. All figures are MiB above the model, after a
garbage collection and ``torch.cuda.empty_cache()``:

    reserved    what the process holds between calls, by the allocator
    allocated   of that, what somebody holds
    peak        the most that is allocated at one time during a step, and what the pools of graphs hold beside that

"over" is what fxwrap reserves between calls beside what graph trees do. The exit code is 1 if that is more than one
segment, or if a step's peak is above Inductor's wrapper and the workspace of the graphs' pool.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from memory_peak import UNet, in_a_process, loss_of
from torch import Tensor, nn

SIDES: dict[str, dict[str, Any]] = {
    "inductor": {},
    "trees": {"mode": "reduce-overhead"},
    "fxwrap": {"backend": "fxwrap"},
}
MIB = 1 << 20
SEGMENT = 20 * MIB  # c10/cuda/CUDAAllocatorConfig.h, kLargeBuffer
WARM, STEPS = 12, 3
VOCABULARY, HIDDEN, LENGTH, BATCH = 1024, 256, 128, 8
Inputs = Callable[[], dict[str, Tensor]]


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def text_model(name: str, **config: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    """A language model of ``transformers``, by the first part of its classes' names."""

    def make() -> tuple[nn.Module, Inputs]:
        import transformers

        family, kind = name.split()
        settings = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, use_cache=False, **config)
        return getattr(transformers, family + kind)(settings), lambda: {"input_ids": ids()}

    return make


def t5() -> tuple[nn.Module, Inputs]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=64, d_ff=1024, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), lambda: {"input_ids": ids(), "decoder_input_ids": ids(64)}


def vit() -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, image_size=96,
        patch_size=8, num_labels=100, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config), lambda: {"pixel_values": torch.randn(BATCH, 3, 96, 96)}


def resnet() -> tuple[nn.Module, Inputs]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], num_labels=100)
    return ResNetForImageClassification(config), lambda: {"pixel_values": torch.randn(BATCH, 3, 128, 128)}


def unet() -> tuple[nn.Module, Inputs]:
    return UNet(width=64), lambda: {"x": torch.randn(4, 3, 96, 96)}


def mlp() -> tuple[nn.Module, Inputs]:
    layers = [part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), lambda: {"input": torch.randn(512, 1024)}


_DECODER = {"hidden_size": HIDDEN, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "mlp": mlp,
    "gpt2": text_model(
        "GPT2 LMHeadModel", n_embd=HIDDEN, n_layer=4, n_head=4, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "bert": text_model(
        "Bert ForMaskedLM", hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "llama": text_model("Llama ForCausalLM", num_hidden_layers=4, **_DECODER),
    "qwen3": text_model("Qwen3 ForCausalLM", num_hidden_layers=4, head_dim=64, **_DECODER),
    "mamba": text_model("Mamba ForCausalLM", hidden_size=HIDDEN, state_size=8, num_hidden_layers=2, expand=2),
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
}  # fmt: skip


def measure(name: str, mode: str, side: str) -> dict[str, Any]:
    """One side, in this process."""
    torch.manual_seed(0)
    training = mode == "training"
    model, fresh = MODELS[name]()
    model = model.train(training).cuda()
    inputs = {key: value.cuda() for key, value in fresh().items()}

    def compute(**values: Any) -> Any:
        return loss_of(model(**values)) if training else model(**values)

    compiled = torch.compile(compute, **SIDES[side])

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(training):
            result = compiled(**inputs)
            if training:
                result.backward()
        model.zero_grad(set_to_none=True)

    def settle() -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    settle()
    before = {"reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
    for _ in range(WARM):
        step()
    settle()
    found: dict[str, Any] = {
        "reserved": torch.cuda.memory_reserved() - before["reserved"],
        "allocated": torch.cuda.memory_allocated() - before["allocated"],
    }
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    pools = sum(segment["total_size"] - segment["allocated_size"] for segment in segments)
    found["peak"] = torch.cuda.max_memory_allocated() - before["allocated"] + pools
    found["pools"] = pools
    if side == "fxwrap":
        import fxwrap

        stats = fxwrap.stats()
        found["told"] = f"{stats['replays']} replays, {sum(stats['eager'].values())} eager"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=["inference", "training"], choices=["inference", "training"])
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "MODE", "SIDE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: python -m hostcuda benchmarks/memory_trees.py")
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; MiB above the model\n")
    columns = [f"{what}: {side}" for what in ("reserved", "allocated", "peak") for side in SIDES]
    print("| model | | " + " | ".join(columns) + " | over | calls |\n" + "|---" * (len(columns) + 4) + "|")
    missed = []
    for name in args.models:
        for mode in args.modes:
            found = {side: in_a_process(__file__, name, mode, side, HOSTCUDA_COMPUTE="0") for side in SIDES}
            cells = [f"{found[s][w] / MIB:.0f}" for w in ("reserved", "allocated", "peak") for s in SIDES]
            over = found["fxwrap"]["reserved"] - found["trees"]["reserved"]
            row = [name, mode, *cells, f"{over / MIB:+.0f}", found["fxwrap"]["told"]]
            print(f"| {' | '.join(row)} |", flush=True)
            if over > SEGMENT or found["fxwrap"]["peak"] > found["inductor"]["peak"] + found["fxwrap"]["pools"]:
                missed.append(f"{name} ({mode})")
    print(f"\nmissed: {', '.join(missed) or 'none'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
