"""Two versions of a model of Megatron, as a receiver has them."""

from __future__ import annotations

import os
from typing import Any

import deltasync
import torch
import torch.distributed as dist

LONG_S = 300.0


def published(chunks: list[torch.nn.Module], **options: Any) -> list[dict[str, torch.Tensor]]:
    """Each rank calls it; what rank 0's receiver has of each version, with 1 added to all parameters between them. The
    first one is proved."""
    name = f"pytest-{os.getppid()}-two"
    got = []
    with deltasync.WeightManager(chunks, name=name, timeout=LONG_S, **options) as manager:
        for _step in range(2):
            manager.offload(chunks)
            if dist.get_rank() == 0:
                with deltasync.Receiver(manager.endpoint, timeout=LONG_S) as receiver:
                    receiver.update(manager.version)
                    got.append({name: tensor.clone() for name, tensor in receiver.tensors()})
            dist.barrier()
            for chunk in chunks:
                for parameter in chunk.parameters():
                    getattr(parameter, "_local_tensor", parameter).detach().add_(1)  # of a DTensor what is here
    return got


def require_both(got: list[dict[str, torch.Tensor]], first: dict[str, torch.Tensor]) -> None:
    """They are the first one and that plus 1."""
    assert len(got) == 2
    for step, version in enumerate(got):
        assert version.keys() == first.keys()
        for name, expected in first.items():
            assert torch.equal(version[name], expected + step), (step, name)
