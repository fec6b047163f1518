"""A real SGLang model of one rank on the CPU, without a GPU, compiled operators or a forward pass."""

import sys
import types

import torch


def define_missing_operators():
    """What the compiled parts of torchvision and vLLM would register."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    package, operators = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding = None
    package._custom_ops = operators
    sys.modules.update({"vllm": package, "vllm._custom_ops": operators})
    return library


LIBRARY = define_missing_operators()


def build(directory, ranks, rank, port, *, experts_parallel):
    """The model and its loader."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(directory),
        device="cpu",
        tp_size=ranks,
        ep_size=ranks if experts_parallel else 1,
        load_format="dummy",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        dtype="bfloat16",
    )
    publish(args, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    initialize_moe_config()
    init_distributed_environment(
        world_size=ranks,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        backend="gloo",
    )
    initialize_model_parallel()
    initialize_dp_attention(args)
    model = make_model(ModelConfig.from_server_args(args))
    return model, model.load_weights


def make_model(config):
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model

    load = LoadConfig(load_format="dummy")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cpu"):
            return _initialize_model(config, load, _get_quantization_config(config, load))
    finally:
        torch.set_default_dtype(torch.float32)


def initialize_again():
    """One more model of the same arguments."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    return make_model(ModelConfig.from_server_args(get_server_args()))
