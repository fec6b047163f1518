"""Tiny models of several families on the real Megatron, on the CPU, in any parallel layout."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import tiny_hybrid
import torch
import torch.nn.functional as F
from tiny_families import Family
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.ssm import gated_delta_net  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.experimental_attention_variant.dsa import (  # noqa: E402
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402

#: Where 0.19 and 0.16 have what their delta nets call.
_DELTA_NET = getattr(gated_delta_net, "common", gated_delta_net)


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
    #: Data-parallel replicas of what is divided over data-parallel ranks (HSDP).
    instances: int = 1
    #: Megatron's notation of a pipeline's stages ("Et|ttt|L").
    stages: str | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "ep", "etp", "dp", "cp", "instances")}
        text = "-".join(f"{name}{size}" for name, size in parts.items() if size not in (None, 1)) or "one"
        return f"{text}{'-stages' if self.stages else ''}{f'-v{self.padded}' if self.padded != 128 else ''}"


def start(layout: Parallel) -> None:
    """Makes Megatron's groups; torch.distributed is initialized."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=layout.instances,
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
        torch.compiler.set_stance("force_eager"),
        mock.patch("torch.cuda.current_device", lambda: cpu),
        mock.patch("torch.cuda.synchronize", lambda *_: None),
        mock.patch("torch.cuda.current_stream", lambda *_: None),
        mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self),
        mock.patch.object(multi_latent_attention, "HAVE_TE", False),
        mock.patch.object(tiny_hybrid.BLOCK, "TENorm", WrappedTorchNorm),
        mock.patch.object(WrappedTorchNorm, "__new__", _norm),
        mock.patch.object(_DELTA_NET, "HAVE_FLA", True),
        # 0.16 uses these names, and has none without the libraries.
        mock.patch.object(_DELTA_NET, "l2norm", _l2norm, create=True),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
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
        "masked_softmax_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "pipeline_dtype": dtype,
        "layernorm_epsilon": hf["rms_norm_eps"],
    }
    common.update(family.megatron)
    common["sequence_parallel"] = layout.tp > 1 and "num_moe_experts" in common  # Megatron wants it to train those
    common["moe_router_enable_expert_bias"] = family.expert_bias
    if layout.vpp:
        common.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if layout.stages:
        common["pipeline_model_parallel_layout"] = layout.stages
    if family.mla:
        return MLATransformerConfig(multi_latent_attention=True, **common)
    heads = {"num_query_groups": hf["num_key_value_heads"], "kv_channels": hf.get("head_dim")}
    return TransformerConfig(**common, **heads)


def build(family: Family, layout: Parallel, dtype: torch.dtype = torch.float32) -> list[torch.nn.Module]:
    """This rank's chunks of the model; after start()."""
    with on_cpu():
        chunks = [_chunk(family, layout, dtype, stage) for stage in range(layout.vpp or 1)]
        return [_Seeing(chunk) for chunk in chunks] if family.seeing else chunks


class _Seeing(MegatronModule):
    """A model whose part that sees is not trained here."""

    def __init__(self, speaks: Any) -> None:
        super().__init__(speaks.config)
        self.language_model = speaks

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.language_model(*inputs)


def _chunk(family: Family, layout: Parallel, dtype: torch.dtype, stage: int) -> torch.nn.Module:
    config = config_of(family, layout, dtype)
    vp_stage = stage if layout.vpp else None
    common: dict[str, Any] = {
        "vocab_size": layout.padded,
        "max_sequence_length": 128,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "share_embeddings_and_output_weights": family.hf["tie_word_embeddings"],
        **family.gpt,
    }
    if "hybrid_override_pattern" in family.hf:
        model: torch.nn.Module = tiny_hybrid.hybrid(config, family.hf["hybrid_override_pattern"], **common)
    else:
        model = _gpt(family, config, vp_stage, common)
    if family.sinks:
        # As the learnable softmax is built, which asks for a GPU.
        config.softmax_type = "learnable"
        for name, module in model.named_modules():
            if name.endswith("core_attention"):
                heads = config.num_attention_heads // layout.tp
                module.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=dtype))
    return model


