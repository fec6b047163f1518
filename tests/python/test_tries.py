"""What a receiver tries again: connecting before its agent is there, and nothing that a second try does not help.
Processes that are started again."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import deltasync
import numpy as np
import pytest
from deltasync import errors
from deltasync._tries import Restarts, Tries
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


def test_restarts_wait_longer_until_one_has_lived_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [50.0]
    monkeypatch.setattr("deltasync._tries.time.monotonic", lambda: now[0])
    restarts = Restarts(logging.getLogger("deltasync.agent"), 1.0)
    pauses = []
    with caplog.at_level(logging.WARNING, "deltasync.agent"):
        for lived in (0.5, 0.1, None, 0.5, 0.5, 0.5, 1.5, 0.5):
            if lived is not None:  # else its start failed
                restarts.started()
                now[0] += lived
            pauses.append(restarts.ended("it ended: no room"))
            now[0] += 100.0
    assert pauses == [0, 0.2, 0.4, 0.8, 1.0, 1.0, 0, 0.2]
    said = [record.getMessage() for record in caplog.records]
    assert said[4] == "it ended: no room; 5 in a row, starting it again in 1.0 s"
    assert said[6] == "it ended: no room; 1 in a row, starting it again in 0.0 s"


#: Ready, and gone.
SHORT_LIVED = """#!/bin/sh
while [ "$1" != --ready-file ]; do shift; done
echo '{"pid": '$$', "port": 1, "socket": "none"}' > "$2"
echo "no room for it" >&2
exit 9
"""


def test_an_agent_that_ends_after_each_start_is_started_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "deltasync-agent"
    program.write_text(SHORT_LIVED)
    program.chmod(0o755)
    monkeypatch.setenv("DELTASYNC_BIN", os.fspath(tmp_path))
    monkeypatch.setattr("deltasync.agent._PAUSE_MAX_S", 1000.0)  # so that none lives longer
    with caplog.at_level(logging.WARNING, "deltasync.agent"):
        agent = deltasync.AgentProcess("short-lived", shm_dir=tmp_path)
        end = time.monotonic() + 120
        while len(caplog.records) < 4 and time.monotonic() < end:
            time.sleep(0.02)
        agent.stop()
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition("; ")[2] for line in said[:4]] == [
        f"{count} in a row, starting it again in {pause:.1f} s" for count, pause in enumerate((0, 0.2, 0.4, 0.8), 1)
    ]
    assert all(line.startswith("agent short-lived ended with exit code 9: no room for it") for line in said)
