"""Megatron-FSDP, which is made for GPUs, over gloo on the CPU: what it asks of streams and devices is nothing here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tiny_megatron as tiny
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from tiny_families import Family
from tiny_megatron import Parallel
from torch.distributed import DeviceMesh
from torch.overrides import TorchFunctionMode


class _Nothing:
    """A stream, or an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Nothing()


class _Devices(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device and str(args[0]).startswith("cuda"):
            return torch.device("cpu")
        return function(*args, **(kwargs or {}))


_MESH = DeviceMesh.from_group


def _mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
    return _MESH(*args, **{**kwargs, "device_type": "cpu"})


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    cuda = {
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": _Nothing,
        "stream": _Nothing,
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "mem_get_info": lambda *_: (1 << 40, 1 << 40),
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": lambda *_: None,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(tiny.on_cpu())
        stack.enter_context(_Devices())
        for name, value in cuda.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", value))
        stack.enter_context(mock.patch.object(DeviceMesh, "from_group", _mesh))
        # 0.16 asks whether modules are Transformer Engine's.
        stack.enter_context(mock.patch.object(mcore_fsdp_adapter, "TELinear", _Nothing, create=True))
        yield


def divided(
    family: Family, layout: Parallel, chunks: list[torch.nn.Module], dtype: torch.dtype
) -> list[torch.nn.Module]:
    """The chunks, of whose parameters each rank keeps some rows."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        num_distributed_optimizer_instances=layout.instances,
        overlap_param_gather=True,
        overlap_grad_reduce=True,
    )
    with on_cpu():
        config = tiny.config_of(family, layout, dtype)
        return [mcore_fsdp_adapter.FullyShardedDataParallel(config, ddp, chunk) for chunk in chunks]
