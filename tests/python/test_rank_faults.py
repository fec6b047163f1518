"""One control service for an engine of several ranks: ranks that die and come back, and a second service."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import _rank, errors

torch = pytest.importorskip("torch")
from control_fleet import TOKENS, Client, Engine, model  # noqa: E402
from rank_fleet import RANKS, Fleet, eventually, restart, serves, update  # noqa: E402


def fails_with(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_the_engine_stops_when_a_rank_was_started_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    update(fleet.client)
    before = fleet.engine.submit("before")
    fleet.engine.finish(before)
    fleet.engine.broken["stop_admission"] = RuntimeError("not now")  # and then it is asked again
    restart(fleet, 1)
    assert eventually(lambda: not fleet.engine.admits)
    assert fleet.client.get("/is_paused")["is_paused"]
    request = fleet.engine.submit("after")
    with monkeypatch.context() as broken:
        broken.setattr(fleet.receivers[2], "prepare", fails_with(errors.NoSpace("no memory for the version")))
        assert "is paused" in fleet.client.post("/pull_weights", {}, 400)["message"]
    assert not fleet.engine.admits and not request.tokens
    fleet.client.post("/pull_weights", {})  # nobody has paused it: it goes on by itself
    assert fleet.engine.finish(request).tokens == [1.0] * TOKENS
    assert serves(fleet) and fleet.values == [1.0] * RANKS


def test_a_service_that_cannot_begin_leaves_the_one_that_is_there(fleet: Fleet) -> None:
    update(fleet.client)
    with pytest.raises(errors.AlreadyExists):
        deltasync.RolloutControl(fleet.engine, fleet.receivers[0], ranks=fleet.group(0), listen=fleet.control.endpoint)
    fleet.train(2.0)
    update(fleet.client)
    assert serves(fleet) and fleet.values == [2.0] * RANKS


class Dead:
    """Of a process that has died: a call that does not come back until the test's end."""

    def __init__(self) -> None:
        self.called, self.over = threading.Event(), threading.Event()

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.called.set()
        self.over.wait()
        raise errors.Cancelled("it has died")


@pytest.fixture
def patient(segment_name: str) -> Iterator[Fleet]:
    """Whose calls last for longer than clients wait."""
    made = Fleet(segment_name, timeout=600)
    update(made.client)
    made.train(2.0)
    yield made
    made.close()


def test_a_rank_that_dies_in_a_commit_and_comes_back_holds_nobody(patient: Fleet) -> None:
    dead, old, old_receiver = Dead(), patient.followers[1], patient.receivers[1]
    old_receiver.commit = dead  # type: ignore[method-assign]

    def come_back() -> None:
        dead.called.wait()
        patient.modules[1] = model(0.0)
        patient.receivers[1] = patient.receiver(1)
        patient.followers[1] = patient.follower(1)

    back = threading.Thread(target=come_back)
    back.start()
    try:
        assert "rank 1" in update(patient.client, 500)
        back.join()
        update(patient.client)
        assert patient.values == [2.0] * RANKS
    finally:
        dead.over.set()
        old.close()
        old_receiver.close()


