"""Megatron's model of Mamba, attention, MLP and expert layers, of its own modules for the CPU."""

from __future__ import annotations

from typing import Any

import mamba_on_cpu
import torch

with mamba_on_cpu.instead_of_mamba_ssm():
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mlp_layer import MLPLayer  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_layer import (  # noqa: E402
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

try:  # 0.19
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    BLOCK, STACK, PARTS = hybrid_block, hybrid_block.HybridStack, hybrid_block.HybridStackSubmodules
except ImportError:
    from megatron.core.models.mamba import MambaModel as HybridModel
    from megatron.core.ssm import mamba_block

    BLOCK, STACK, PARTS = mamba_block, mamba_block.MambaStack, mamba_block.MambaStackSubmodules


def _stack(experts: int) -> ModuleSpec:
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    add, norm = get_bias_dropout_add, WrappedTorchNorm

    def layer(kind: Any, **parts: Any) -> ModuleSpec:
        return ModuleSpec(kind, submodules=TransformerLayerSubmodules(**parts))

    def mlp(experts: int | None = None) -> dict[str, Any]:
        spec = get_mlp_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
        return {"pre_mlp_layernorm": norm, "mlp": spec, "mlp_bda": add}

    parts = PARTS(
        mamba_layer=ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=add)),
        attention_layer=layer(TransformerLayer, input_layernorm=norm, self_attention=attention, self_attn_bda=add),
        mlp_layer=layer(MLPLayer, **mlp()),
        moe_layer=layer(MoETransformerLayer, **mlp(experts)),
    )
    return ModuleSpec(STACK, submodules=parts)


def hybrid(config: Any, pattern: str, **more: Any) -> torch.nn.Module:
    """`pattern`: as in config.json's hybrid_override_pattern."""
    stages = config.pipeline_model_parallel_size
    if BLOCK.__name__.endswith("hybrid_block"):
        each = len(pattern) // stages
        more["hybrid_layer_pattern"] = "|".join(pattern[i : i + each] for i in range(0, len(pattern), each))
    else:
        more["hybrid_override_pattern"] = pattern
    return HybridModel(config, _stack(config.num_moe_experts), position_embedding_type="none", **more)
