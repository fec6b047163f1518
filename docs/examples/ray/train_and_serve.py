"""A trainer and engines as actors of a Ray cluster: agents on the trainer's nodes, relays on the engines'.

pip install deltasync ray torch
python train_and_serve.py [--trainers N] [--engines N] [--steps N]     # each with a CPU of the cluster, or of this host
"""

from __future__ import annotations

import argparse
import hashlib
import socket
from collections.abc import Mapping
from typing import Any

import deltasync
import deltasync.ray
import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.fsdp import fully_shard

LONG_S = 300


def build(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of every bit."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@ray.remote
class Trainer:
    """A rank with its shard of the model (FSDP2)."""

    def address(self) -> str:
        with socket.create_server(("", 0)) as probe:
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, fleet: deltasync.ray.Fleet, master: str, rank: int, ranks: int) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://{master}", rank=rank, world_size=ranks)
        self.model = build(seed=0)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.manager = deltasync.WeightManager(
            self.model, dtype="bfloat16", process_group=True, timeout=LONG_S, **fleet.trainer_options()
        )

    def step(self) -> tuple[deltasync.Version, str]:
        """Trains and publishes; the version, and the digest of what it has to be."""
        tokens = torch.randint(0, 1000, (8,))
        torch.nn.functional.cross_entropy(self.model(tokens), tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        version = self.manager.offload().version
        return version, digest({k: v.full_tensor().bfloat16() for k, v in self.model.state_dict().items()})

    def close(self) -> None:
        self.manager.close()
        dist.destroy_process_group()


@ray.remote
class Engine:
    """Has the model in place, as a rollout engine does."""

    def __init__(self, fleet: deltasync.ray.Fleet) -> None:
        self.model = build(seed=1).bfloat16()
        self.options = fleet.receiver_options()
        self.receiver: deltasync.Receiver | None = None

    def update(self, version: deltasync.Version) -> tuple[str, str]:
        """How the version came, and the digest of what is there now."""
        if self.receiver is None:
            self.receiver = deltasync.Receiver(module=self.model, timeout=LONG_S, **self.options)
        mode = self.receiver.update(version).mode
        return mode, digest(self.model.state_dict())

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()


class Job:
    """Ranks of a trainer and engines, each with a bundle of one placement group, and the fleet between them."""

    def __init__(self, trainers: int, engines: int, **fleet: Any) -> None:
        self.group = placement_group([{"CPU": 1}] * (trainers + engines), strategy="SPREAD")
        trainer_nodes = deltasync.ray.nodes_of(self.group, range(trainers))
        engine_nodes = deltasync.ray.nodes_of(self.group, range(trainers, trainers + engines))
        self.fleet = deltasync.ray.Fleet(trainer=trainer_nodes, rollout=engine_nodes, **fleet)
        self.trainers = self.start_trainers(trainers)
        self.engines = [Engine.options(**self._in(trainers + i)).remote(self.fleet) for i in range(engines)]

    def start_trainers(self, ranks: int) -> list[Any]:
        trainers = [Trainer.options(**self._in(bundle)).remote() for bundle in range(ranks)]
        master = ray.get(trainers[0].address.remote(), timeout=LONG_S)
        joined = [trainer.join.remote(self.fleet, master, rank, ranks) for rank, trainer in enumerate(trainers)]
        ray.get(joined, timeout=LONG_S)
        return trainers

    def _in(self, bundle: int) -> dict[str, Any]:
        return {"num_cpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)}

    def step(self) -> tuple[deltasync.Version, list[str]]:
        """Trains, and brings the version to all engines; it, and how it came to each of them."""
        version, wanted = ray.get([trainer.step.remote() for trainer in self.trainers], timeout=LONG_S)[0]
        updated = ray.get([engine.update.remote(version) for engine in self.engines], timeout=LONG_S)
        assert all(found == wanted for _, found in updated), f"version {version}: {updated}, not {wanted}"
        return version, [mode for mode, _ in updated]

    def close(self) -> None:
        ray.get([actor.close.remote() for actor in (*self.engines, *self.trainers)], timeout=LONG_S)
        self.fleet.close()
        remove_placement_group(self.group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    job = Job(args.trainers, args.engines)
    for _ in range(args.steps):
        version, modes = job.step()
        print(f"version {version.number} is on all engines, bit for bit: {', '.join(modes)}")
    job.close()


if __name__ == "__main__":
    main()
