"""A LoRA adapter into the slots of a real vLLM, over its real routes."""

import json
import subprocess
import sys

import pytest
import torch
from checkpoints import write_config
from deltasync import errors
from deltasync.adapters import lora
from deltasync.adapters.servers import VllmServer
from vllm_replica import HERE, needs_vllm

pytestmark = pytest.mark.engines
RANK, ALPHA = 4, 8
NAME = "base_model.model.model.layers.0.self_attn.o_proj"


@pytest.fixture
def server(tmp_path, held_port):
    needs_vllm()
    model = tmp_path / "model"
    model.mkdir()
    write_config("qwen3", model)
    log = (tmp_path / "server.log").open("w+")
    command = [sys.executable, str(HERE / "vllm_lora_server.py"), str(model), str(held_port.number)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        url = process.stdout.readline().strip()
        assert url, (tmp_path / "server.log").read_text()[-4000:]
        config = json.loads((model / "config.json").read_text())
        heads = config["num_attention_heads"] * config["head_dim"]
        yield VllmServer(url), (config["hidden_size"], heads)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        log.close()


def adapter(shape, seed, rank=RANK):
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{NAME}.lora_A.weight": torch.randn(rank, inputs, generator=generator).bfloat16(),
        f"{NAME}.lora_B.weight": torch.randn(outputs, rank, generator=generator).bfloat16(),
    }


def manager(tensors, name, rank=RANK):
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": ["o_proj"], "bias": "none"}
    return lora.manager(tensors, config, name=name)


def slot_of(server):
    return server.http.get("/slot", timeout=30)


def expect(server, tensors):
    """vLLM keeps B times alpha / rank, and zeros beyond the adapter's rank."""
    slot = slot_of(server)
    a, b = (torch.tensor(slot[one]).bfloat16() for one in "ab")
    assert torch.equal(a[:RANK], tensors[f"{NAME}.lora_A.weight"])
    assert torch.equal(b[:, :RANK], tensors[f"{NAME}.lora_B.weight"] * (ALPHA / RANK))
    assert not a[RANK:].any() and not b[:, RANK:].any()
    assert not slot["paused"]


def test_versions_reach_the_slot(server, segment_name, tmp_path):
    server, shape = server
    before, after = adapter(shape, 1), adapter(shape, 1)
    after[f"{NAME}.lora_B.weight"][3, 1] += 1
    with manager(before, segment_name) as trainer:
        trainer.offload(before)
        with lora.AdapterSlot(server, "policy", trainer.endpoint, directory=tmp_path / "policy", timeout=60) as slot:
            assert slot.update().number == 1
            expect(server, before)
            trainer.offload(after)
            assert slot.update(2).number == 2
            expect(server, after)
            assert slot.update().number == 2
        loads = slot_of(server)["loads"]
        assert len(loads) == len(set(loads)) == 2  # once each, by paths that tell the versions apart
        assert server.loaded_adapter("policy", 30) == loads[-1]


def test_what_vllm_refuses_leaves_the_adapter_before(server, segment_name, tmp_path):
    server, shape = server
    good, wide = adapter(shape, 1), adapter(shape, 2, rank=16)
    with manager(good, segment_name) as trainer:
        trainer.offload(good)
        with lora.AdapterSlot(server, "policy", trainer.endpoint, directory=tmp_path / "policy") as slot:
            slot.update()
    with manager(wide, f"{segment_name}-wide", rank=16) as trainer:
        trainer.offload(wide)
        with lora.AdapterSlot(server, "policy", trainer.endpoint, directory=tmp_path / "wide") as slot:
            for _ in range(2):  # it is not taken for loaded the second time either
                with pytest.raises(errors.Error, match="rank"):
                    slot.update()
    expect(server, good)


def test_a_directory_that_the_server_does_not_see(server, segment_name, tmp_path):
    server, shape = server
    good = adapter(shape, 1)
    options = {"directory": tmp_path / "policy", "seen_as": "/not/there"}
    with manager(good, segment_name) as trainer:
        trainer.offload(good)
        with lora.AdapterSlot(server, "policy", trainer.endpoint, **options) as slot:
            with pytest.raises(errors.NotFound, match="/not/there"):
                slot.update()
    assert not slot_of(server)["paused"]
