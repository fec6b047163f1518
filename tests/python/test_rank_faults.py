"""One control service for an engine of several ranks: ranks that die and come back, and a second service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deltasync
import pytest
from deltasync import errors

torch = pytest.importorskip("torch")
from control_fleet import TOKENS  # noqa: E402
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
