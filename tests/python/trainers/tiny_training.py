"""Megatron's own training of a tiny model on the CPU: its schedules, data parallelism and distributed optimizer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from tiny_families import VOCAB
from tiny_megatron import on_cpu

TOKENS = 16
SEQUENCES = 2
MICROBATCHES = 4


class Training:
    """As Megatron's own trainer sets it up. The next forward gathers the new parameters."""

    def __init__(self, chunks: list[Any]) -> None:
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            overlap_grad_reduce=True,
            grad_reduce_in_fp32=True,
        )
        adam = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=chunks[0].config.bf16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            clip_grad=1.0,
        )
        with on_cpu():
            self.chunks = [DistributedDataParallel(chunk.config, ddp, _in_bf16(chunk)) for chunk in chunks]
            self._optimizer = get_megatron_optimizer(adam, self.chunks, use_gloo_process_groups=False)
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = finalize_model_grads
            chunk.config.grad_scale_func = self._optimizer.scale_loss
            pauses = [chunk.no_sync for chunk in self.chunks]
            chunk.config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]

    def step(self, number: int) -> list[float]:
        """The loss of this rank's sequences, in the last stage; nothing in others."""
        shuffled = torch.Generator().manual_seed(number * 1000 + parallel_state.get_data_parallel_rank())
        with on_cpu():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            batches = [_batch(shuffled) for _ in range(MICROBATCHES)]
            losses = get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=[iter(batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=MICROBATCHES,
                seq_length=TOKENS,
                micro_batch_size=SEQUENCES,
                forward_only=False,
            )
            assert self._optimizer.step()[0]
        return [torch.stack(losses).mean().item()] if losses else []

    def gather(self) -> None:
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)


def _in_bf16(chunk: Any) -> Any:
    if not chunk.config.bf16:
        return chunk
    wrapped = Float16Module(chunk.config, chunk)
    for module in chunk.modules():  # what that one has rounded, and Megatron's trainer has in fp32
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    return wrapped


def _batch(shuffled: torch.Generator) -> torch.Tensor:
    """Sequences that can be learned: each token follows from the one before."""
    tokens = [torch.randint(0, VOCAB, (SEQUENCES,), generator=shuffled)]
    for _ in range(TOKENS):
        tokens.append((3 * tokens[-1] + 1) % VOCAB)
    return torch.stack(tokens, 1)


def _forward(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    places = torch.arange(TOKENS).expand(SEQUENCES, TOKENS)
    masked = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    mask = torch.ones(SEQUENCES, TOKENS)
    return model(tokens[:, :-1], places, masked, labels=tokens[:, 1:], loss_mask=mask), _loss


def _loss(of_tokens: torch.Tensor) -> Any:
    loss = of_tokens.float().mean()
    return loss, loss.detach().clone()  # Megatron divides the first where it is
