"""One trainer rank of test_vllm_trainer.py, started by torchrun. vllm_trainer_worker.py REPORT SEGMENT"""

import os
import sys
from functools import cached_property
from pathlib import Path

import deltasync
import torch
import torch.distributed as dist
from deltasync import errors
from deltasync.engines.vllm_trainer import DeltasyncTrainerInitInfo
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_ranks import run_checks
from vllm.distributed.weight_transfer import (
    ModuleSource,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

REPORT, SEGMENT = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])


class Client:
    """Plays the engine: a receiver, and what it was told."""

    def __init__(self):
        self.receiver, self.label, self.calls = None, None, 0

    def init_weight_transfer_engine(self, info):
        self.calls += 1
        self.receiver = deltasync.Receiver(info["agent"])

    def start_weight_update(self):
        self.calls += 1

    def update_weights(self, info):
        self.receiver.update(info["version"])

    def finish_weight_update(self, weight_version=None):
        self.label = weight_version


class Halves(WeightSource):
    """Each rank has half of the rows; all gather them."""

    def __init__(self, rows):
        self.rows = rows

    @cached_property
    def metadata(self):
        return [ParamMeta("weight", self.rows.dtype, (2 * len(self.rows), *self.rows.shape[1:]))]

    def iter_full(self):
        parts = [torch.empty_like(self.rows) for _ in range(2)]
        dist.all_gather(parts, self.rows)
        yield "weight", torch.cat(parts)


def start(name, client, source, rank=RANK):
    info = DeltasyncTrainerInitInfo(rank=rank, manager={"name": f"{SEGMENT}-{name}"}, timeout=60)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def expect(client, number, tensors):
    if RANK != 0:
        assert client.calls == 0
        return
    assert client.label == str(number)
    got = dict(client.receiver.tensors())
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(got[name], tensor), name


def fsdp():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 33), torch.nn.Linear(33, 8, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    client = Client()
    engine = start("fsdp", client, ModuleSource(model))
    for number in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(0.01 * number)
        engine.send_weights()
        full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
        expect(client, number, {name: tensor.detach() for name, tensor in full.items()})
    engine.shutdown()


def gathered():
    rows, client = torch.full((3, 5), float(RANK)), Client()
    engine = start("gathered", client, Halves(rows))
    for number in (1, 2):
        rows += number
        engine.send_weights()
        expect(client, number, dict(Halves(rows).iter_full()))
    engine.shutdown()


def ranks():
    """The two say each other's number."""
    try:
        start("ranks", Client(), ModuleSource(torch.nn.Linear(2, 2)), rank=1 - RANK)
    except errors.InvalidArgument as error:
        assert f"rank {1 - RANK} is rank {RANK} of the process group" in str(error), error
    else:
        raise AssertionError("no error")


run_checks(REPORT, RANK, {"fsdp": fsdp, "gathered": gathered, "ranks": ranks})
