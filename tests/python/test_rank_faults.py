"""One control service for an engine of several ranks: ranks that die and come back, and a second service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import deltasync
import pytest
from deltasync import _rank, errors

torch = pytest.importorskip("torch")
from control_fleet import TOKENS, Client, Engine, model  # noqa: E402
from rank_fleet import RANKS, Fleet, eventually, restart, serves, update  # noqa: E402


@pytest.fixture
def fleet(segment_name: str) -> Iterator[Fleet]:
    made = Fleet(segment_name)
    yield made
    made.close()


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
