"""slime's hook after a version's files are written, and then its requests to an engine behind the control service."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import deltasync
import pytest
from deltasync import errors
from deltasync.adapters.slime import Publish

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
from control_clients import Slime  # noqa: E402
from control_fleet import TOKENS, Engine, model  # noqa: E402

FULL = Namespace(update_weight_mode="full")


@pytest.fixture
def publish(segment_name: str) -> Iterator[Publish]:
    made = Publish(name=segment_name)
    yield made
    made.close()


def write(root: Path, version: int, value: float) -> str:
    directory = root / f"weight_v{version:06d}"
    directory.mkdir()
    safetensors.save_file(model(value).state_dict(), directory / "model.safetensors")
    return str(directory)


def test_what_is_written_is_pulled(publish: Publish, tmp_path: Path) -> None:
    publish(FULL, write(tmp_path, 1, 1.0), [])
    served = model(0.0)
    engine = Engine(served)
    with (
        deltasync.Receiver(publish.endpoint, module=served, shadow=True) as receiver,
        deltasync.RolloutControl(engine, receiver, dialects=["sglang"]) as control,
    ):
        slime = Slime(control.endpoint)
        slime.init()
        slime.update_weights(1)
        assert engine.finish(engine.submit("a")).tokens == [1.0] * TOKENS
        for version in (2, 4):  # one failed
            publish(FULL, write(tmp_path, version, float(version)), [])
            slime.update_weights(version)
            assert engine.finish(engine.submit(str(version))).tokens == [float(version)] * TOKENS
        assert receiver.version is not None and receiver.version.number == 4
    engine.close()
    assert engine.torn == []


def test_what_is_no_whole_version_is_refused(publish: Publish, tmp_path: Path) -> None:
    first = write(tmp_path, 1, 1.0)
    with pytest.raises(errors.Unsupported, match="--update-weight-mode full"):
        publish(Namespace(update_weight_mode="delta"), first, [])
    with pytest.raises(errors.Unsupported, match="no whole version"):
        publish(FULL, str(tmp_path), [])
    assert publish.endpoint == ""
    publish(FULL, first, [])
    with pytest.raises(errors.InvalidArgument, match="version 1 comes after version 1"):
        publish(FULL, first, [])


def test_the_first_rank_publishes(publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    publish(FULL, write(tmp_path, 1, 1.0), [])
    assert publish.publisher is None
