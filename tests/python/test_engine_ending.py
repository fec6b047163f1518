"""engines/group.py with real receivers, a real trainer and a real store: what ranks have after a failed commit."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator
from typing import Any

import deltasync
import pytest

torch = pytest.importorskip("torch")

from deltasync.engines.group import Ending, Group, Work  # noqa: E402
from deltasync.engines.session import LOADING, EngineReceiver  # noqa: E402
from engine_support import Engine, Loader, assert_bits, bits, change, first_version  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

RANKS = 2
WAIT = 30.0


class Rank:
    """One of two, with a store of its own connection; ``lose`` is the round in which that breaks, once."""

    def __init__(self, endpoint: str, number: int, store: Any) -> None:
        self.engine = Engine(number, RANKS)
        self.loader = Loader(self.engine)
        self.receiver = EngineReceiver(self.engine, self.loader, endpoint, name=f"rank{number}", timeout=WAIT)
        self.group = Group(self, number, RANKS)
        self.store, self.lose, self.updates = store, "", 0

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        if self.lose and key.endswith(f"{self.lose}/verdict"):
            self.lose = ""
            raise RuntimeError("connection reset by peer")
        return self.store.compare_set(key, expected, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def update(self, version: int) -> Ending | None:
        self.updates += 1
        staging = self.receiver.prepare(version, timeout=WAIT)
        staging.wait(WAIT)
        committed: list[EngineReceiver] = []

        def commit() -> str | None:
            try:
                self.receiver.commit(staging, verify=True)
            except Exception as error:
                return str(error)
            committed.append(self.receiver)
            return None

        work = Work(commit, [self.receiver], committed)
        end = time.monotonic() + WAIT
        ending = self.group.update(None, work, subject=f"version {version}", end=end, margin=0, at=str(self.updates))
        self.receiver.follow()
        return None if ending.kept else ending


class Replica:
    def __init__(self, name: str) -> None:
        self.weights = first_version()
        self.manager = deltasync.WeightManager(self.weights, name=name)
        self.number = 0
        self.publish()
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = [server, TCPStore("127.0.0.1", server.port, wait_for_workers=False)]
        self.ranks = [Rank(self.manager.endpoint, number, store) for number, store in enumerate(stores)]

    def publish(self) -> None:
        self.number += 1
        if self.number > 1:
            change(self.weights, self.number)
        self.manager.offload(self.weights, self.number)
        self.manager.wait_ready()

    def update(self) -> list[Ending | None]:
        with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
            return [done.result(WAIT) for done in [pool.submit(rank.update, self.number) for rank in self.ranks]]

    def reach(self, version: int) -> None:
        while self.number < version:
            self.publish()
            assert self.update() == [None, None]

    def assert_serves_newest(self) -> None:
        for rank in self.ranks:
            assert rank.receiver.version is not None and rank.receiver.version.number == self.number
            assert not rank.receiver.doubt
            assert_bits(rank.engine, rank.engine.expected(self.weights))

    def close(self) -> None:
        for rank in self.ranks:
            rank.receiver.close()
        self.manager.close()


@pytest.fixture
def replica(segment_name: str, shm_files: set[str]) -> Iterator[Replica]:
    made = Replica(segment_name)
    try:
        assert made.update() == [None, None]
        made.assert_serves_newest()
        yield made
    finally:
        made.close()


def test_a_rank_that_does_not_see_the_yes_is_of_no_version_until_the_next_update(replica: Replica) -> None:
    replica.reach(2)
    replica.publish()
    replica.ranks[0].lose = "written"
    unknown, kept = replica.update()
    assert kept is None and unknown is not None and not unknown.as_before
    assert "THE OUTCOME IS UNKNOWN: rank 0: the store" in unknown.text
    why = "the weights of rank0 are of no version: whether the other ranks keep version 3 is unknown"
    assert why in unknown.text
    first, second = (rank.receiver for rank in replica.ranks)
    assert (first.version, first.state) == (None, LOADING) and second.version is not None
    replica.publish()
    assert replica.update() == [None, None]
    # All of it on one rank, and on the other the layer that goes through the loader in each update.
    assert [len(rank.loader.reloaded[-1]) for rank in replica.ranks] == [8, 1]
    replica.assert_serves_newest()


def test_a_rank_that_fails_has_the_other_roll_back_and_both_say_so(replica: Replica) -> None:
    replica.reach(2)
    before = [bits(rank.engine) for rank in replica.ranks]
    replica.publish()
    replica.ranks[1].loader.fail = True
    for ending in replica.update():
        assert ending is not None and ending.as_before
        assert "all was rolled back" in ending.text and "rank 1: the loader was told to fail" in ending.text
    for rank, expected in zip(replica.ranks, before, strict=True):
        assert_bits(rank.engine, expected)
        assert rank.receiver.version.number == 2 and not rank.receiver.doubt
    assert replica.update() == [None, None]
    replica.assert_serves_newest()


def test_a_load_that_fails_half_way_is_said_by_all(replica: Replica) -> None:
    replica.reach(2)
    for rank in replica.ranks:
        rank.receiver.void("level-2 sleep")
    replica.ranks[1].loader.fail = True
    replica.publish()
    for ending in replica.update():
        assert ending is not None and not ending.as_before
        assert "NOT ALL RANKS HAVE THE WEIGHTS OF BEFORE" in ending.text
        assert "rank 0: the weights of rank0 are of no version: its first load was rolled back" in ending.text
        assert "the weights of rank1 are of no version: the engine's loader has not come to the end of version 3" in (
            ending.text
        )
    assert replica.update() == [None, None]
    replica.assert_serves_newest()


def test_a_rollback_that_fails_on_one_rank_is_said_by_all(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    replica.reach(2)
    replica.publish()
    replica.ranks[1].loader.fail = True

    def broken() -> None:
        raise OSError("the device is lost")

    monkeypatch.setattr(replica.ranks[0].receiver._receiver, "rollback", broken)
    for ending in replica.update():
        assert ending is not None and not ending.as_before
        assert "rank 0: the weights of rank0 are of no version: a rollback failed: the device is lost" in ending.text
        assert "the weights of rank1" not in ending.text
    monkeypatch.undo()
    assert replica.update() == [None, None]
    replica.assert_serves_newest()


def test_what_is_wrong_in_live_memory_is_of_no_version(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    replica.reach(2)
    replica.publish()
    rank = replica.ranks[1]
    attest: Callable[..., Any] = rank.receiver._receiver.attest

    def damaged(timeout: float) -> Any:
        rank.engine.norm.weight.data.view(torch.int16)[3] ^= 1
        return attest(timeout=timeout)

    monkeypatch.setattr(rank.receiver._receiver, "attest", damaged)
    for ending in replica.update():
        assert ending is not None and not ending.as_before
        assert "rank 1: the weights of rank1 are of no version: norm.weight: tile" in ending.text
        assert "of version 3 differs in" in ending.text
    monkeypatch.undo()
    assert replica.update() == [None, None]
    replica.assert_serves_newest()
