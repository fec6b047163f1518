"""Models on the real Megatron, gathered: each rank gets each tensor as the unsharded model has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")

import deltasync  # noqa: E402
import tiny_megatron as tiny  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deltasync import _nodes, megatron  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from test_megatron_export import LAYOUTS  # noqa: E402
from test_megatron_training import LONG_S, same_bits  # noqa: E402
from tiny_megatron import Parallel  # noqa: E402
from tiny_training import Training  # noqa: E402

STEPS = 4


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_each_rank_gets_what_the_unsharded_model_has(whole: Any, name: str, layout: Parallel, tmp_path: Path) -> None:
    model = whole(name)
    bucket = 64 << 10

    def export(rank: int) -> Any:
        plan = megatron.plan(model.chunks(layout), model.hf, mode="gathered")
        got = megatron.export_hf_named_params(plan, bucket_bytes=bucket)
        names, wrong = [], []
        for tensor, value in got:
            names.append(tensor)
            expected = model.tensors[tensor]
            if value.dtype != expected.dtype or not torch.equal(value, expected):
                wrong.append(tensor)
        return names, wrong, got.temporary_bytes_max, plan.layout.names()

    largest = max(tensor.nbytes for tensor in model.tensors.values())
    for names, wrong, most, wanted in run_ranks(layout.world, export, tmp_path):
        assert not wrong
        assert names == wanted
        assert set(names) == set(model.tensors)
        assert most <= 2 * max(bucket, largest + bucket)


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_version_is_what_megatron_saves(whole: Any, nodes: int, tmp_path: Path) -> None:
    layout = Parallel(tp=2, pp=2, ep=2, etp=1)
    model = whole("qwen3_moe", torch.bfloat16)
    saved = [tmp_path / f"saved-{step}" for step in range(STEPS)]

    def train(rank: int) -> list[Any]:
        node = rank * nodes // layout.world
        _nodes.this_node = lambda: f"node{node} boot"
        chunks = model.chunks(layout)
        training = Training(chunks)
        options = {"export": "gathered", "bucket_bytes": 64 << 10, "advertise": "127.0.0.1", "timeout": LONG_S}
        segment = f"pytest-{os.getppid()}-gathered-{node}"
        versions = []
        with deltasync.WeightManager(training.chunks, hf=model.hf, name=segment, **options) as manager:
            receiver = None
            for step in range(STEPS):
                if step:
                    training.step(step)
                report = manager.offload(training.chunks, version=step + 1)
                assert 0 < report.temporary_bytes_max <= 2 * (64 << 10) and report.gather_s > 0
                if rank == 0:
                    receiver = receiver or deltasync.Receiver(manager.endpoint, timeout=LONG_S)
                    receiver.update(manager.version)
                    versions.append({name: tensor.clone() for name, tensor in receiver.tensors()})
                    saved[step].mkdir()
                dist.barrier()
                training.gather()  # what saves a checkpoint does it, too
                tiny.save(chunks, str(saved[step]))
            if receiver is not None:
                receiver.close()
        return versions

    versions = run_ranks(layout.world, train, tmp_path)[0]

    def compare(rank: int) -> list[str]:
        (unsharded,) = model.chunks(Parallel())
        wrong = []
        for step, directory in enumerate(saved):
            tiny.load([unsharded], str(directory))
            expected, got = model.to_hf(unsharded), versions[step]
            assert got.keys() == expected.keys()
            wrong += [f"step {step}: {name}" for name in expected if not same_bits(got[name], expected[name])]
        return wrong

    assert run_ranks(1, compare, tmp_path) == [[]]
