"""A receiver that takes what a directory has: all of it or nothing, and afterwards the trainer's versions again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import errors

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


def model(fill: float) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 1))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(fill)
    return made


def snapshot(directory: Path, **changes: Any) -> Path:
    """Of weights that differ everywhere; `changes` by tensor, None: it is missing."""
    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    tensors = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model(0).state_dict().items()}
    tensors |= {name.replace("_", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    safetensors.save_file(kept, directory / "model.safetensors")
    return directory


def test_a_directory_by_asyncio(segment_name: str, tmp_path: Path) -> None:
    trained, served = model(1.0), model(0.0)

    async def run(endpoint: str) -> None:
        async with await deltasync.AsyncReceiver.connect(endpoint, module=served) as receiver:
            for last in (await receiver.prepare(directory=directory), await receiver.update(directory=directory)):
                assert last.version.label == str(directory)
            with pytest.raises(errors.InvalidArgument, match="not both"):
                await receiver.update(1, directory=directory)

    directory = snapshot(tmp_path)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        asyncio.run(run(manager.endpoint))
    expected = safetensors.load_file(directory / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in served.state_dict().items())


@pytest.mark.parametrize("policy", ["stage", "in_place"])
@pytest.mark.parametrize("shadow", [False, True])
def test_a_directory_and_then_versions_again(policy: str, shadow: bool, segment_name: str, tmp_path: Path) -> None:
    trained, served = model(1.0), model(0.0)
    directory = snapshot(tmp_path / "snapshot")
    expected = safetensors.load_file(directory / "model.safetensors")
    with (
        deltasync.WeightManager(trained, name=segment_name) as manager,
        deltasync.Receiver(manager.endpoint, module=served, shadow=shadow, full_update_policy=policy) as receiver,
    ):
        manager.offload()
        receiver.update()
        report = receiver.update(directory=directory)
        assert report.mode == "full" and report.wire_bytes == 0
        assert receiver.version is not None and receiver.version.epoch == 1
        assert receiver.version.label == str(directory)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in served.state_dict().items())
        assert receiver.attest() == []
        # Nothing is new at the trainer, and yet all comes.
        assert receiver.update().mode == "full"
        assert receiver.version.number == 1 and served[0].weight.eq(1.0).all()
        receiver.update(directory=directory)
        manager.offload(model(2.0))
        manager.wait_ready()
        assert receiver.update().mode == "full"
        assert served[0].weight.eq(2.0).all() and receiver.attest() == []
        manager.offload(model(3.0))
        manager.wait_ready()
        assert receiver.update().mode == "delta"


def test_a_directory_is_rolled_back(segment_name: str, tmp_path: Path) -> None:
    served = model(0.0)
    with (
        deltasync.WeightManager(model(1.0), name=segment_name) as manager,
        deltasync.Receiver(manager.endpoint, module=served) as receiver,
    ):
        manager.offload()
        receiver.update()
        receiver.update(directory=snapshot(tmp_path))
        before = receiver.rollback()
        assert before is not None and before.number == 1 and served[0].weight.eq(1.0).all()
        prepared = receiver.prepare(directory=tmp_path)
        prepared.wait(60)
        assert served[0].weight.eq(1.0).all()  # staged only
        receiver.commit()
        assert not served[0].weight.eq(1.0).any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"0_bias": None}, "it lacks 0.bias"),
        ({"2_bias": torch.zeros(1)}, "nothing takes 2.bias"),
        ({"0_weight": torch.zeros(300, 200)}, r"0.weight is F32 \[300, 200\], not F32 \[200, 300\]"),
        ({"0_weight": torch.zeros(200, 300, dtype=torch.bfloat16)}, "of another dtype: 0.weight is BF16"),
    ],
)
@pytest.mark.parametrize("policy", ["stage", "in_place"])
def test_what_does_not_match_touches_nothing(
    changes: dict[str, Any], says: str, policy: str, segment_name: str, tmp_path: Path
) -> None:
    served = model(0.0)
    with (
        deltasync.WeightManager(model(1.0), name=segment_name) as manager,
        deltasync.Receiver(manager.endpoint, module=served, full_update_policy=policy) as receiver,
    ):
        manager.offload()
        receiver.update()
        with pytest.raises(errors.LayoutMismatch, match=says):
            receiver.update(directory=snapshot(tmp_path, **changes))
        assert receiver.version is not None and receiver.version.number == 1
        assert all(parameter.eq(1.0).all() for parameter in served.parameters())
        assert receiver.update().mode == "up_to_date"


def test_what_is_no_snapshot(segment_name: str, tmp_path: Path) -> None:
    with (
        deltasync.WeightManager(model(1.0), name=segment_name) as manager,
        deltasync.Receiver(manager.endpoint, module=model(0.0)) as receiver,
        deltasync.Receiver(manager.endpoint, directory=tmp_path / "out") as directories,
    ):
        manager.offload()
        with pytest.raises(errors.NotFound):
            receiver.update(directory=tmp_path / "nothing")
        with pytest.raises(errors.InvalidArgument, match="a version or a directory"):
            receiver.update(1, directory=tmp_path)
        file = snapshot(tmp_path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4])
        with pytest.raises(errors.CorruptData):
            receiver.update(directory=tmp_path)
        with pytest.raises(errors.Unsupported, match="a trainer only"):
            directories.update(directory=snapshot(tmp_path))
        assert receiver.update().mode == "full"
