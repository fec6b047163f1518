"""Full updates out of the memory of an agent on this host."""

from __future__ import annotations

from pathlib import Path

import deltasync
import numpy as np
import pytest
from deltasync import errors


def test_a_full_update_comes_out_of_the_agents_memory_unless_it_shall_not(agent: deltasync.AgentProcess) -> None:
    weights = {"w": np.arange(1 << 20, dtype=np.float32)}
    with deltasync.WeightManager(weights, agent=agent.socket) as manager:
        manager.offload(weights)
        for local, copied in (("auto", True), ("always", True), ("never", False)):
            with deltasync.Receiver(agent.endpoint, local=local) as receiver:
                report = receiver.update()
                assert (report.mode, report.full_bytes) == ("full", 4 << 20)
                assert report.local_bytes == (4 << 20 if copied else 0), local
                assert (report.wire_bytes < 1 << 20) == copied, local
                assert np.array_equal(dict(receiver.arrays())["w"], weights["w"])
                weights["w"][7] += 1
                report = receiver.update(manager.offload(weights).version.number)
                assert (report.mode, report.local_bytes) == ("delta", 0)
                assert np.array_equal(dict(receiver.arrays())["w"], weights["w"])


def test_without_the_agents_socket_it_comes_by_the_connection_or_not_at_all(
    agent: deltasync.AgentProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = {"w": np.arange(1 << 16, dtype=np.float32)}
    with deltasync.WeightManager(weights, agent=agent.socket) as manager:
        manager.offload(weights)
        Path(agent.socket).rename(agent.socket + ".away")
        with deltasync.Receiver(agent.endpoint) as receiver:
            assert receiver.update().local_bytes == 0
            assert capfd.readouterr().err.count("local_pull_failed") == 1
        with (
            deltasync.Receiver(agent.endpoint, local="always") as receiver,
            pytest.raises(errors.Unsupported, match=r"the agent's memory \(option local\) cannot be had"),
        ):
            receiver.update()
        Path(agent.socket + ".away").rename(agent.socket)


def test_a_word_that_is_none(agent: deltasync.AgentProcess) -> None:
    with pytest.raises(errors.InvalidArgument, match="local is auto, never or always, not 'yes'"):
        deltasync.Receiver(agent.endpoint, local="yes")