def test_a_rank_that_dies_in_a_commit_has_a_time_to_come_back(patient: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Dead()
    with monkeypatch.context() as broken:
        broken.setattr(patient.receivers[1], "commit", dead)
        broken.setattr(_rank, "_PATIENCE_S", 1.0)
        assert "rank 1" in update(patient.client, 500)
        dead.over.set()
    update(patient.client)
    assert patient.values == [2.0] * RANKS


def test_a_new_rank_0_need_not_wait_for_what_the_old_one_began(patient: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Dead()
    monkeypatch.setattr(patient.control._weights._rank, "commit", dead)
    asked = threading.Thread(target=lambda: patient.client.send("POST", "/pull_weights", {}))
    asked.start()
    assert dead.called.wait(60)
    module = model(0.0)
    with deltasync.Receiver(patient.trainer.endpoint, module=module, shadow=True) as receiver:
        with deltasync.RolloutControl(Engine(module), receiver, ranks=patient.group(0), timeout=600) as control:
            Client(control.endpoint).post("/pull_weights", {})
            assert module.weight[0, 0].item() == 2.0 and patient.values[1:] == [2.0] * (RANKS - 1)
    dead.over.set()
    asked.join()


def test_an_old_rank_0_is_not_obeyed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still between its look at who the ranks are and its word to them."""
    update(fleet.client)
    leader = fleet.control._weights
    looked, goes_on = threading.Event(), threading.Event()
    real = leader._wait_for_members

    def slow(end: float) -> list[str]:
        found = real(end)
        looked.set()
        goes_on.wait()
        return found

    monkeypatch.setattr(leader, "_wait_for_members", slow)
    asked = threading.Thread(target=lambda: fleet.client.send("POST", "/sleep?level=1"))
    asked.start()
    assert looked.wait(60)
    fleet.train(2.0)
    module = model(0.0)
    with deltasync.Receiver(fleet.trainer.endpoint, module=module, shadow=True) as receiver:
        with deltasync.RolloutControl(Engine(module), receiver, ranks=fleet.group(0)) as control:
            Client(control.endpoint).post("/pull_weights", {})
            goes_on.set()
            asked.join()
            assert control.admit().version.number == 2
            assert fleet.numbers[1:] == [2] * (RANKS - 1) and fleet.values[1:] == [2.0] * (RANKS - 1)


def test_a_sleep_that_failed_on_one_rank_names_what_helps(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    update(fleet.client)
    with monkeypatch.context() as broken:
        broken.setattr(fleet.receivers[2], "release", fails_with(errors.DeadlinePassed("the device is busy")))
        failed = str(fleet.client.send("POST", "/sleep?level=1")[1])
    assert "the device is busy" in failed and "wake the weights" in failed
    assert not serves(fleet)
    fleet.client.post("/wake_up")
    assert serves(fleet) and fleet.engine.admits and fleet.values == [1.0] * RANKS


def test_a_sleep_of_which_nobody_was_told_changes_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    update(fleet.client)
    with monkeypatch.context() as broken:
        broken.setattr(fleet.control._weights._rank, "members", fails_with(errors.IoError("the store is slow")))
        assert "the store is slow" in str(fleet.client.send("POST", "/sleep?level=1")[1])
    assert serves(fleet) and fleet.engine.admits


def test_a_command_that_nobody_understands_is_not_read_in_a_loop(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = fleet.followers[1]
    waits: list[float] = []
    wait = follower._stop.wait

    def noted(timeout: float) -> bool:
        waits.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(follower._stop, "wait", noted)
    for garbage in ("no JSON", "[1]", "{}"):
        waits.clear()
        fleet.store.set(f"{fleet.name}/command", garbage)
        assert eventually(lambda: 1.0 in waits), garbage
    update(fleet.client)
    assert fleet.values == [1.0] * RANKS


def test_weights_of_a_service_that_ends_are_not_filled(fleet: Fleet) -> None:
    update(fleet.client)
    weights = fleet.followers[1]._rank.weights
    weights.release(60)
    weights.cancel()
    with pytest.raises(errors.Cancelled):
        weights.fill(60)


EXIT = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "deltasync-" in thread.name]))
import sys, deltasync, torch
import torch.distributed as dist
receiver = deltasync.Receiver(sys.argv[1], module=torch.nn.Linear(256, 128))
store = dist.HashStore()
follower = deltasync.RankFollower(receiver, deltasync.RankGroup(store, 1, 2, name="engine"))
print([thread.name for thread in threading.enumerate() if "deltasync-" in thread.name])
"""


def test_no_thread_of_a_follower_outlives_its_program(fleet: Fleet, tmp_path: Path) -> None:
    """One that came back from native code then would abort it."""
    script = tmp_path / "follower.py"
    script.write_text(EXIT)
    command = [sys.executable, str(script), fleet.trainer.endpoint]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    during, after = ended.stdout.splitlines()
    assert "deltasync-rank-1" in during and "deltasync-store-1" in during
    assert "deltasync-rank" not in after and "deltasync-store" not in after
