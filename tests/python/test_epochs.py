"""Trainers that begin again, and trainers that never heard of each other."""

from __future__ import annotations

import pickle
from pathlib import Path

import deltasync
import numpy as np
import pytest
from deltasync import errors


def publish(agent: deltasync.AgentProcess, value: float) -> deltasync.Version:
    """One incarnation of a trainer."""
    weights = {"w": np.arange(64 * 64, dtype=np.float32).reshape(64, 64)}
    weights["w"][0, 0] = value
    with deltasync.WeightManager(weights, agent=agent.socket) as manager:
        version = manager.offload(weights).version
        manager.wait_ready()
        return version


def test_a_manager_that_begins_again_comes_after_the_ones_before(agent: deltasync.AgentProcess) -> None:
    published = [publish(agent, 0.0)]
    with deltasync.Receiver(agent.endpoint) as receiver:
        assert receiver.update().version == published[0]
        for run in range(1, 4):
            published.append(publish(agent, float(run)))
            report = receiver.update()
            assert (report.version, report.mode) == (published[-1], "delta")
            assert dict(receiver.arrays())["w"][0, 0] == run
    assert published == sorted(published)
    assert len({version.epoch for version in published}) == len(published)


def test_what_a_receiver_does_at_an_agent_of_an_older_epoch(
    agent: deltasync.AgentProcess, segment_name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for run in range(3):
        held = publish(agent, float(run))
    with deltasync.Receiver(agent.endpoint, directory=tmp_path) as receiver:
        assert receiver.update().version == held
    with deltasync.AgentProcess(f"{segment_name}-other") as other:
        older = publish(other, 9.0)
        assert older.epoch < held.epoch
        with deltasync.Receiver(other.endpoint, directory=tmp_path, on_older_epoch="fail") as receiver:
            with pytest.raises(errors.VersionConflict, match="older epoch"):
                receiver.update()
            assert receiver.version == held
        with deltasync.Receiver(other.endpoint, directory=tmp_path, on_older_epoch="wait") as receiver:
            with pytest.raises(errors.DeadlinePassed):
                receiver.update(timeout=3)
            assert receiver.version == held
            assert capfd.readouterr().err.count("older_epoch") == 1
        with deltasync.Receiver(other.endpoint, directory=tmp_path) as receiver:
            assert receiver.update().version == older
            assert receiver.version == older
    with pytest.raises(errors.InvalidArgument, match="on_older_epoch is follow, wait or fail, not 'never'"):
        deltasync.Receiver(agent.endpoint, on_older_epoch="never")


def test_a_version_goes_to_another_process() -> None:
    version = deltasync.Version(deltasync.make_epoch(), 2**64 - 1, "step ü")
    again = pickle.loads(pickle.dumps(version))
    assert (again, again.label) == (version, version.label)


def test_epochs_that_are_made_by_hand() -> None:
    first = deltasync.make_epoch()
    assert first >> 32 == 1
    assert deltasync.make_epoch(first) >> 32 == 2
    assert deltasync.make_epoch((1 << 64) - 1) >> 32 == 1
