"""One control service for an engine of several ranks: all come to a version, or none does."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import _rank, errors

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from control_fleet import Client, Engine, model  # noqa: E402
from rank_fleet import PROCESS, RANKS, Fleet, Process, eventually, restart, serves, update  # noqa: E402


def test_all_ranks_take_a_version(fleet: Fleet) -> None:
    update(fleet.client)
    assert fleet.values == [1.0] * RANKS
    fleet.train(2.0)
    update(fleet.client, version="2", verify_checksum=True)
    assert fleet.values == [2.0] * RANKS and fleet.numbers == [2] * RANKS
    update(fleet.client, version="2")  # which all have
    assert fleet.numbers == [2] * RANKS
    assert fleet.client.get("/get_world_size")["world_size"] == RANKS


def test_the_store_does_not_grow(fleet: Fleet) -> None:
    keys = []
    for value in range(2, 26):
        fleet.train(float(value))
        update(fleet.client)
        keys.append(fleet.store.num_keys())
    assert len(set(keys[12:])) == 1, keys


def test_who_stands_still_behind_its_vote_finds_the_others(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many updates have failed for lack of it meanwhile."""
    monkeypatch.setattr(_rank, "_MARGIN_S", 0.0)
    fleet = Fleet(segment_name, timeout=10)
    update(fleet.client)
    fleet.train(2.0)
    keys, goes_on, rolled_back = fleet.followers[2]._rank.keys, threading.Event(), []
    check = keys.check

    def late(names: Any) -> bool:
        if any("/written/" in name for name in names) and fleet.numbers[2] == 2:  # not in the update before
            goes_on.wait(60)
        return check(names)

    monkeypatch.setattr(keys, "check", late)
    monkeypatch.setattr(fleet.receivers[2], "rollback", lambda: rolled_back.append(2))
    update(fleet.client)
    for _ in range(20):
        with pytest.raises(errors.Aborted):
            fleet.control._weights.stage("2", "", False, 0.1)
    goes_on.set()
    fleet.client.post("/v1/pause")
    assert eventually(lambda: fleet.client.send("POST", "/v1/update_weights", {})[0] == 200)
    assert not rolled_back and fleet.values == [2.0] * RANKS
    fleet.close()


def test_nothing_is_served_while_a_rank_that_was_started_again_has_no_weights(fleet: Fleet) -> None:
    update(fleet.client)
    assert serves(fleet)
    restart(fleet, 1)
    assert eventually(lambda: not serves(fleet))
    fleet.client.post("/v1/pause")
    assert fleet.client.send("POST", "/v1/resume")[0] != 200
    update(fleet.client)
    assert serves(fleet) and fleet.values == [1.0] * RANKS


def test_a_failed_update_with_a_rank_that_was_started_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    update(fleet.client)
    fleet.train(2.0)
    restart(fleet, 1)

    def fail(*_: Any, **__: Any) -> Any:
        raise errors.IoError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(fleet.receivers[2], "commit", fail)
        update(fleet.client, 500)
    assert not serves(fleet)
    update(fleet.client)
    assert serves(fleet) and fleet.values == [2.0] * RANKS


def test_what_a_receiver_did_beside_the_service_is_not_served(fleet: Fleet) -> None:
    update(fleet.client)
    fleet.train(2.0)
    fleet.receivers[0].update(2)
    assert not serves(fleet)
    update(fleet.client)
    assert serves(fleet) and fleet.values == [2.0] * RANKS


