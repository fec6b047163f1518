"""What ranks agree on in each call, with a thread for each rank and torch's store of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from deltasync import _agreement, _rank_store
from deltasync._agreement import Agreement
from deltasync.errors import Aborted, CoverageError, DeadlinePassed, Error, IoError, VersionConflict

dist = pytest.importorskip("torch.distributed")

RANKS = 4
LONG_S = 60.0


class Ranks:
    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.agreements = [Agreement(self.store, rank, RANKS, "job") for rank in range(RANKS)]

    def all_do(self, call: Callable[[Agreement, int], Any]) -> list[Any]:
        """What each rank gets: a result, or an exception."""

        def one(rank: int) -> Any:
            try:
                return call(self.agreements[rank], rank)
            except Exception as error:
                self.agreements[rank].fail(error)
                return error

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(one, range(RANKS)))


def soon() -> float:
    return time.monotonic() + LONG_S


def whole_call(agreement: Agreement, rank: int) -> bytes:
    agreement.begin(("first", "last"))
    agreement.require_same("version 1")
    made = agreement.agree("to speak", soon(), bytes([65 + rank]), lambda said: b"".join(said))
    agreement.agree("to end", soon())
    return made


def test_all_have_what_one_made_of_what_all_said() -> None:
    assert Ranks().all_do(whole_call) == [b"ABCD"] * RANKS


def test_values_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_agreement, "_VALUE_BYTES", 3)
    for size in (0, 1, 3, 4, 30):

        def call(agreement: Agreement, rank: int, size: int = size) -> bytes:
            agreement.begin(("only",))
            return agreement.agree("to speak", soon(), bytes([rank]) * size, lambda said: b"".join(said))

        assert Ranks().all_do(call) == [b"".join(bytes([rank]) * size for rank in range(RANKS))] * RANKS


@pytest.mark.parametrize("broken", range(RANKS))
def test_the_error_of_one_is_that_of_all_at_once(broken: int) -> None:
    ranks = Ranks()
    for last_word in (False, True, False):

        def call(agreement: Agreement, rank: int, last_word: bool = last_word) -> None:
            agreement.begin(("first", "last"))
            if last_word:
                agreement.agree("to speak", soon())
            if rank == broken:
                raise ZeroDivisionError("its own")
            agreement.agree("to speak", soon())

        for rank, found in enumerate(ranks.all_do(call)):
            if rank == broken:
                assert isinstance(found, ZeroDivisionError)
            else:
                assert isinstance(found, Aborted)
                assert f"rank {broken} failed: ZeroDivisionError: its own" in str(found)
    assert ranks.all_do(whole_call) == [b"ABCD"] * RANKS


def test_what_the_merging_raises_is_raised_by_all() -> None:
    def merge(_: list[bytes]) -> bytes:
        raise CoverageError("no node holds w", "say more")

    def call(agreement: Agreement, rank: int) -> None:
        agreement.begin(("first", "last"))
        agreement.agree("to speak", soon(), b"", merge)

    for found in Ranks().all_do(call):
        assert isinstance(found, CoverageError)
        assert str(found) == "no node holds w (say more)"


def test_who_does_not_come_is_waited_for_until_the_deadline() -> None:
    ranks = Ranks()

    def call(agreement: Agreement, rank: int) -> None:
        agreement.begin(("only",))
        if rank == 2:
            return
        agreement.agree("to speak", time.monotonic() + (0.2 if rank == 0 else LONG_S))

    began = time.monotonic()
    found = ranks.all_do(call)
    assert time.monotonic() - began < LONG_S / 2, "the first deadline is that of all"
    for error in found[:2] + found[3:]:
        assert isinstance(error, DeadlinePassed)
        assert "3 of 4 ranks came by the deadline, without rank 2: to speak" in str(error)
    with pytest.raises(DeadlinePassed):  # the late one
        ranks.agreements[2].agree("to speak", soon())
    assert not ranks.agreements[2].fail(ValueError())
    assert ranks.all_do(whole_call) == [b"ABCD"] * RANKS


def test_who_missed_calls_finds_the_others_by_what_theirs_is_about() -> None:
    ranks = Ranks()

    def call(agreement: Agreement, rank: int, number: int, timeout: float = LONG_S) -> int:
        agreement.begin(("first", "last"))
        agreement.require_same(f"version {number}")
        agreement.agree("to speak", time.monotonic() + timeout)
        agreement.agree("to end", soon())
        return number

    for number in (1, 2):
        found = ranks.all_do(lambda agreement, rank, n=number: rank == 1 or call(agreement, rank, n, 0.2))
        assert [type(one) for one in found] == [DeadlinePassed, bool, DeadlinePassed, DeadlinePassed]
    for number in (3, 4):
        assert ranks.all_do(lambda agreement, rank, n=number: call(agreement, rank, n)) == [number] * RANKS


def test_an_error_behind_the_last_word_comes_too_late() -> None:
    ranks = Ranks()

    def call(agreement: Agreement, rank: int) -> bool:
        agreement.begin(("only",))
        if rank == 3:
            wait = agreement._wait

            def interrupted(*words: Any) -> bytes:
                agreement._wait = wait  # type: ignore[method-assign]
                wait(*words)
                raise ZeroDivisionError

            agreement._wait = interrupted  # type: ignore[method-assign]
            with pytest.raises(ZeroDivisionError) as raised:
                agreement.agree("to speak", soon())
            return agreement.fail(raised.value)
        while ranks.store.add("job/1/only/count", 0) == 0:  # rank 3 is the first
            time.sleep(0.001)
        agreement.agree("to speak", soon())
        return agreement.fail(ValueError())

    assert ranks.all_do(call) == [True] * RANKS
    assert ranks.all_do(whole_call) == [b"ABCD"] * RANKS


def test_calls_are_about_the_same() -> None:
    def call(agreement: Agreement, rank: int) -> None:
        agreement.begin(("only",))
        agreement.require_same(f"version {rank == 1}")
        agreement.agree("to speak", soon())

    for found in Ranks().all_do(call):
        assert isinstance(found, VersionConflict)
        assert "version True" in str(found) and "version False" in str(found)


def test_nothing_is_left_of_earlier_calls() -> None:
    ranks = Ranks()
    keys = []
    for _ in range(5):
        assert ranks.all_do(whole_call) == [b"ABCD"] * RANKS
        keys.append(ranks.store.num_keys())
    assert keys[0] == keys[-1], keys


def test_errors_of_others_keep_their_kind() -> None:
    ranks = Ranks()

    def call(agreement: Agreement, rank: int) -> None:
        agreement.begin(("only",))
        if rank == 0:
            raise CoverageError("w is missing")
        agreement.agree("to speak", soon())

    found = ranks.all_do(call)
    assert all(isinstance(error, CoverageError) and isinstance(error, Error) for error in found)
    assert "rank 0 failed: w is missing" in str(found[1])


@pytest.mark.parametrize("call", ["add", "check", "compare_set"])
def test_a_store_that_stands_still_holds_nobody(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """As where rank 0, which has it, is stopped."""
    monkeypatch.setattr(_rank_store, "ANSWER_S", 0.5)
    goes_on = threading.Event()

    class Standing(dist.HashStore):  # type: ignore[misc]
        pass

    setattr(Standing, call, lambda *_: goes_on.wait())
    agreement = Agreement(Standing(), 0, 2, "job")
    agreement.begin(("only",))
    began = time.monotonic()
    with pytest.raises(IoError, match="has not answered"):
        agreement.agree("to speak", began + 1.0)
    assert not agreement.fail(ValueError())
    assert time.monotonic() - began < LONG_S / 2
    goes_on.set()
