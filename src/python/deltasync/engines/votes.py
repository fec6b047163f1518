"""All ranks of a replica, or none: one decision per step, over a key-value store that they share.

A collective would do while nothing fails. But one that a rank has left at its deadline leaves the group out of step for
ever, and it carries no reasons. So each round is a register in the store that is written once:

* A rank puts its vote at ``ROUND/vote/RANK``, and waits for those of all others.
* Who has all of them writes the verdict; who waited in vain writes "no". The first write counts (``compare_set``), and
  everybody takes what stands there. So a rank that gave up has either prevented a "yes", or it finds one and goes
  along. Who votes no waits too: a verdict before the others came would send them on.
* Rounds are counted: a rank that comes late to a round with a verdict goes on to the next without one, where the
  others will be. Ranks that name their rounds (`at`) meet by name: who comes late takes the verdict that is there.

Values are JSON. What the store raises after this rank has voted yes leaves the outcome unknown to it: the others may
have read a "yes". A rank that has voted no, or not at all, knows better: nobody can.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: A rank looks so often for the others, less often the longer it waits. (Store.wait with a timeout would hold the
#: store's connection, which others of the process use too, and logs a warning each time.)
_LOOK_MIN_S = 0.0005
_LOOK_MAX_S = 0.02


class Outcome(enum.Enum):
    YES = "yes"
    NO = "no"
    #: This rank has voted yes, and cannot know what the others read.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    #: Who voted no and why, who was missing, or why the outcome is unknown; empty if all voted yes.
    reason: str
    #: What ranks say of their weights beside it; that of those who were heard.
    doubt: str = ""

    @property
    def yes(self) -> bool:
        return self.outcome is Outcome.YES


@dataclass(frozen=True, slots=True)
class Lacks:
    """What a rank has no place for, as the bits of a number: none of them may be lacking on every rank. `words`: what
    is said of bits that are."""

    bits: int = 0
    words: Callable[[int], str] = hex


NOTHING = Lacks()


class Votes:
    """One rank's. ``store``: of torch.distributed, or None where it is the only one. Not thread-safe."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store, self.rank, self.ranks = store, rank, ranks
        self._round = 0
        self._voted = False

    def decide(
        self,
        reason: str | None,
        *,
        subject: str = "",
        timeout: float,
        at: str = "",
        doubt: str = "",
        lacks: Lacks = NOTHING,
    ) -> Verdict:
        """`reason`: why this rank votes no, or None for yes. `subject`: what about; ranks that vote about different
        things have no agreement. `at`: the round's name, once for each round; either all rounds have one or none.
        `doubt`: what the others are to know of this rank's weights. `lacks`: what another rank has to have. Yes
        and no are the same on every rank; waits `timeout` seconds at most for the others."""
        if self.ranks == 1:
            return _verdict(reason or (lacks.words(lacks.bits) if lacks.bits else ""), doubt)
        self._voted = False
        try:
            return self._decide(reason, subject, time.monotonic() + timeout, at, doubt, lacks)
        except Exception as error:  # DistError and its kind, or a value that is no vote
            failed = f"rank {self.rank}: the store that the ranks share failed: {error}"
            if reason is None and self._voted:
                return Verdict(Outcome.UNKNOWN, failed, doubt)
            return Verdict(Outcome.NO, failed if reason is None else f"rank {self.rank}: {reason}; {failed}", doubt)

    def _decide(self, reason: str | None, subject: str, end: float, at: str, doubt: str, lacks: Lacks) -> Verdict:
        store = self._store
        if not at:
            while store.check([f"{self._round}/verdict"]):
                self._round += 1
            at = str(self._round)
            self._round += 1
        mine = {
            "reason": reason if reason is None else f"rank {self.rank}: {reason}",
            "subject": subject,
            "doubt": doubt,
            "lacks": f"{lacks.bits:x}",
        }
        self._voted = True  # it may arrive, whatever set() says
        store.set(f"{at}/vote/{self.rank}", json.dumps(mine))
        votes = [f"{at}/vote/{rank}" for rank in range(self.ranks)]
        pause = _LOOK_MIN_S
        while not store.check(votes):
            left = end - time.monotonic()
            if left <= 0:
                missing = [rank for rank, key in enumerate(votes) if not store.check([key])]
                why = f"rank {self.rank} has waited in vain for {_ranks(missing)}"
                heard = [json.loads(store.get(key)) for rank, key in enumerate(votes) if rank not in missing]
                return self._write(at, why if reason is None else f"rank {self.rank}: {reason}; {why}", heard)
            if store.check([f"{at}/verdict"]):
                return self._read(store.get(f"{at}/verdict"))
            time.sleep(min(pause, left))
            pause = min(pause * 2, _LOOK_MAX_S)
        heard = [json.loads(store.get(key)) for key in votes]
        return self._write(at, _objection(heard, lacks), heard)

    def _write(self, at: str, reason: str, heard: list[dict[str, Any]]) -> Verdict:
        verdict = {"reason": reason, "doubt": "; ".join(str(vote["doubt"]) for vote in heard if vote.get("doubt"))}
        return self._read(self._store.compare_set(f"{at}/verdict", "", json.dumps(verdict)))

    @staticmethod
    def _read(raw: bytes) -> Verdict:
        verdict = json.loads(raw)
        return _verdict(str(verdict["reason"]), str(verdict.get("doubt", "")))


def _verdict(reason: str, doubt: str) -> Verdict:
    return Verdict(Outcome.NO if reason else Outcome.YES, reason, doubt)


def _objection(votes: list[dict[str, Any]], lacks: Lacks) -> str:
    reasons = [str(vote["reason"]) for vote in votes if vote["reason"] is not None]
    if reasons:
        return "; ".join(reasons)
    subjects = {str(vote["subject"]): rank for rank, vote in enumerate(votes)}
    if len(subjects) > 1:
        return "the ranks do not speak of the same: " + ", ".join(f"{what} on rank {r}" for what, r in subjects.items())
    bits = lacks.bits
    for vote in votes:
        bits &= int(vote.get("lacks", "0"), 16)
    return lacks.words(bits) if bits else ""


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