def test_a_store_that_fails_rank_0_after_its_yes(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(segment_name, timeout=3)
    update(fleet.client)
    fleet.train(2.0)
    keys = fleet.control._weights._rank.keys
    check, lost = keys.check, threading.Event()

    def fail(names: Any) -> bool:
        if any("/staged/" in name for name in names) and fleet.control._weights._number:
            lost.set()
        if lost.is_set():
            raise errors.IoError("the store is gone")
        return check(names)

    with monkeypatch.context() as broken:
        broken.setattr(keys, "check", fail)
        update(fleet.client, 500)
        assert not serves(fleet)
    # The others have voted, and wait for rank 0 until the call's deadline.
    assert eventually(lambda: fleet.client.send("POST", "/v1/update_weights", {})[0] == 200)
    fleet.client.post("/v1/resume")
    assert serves(fleet) and fleet.values == [2.0] * RANKS
    fleet.close()


def test_memory_that_cannot_be_repaired_is_not_called_as_before(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    update(fleet.client)
    fleet.train(2.0)
    receiver = fleet.receivers[2]

    def wrong(**_: Any) -> Any:
        return [deltasync.TileMismatch(0, "weight")]

    def fail(*_: Any, **__: Any) -> Any:
        raise errors.VersionGone("another one by now")

    with monkeypatch.context() as broken:
        broken.setattr(receiver, "attest", wrong)
        broken.setattr(receiver, "repair", fail)
        failed = update(fleet.client, 500, verify_checksum=True)
    assert "as before" not in failed and not serves(fleet)
    update(fleet.client)
    assert serves(fleet) and fleet.values == [2.0] * RANKS


def test_groups_of_other_sizes_and_directories_are_refused(segment_name: str) -> None:
    fleet = Fleet(segment_name)
    try:
        fleet.followers.pop(2).close()
        other = deltasync.RankGroup(fleet.store, 2, RANKS + 1, name=fleet.name)
        fleet.followers[2] = deltasync.RankFollower(fleet.receivers[2], other)
        assert "takes part in ranks=4" in update(fleet.client, 400)
        fleet.followers.pop(2).close()
        fleet.followers[2] = fleet.follower(2)
        update(fleet.client)
        fleet.client.post("/v1/pause")
        assert "publish" in str(fleet.client.send("POST", "/v1/update_weights", {"directory": "/tmp"})[1])
    finally:
        fleet.close()


def test_the_last_process_that_says_so_is_the_rank(fleet: Fleet) -> None:
    update(fleet.client)
    fleet.train(2.0)
    with deltasync.Receiver(fleet.trainer.endpoint, module=model(0.0)) as second:
        with deltasync.RankFollower(second, fleet.group(1)) as taken_over:
            update(fleet.client)
            assert taken_over.version is not None and taken_over.version.number == 2
            assert eventually(lambda: "another process" in fleet.followers[1].doubt)
            assert fleet.numbers == [2, 1, 2]


def test_a_store_that_stands_still_holds_nobody(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    update(fleet.client)
    fleet.train(2.0)
    goes_on = threading.Event()

    class Still:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                goes_on.wait(60)
                return getattr(fleet.store, name)(*arguments)

            return call

    for rank in (fleet.control._weights._rank, fleet.followers[1]._rank):
        monkeypatch.setattr(rank.keys, "_store", Still())
    assert "has not answered" in update(fleet.client, 500)
    began = time.monotonic()
    fleet.followers.pop(1).close()
    fleet.control.close()
    assert time.monotonic() - began < 30
    goes_on.set()


def test_a_version_that_is_gone_for_one_rank_makes_way_for_the_next(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer published it after rank 0 had found the one before to be the newest."""
    update(fleet.client)
    fleet.train(2.0)
    prepare, asked = fleet.receivers[1].prepare, []

    def gone_once(version: Any, **options: Any) -> Any:
        asked.append(version)
        if len(asked) == 1:
            fleet.train(3.0)
            raise errors.VersionGone("the agent serves the next one by now")
        return prepare(version, **options)

    monkeypatch.setattr(fleet.receivers[1], "prepare", gone_once)
    update(fleet.client)
    assert asked == [2, 3] and fleet.values == [3.0] * RANKS


def test_ranks_of_different_trainers_do_not_agree(fleet: Fleet, segment_name: str) -> None:
    """Their versions have the same numbers."""
    with deltasync.WeightManager(model(5.0), name=f"{segment_name}-other") as other:
        other.offload(model(5.0), version=1)
        fleet.followers.pop(2).close()
        fleet.receivers[2].close()
        fleet.receivers[2] = deltasync.Receiver(other.endpoint, module=fleet.modules[2])
        fleet.followers[2] = fleet.follower(2)
        assert "epoch" in update(fleet.client, 500, version="1")
        assert fleet.numbers == [None] * RANKS
        fleet.followers.pop(2).close()
        fleet.receivers[2].close()


def test_no_rank_takes_what_one_could_not_stage(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    update(fleet.client)
    fleet.train(2.0)

    def fail(*_: Any, **__: Any) -> Any:
        raise errors.NoSpace("no memory for the version")

    with monkeypatch.context() as broken:
        broken.setattr(fleet.receivers[2], "prepare", fail)
        failed = update(fleet.client, 500)
    assert "rank 2" in failed and "no memory for the version" in failed
    assert fleet.values == [1.0] * RANKS
    update(fleet.client)
    assert fleet.values == [2.0] * RANKS


@pytest.mark.parametrize("broken_rank", [0, 2])
def test_a_commit_that_fails_on_one_rank_is_rolled_back_on_all(
    fleet: Fleet, broken_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(fleet.client)
    fleet.train(2.0)

    def fail(**_: Any) -> Any:
        raise errors.IoError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(fleet.receivers[broken_rank], "commit", fail)
        failed = update(fleet.client, 500)
    assert f"rank {broken_rank}" in failed and "the device is gone" in failed
    assert fleet.values == [1.0] * RANKS and fleet.numbers == [1] * RANKS
    assert fleet.engine.finish(fleet.engine.submit("a")).tokens[0] == 1.0
    update(fleet.client)
    assert fleet.values == [2.0] * RANKS


def test_a_version_that_came_again_with_other_bytes_is_rolled_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does in which an agent has found a damaged tile."""
    update(fleet.client)
    held = fleet.receivers[0].version
    fleet.train(2.0)

    def fail(**_: Any) -> Any:
        raise errors.IoError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(deltasync.Receiver, "version", property(lambda _: held))
        broken.setattr(fleet.receivers[2], "commit", fail)
        assert "as before" in update(fleet.client, 500)
    assert fleet.values == [1.0] * RANKS


def test_a_rollback_that_fails_stops_the_engine_until_an_update(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    update(fleet.client)
    fleet.train(2.0)

    def fail(*_: Any, **__: Any) -> Any:
        raise errors.IoError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(fleet.receivers[2], "commit", fail)
        broken.setattr(fleet.receivers[1], "rollback", fail)
        failed = update(fleet.client, 500)
    assert "rank 1" in failed
    assert fleet.followers[1].doubt
    with pytest.raises(errors.Error):
        fleet.control.admit()
    update(fleet.client)
    fleet.client.post("/resume")
    assert fleet.values == [2.0] * RANKS
    assert eventually(lambda: not fleet.followers[1].doubt)  # which hears of the end when rank 0 has it
    assert fleet.control.admit().version.number == 2


def test_weights_of_all_ranks_sleep_and_wake(fleet: Fleet) -> None:
    update(fleet.client)
    fleet.client.post("/sleep?level=1")
    for module in fleet.modules[1:]:
        with torch.no_grad():
            module.weight.fill_(7.0)
    fleet.client.post("/wake_up")
    assert fleet.values == [1.0] * RANKS


def test_a_rank_that_is_away_is_named_and_comes_back(segment_name: str) -> None:
    fleet = Fleet(segment_name, timeout=3)
    try:
        update(fleet.client)
        fleet.followers.pop(2).close()
        fleet.train(2.0)
        failed = update(fleet.client, 500)
        assert "2" in failed
        assert fleet.values == [1.0] * RANKS
        fleet.receivers[2].close()
        fleet.receivers[2] = fleet.receiver(2)  # started again
        fleet.followers[2] = fleet.follower(2)
        update(fleet.client)
        assert fleet.values == [2.0] * RANKS
    finally:
        fleet.close()


def test_close_ends_a_wait_for_a_rank(segment_name: str) -> None:
    fleet = Fleet(segment_name, timeout=600)
    fleet.followers.pop(2).close()

    def ask() -> None:
        with contextlib.suppress(http.client.HTTPException, OSError):
            fleet.client.send("POST", "/v1/update_weights", {})

    asked = threading.Thread(target=ask)
    asked.start()
    deadline = threading.Event()
    while not fleet.receivers[0]._pulls.staged and not deadline.wait(0.05):
        pass
    fleet.close()
    asked.join(60)
    assert not asked.is_alive()


def test_what_makes_no_group(fleet: Fleet) -> None:
    with pytest.raises(errors.InvalidArgument, match="ranks are 0 to 2"):
        deltasync.RankGroup(fleet.store, 3, 3, name="engine")
    with pytest.raises(errors.InvalidArgument, match="RolloutControl"):
        deltasync.RankFollower(fleet.receivers[0], fleet.group(0))
    with pytest.raises(errors.InvalidArgument, match="RankFollower"):
        deltasync.RolloutControl(fleet.engine, fleet.receivers[1], ranks=fleet.group(1))
    in_place = deltasync.Receiver(fleet.trainer.endpoint, module=model(0.0), full_update_policy="in_place")
    with pytest.raises(errors.InvalidArgument, match="in_place"):
        deltasync.RankFollower(in_place, fleet.group(1))
    in_place.close()


def test_ranks_that_are_processes(segment_name: str, tmp_path: Path) -> None:
    script = tmp_path / "follower.py"
    script.write_text(PROCESS)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    own = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=60))
    trainer = deltasync.WeightManager(model(1.0), name=segment_name)
    trainer.offload(model(1.0), version=1)
    mine = model(0.0)
    receiver = deltasync.Receiver(trainer.endpoint, module=mine)
    engine = Engine(mine)
    processes = [Process(script, trainer.endpoint, store.port, rank) for rank in range(1, RANKS)]
    group = deltasync.RankGroup(own, 0, RANKS, name="engine")
    try:
        with deltasync.RolloutControl(engine, receiver, ranks=group, timeout=5) as control:
            client = Client(control.endpoint)
            update(client)
            assert [process.value() for process in processes] == [1.0, 1.0] and mine.weight[0, 0] == 1.0
            trainer.wait_ready(timeout=60)
            trainer.offload(model(2.0))
            trainer.wait_ready(timeout=60)
            processes[1].end()
            update(client, 500, version="2")
            assert processes[0].value() == 1.0 and mine.weight[0, 0] == 1.0
            processes[1] = Process(script, trainer.endpoint, store.port, 2)
            update(client, version="2")
            assert [process.value() for process in processes] == [2.0, 2.0] and mine.weight[0, 0] == 2.0
    finally:
        for process in processes:
            process.end()
        engine.close()
        receiver.close()
        trainer.close()
