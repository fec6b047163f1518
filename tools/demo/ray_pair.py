"""A trainer and a rollout as Ray actors, on one machine or many: the rollout finds the trainer's agent through Ray.

pip install deltasync ray torch
python tools/demo/ray_pair.py
"""

import deltasync
import ray
import torch
from deltasync.adapters.publisher import Publisher
from deltasync.adapters.ray import find_endpoint, node_address, publish_endpoint


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000)).to(torch.bfloat16)


@ray.remote
class Trainer:
    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.publisher = Publisher(self.model, host=node_address())  # beyond loopback: it makes a token
        publish_endpoint(name, self.publisher.endpoint, token=self.publisher.token)

    def step(self) -> int:
        """Trains, publishes; returns the version's number."""
        tokens = torch.randint(0, 1000, (8,))
        torch.nn.functional.cross_entropy(self.model(tokens).float(), tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.publisher.offload().version.number

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.view(torch.int16) for name, tensor in self.model.state_dict().items()}

    def close(self) -> None:
        self.publisher.close()


@ray.remote
class Rollout:
    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        self.model = build()
        found = find_endpoint(name, 60)
        self.receiver = deltasync.Receiver(found.address, token=found.token, module=self.model)

    def update(self, number: int) -> tuple[str, int]:
        """Brings the model to a version; returns how, and the bytes that it took."""
        report = self.receiver.update(number)
        return report.mode, report.wire_bytes

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.view(torch.int16) for name, tensor in self.model.state_dict().items()}

    def close(self) -> None:
        self.receiver.close()


def main(name: str = "policy", steps: int = 4) -> list[str]:
    """Runs the pair; returns how each step's update was made."""
    rollout, trainer = Rollout.remote(name), Trainer.remote(name)  # in any order: the rollout waits
    modes = []
    for _ in range(steps):
        number = ray.get(trainer.step.remote(), timeout=120)
        mode, wire_bytes = ray.get(rollout.update.remote(number), timeout=120)
        ours, theirs = ray.get([rollout.weights.remote(), trainer.weights.remote()], timeout=120)
        same = all(torch.equal(ours[key], theirs[key]) for key in theirs)
        print(f"version {number}: {mode}, {wire_bytes} bytes, {'identical' if same else 'DIFFERENT'}")
        assert same
        modes.append(mode)
    ray.get([rollout.close.remote(), trainer.close.remote()], timeout=60)
    return modes


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    main()
