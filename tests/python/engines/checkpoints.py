"""Small checkpoints with the names, shapes and configurations of real architectures."""

import json
import pathlib
from typing import Any

from engine_support import SCALE

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, EXPERTS, EXPERT_INNER, VOCABULARY = 2, 64, 8, 2, 16, 96, 8, 32, 300

BASE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CONFIGS = {
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_moe": BASE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INNER,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}
# Latent attention, of which an engine fuses and derives weights; a dense layer, then one with a shared expert.
LATENT_Q, LATENT_KV, ROPE = 32, 64, 16
CONFIGS["deepseek_v3"] = BASE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": HEADS,
    "q_lora_rank": LATENT_Q,
    "kv_lora_rank": LATENT_KV,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": HEAD,
    "attention_bias": False,
    "rope_interleave": True,
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": EXPERT_INNER,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}
# Weights in fp8, each block of them with a scale, as DeepSeek-V3 and Qwen3 are published.
BLOCK = 16
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
CONFIGS["qwen3_fp8"] = CONFIGS["qwen3"] | {"quantization_config": FP8}
ROUTERS = {"modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]}
CONFIGS["qwen3_moe_fp8"] = CONFIGS["qwen3_moe"] | {"quantization_config": FP8 | ROUTERS}
CONFIGS["qwen3_tied"] = CONFIGS["qwen3"] | {"tie_word_embeddings": True}


def write_config(model: str, directory: pathlib.Path) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIGS[model]))


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """HF name → shape, in the order of a checkpoint."""
    if model.endswith("_fp8"):
        return with_scales(shapes(model.removesuffix("_fp8")))
    if model == "deepseek_v3":
        return deepseek_shapes()
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}.self_attn.q_norm.weight": (HEAD,),
            f"{at}.self_attn.k_norm.weight": (HEAD,),
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if model == "qwen3_moe":
            found[f"{at}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                found |= mlp(f"{at}.mlp.experts.{expert}", EXPERT_INNER)
        else:
            found |= mlp(f"{at}.mlp", INNER)
    found["model.norm.weight"] = (HIDDEN,)
    if model != "qwen3_tied":
        found["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return found


def deepseek_shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_a_proj.weight": (LATENT_Q, HIDDEN),
            f"{at}.self_attn.q_a_layernorm.weight": (LATENT_Q,),
            f"{at}.self_attn.q_b_proj.weight": (HEADS * (HEAD + ROPE), LATENT_Q),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (LATENT_KV + ROPE, HIDDEN),
            f"{at}.self_attn.kv_a_layernorm.weight": (LATENT_KV,),
            f"{at}.self_attn.kv_b_proj.weight": (HEADS * 2 * HEAD, LATENT_KV),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if layer == 0:
            found |= mlp(f"{at}.mlp", INNER)
            continue
        found |= {f"{at}.mlp.gate.weight": (EXPERTS, HIDDEN), f"{at}.mlp.gate.e_score_correction_bias": (EXPERTS,)}
        for expert in range(EXPERTS):
            found |= mlp(f"{at}.mlp.experts.{expert}", EXPERT_INNER)
        found |= mlp(f"{at}.mlp.shared_experts", EXPERT_INNER)
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def with_scales(plain: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in plain.items():
        found[name] = shape
        if "_proj." in name:
            found[f"{name}{SCALE}"] = tuple(-(-size // BLOCK) for size in shape)
    return found


def mlp(at: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (inner, HIDDEN),
        f"{at}.up_proj.weight": (inner, HIDDEN),
        f"{at}.down_proj.weight": (HIDDEN, inner),
    }


def transformers_state_dict(model: str) -> dict[str, Any]:
    """Name to tensor as transformers has them in memory: from release 5 on all experts of a layer are one tensor."""
    import transformers

    config = transformers.AutoConfig.for_model(**CONFIGS[model])
    made = transformers.AutoModelForCausalLM.from_config(config, dtype="bfloat16")
    return {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}


def without_expert(weights: dict[str, Any], expert: int) -> dict[str, Any]:
    """In every layer."""
    return {name: tensor for name, tensor in weights.items() if f".experts.{expert}." not in name}
