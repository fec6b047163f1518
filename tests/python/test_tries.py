"""What a receiver tries again: connecting before its agent is there, and nothing that a second try does not help."""

from __future__ import annotations

import logging
import threading

import deltasync
import numpy as np
import pytest
from deltasync import errors
from deltasync._tries import Tries
from held_port import HeldPort


def test_an_agent_that_starts_after_its_receiver(
    segment_name: str, held_port: HeldPort, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = held_port.endpoint
    begun = threading.Event()
    found: list[int] = []

    def receive() -> None:
        begun.set()
        with deltasync.Receiver(endpoint, timeout=120) as receiver:
            found.append(receiver.update().version.number)

    engine = threading.Thread(target=receive)
    with caplog.at_level(logging.WARNING, "deltasync.rollout"):
        engine.start()
        begun.wait()
        while not caplog.records and engine.is_alive():  # so that one try has failed at least
            engine.join(0.1)
        with deltasync.WeightManager({"w": np.ones(8, np.float32)}, name=segment_name, listen=endpoint) as manager:
            manager.offload({"w": np.ones(8, np.float32)})
            engine.join(120)
    assert found == [1]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, said
    assert said[0].startswith(f"connecting to {endpoint} failed, trying again in 0.2 s, later less often: ")


def test_what_no_second_try_helps_is_raised_at_once(
    agent: deltasync.AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync._connecting.time.sleep", lambda seconds: pytest.fail("it is tried again"))
    with pytest.raises(errors.Unauthenticated):
        deltasync.Receiver(agent.endpoint, token="not the token of this agent", timeout=60)


def test_pauses_double_and_lines_are_few(caplog: pytest.LogCaptureFixture) -> None:
    tries = Tries(logging.getLogger("deltasync.rollout"), "it", 1.0)
    away, late = errors.ConnectionFailed("away"), errors.DeadlinePassed("late")
    with caplog.at_level(logging.WARNING, "deltasync.rollout"):
        assert [tries.failed(away) for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
        assert [tries.failed(late) for _ in range(2)] == [1.0, 1.0]
        tries.succeeded()
        assert tries.failure is None
        assert tries.failed(late) == 0.2
    lines = [record.getMessage().partition(",")[0] for record in caplog.records]
    assert lines == ["it failed", "it failed", "it failed"]
