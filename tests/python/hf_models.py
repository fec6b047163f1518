"""Tiny models of transformers whose checkpoints have other tensors than the modules."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.core_model_loading import Chunk, WeightConverter

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}


def _deepseek() -> Any:
    return transformers.DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4, "head_dim": None},
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


CONFIGS: dict[str, Any] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_COMMON, num_local_experts=3, num_experts_per_tok=2),
    "deepseek_v3": _deepseek,
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_tied": lambda: transformers.Qwen3Config(**_COMMON, tie_word_embeddings=True),
    # A checkpoint with one projection where the module has three (joined() below says so).
    "joined": lambda: transformers.Qwen3Config(**{**_COMMON, "num_key_value_heads": 4}, tie_word_embeddings=False),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2),
}


def tiny(name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """The causal language model of this config, with all parameters random."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    if name == "joined":
        parts = [f"self_attn.{part}_proj.weight" for part in "qkv"]
        model._weight_conversions = [WeightConverter("self_attn.qkv.weight", parts, [Chunk(0)])]
    return model
