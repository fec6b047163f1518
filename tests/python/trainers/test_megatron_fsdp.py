"""Megatron-FSDP: DTensors, whose parts are uneven and say by its own functions where they lie; and whole models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")

import deltasync  # noqa: E402
import tiny_fsdp  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor  # noqa: E402
from tiny_megatron import Parallel  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from two_versions import LONG_S, published, require_both  # noqa: E402

#: Rows of each rank: what does not fill a bucket is the next rank's.
ROWS = {"first": [5, 0, 2], "between": [0, 7, 0], "all": [1, 3, 3]}


@pytest.mark.parametrize("replicas", [1, 2])
def test_uneven_parts_arrive_whole(replicas: int, tmp_path: Path) -> None:
    whole = {name: torch.randn(7, 4, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(ROWS)}

    def publish(rank: int) -> Any:
        shape, names = ((3,), ("shard",)) if replicas == 1 else ((replicas, 3), ("replicate", "shard"))
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        at = mesh.get_coordinate()[-1]
        placements = [Replicate(), Shard(0)][-mesh.ndim :]
        state = {}
        for name, rows in ROWS.items():
            first = sum(rows[:at])
            part = whole[name][first : first + rows[at]].clone()
            state[name] = DTensor.from_local(part, mesh, placements, run_check=False, shape=(7, 4), stride=(4, 1))
        segment = f"pytest-{os.getppid()}-uneven-{replicas}"
        got = []
        with deltasync.WeightManager(state, process_group=True, name=segment, timeout=LONG_S) as manager:
            with pytest.raises(deltasync.errors.Error) as raised:
                manager.offload(state, timeout=10)
            said = str(raised.value)
            uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
            for _step in range(2):
                manager.offload(state)
                if rank == 0:
                    with deltasync.Receiver(manager.endpoint, timeout=LONG_S) as receiver:
                        receiver.update(manager.version)
                        got.append({name: tensor.clone() for name, tensor in receiver.tensors()})
                dist.barrier()
                for tensor in state.values():
                    tensor._local_tensor += 1
        return got, said

    results = run_ranks(3 * replicas, publish, tmp_path)
    assert any("uneven_dtensor" in said for _, said in results)
    for step, got in enumerate(results[0][0]):
        assert got.keys() == whole.keys()
        for name, expected in whole.items():
            assert torch.equal(got[name], expected + step), (step, name)


MODELS = [
    ("llama", Parallel(dp=3)),
    ("llama_tied", Parallel(dp=2)),
    ("llama", Parallel(tp=2, dp=2)),
    ("llama", Parallel(dp=4, instances=2)),
    ("qwen3_moe", Parallel(ep=2, dp=4)),
    ("qwen3_moe", Parallel(tp=2, ep=2, etp=1, dp=2)),
]


@pytest.mark.parametrize(("name", "layout"), MODELS, ids=lambda value: str(value))
def test_a_model_is_published_as_the_directory_has_it(whole: Any, name: str, layout: Parallel, tmp_path: Path) -> None:
    model = whole(name)

    def publish(rank: int) -> Any:
        chunks = tiny_fsdp.divided(model.family, layout, model.chunks(layout), torch.float32)
        assert all(isinstance(parameter, DTensor) for chunk in chunks for parameter in chunk.parameters())
        return published(chunks, hf=model.hf)

    require_both(run_ranks(layout.world, publish, tmp_path)[0], model.tensors)


def test_what_is_whole_for_a_forward_is_not_read(whole: Any, tmp_path: Path) -> None:
    model, layout = whole("llama"), Parallel(dp=2)

    def read(rank: int) -> str:
        (chunk,) = tiny_fsdp.divided(model.family, layout, model.chunks(layout), torch.float32)
        plan = deltasync.megatron.plan(chunk, model.hf)
        assert deltasync.megatron.prove(plan, model.hf).identical
        chunk.module._replace_param_with_raw_if_needed()
        with pytest.raises(deltasync.errors.InvalidArgument) as raised:
            plan._pieces.views()
        chunk.module._replace_param_with_distributed_if_needed()
        assert deltasync.megatron.prove(plan, model.hf).identical
        return str(raised.value)

    for said in run_ranks(2, read, tmp_path):
        assert "put all of it together" in said and "after the optimizer" in said


def test_a_model_of_dtensors_is_refused_with_what_to_do(whole: Any, tmp_path: Path) -> None:
    model = whole("llama")

    def make(rank: int) -> str:
        chunks = model.chunks(Parallel())
        mesh = dist.init_device_mesh("cpu", (1,))
        norm = chunks[0].decoder.final_layernorm
        norm.weight = torch.nn.Parameter(DTensor.from_local(norm.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(deltasync.errors.Unsupported) as raised:
            deltasync.megatron.plan(chunks, model.hf)
        return str(raised.value)

    (said,) = run_ranks(1, make, tmp_path)
    assert "decoder.final_layernorm.weight" in said and "none of Megatron-FSDP" in said and "process_group=True" in said
