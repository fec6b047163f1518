"""engines/group.py over real TCP stores: all ranks decide the same, whatever is late or missing."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deltasync.engines.group import Group, Outcome, Verdict  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

YES = Verdict(Outcome.YES, "")
RANKS = 3
WAIT = 30.0


@pytest.fixture
def stores() -> Iterator[list[Any]]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [server, *(TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(RANKS - 1))]


def groups(stores: list[Any]) -> list[Group]:
    return [Group(store, rank, RANKS) for rank, store in enumerate(stores)]


def at_once(calls: list[Callable[[], Verdict]]) -> list[Verdict]:
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT) for future in [pool.submit(call) for call in calls]]


def decide(
    group: Group, reason: str | None = None, subject: str = "", timeout: float = WAIT, at: str = ""
) -> Callable[[], Verdict]:
    return lambda: group.vote(reason, subject=subject, timeout=timeout, at=at)


def test_all_yes_over_many_rounds(stores: list[Any]) -> None:
    ranks = groups(stores)
    for number in range(20):
        assert at_once([decide(rank, subject=f"v{number}") for rank in ranks]) == [YES] * RANKS


def test_one_no_is_everybodys_and_names_the_rank(stores: list[Any]) -> None:
    ranks = groups(stores)
    verdicts = at_once([decide(ranks[0]), decide(ranks[1], "disk full"), decide(ranks[2])])
    assert verdicts == [Verdict(Outcome.NO, "rank 1: disk full")] * RANKS
    assert all(verdict.yes for verdict in at_once([decide(rank) for rank in ranks]))


def test_what_is_doubted_is_known_to_all(stores: list[Any]) -> None:
    ranks = groups(stores)
    doubts = ["", "rank 1 is void", "rank 2 is void"]

    def one(rank: int, reason: str | None) -> Callable[[], Verdict]:
        return lambda: ranks[rank].vote(reason, timeout=WAIT, doubt=doubts[rank])

    told = "rank 1 is void; rank 2 is void"
    assert at_once([one(0, "late"), one(1, None), one(2, None)]) == [Verdict(Outcome.NO, "rank 0: late", told)] * RANKS
    assert at_once([one(rank, None) for rank in range(RANKS)]) == [Verdict(Outcome.YES, "", told)] * RANKS
    alone = ranks[1].vote(None, timeout=0.1, doubt=doubts[1])
    assert (alone.outcome, alone.doubt) == (Outcome.NO, "rank 1 is void")
    assert Group(None, 0, 1).vote(None, timeout=0, doubt="void") == Verdict(Outcome.YES, "", "void")


def test_a_no_that_comes_first_waits_for_the_others(stores: list[Any]) -> None:
    ranks = groups(stores)
    with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
        first = pool.submit(decide(ranks[1], "disk full"))
        while not stores[0].check(["0/vote/1"]):
            pass
        others = [pool.submit(decide(ranks[rank])) for rank in (0, 2)]
        verdicts = [future.result(WAIT) for future in (first, *others)]
    assert verdicts == [Verdict(Outcome.NO, "rank 1: disk full")] * RANKS
    assert all(verdict.yes for verdict in at_once([decide(rank) for rank in ranks]))


def test_ranks_that_speak_of_different_versions_do_not_agree(stores: list[Any]) -> None:
    ranks = groups(stores)
    verdicts = at_once([decide(rank, subject="v7" if number else "v6") for number, rank in enumerate(ranks)])
    assert len(set(verdicts)) == 1
    assert not verdicts[0].yes and "v6" in verdicts[0].reason and "v7" in verdicts[0].reason


def test_a_missing_rank_ends_at_the_deadline_and_finds_the_others_later(stores: list[Any]) -> None:
    ranks = groups(stores)
    verdicts = at_once([decide(ranks[0], timeout=0.3), decide(ranks[1], timeout=0.3)])
    assert verdicts[0] == verdicts[1]
    assert not verdicts[0].yes and "in vain for rank 2" in verdicts[0].reason
    # Rank 2 never came to that round; all meet in the next one.
    assert at_once([decide(rank) for rank in ranks]) == [YES] * RANKS


def test_who_gives_up_has_prevented_a_yes(stores: list[Any]) -> None:
    ranks = groups(stores)
    gave_up = ranks[0].vote(None, timeout=0.0)
    assert not gave_up.yes
    # Both others come when it has gone: no verdict of theirs can be a yes without it.
    verdicts = at_once([decide(ranks[1], timeout=0.5), decide(ranks[2], timeout=0.5)])
    assert verdicts[0] == verdicts[1]
    assert not verdicts[0].yes and "rank 0" in verdicts[0].reason


def test_who_gives_up_too_late_goes_along(stores: list[Any]) -> None:
    # All others have voted and one wrote the verdict, between this rank's look at the clock and its giving up.
    real = stores[0].compare_set

    class Late:
        def __getattr__(self, name: str) -> Any:
            return getattr(stores[0], name)

        def compare_set(self, key: str, expected: str, value: str) -> Any:
            if key == "0/verdict":
                stores[1].compare_set(key, "", '{"reason": ""}')  # set() does not wait until it is there
            return real(key, expected, value)

    assert Group(Late(), 0, RANKS).vote(None, timeout=0.0) == YES


class Failing:
    """A store that raises when something with such an end is written, or looked for."""

    def __init__(self, store: Any, *, write: str = "nothing", check: str = "nothing") -> None:
        self._store, self._write, self._check = store, write, check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        if key.endswith(self._write):
            raise RuntimeError("connection reset by peer")
        return self._store.compare_set(key, expected, value)

    def check(self, keys: list[str]) -> Any:
        if keys[0].endswith(self._check):
            raise RuntimeError("connection reset by peer")
        return self._store.check(keys)


VOTE, VERDICT = "vote/0", "verdict"


@pytest.mark.parametrize("write", [VOTE, VERDICT])
def test_who_loses_the_store_after_a_yes_does_not_know_the_outcome(stores: list[Any], write: str) -> None:
    found = Group(Failing(stores[0], write=write), 0, RANKS).vote(None, timeout=0.0)
    assert found.outcome is Outcome.UNKNOWN and not found.yes
    assert "rank 0: the store that the ranks share failed: connection reset" in found.reason


def test_others_may_have_a_yes_that_one_rank_does_not_see(stores: list[Any]) -> None:
    ranks = [Group(Failing(stores[0], write=VERDICT), 0, RANKS), *groups(stores)[1:]]
    found = at_once([decide(rank) for rank in ranks])
    assert [verdict.outcome for verdict in found] == [Outcome.UNKNOWN, Outcome.YES, Outcome.YES]


def test_who_voted_no_or_not_at_all_knows_that_there_is_no_yes(stores: list[Any]) -> None:
    found = Group(Failing(stores[0], write=VOTE), 0, RANKS).vote("disk full", timeout=0.0)
    assert found.outcome is Outcome.NO and "rank 0: disk full; rank 0: the store" in found.reason
    found = Group(Failing(stores[0], check=VERDICT), 0, RANKS).vote(None, timeout=0.0)
    assert found.outcome is Outcome.NO and "connection reset" in found.reason


def test_a_process_that_starts_again_does_not_take_its_own_earlier_yes(stores: list[Any]) -> None:
    ranks = groups(stores)
    with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
        others = [pool.submit(decide(rank, at="1/staged")) for rank in ranks[1:]]
        assert ranks[0].vote(None, timeout=WAIT, at="1/staged").yes
        assert all(future.result(WAIT).yes for future in others)
    again = Group(stores[0], 0, RANKS).vote("no weights yet", timeout=WAIT, at="1/staged")
    assert again.outcome is Outcome.UNKNOWN and "an earlier process of this rank has voted" in again.reason


def test_words_that_are_no_text_arrive(stores: list[Any]) -> None:
    ranks = groups(stores)
    found = at_once([decide(ranks[0], "no file \udcff"), *(decide(rank) for rank in ranks[1:])])
    assert found == [Verdict(Outcome.NO, r"rank 0: no file \udcff")] * RANKS


def test_named_rounds_meet_by_name_and_who_is_late_takes_the_verdict(stores: list[Any]) -> None:
    ranks = groups(stores)
    # Rank 0 never comes to the first of these rounds.
    found = at_once([decide(rank, timeout=0.2, at="1/written") for rank in ranks[1:]])
    assert found[0] == found[1] and "in vain for rank 0" in found[0].reason
    assert at_once([decide(rank, at="2/staged") for rank in ranks]) == [YES] * RANKS
    assert ranks[0].vote(None, timeout=WAIT, at="1/written") == found[0]


def test_one_rank_needs_no_store() -> None:
    assert Group(None, 0, 1).vote(None, timeout=0) == YES
    assert Group(None, 0, 1).vote("no room", timeout=0) == Verdict(Outcome.NO, "no room")
