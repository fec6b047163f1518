"""A process of test_nodes_lab.py on a host of a lab. Does what the lines of its input say, and answers in JSON.

lab_rank.py trainer  # with the environment that torchrun makes: a rank with its part of a model of FSDP2
lab_rank.py rollout  # pulls from all trainer hosts, and is told one
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltasync
import torch
import torch.distributed as dist
from deltasync.errors import Error
from same_tensors import require_same
from torch.distributed.fsdp import fully_shard

HERE = Path("..")  # of all hosts
TOKEN = HERE / "token"
LONG_S = 300.0


class Broken(RuntimeError):
    """What a rank is told to throw."""


class Trainer:
    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Embedding(197, 48), torch.nn.Linear(48, 33), torch.nn.LayerNorm(33))
        for layer in (self.model[1], self.model):
            fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        agents: dict[str, Any] = {"listen": "0.0.0.0:7070", "token_file": TOKEN}
        if sys.argv[2:] == ["with-agent"]:
            agents = {"agent": "agent.sock", "advertise": f"{socket.gethostname()}:7070"}
        self.manager = deltasync.WeightManager(self.model, process_group=True, timeout=LONG_S, **agents)
        self.broken = -1

    def offload(self) -> dict[str, Any]:
        self.model(torch.arange(20) + self.rank).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        full = {name: tensor.full_tensor() for name, tensor in self.model.state_dict().items()}
        began = time.monotonic()
        try:
            report = self.manager.offload(self._tensors)
        except (Error, Broken) as error:
            return {"error": type(error).__name__, "why": str(error), "soon": time.monotonic() - began < LONG_S / 2}
        if self.rank == 0:
            torch.save(full, HERE / "version.pt")
        return {"number": report.version.number, "epoch": self.manager.epoch, "endpoints": self.manager.endpoints}

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        for number, item in enumerate(self.model.state_dict().items()):
            if number == 1 and self.broken == self.rank and self.manager.version is not None:
                self.broken = -1
                raise Broken("told to")
            yield item

    def end_agent(self, rank: str) -> dict[str, Any]:
        if int(rank) == self.rank and self.manager.agent is not None:
            os.kill(self.manager.agent.pid, 9)
        return {}

    def fail_next(self, rank: str) -> dict[str, Any]:
        self.broken = int(rank)
        return {}

    def end(self) -> dict[str, Any]:
        dist.barrier()
        self.manager.close()
        dist.destroy_process_group()
        return {}


class Rollout:
    receiver: deltasync.Receiver

    def connect(self, endpoint: str) -> dict[str, Any]:
        self.receiver = deltasync.Receiver(endpoint, token_file=TOKEN)
        return {}

    def pull(self, number: str) -> dict[str, Any]:
        mode = self.receiver.update(int(number)).mode
        require_same(dict(self.receiver.tensors()), torch.load(HERE / "version.pt"))
        return {"mode": mode}

    def end(self) -> dict[str, Any]:
        self.receiver.close()
        return {}


def main() -> None:
    torch.set_num_threads(1)
    role: Any = Trainer() if sys.argv[1] == "trainer" else Rollout()
    print(json.dumps({"did": "start"}), flush=True)
    for line in sys.stdin:
        name, *words = line.split()
        act: Callable[..., dict[str, Any]] = getattr(role, name)
        print(json.dumps({"did": name, **act(*words)}), flush=True)
        if name == "end":
            return


main()