def _gpt(family: Family, config: TransformerConfig, vp_stage: int | None, common: dict[str, Any]) -> torch.nn.Module:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    mtp = None
    if getattr(config, "mtp_num_layers", None):
        last = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization="RMSNorm")[-1]
        _without_kernels(last, family)
        mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=False, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage)
    for number, layer in enumerate(spec.layer_specs):
        _without_kernels(layer, family)
        if (first + number + 1) % family.attends_each:
            spec.layer_specs[number] = _delta_net(layer)
    return GPTModel(config, spec, position_embedding_type="rope", mtp_block_spec=mtp, vp_stage=vp_stage, **common)


class _Attention(torch.nn.Module):
    """Causal, with values that are of another size than keys."""

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class _Linear(torch.nn.Linear):
    """In place of Transformer Engine's that every rank has whole."""

    def __init__(self, inputs: int, outputs: int, *_: Any, config: TransformerConfig, **__: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)


class _IndexedAttention(DSAttention):
    """To all tokens, of which there are less than its indexer picks."""

    def __init__(self, config: TransformerConfig, *rest: Any, **more: Any) -> None:
        indexer = ModuleSpec(DSAIndexer, submodules=DSAIndexerSubmodules(_Linear, _Linear, _LayerNorm, _Linear))
        super().__init__(config, DSAttentionSubmodules(indexer), *rest, **more)
        self._attention = _Attention(softmax_scale=self.softmax_scale)

    def forward(self, *inputs: Any, **more: Any) -> torch.Tensor:
        return self._attention(*inputs)


class _LayerNorm(torch.nn.LayerNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


def _norm(_: Any, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
    """In place of WrappedTorchNorm, which makes none whose weight has 1 less than its factor."""
    kind = _ZeroCentred if config.layernorm_zero_centered_gamma else torch.nn.RMSNorm
    norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


class _ZeroCentred(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


class _NormOfAllHeads(torch.nn.Module):
    """As MiniMax-M2's trainers have it, Megatron itself has one of each head."""

    heads: int

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(self.heads // config.tensor_model_parallel_size * hidden_size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.flatten(2), self.weight.shape, self.weight, self._eps).view(x.shape)

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> Any:
        group = parallel_state.get_tensor_model_parallel_group()
        replicas = metadata["dp_cp_group"]
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets, tp_group=group, dp_cp_group=replicas
        )


def _l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + eps)


def _delta_net(layer: Any) -> ModuleSpec:
    """The layer with a gated delta net in place of its attention, of Megatron's own modules for the CPU."""
    parts = gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    net = ModuleSpec(gated_delta_net.GatedDeltaNet, submodules=parts)
    return replace(layer, submodules=replace(layer.submodules, self_attention=net))


def _without_kernels(layer: Any, family: Family) -> None:
    if family.mla:  # its core attention has no weights, and none for the CPU
        attention = ModuleSpec(_IndexedAttention) if family.indexer else _Attention
        layer.submodules.self_attention.submodules.core_attention = attention
    if family.norms_of_all_heads:
        parts = layer.submodules.self_attention.submodules
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            setattr(parts, f"{name}_layernorm", type("Norm", (_NormOfAllHeads,), {"heads": family.hf[heads]}))


def number(model: torch.nn.Module) -> None:
    """Gives each element of the whole model a value of its own."""
    first = 1
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                assert tensor.dtype == torch.float32 and first + tensor.numel() < 1 << 24
                tensor.copy_(torch.arange(first, first + tensor.numel()).view(tensor.shape))
                first += tensor.numel()


def randomise(model: torch.nn.Module) -> None:
    """Gives it weights with which each of them has a share in the logits."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                tensor.copy_(torch.randn_like(tensor) * 0.2 + mean)


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of the unsharded model."""
    places = torch.arange(tokens.shape[1]).expand(tokens.shape)
    masked = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    with on_cpu(), torch.no_grad():
        return model.eval()(tokens, places, masked)


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
    return model.sharded_state_dict(metadata={"dp_cp_group": group, "non_homogeneous_layers": True})
