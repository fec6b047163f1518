"""The integration that README shows is run as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from held_port import HeldPort

torch = pytest.importorskip("torch")

README = Path(__file__).resolve().parents[2] / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def test_integration_as_it_stands(shm_files: set[str], held_port: HeldPort) -> None:
    trainer_code, rollout_code, _ = python_blocks()  # that of Megatron is run in trainers/test_megatron_training.py
    lines = [line for line in (trainer_code + rollout_code).splitlines() if line.strip()]
    assert len(lines) <= 10
    port = str(held_port.number)
    trainer_code, rollout_code = (code.replace("7070", port) for code in (trainer_code, rollout_code))

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
    policy = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(model: torch.nn.Module, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[:-1]), batch[1:]).backward()
        optimizer.step()

    trainer: dict[str, object] = {"model": model, "batches": torch.randint(0, 50, (3, 9)), "train": train}
    exec(compile(trainer_code, f"{README}: trainer", "exec"), trainer)
    manager = trainer["manager"]
    try:

        def rounds() -> Iterator[bool]:
            yield True
            train(model, torch.randint(0, 50, (9,)))
            manager.offload(version=4)  # type: ignore[attr-defined]
            manager.wait_ready()  # type: ignore[attr-defined]
            yield True
            yield False

        going = rounds()
        rollout: dict[str, object] = {"policy": policy, "generate": lambda _: next(going)}
        exec(compile(rollout_code, f"{README}: rollout", "exec"), rollout)
        receiver = rollout["receiver"]
        assert receiver.version.number == 4  # type: ignore[attr-defined]
        for name, tensor in model.state_dict().items():
            own = policy.state_dict()[name]
            assert torch.equal(own.view(torch.int16), tensor.to(torch.bfloat16).view(torch.int16)), name
        receiver.close()  # type: ignore[attr-defined]
    finally:
        manager.close()  # type: ignore[attr-defined]
