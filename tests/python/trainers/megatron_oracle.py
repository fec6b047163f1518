"""The HuggingFace tensors of an unsharded model of Megatron, by a converter that has nothing of the one under test.

It goes over Megatron's own names (local spec), slices the weights, and writes the names down as they are.
"""

from __future__ import annotations

import re
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
_ATTENTION = {
    "linear_proj.weight": "o_proj.weight",
    "q_layernorm.weight": "q_norm.weight",
    "k_layernorm.weight": "k_norm.weight",
    "linear_proj.bias": "o_proj.bias",
    "core_attention.softmax_offset": "sinks",
}
_LATENT = {
    "linear_proj.weight": "o_proj.weight",
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "q_layernorm.weight": "q_a_layernorm.weight",
    "kv_layernorm.weight": "kv_a_layernorm.weight",
}
#: How a family's experts are called, and its shared expert.
_SPARSE = ("block_sparse_moe.experts.{}", {"gate": "w1", "up": "w3", "down": "w2"})
_EXPERTS = {"mixtral": _SPARSE, "minimax_m2": _SPARSE}
_SHARED = {"qwen2_moe": "shared_expert"}
_ROUTERS = {"mixtral": "block_sparse_moe.gate.weight", "minimax_m2": "block_sparse_moe.gate.weight"}
_EXPERT_BIASES = {"minimax_m2": "block_sparse_moe.e_score_correction_bias"}
_TOP = {
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
}
_PREDICTOR = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}


def to_hf(named: Tensors, hf: dict[str, Any]) -> Tensors:
    """`named`: parameters and persistent buffers of the whole model. `hf`: config.json."""
    out: Tensors = {}
    for name, tensor in named.items():
        if name in _TOP:
            whole = "embed" in name or name.startswith("output")
            out[_TOP[name]] = tensor[: hf["vocab_size"]] if whole else tensor
            continue
        if layer := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
            _layer(out, f"model.layers.{layer[1]}", layer[2], tensor, hf)
        elif layer := re.match(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.*)", name):
            at = f"model.layers.{hf['num_hidden_layers'] + int(layer[1])}"
            if layer[2] in _PREDICTOR:
                out[f"{at}.{_PREDICTOR[layer[2]]}"] = tensor
            else:
                _layer(out, at, layer[2], tensor, hf)
        else:
            raise AssertionError(f"the oracle knows no {name}")
    if hf["model_type"] == "gpt_oss":
        _stack(out, hf)
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _stack(out: Tensors, hf: dict[str, Any]) -> None:
    """All experts in one tensor, inputs before outputs, with gate and up in turns."""
    for layer in range(hf["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp"
        for kind in ("weight", "bias"):
            both, down = [], []
            for expert in range(hf["num_local_experts"]):
                name = f"{at}.experts.{expert}"
                gate, up = (out.pop(f"{name}.{which}_proj.{kind}") for which in ("gate", "up"))
                rows = torch.empty(2 * len(gate), *gate.shape[1:], dtype=gate.dtype)
                rows[0::2], rows[1::2] = gate, up
                both.append(rows.t() if kind == "weight" else rows)
                last = out.pop(f"{name}.down_proj.{kind}")
                down.append(last.t() if kind == "weight" else last)
            end = "" if kind == "weight" else "_bias"
            out[f"{at}.experts.gate_up_proj{end}"] = torch.stack(both)
            out[f"{at}.experts.down_proj{end}"] = torch.stack(down)
            out[f"{at}.router.{kind}"] = out.pop(f"{at}.gate.{kind}")


def _layer(out: Tensors, at: str, rest: str, tensor: torch.Tensor, hf: dict[str, Any]) -> None:
    if rest in _NORMS:
        out[f"{at}.{_NORMS[rest]}"] = tensor
    elif rest.startswith("self_attention."):
        _attention(out, f"{at}.self_attn", rest.removeprefix("self_attention."), tensor, hf)
    elif rest.startswith("mlp."):
        _mlp(out, at, rest.removeprefix("mlp."), tensor, hf["model_type"])
    else:
        raise AssertionError(f"the oracle knows no {rest}")


def _attention(out: Tensors, at: str, rest: str, tensor: torch.Tensor, hf: dict[str, Any]) -> None:
    if rest in ("linear_qkv.weight", "linear_qkv.bias"):
        groups = hf["num_key_value_heads"]
        heads = hf["num_attention_heads"] // groups
        size = hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
        rows: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
        for group in range(groups):
            first = group * (heads + 2) * size
            for head in range(heads + 2):
                which = "q" if head < heads else "kv"[head - heads]
                rows[which].append(tensor[first + head * size : first + (head + 1) * size])
        kind = rest.removeprefix("linear_qkv.")
        for which, parts in rows.items():
            out[f"{at}.{which}_proj.{kind}"] = torch.cat(parts)
        return
    names = _LATENT if "kv_lora_rank" in hf else _ATTENTION
    out[f"{at}.{names[rest]}"] = tensor


def _mlp(out: Tensors, layer: str, rest: str, tensor: torch.Tensor, kind: str) -> None:
    at = f"{layer}.mlp"
    if rest.startswith("router.") and rest != "router.expert_bias":
        out[f"{layer}.{_ROUTERS.get(kind, f'mlp.gate.{rest[7:]}')}"] = tensor
    elif rest == "router.expert_bias":
        out[f"{layer}.{_EXPERT_BIASES.get(kind, 'mlp.gate.e_score_correction_bias')}"] = tensor
    elif rest == "shared_experts.gate_weight":
        out[f"{at}.shared_expert_gate.weight"] = tensor
    else:
        form = r"(?:experts\.local_experts\.(\d+)\.|(shared_experts)\.)?linear_fc([12])\.(weight|bias)"
        found = re.fullmatch(form, rest)
        assert found, f"the oracle knows no {rest}"
        expert, shared, which, what = found.groups()
        inner, parts = at, {part: f"{part}_proj" for part in ("gate", "up", "down")}
        if expert is not None:
            path, parts = _EXPERTS.get(kind, ("mlp.experts.{}", parts))
            inner = f"{layer}.{path.format(expert)}"
        elif shared:
            inner = f"{at}.{_SHARED.get(kind, shared)}"
        if which == "2":
            out[f"{inner}.{parts['down']}.{what}"] = tensor
        else:
            half = tensor.shape[0] // 2
            out[f"{inner}.{parts['gate']}.{what}"] = tensor[:half]
            out[f"{inner}.{parts['up']}.{what}"] = tensor[half:]
