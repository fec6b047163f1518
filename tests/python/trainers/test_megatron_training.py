"""Training on the real Megatron: each version that receivers get is the checkpoint that Megatron itself saves."""

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
from gloo_ranks import run_ranks  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_megatron import Parallel, Training  # noqa: E402

STEPS = 20
LONG_S = 300.0


def same_bits(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", Parallel(tp=2, pp=2, ep=2, etp=1, dp=2)),
        ("llama_tied", Parallel(pp=2, vpp=2, dp=2)),
        ("gpt_oss", Parallel(tp=2, ep=2, etp=1)),  # gate and up alternate
    ],
    ids=str,
)
def test_each_version_is_what_megatron_saves(whole: Any, name: str, layout: Parallel, tmp_path: Path) -> None:
    model = whole(name, torch.bfloat16)
    saved = [tmp_path / f"saved-{step}" for step in range(STEPS + 1)]
    received = [tmp_path / f"received-{step}.safetensors" for step in range(STEPS + 1)]

    def train(rank: int) -> list[str]:
        chunks = model.chunks(layout)
        training = Training(model.family, layout, chunks, model.dtype)
        modes = []
        segment = f"pytest-{os.getppid()}-{name}"
        with deltasync.WeightManager(training.chunks, hf=model.hf, name=segment, timeout=LONG_S) as manager:
            receiver = deltasync.Receiver(manager.endpoint, timeout=LONG_S) if rank == 0 else None
            for step in range(STEPS + 1):
                if step:
                    training.step(step)
                manager.offload(training.chunks, version=step + 1)
                if receiver is not None:
                    modes.append(receiver.update(manager.version).mode)
                    save_file({name: tensor.clone() for name, tensor in receiver.tensors()}, received[step])
                    saved[step].mkdir()
                dist.barrier()
                training.gather()  # what saves a checkpoint does it, too
                tiny.save(chunks, str(saved[step]))
            if receiver is not None:
                receiver.close()
        return modes

    modes = run_ranks(layout.world, train, tmp_path)[0]
    assert modes[1:] == [modes[1]] * STEPS and modes[1] != modes[0]

    def compare(rank: int) -> list[str]:
        (unsharded,) = model.chunks(Parallel())
        wrong, before = [], None
        for step, directory in enumerate(saved):
            tiny.load([unsharded], str(directory))
            expected, got = model.to_hf(unsharded), load_file(received[step])
            assert got.keys() == expected.keys()
            wrong += [f"step {step}: {name}" for name in expected if not same_bits(got[name], expected[name])]
            if before is not None:
                wrong += [f"step {step}: {name} is as before" for name in got if same_bits(got[name], before[name])]
            before = got
        return wrong

    assert run_ranks(1, compare, tmp_path) == [[]]


def test_what_is_offloaded_first_is_proved(whole: Any, tmp_path: Path) -> None:
    model = whole("llama")

    def publish(rank: int) -> str:
        chunks = model.chunks(Parallel(tp=2))
        with torch.no_grad():
            chunks[0].decoder.layers[1].self_attention.linear_proj.weight[3, 2] += 1
        segment = f"pytest-{os.getppid()}-proved"
        with deltasync.WeightManager(chunks, hf=model.hf, name=segment, timeout=LONG_S) as manager:
            with pytest.raises(deltasync.errors.LayoutMismatch) as raised:
                manager.offload()
            assert manager.version is None
        with deltasync.WeightManager(chunks, hf=model.hf, name=segment, prove="off", timeout=LONG_S) as manager:
            manager.offload()
        return str(raised.value)

    first, second = run_ranks(2, publish, tmp_path)
    assert first == second
    assert "model.layers.1.self_attn.o_proj.weight" in first
