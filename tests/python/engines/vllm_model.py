"""A real vLLM model of one rank on the CPU, without a GPU, compiled operators or a forward pass."""

import contextlib
import os

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch


def build(directory, ranks, rank, port, *, experts_parallel):
    """The model, and its loader with completeness checks off."""
    return build_with_config(directory, ranks, rank, port, experts_parallel=experts_parallel)[:2]


def keep_fp8_as_it_is():
    """As Triton's kernel, which needs a GPU when it runs: weights and scales stay in the checkpoint's form. The CPU's
    own kernel needs a newer CPU, and packs them by compiled operators."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import current_platform

    class Kept(linear.TritonFp8BlockScaledMMKernel):
        is_supported = classmethod(lambda cls, *_: (True, None))
        can_implement = classmethod(lambda cls, *_: (True, None))

    linear._POSSIBLE_FP8_BLOCK_KERNELS[current_platform._enum] = [Kept]


def build_with_config(directory, ranks, rank, port, *, experts_parallel=False, stages=1, **arguments):
    """The model, processed as after its first load, its loader, and the engine's configuration. ``stages``: of a
    pipeline that the ranks form; ``arguments``: the engine's own."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    keep_fp8_as_it_is()
    config = EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=64,
        enable_expert_parallel=experts_parallel,
        **arguments,
    ).create_engine_config()
    if config.model_config.use_mla:  # what a CPU with AMX would take needs compiled operators
        config.attention_config.backend = AttentionBackendEnum.CPU_MLA
    # Set here: asking for ranks above needs an executor to start them.
    config.parallel_config.world_size = ranks
    config.parallel_config.tensor_parallel_size = ranks // stages
    config.parallel_config.pipeline_parallel_size = stages
    config.parallel_config.rank = rank
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        initialize_model_parallel(ranks // stages, stages)
        torch.set_default_dtype(torch.bfloat16)
        stack.callback(torch.set_default_dtype, torch.float32)
        with torch.device("cpu"):
            model = initialize_model(config)
    type(current_platform).is_cpu = lambda self: False  # the CPU's packing needs compiled operators
    # As with the Triton back end, which keeps the bytes of experts as they are.
    for method in (UnquantizedFusedMoEMethod, Fp8MoEMethod):
        method._setup_kernel = lambda *args, **options: None
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))

    def load(weights):
        with set_current_vllm_config(config), disable_mtp_completeness_check():
            return model.load_weights(weights)

    return model, load, config
