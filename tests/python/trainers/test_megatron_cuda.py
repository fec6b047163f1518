"""The real Megatron trains on a CUDA device; transformers' model, on the same device, computes with what arrives.

DELTASYNC_TEST_DEVICE=cpu runs it on the host."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
DEVICE = os.environ.get("DELTASYNC_TEST_DEVICE", "cuda")
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")

import deltasync  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCABULARY, LENGTH = 512, 32


def on_the_device() -> Any:
    if DEVICE == "cuda":
        return contextlib.nullcontext()
    from tiny_megatron import on_cpu

    return on_cpu()


class Trainer:
    """One rank: a llama in bf16 behind Megatron's data parallelism and distributed optimizer."""

    def __init__(self) -> None:
        config = TransformerConfig(
            num_layers=4,
            hidden_size=256,
            ffn_hidden_size=640,
            num_attention_heads=8,
            num_query_groups=4,
            kv_channels=32,
            normalization="RMSNorm",
            layernorm_epsilon=1e-6,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            use_cpu_initialization=DEVICE != "cuda",
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        model = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        model = model.to(DEVICE, torch.bfloat16)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        adam = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, clip_grad=0.0)
        self.model = DistributedDataParallel(config, ddp, model)
        self._optimizer = get_megatron_optimizer(adam, [self.model], use_gloo_process_groups=False)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=DEVICE).expand(tokens.shape)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).triu(1)
        return self.model(tokens, places, mask)

    def step(self, tokens: torch.Tensor) -> float:
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self.logits(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        if DEVICE == "cuda":  # of one rank nothing is to be summed
            self.model.finish_grad_sync()
        assert self._optimizer.step()[0]
        return float(loss)


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    with on_the_device():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        if DEVICE == "cuda":
            model_parallel_cuda_manual_seed(1)
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def served_model(directory: Path) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        torch_dtype=torch.bfloat16,
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return model.to(DEVICE).eval()


def test_what_arrives_computes_what_megatron_computes(one_rank: Any, tmp_path: Path, segment_name: str) -> None:
    served = served_model(tmp_path / "hf")
    trainer = Trainer()
    tokens = torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    with deltasync.WeightManager([trainer.model], hf=tmp_path / "hf", prove="off", name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, attest_commits=True, local="never") as receiver:
            modes, losses = [receiver.update().mode], []
            for number in range(2, 12):
                losses.append(trainer.step(tokens))
                manager.offload()
                modes.append(receiver.update(number).mode)
            assert modes == ["full"] + ["delta"] * 10
            assert receiver.attest() == []
    assert losses[-1] < losses[0] - 0.5
    with torch.no_grad():
        expected, got = trainer.logits(tokens).float(), served(tokens).logits.float()
    # The same weights, rounded to bf16 in another order of operations.
    assert (got - expected).abs().mean() < 0.02 * expected.std()
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95
