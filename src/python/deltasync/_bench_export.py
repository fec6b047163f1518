"""``python -m deltasync.bench export``: what ranks of a trainer wait for, and what memory they take, if each writes its
own part of an MoE-like model ("auto"), and if all tensors are put together first ("gathered"). The processes of one
host, over gloo. ``deltasync bench export`` is the former without Python."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import WeightManager

_PAGE = """
name = "bench"
architectures = ["BenchForCausalLM"]
[[rows]]
mcore = "{L}.qkv"
hf = "layers.{L}.qkv"
[[rows]]
mcore = "{L}.proj"
hf = "layers.{L}.proj"
[[rows]]
mcore = "{L}.norm"
hf = "layers.{L}.norm"
[[rows]]
mcore = "{L}.{E}.fc"
hf = "layers.{L}.experts.{E}.fc"
"""
_HIDDEN, _EXPERTS_OF_RANK = 1024, 2


@dataclass
class _Shard:
    """As Megatron's ShardedTensor."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int = 0
    prepend_axis_num: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


def _shapes(ranks: int) -> dict[str, tuple[int, ...]]:
    """Of a layer."""
    experts = {f"{expert}.fc": (_HIDDEN, 3 * _HIDDEN // 2) for expert in range(ranks * _EXPERTS_OF_RANK)}
    return {"qkv": (3 * _HIDDEN, _HIDDEN), "proj": (_HIDDEN, _HIDDEN), "norm": (_HIDDEN,), **experts}


def _model(layers: int, rank: int, ranks: int) -> Any:
    """What a rank has: rows or columns of attention, some experts, and all of the norms."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shards: list[_Shard] = []
            for layer in range(layers):
                for name, shape in _shapes(ranks).items():
                    own, offset = list(shape), [0] * len(shape)
                    if name in ("qkv", "proj"):
                        dim = 0 if name == "qkv" else 1
                        own[dim] //= ranks
                        offset[dim] = rank * own[dim]
                    elif name != "norm" and int(name.split(".")[0]) // _EXPERTS_OF_RANK != rank:
                        continue
                    tensor = torch.nn.Parameter(torch.randn(own).to(torch.bfloat16))
                    self.register_parameter(f"{layer}.{name}".replace(".", "_"), tensor)
                    replica = rank if name == "norm" else 0
                    self.shards.append(_Shard(f"{layer}.{name}", tensor, shape, tuple(offset), replica))

        def sharded_state_dict(self, metadata: dict[str, Any]) -> list[_Shard]:
            return self.shards

    return Model()


def _write_directory(directory: Path, layers: int, ranks: int) -> int:
    """Weights of zeros, which take no space. Their bytes."""
    header, at = {}, 0
    for layer in range(layers):
        for name, shape in _shapes(ranks).items():
            hf = f"layers.{layer}.{name}" if name in ("qkv", "proj", "norm") else f"layers.{layer}.experts.{name}"
            end = at + 2 * math.prod(shape)
            header[hf] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
            at = end
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (directory / "config.json").write_text(json.dumps({"architectures": ["BenchForCausalLM"]}))
    (directory / "bench.toml").write_text(_PAGE)
    return at


def _rank(
    rank: int, ranks: int, directory: Path, layers: int, mode: str, bucket_bytes: int, rounds: int, tell: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store-{mode}", rank=rank, world_size=ranks)
    model = _model(layers, rank, ranks)
    options: dict[str, Any] = {"tables": [directory / "bench.toml"], "export": mode, "bucket_bytes": bucket_bytes}
    name = f"bench-export-{os.getppid()}"
    with WeightManager(model, hf=directory, prove="off", name=name, timeout=300.0, **options) as manager:
        reports = []
        for number in range(rounds + 2):  # the first two write to pages that are new to the ranks
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 1
            dist.barrier()
            report = manager.offload(version=number + 1)
            manager.wait_ready()
            reports.append(report)
        assert manager._export is not None
        wholes = manager._export.plan.gathered()
        dist.barrier()
    tell.send(
        {
            "total_s": [report.total_s - report.guard_s for report in reports[2:]],
            "gather_s": max(report.gather_s for report in reports[2:]),
            "convert_s": max(report.convert_s for report in reports[2:]),
            "temporary_bytes_max": max(report.temporary_bytes_max for report in reports),
            "written_bytes": reports[-1].nbytes,
            "sent_bytes": sum(s.nbytes for whole in wholes for s in whole.shares if rank == s.rank != whole.home),
        }
    )
    dist.destroy_process_group()


def measure(model_bytes: int, ranks: int, bucket_bytes: int, rounds: int) -> dict[str, Any]:
    layer_bytes = sum(2 * math.prod(shape) for shape in _shapes(ranks).values())
    layers = max(1, model_bytes // layer_bytes)
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        nbytes = _write_directory(directory, layers, ranks)
        result: dict[str, Any] = {"case": "export", "ranks": ranks, "model_bytes": nbytes, "bucket_bytes": bucket_bytes}
        for mode in ("auto", "gathered"):
            pipes = [fork.Pipe(duplex=False) for _ in range(ranks)]
            common = (ranks, directory, layers, mode, bucket_bytes, rounds)
            processes = [fork.Process(target=_rank, args=(rank, *common, pipes[rank][1])) for rank in range(ranks)]
            for process in processes:
                process.start()
            for _, end in pipes:
                end.close()
            said = [pipe.recv() for pipe, _ in pipes]  # EOFError if a rank has failed, which says why itself
            for process in processes:
                process.join()
            slowest = [max(times) for times in zip(*(one["total_s"] for one in said), strict=True)]
            result[mode] = {
                "total_s": statistics.median(slowest),
                **{key: max(one[key] for one in said) for key in ("gather_s", "convert_s", "temporary_bytes_max")},
                **{key: sum(one[key] for one in said) for key in ("written_bytes", "sent_bytes")},
            }
    return result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deltasync.bench export", description=__doc__)
    parser.add_argument("--model-gib", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    result = measure(int(options.model_gib * (1 << 30)), options.ranks, options.bucket_mib << 20, options.rounds)
    print(json.dumps(result), flush=True)
    return 0
