"""Tiny models of several families on the real Megatron, on the CPU, in any parallel layout."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

VOCAB = 100
HIDDEN = 64


@dataclass(frozen=True)
class Parallel:
    """How many parts there are of each kind, and how the vocabulary is padded."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    cp: int = 1
    padded: int = 128
    #: Megatron's notation of a pipeline's stages ("Et|ttt|L").
    stages: str | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")}
        text = "-".join(f"{name}{size}" for name, size in parts.items() if size not in (None, 1)) or "one"
        return f"{text}{'-stages' if self.stages else ''}{f'-v{self.padded}' if self.padded != 128 else ''}"


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
    # Without its norms of all of q and k: Megatron has one for each head.
    "minimax_m2": Family(
        {
            **_DENSE,
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
        },
        {**_MOE_MEGATRON, "moe_router_load_balancing_type": "none"},
        expert_bias=True,
    ),
    "glm4_moe": Family(
        {
            **_DENSE,
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
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
            "sliding_window": 16,
        },
        {
            **_MOE_MEGATRON,
            "add_bias_linear": True,
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


def start(layout: Parallel) -> None:
    """Makes Megatron's groups; torch.distributed is initialized."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )


class _OnCpu(TorchFunctionMode):
    """Makes on the host what is asked for on a GPU, and says of the host's tensors that they are a GPU's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        said = function(*args, **kwargs)
        return (
            said.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and isinstance(said, str) else said
        )


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron builds, trains and saves."""
    cpu = torch.device("cpu")
    with (
        _OnCpu(),
        mock.patch("torch.cuda.current_device", lambda: cpu),
        mock.patch("torch.cuda.synchronize", lambda *_: None),
        mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self),
        mock.patch.object(multi_latent_attention, "HAVE_TE", False),
    ):
        yield


def config_of(family: Family, layout: Parallel, dtype: torch.dtype) -> TransformerConfig:
    hf = family.hf
    common: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "layernorm_epsilon": hf["rms_norm_eps"],
    }
    common.update(family.megatron)
    if layout.stages:
        common["pipeline_model_parallel_layout"] = layout.stages
    if family.mla:
        return MLATransformerConfig(multi_latent_attention=True, **common)
    heads = {"num_query_groups": hf["num_key_value_heads"], "kv_channels": hf.get("head_dim")}
    return TransformerConfig(**common, **heads)


def build(family: Family, layout: Parallel, dtype: torch.dtype = torch.float32) -> list[torch.nn.Module]:
    """This rank's chunks of the model; after start()."""
    with on_cpu():
        return [_chunk(family, layout, dtype, stage) for stage in range(layout.vpp or 1)]


def _chunk(family: Family, layout: Parallel, dtype: torch.dtype, stage: int) -> torch.nn.Module:
    config = config_of(family, layout, dtype)
    vp_stage = stage if layout.vpp else None
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    mtp = None
    if getattr(config, "mtp_num_layers", None):
        last = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization="RMSNorm")[-1]
        _without_kernels(last, family)
        mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        _without_kernels(layer, family)
    model = GPTModel(
        config,
        spec,
        vocab_size=layout.padded,
        max_sequence_length=128,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=family.hf["tie_word_embeddings"],
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    if family.expert_bias:
        for name, module in model.named_modules():
            if name.endswith("mlp.router"):
                del module.expert_bias
                module.register_buffer("expert_bias", torch.zeros(config.num_moe_experts, dtype=torch.float32))
    if family.sinks:
        # As the learnable softmax is built, which asks for a GPU.
        config.softmax_type = "learnable"
        for name, module in model.named_modules():
            if name.endswith("core_attention"):
                heads = config.num_attention_heads // layout.tp
                module.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=dtype))
    return model


def _without_kernels(layer: Any, family: Family) -> None:
    if family.mla:  # its core attention has no weights, and none for the CPU
        layer.submodules.self_attention.submodules.core_attention = IdentityOp


def number(model: torch.nn.Module) -> None:
    """Gives each element of the whole model a value of its own."""
    first = 1
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                assert tensor.dtype == torch.float32 and first + tensor.numel() < 1 << 24
                tensor.copy_(torch.arange(first, first + tensor.numel()).view(tensor.shape))
                first += tensor.numel()


class Training:
    """Megatron's data parallelism and distributed optimizer, whose new parameters the next forward gathers."""

    def __init__(self, family: Family, layout: Parallel, chunks: list[torch.nn.Module], dtype: torch.dtype) -> None:
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True
        )
        adam = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            clip_grad=0.0,
        )
        with on_cpu():
            config = config_of(family, layout, dtype)
            self.chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
            self._optimizer = get_megatron_optimizer(adam, self.chunks, use_gloo_process_groups=False)

    def step(self, number: int) -> None:
        """With gradients that are made up, the same for all copies of a parameter."""
        with on_cpu():
            for name, parameter in (pair for chunk in self.chunks for pair in chunk.named_parameters()):
                torch.manual_seed(zlib.crc32(name.encode()) + number)
                parameter.main_grad.normal_()
            assert self._optimizer.step()[0]

    def gather(self) -> None:
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)


def save(chunks: list[torch.nn.Module], directory: str) -> None:
    """As Megatron saves it. All ranks."""
    from megatron.core import dist_checkpointing

    with on_cpu():
        dist_checkpointing.save({str(i): _state(chunk) for i, chunk in enumerate(chunks)}, directory)


def load(chunks: list[torch.nn.Module], directory: str) -> None:
    """As Megatron loads it into this rank's chunks. All ranks."""
    from megatron.core import dist_checkpointing

    with on_cpu():
        states = dist_checkpointing.load({str(i): _state(chunk) for i, chunk in enumerate(chunks)}, directory)
        for i, chunk in enumerate(chunks):
            missing, unexpected = chunk.load_state_dict(states[str(i)], strict=False)
            assert not unexpected and all("_extra_state" in name for name in missing), (missing, unexpected)


def _state(model: Any) -> Any:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})
