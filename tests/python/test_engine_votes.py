"""engines/votes.py over real TCP stores: all ranks decide the same, whatever is late or missing."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deltasync.engines.votes import Outcome, Verdict, Votes  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

YES = Verdict(Outcome.YES, "")
RANKS = 3
WAIT = 30.0


@pytest.fixture
def stores() -> Iterator[list[Any]]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [server, *(TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(RANKS - 1))]


def ballots(stores: list[Any]) -> list[Votes]:
    return [Votes(store, rank, RANKS) for rank, store in enumerate(stores)]


def at_once(calls: list[Callable[[], Verdict]]) -> list[Verdict]:
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT) for future in [pool.submit(call) for call in calls]]


def decide(
    votes: Votes, reason: str | None = None, subject: str = "", timeout: float = WAIT, at: str = ""
) -> Callable[[], Verdict]:
    return lambda: votes.decide(reason, subject=subject, timeout=timeout, at=at)


def test_all_yes_over_many_rounds(stores: list[Any]) -> None:
    votes = ballots(stores)
    for number in range(20):
        assert at_once([decide(vote, subject=f"v{number}") for vote in votes]) == [YES] * RANKS


def test_one_no_is_everybodys_and_names_the_rank(stores: list[Any]) -> None:
    votes = ballots(stores)
    verdicts = at_once([decide(votes[0]), decide(votes[1], "disk full"), decide(votes[2])])
    assert verdicts == [Verdict(Outcome.NO, "rank 1: disk full")] * RANKS
    assert all(verdict.yes for verdict in at_once([decide(vote) for vote in votes]))


def test_what_is_doubted_is_known_to_all(stores: list[Any]) -> None:
    votes = ballots(stores)
    doubts = ["", "rank 1 is void", "rank 2 is void"]

    def one(rank: int, reason: str | None) -> Callable[[], Verdict]:
        return lambda: votes[rank].decide(reason, timeout=WAIT, doubt=doubts[rank])

    told = "rank 1 is void; rank 2 is void"
    assert at_once([one(0, "late"), one(1, None), one(2, None)]) == [Verdict(Outcome.NO, "rank 0: late", told)] * RANKS
    assert at_once([one(rank, None) for rank in range(RANKS)]) == [Verdict(Outcome.YES, "", told)] * RANKS
    alone = votes[1].decide(None, timeout=0.1, doubt=doubts[1])
    assert (alone.outcome, alone.doubt) == (Outcome.NO, "rank 1 is void")
    assert Votes(None, 0, 1).decide(None, timeout=0, doubt="void") == Verdict(Outcome.YES, "", "void")


def test_a_no_that_comes_first_waits_for_the_others(stores: list[Any]) -> None:
    votes = ballots(stores)
    with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
        first = pool.submit(decide(votes[1], "disk full"))
        while not stores[0].check(["0/vote/1"]):
            pass
        others = [pool.submit(decide(votes[rank])) for rank in (0, 2)]
        verdicts = [future.result(WAIT) for future in (first, *others)]
    assert verdicts == [Verdict(Outcome.NO, "rank 1: disk full")] * RANKS
    assert all(verdict.yes for verdict in at_once([decide(vote) for vote in votes]))


def test_ranks_that_speak_of_different_versions_do_not_agree(stores: list[Any]) -> None:
    votes = ballots(stores)
    verdicts = at_once([decide(vote, subject="v7" if rank else "v6") for rank, vote in enumerate(votes)])
    assert len(set(verdicts)) == 1
    assert not verdicts[0].yes and "v6" in verdicts[0].reason and "v7" in verdicts[0].reason


def test_a_missing_rank_ends_at_the_deadline_and_finds_the_others_later(stores: list[Any]) -> None:
    votes = ballots(stores)
    verdicts = at_once([decide(votes[0], timeout=0.3), decide(votes[1], timeout=0.3)])
    assert verdicts[0] == verdicts[1]
    assert not verdicts[0].yes and "in vain for rank 2" in verdicts[0].reason
    # Rank 2 never came to that round; all meet in the next one.
    assert at_once([decide(vote) for vote in votes]) == [YES] * RANKS


def test_who_gives_up_has_prevented_a_yes(stores: list[Any]) -> None:
    votes = ballots(stores)
    gave_up = votes[0].decide(None, timeout=0.0)
    assert not gave_up.yes
    # Both others come when it has gone: no verdict of theirs can be a yes without it.
    verdicts = at_once([decide(votes[1], timeout=0.5), decide(votes[2], timeout=0.5)])
    assert verdicts[0] == verdicts[1]
    assert not verdicts[0].yes and "rank 0" in verdicts[0].reason


def test_who_gives_up_too_late_goes_along(stores: list[Any]) -> None:
    votes = ballots(stores)
    at = votes[0]._round
    stores[0].set(f"{at}/vote/1", '{"reason": null, "subject": ""}')
    # All others have voted and one wrote the verdict, between this rank's look at the clock and its giving up.
    real = stores[0].compare_set

    class Late:
        def __getattr__(self, name: str) -> Any:
            return getattr(stores[0], name)

        def compare_set(self, key: str, expected: str, value: str) -> Any:
            stores[1].set(key, '{"reason": ""}')
            return real(key, expected, value)

    assert Votes(Late(), 0, RANKS).decide(None, timeout=0.0) == YES


class Failing:
    """A store whose calls of these names raise."""

    def __init__(self, store: Any, *names: str) -> None:
        self._store, self._names = store, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise RuntimeError("connection reset by peer")
        return getattr(self._store, name)


@pytest.mark.parametrize("call", ["set", "compare_set"])
def test_who_loses_the_store_after_a_yes_does_not_know_the_outcome(stores: list[Any], call: str) -> None:
    found = Votes(Failing(stores[0], call), 0, RANKS).decide(None, timeout=0.0)
    assert found.outcome is Outcome.UNKNOWN and not found.yes
    assert "rank 0: the store that the ranks share failed: connection reset" in found.reason


def test_others_may_have_a_yes_that_one_rank_does_not_see(stores: list[Any]) -> None:
    votes = [Votes(Failing(stores[0], "compare_set"), 0, RANKS), *ballots(stores)[1:]]
    found = at_once([decide(vote) for vote in votes])
    assert [verdict.outcome for verdict in found] == [Outcome.UNKNOWN, Outcome.YES, Outcome.YES]


def test_who_voted_no_or_not_at_all_knows_that_there_is_no_yes(stores: list[Any]) -> None:
    found = Votes(Failing(stores[0], "set"), 0, RANKS).decide("disk full", timeout=0.0)
    assert found.outcome is Outcome.NO and "rank 0: disk full; rank 0: the store" in found.reason
    found = Votes(Failing(stores[0], "check"), 0, RANKS).decide(None, timeout=0.0)
    assert found.outcome is Outcome.NO and "connection reset" in found.reason


def test_named_rounds_meet_by_name_and_who_is_late_takes_the_verdict(stores: list[Any]) -> None:
    votes = ballots(stores)
    # Rank 0 never comes to the first of these rounds.
    found = at_once([decide(vote, timeout=0.2, at="1/written") for vote in votes[1:]])
    assert found[0] == found[1] and "in vain for rank 0" in found[0].reason
    assert at_once([decide(vote, at="2/staged") for vote in votes]) == [YES] * RANKS
    assert votes[0].decide(None, timeout=WAIT, at="1/written") == found[0]


def test_one_rank_needs_no_store() -> None:
    assert Votes(None, 0, 1).decide(None, timeout=0) == YES
    assert Votes(None, 0, 1).decide("no room", timeout=0) == Verdict(Outcome.NO, "no room")
