"""The families of the tiny models: of each a checkpoint's config.json, and what Megatron's config has for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

VOCAB = 100
HIDDEN = 64


@dataclass(frozen=True)
class Family:
    #: As a checkpoint's config.json says it.
    hf: dict[str, Any]
    #: Of Megatron's config, beyond what common() makes of `hf`.
    megatron: dict[str, Any] = field(default_factory=dict)
    mla: bool = False
    #: Routers have a bias that balances the experts, in a buffer.
    expert_bias: bool = False
    #: The softmax of attention has a learned offset.
    sinks: bool = False
    #: Of q and of k; Megatron has one of each head.
    norms_of_all_heads: bool = False
    #: Of so many layers the last attends, the others are gated delta nets.
    attends_each: int = 1
    #: An indexer in each layer's attention, of which tokens to attend to.
    indexer: bool = False
    #: Beside its text_config, `hf`, of a model that sees. Megatron has the part that speaks as its language_model.
    seeing: dict[str, Any] | None = None
    #: For the GPTModel.
    gpt: dict[str, Any] = field(default_factory=dict)


def _sigmoid_of_more(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


_DENSE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 112,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_MOE: dict[str, Any] = {
    **_DENSE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_MOE_MEGATRON = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 40, "moe_grouped_gemm": False}

#: Experts with a shared one that has a gate.
_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_SHARED_MEGATRON = {
    **_MOE_MEGATRON,
    "moe_shared_expert_intermediate_size": 72,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": "none",
}
#: Gated delta nets, and attention whose queries have gates.
_NET = {
    **_DENSE,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_NET_MEGATRON = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "deterministic_mode": True,
}

FAMILIES: dict[str, Family] = {
    "llama": Family({**_DENSE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
    "llama_tied": Family(
        {**_DENSE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    ),
    "llama_one_group": Family(
        {**_DENSE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 1}
    ),
    "qwen2": Family(
        {
            **{key: value for key, value in _DENSE.items() if key != "head_dim"},
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
        },
        {"add_qkv_bias": True},
    ),
    "qwen3": Family(
        {**_DENSE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
        {"qk_layernorm": True},
    ),
    "qwen3_moe": Family(
        {**_MOE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        {**_MOE_MEGATRON, "qk_layernorm": True, "moe_router_load_balancing_type": "none"},
    ),
    "qwen2_moe": Family(
        {
            **{key: value for key, value in _MOE.items() if key != "head_dim"},
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "shared_expert_intermediate_size": 72,
        },
        {
            **_MOE_MEGATRON,
            "add_qkv_bias": True,
            "moe_shared_expert_intermediate_size": 72,
            "moe_shared_expert_gate": True,
            "moe_router_load_balancing_type": "none",
        },
    ),
    "qwen3_next": Family(
        {**_NET, **_SHARED, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
        {**_NET_MEGATRON, **_SHARED_MEGATRON},
        attends_each=2,
        gpt={"rotary_percent": 0.25},
    ),
    "qwen3_5": Family(
        {**_NET, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
        _NET_MEGATRON,
        attends_each=2,
        gpt={"rotary_percent": 0.25},
    ),
    "qwen3_5_moe": Family(
        {**_NET, **_SHARED, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"},
        {**_NET_MEGATRON, **_SHARED_MEGATRON},
        attends_each=2,
        gpt={"rotary_percent": 0.25},
    ),
    "nemotron_h": Family(
        {
            **_DENSE,
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "MEM*-M",
            "num_hidden_layers": 6,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 4,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "ssm_state_size": 12,
            "conv_kernel": 4,
            "time_step_min": 1e-9,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 72,
            "norm_topk_prob": True,
        },
        {
            **_MOE_MEGATRON,
            "gated_linear_unit": False,
            "activation_func": _squared_relu,
            "layernorm_epsilon": 1e-5,
            "mamba_num_heads": 4,
            "mamba_head_dim": 20,
            "mamba_num_groups": 2,
            "mamba_state_dim": 12,
            "moe_shared_expert_intermediate_size": 72,
            "moe_router_score_function": "sigmoid",
            "moe_router_load_balancing_type": "none",
        },
        expert_bias=True,
    ),
    "mixtral": Family(
        {
            **_DENSE,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
        },
        {**_MOE_MEGATRON, "moe_router_load_balancing_type": "none"},
    ),
    "minimax_m2": Family(
        {
            **_DENSE,
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "rotary_dim": 12,
        },
        {
            **_MOE_MEGATRON,
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid",
            "qk_layernorm": True,
        },
        expert_bias=True,
        norms_of_all_heads=True,
        gpt={"rotary_percent": 0.5},
    ),
    "glm4_moe": Family(
        {
            **_DENSE,
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 40,
            "num_nextn_predict_layers": 1,
            "norm_topk_prob": True,
        },
        {
            **_MOE_MEGATRON,
            "add_qkv_bias": True,
            "qk_layernorm": True,
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_shared_expert_intermediate_size": 40,
            "moe_router_score_function": "sigmoid",
            "moe_router_load_balancing_type": "none",
            "mtp_num_layers": 1,
        },
        expert_bias=True,
        gpt={"rotary_percent": 0.5},
    ),
    "gpt_oss": Family(
        {
            **_DENSE,
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "sliding_window": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {
            **_MOE_MEGATRON,
            "add_bias_linear": True,
            "activation_func": _sigmoid_of_more,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
            "add_qkv_bias": True,
            "moe_router_load_balancing_type": "none",
        },
        sinks=True,
    ),
    "deepseek": Family(
        {
            **{key: value for key, value in _DENSE.items() if key != "head_dim"},
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 36,
            "kv_lora_rank": 28,
            "qk_nope_head_dim": 20,
            "qk_rope_head_dim": 8,
            "v_head_dim": 18,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "moe_intermediate_size": 40,
            "num_nextn_predict_layers": 1,
            "routed_scaling_factor": 1.0,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
        },
        {
            **_MOE_MEGATRON,
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_shared_expert_intermediate_size": 40,
            "moe_router_score_function": "sigmoid",
            "moe_router_load_balancing_type": "none",
            "mtp_num_layers": 1,
            "q_lora_rank": 36,
            "kv_lora_rank": 28,
            "qk_head_dim": 20,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 18,
            "qk_layernorm": True,
            "rope_type": "rope",
        },
        mla=True,
        expert_bias=True,
    ),
}


def without_predictors(family: Family) -> Family:
    """Without layers for further tokens, which transformers has not."""
    hf = {**family.hf, "num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in family.hf else family.hf
    return replace(family, hf=hf, megatron={**family.megatron, "mtp_num_layers": None})


_EYES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_KIMI_EYES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
_IN_THREE = {"rope_type": "default", "rope_theta": 10000.0}


def _that_sees(name: str, model_type: str, text: str, eyes: dict[str, Any] = _EYES, **rope: Any) -> Family:
    speaks = without_predictors(FAMILIES[name])
    hf = {key: value for key, value in speaks.hf.items() if key != "architectures"}
    if rope:
        hf["rope_parameters"] = rope
    hf.update(model_type=text)
    tied = hf["tie_word_embeddings"]
    return replace(speaks, hf=hf, seeing={"model_type": model_type, "vision_config": eyes, "tie_word_embeddings": tied})


FAMILIES |= {
    "qwen2_5_vl": _that_sees("qwen2", "qwen2_5_vl", "qwen2_5_vl_text", **_IN_THREE, mrope_section=[2, 3, 3]),
    "qwen3_vl": _that_sees("qwen3", "qwen3_vl", "qwen3_vl_text", **_IN_THREE, mrope_section=[4, 4, 4]),
    "qwen3_vl_moe": _that_sees("qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text", **_IN_THREE, mrope_section=[4, 4, 4]),
    "qwen3_5_vl": _that_sees(
        "qwen3_5_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        **_IN_THREE,
        partial_rotary_factor=0.25,
        mrope_section=[1, 1, 1],
    ),
    "kimi_k25": _that_sees("deepseek", "kimi_k25", "deepseek_v3", _KIMI_EYES),
    "glm4_moe_lite": replace(
        FAMILIES["deepseek"],
        hf={**FAMILIES["deepseek"].hf, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"},
    ),
    "glm_moe_dsa": replace(
        FAMILIES["deepseek"],
        hf={
            **FAMILIES["deepseek"].hf,
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": 64,
        },
        megatron={
            **FAMILIES["deepseek"].megatron,
            "dsa_indexer_n_heads": 4,
            "dsa_indexer_head_dim": 16,
            "dsa_indexer_topk": 64,
        },
        indexer=True,
    ),
}
