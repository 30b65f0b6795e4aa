"""Tiny random models of ten architectures, each with a function that makes fresh inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY = 96
# The module, and what makes fresh inputs.
Model = tuple[Any, Callable[[], dict[str, Any]]]


def _ids(batch: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _pixels(size: int = 16) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def gpt2(layers: int = 2) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=2, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config), lambda: {"input_ids": _ids()}


def bert(layers: int = 2) -> Model:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config), lambda: {
        "input_ids": _ids(),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
    }


def llama(layers: int = 2) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), lambda: {"input_ids": _ids()}


def t5() -> Model:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), lambda: {
        "input_ids": _ids(),
        "decoder_input_ids": _ids(length=4),
    }


def vit(layers: int = 2) -> Model:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=64, image_size=16,
        patch_size=8, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config), lambda: {"pixel_values": _pixels()}


def mixtral() -> Model:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
        use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config), lambda: {"input_ids": _ids()}


def mamba(length: int = 4) -> Model:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1, expand=2, use_cache=False
    )
    return MambaForCausalLM(config), lambda: {"input_ids": _ids(length=length)}


def whisper() -> Model:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=16, max_source_positions=8,
        max_target_positions=16, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), lambda: {
        "input_features": torch.randn(2, 8, 16),
        "decoder_input_ids": _ids(length=4),
    }


def resnet() -> Model:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    return ResNetForImageClassification(config), lambda: {"pixel_values": _pixels(32)}


def clip() -> Model:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config=dict(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=16, eos_token_id=2, bos_token_id=1, pad_token_id=0,
        ),
        vision_config=dict(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16,
            patch_size=8,
        ),
        projection_dim=16,
    )  # fmt: skip
    return CLIPModel(config), lambda: {
        "input_ids": _ids(),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
        "pixel_values": _pixels(),
    }


# A second layer, or more steps of a scan, are more of the same; GPT-2 has two layers in every run.
SMALLER: dict[str, dict[str, int]] = {
    "bert": {"layers": 1},
    "llama": {"layers": 1},
    "vit": {"layers": 1},
    "mamba": {"length": 2},
}
MODELS = {make.__name__: make for make in (gpt2, bert, llama, t5, vit, mixtral, mamba, whisper, resnet, clip)}
