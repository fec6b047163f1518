"""An engine of several ranks that has a control service: its ranks are threads of this process, or processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltasync
import torch.distributed as dist
from control_fleet import Client, Engine, model
from deltasync import errors

RANKS = 3


class Fleet:
    """A trainer, and an engine whose ranks are threads of this process. Rank 0 generates."""

    def __init__(self, name: str, **control: Any) -> None:
        self.name = name
        self.trainer = deltasync.WeightManager(model(1.0), name=name)
        self.trainer.offload(model(1.0), version=1)
        self.store = dist.HashStore()
        self.modules = [model(0.0) for _ in range(RANKS)]
        self.receivers = [self.receiver(rank) for rank in range(RANKS)]
        self.followers = {rank: self.follower(rank) for rank in range(1, RANKS)}
        self.engine = Engine(self.modules[0])
        self.control = deltasync.RolloutControl(
            self.engine, self.receivers[0], ranks=self.group(0), timeout=control.pop("timeout", 30), **control
        )
        self.client = Client(self.control.endpoint)

    def group(self, rank: int) -> deltasync.RankGroup:
        return deltasync.RankGroup(self.store, rank, RANKS, name=self.name)

    def receiver(self, rank: int) -> deltasync.Receiver:
        return deltasync.Receiver(self.trainer.endpoint, module=self.modules[rank], shadow=True, name=f"rank {rank}")

    def follower(self, rank: int) -> deltasync.RankFollower:
        return deltasync.RankFollower(self.receivers[rank], self.group(rank))

    def train(self, value: float) -> None:
        self.trainer.wait_ready(timeout=60)
        self.trainer.offload(model(value))
        self.trainer.wait_ready(timeout=60)

    @property
    def values(self) -> list[float]:
        return [module.weight[0, 0].item() for module in self.modules]

    @property
    def numbers(self) -> list[int | None]:
        return [receiver.version.number if receiver.version else None for receiver in self.receivers]

    def close(self) -> None:
        self.control.close()
        for follower in self.followers.values():
            follower.close()
        self.engine.close()
        for receiver in self.receivers:
            receiver.close()
        self.trainer.close()
        assert not self.engine.torn


def update(client: Client, status: int = 200, **info: Any) -> str:
    """What is wrong. The engine is open afterwards, if it has weights to be open with."""
    client.post("/v1/pause")
    answer = client.post("/v1/update_weights", info, status)
    client.send("POST", "/v1/resume")
    return str(answer["error_message"])


def restart(fleet: Fleet, rank: int) -> None:
    """As another process: with memory of its own."""
    fleet.followers.pop(rank).close()
    fleet.receivers[rank].close()
    fleet.modules[rank] = model(0.0)
    fleet.receivers[rank] = fleet.receiver(rank)
    fleet.followers[rank] = fleet.follower(rank)


def serves(fleet: Fleet) -> bool:
    try:
        fleet.control.admit()
    except errors.Error:
        return False
    return True


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


PROCESS = """
import sys, deltasync, torch
import torch.distributed as dist
from datetime import timedelta
endpoint, port, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
module = torch.nn.Linear(256, 128)
receiver = deltasync.Receiver(endpoint, module=module)
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
follower = deltasync.RankFollower(receiver, deltasync.RankGroup(store, rank, ranks, name="engine"))
print("ready", flush=True)
for _ in sys.stdin:
    print(module.weight[0, 0].item(), flush=True)
follower.close()
"""


class Process:
    def __init__(self, script: Path, endpoint: str, port: int, rank: int) -> None:
        command = [sys.executable, str(script), endpoint, str(port), str(rank), str(RANKS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdin is not None
        self.out, self.input = self.process.stdout, self.process.stdin
        assert self.out.readline().strip() == "ready"

    def value(self) -> float:
        self.input.write("\n")
        self.input.flush()
        return float(json.loads(self.out.readline()))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.input.close()
        self.out.close()
