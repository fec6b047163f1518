"""All ranks of a replica, or none: one decision per step, over a key-value store that they share.

A collective would do while nothing fails. But one that a rank has left at its deadline leaves the group out of step for
ever, and it carries no reasons. So each round is a register in the store that is written once:

* A rank puts its vote at ``ROUND/vote/RANK``, and waits for those of all others.
* Who has all of them writes the verdict; who waited in vain writes "no". The first write counts (``compare_set``), and
  everybody takes what stands there. So a rank that gave up has either prevented a "yes", or it finds one and goes
  along. Who votes no waits too: a verdict before the others came would send them on.
* A rank that comes late to a round with a verdict goes on to the next without one, where the others will be.

Values are JSON. Whatever the store raises leaves the outcome unknown: ConnectionFailed says so.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from ..errors import ConnectionFailed

#: A rank looks so often for the others, less often the longer it waits. (Store.wait with a timeout would hold the
#: store's connection, which others of the process use too, and logs a warning each time.)
_LOOK_MIN_S = 0.0005
_LOOK_MAX_S = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    yes: bool
    #: Who voted no and why, or who was missing; empty if all voted yes.
    reason: str


class Votes:
    """One rank's. ``store``: of torch.distributed, or None where it is the only one. Not thread-safe.

    ``lockstep``: all ranks come to every round, in the same order, whatever fails. A rank that finds a verdict is then
    late to this round and not left over from an older one, and takes it."""

    def __init__(self, store: Any, rank: int, ranks: int, *, lockstep: bool = False) -> None:
        self._store, self.rank, self.ranks = store, rank, ranks
        self._lockstep = lockstep
        self._round = 0

    def decide(self, reason: str | None, *, subject: str = "", timeout: float) -> Verdict:
        """`reason`: why this rank votes no, or None for yes. `subject`: what about; ranks that vote about different
        things have no agreement. Returns the same on every rank; waits `timeout` seconds at most for the others."""
        if self.ranks == 1:
            return Verdict(reason is None, reason or "")
        try:
            return self._decide(reason, subject, time.monotonic() + timeout)
        except RuntimeError as error:  # DistError and its kind
            raise ConnectionFailed(
                f"rank {self.rank}: the store that the ranks share failed, and what they decided is unknown: {error}"
            ) from error

    def _decide(self, reason: str | None, subject: str, end: float) -> Verdict:
        store = self._store
        while not self._lockstep and store.check([f"{self._round}/verdict"]):
            self._round += 1
        at = self._round
        self._round += 1
        mine = {"reason": reason if reason is None else f"rank {self.rank}: {reason}", "subject": subject}
        store.set(f"{at}/vote/{self.rank}", json.dumps(mine))
        votes = [f"{at}/vote/{rank}" for rank in range(self.ranks)]
        pause = _LOOK_MIN_S
        while not store.check(votes):
            left = end - time.monotonic()
            if left <= 0:
                missing = [rank for rank, key in enumerate(votes) if not store.check([key])]
                why = f"rank {self.rank} has waited in vain for {_ranks(missing)}"
                return self._write(at, why if reason is None else f"rank {self.rank}: {reason}; {why}")
            if store.check([f"{at}/verdict"]):
                return self._read(store.get(f"{at}/verdict"))
            time.sleep(min(pause, left))
            pause = min(pause * 2, _LOOK_MAX_S)
        return self._write(at, _objection([json.loads(store.get(key)) for key in votes]))

    def _write(self, at: int, reason: str) -> Verdict:
        return self._read(self._store.compare_set(f"{at}/verdict", "", json.dumps({"reason": reason})))

    @staticmethod
    def _read(raw: bytes) -> Verdict:
        reason = str(json.loads(raw)["reason"])
        return Verdict(not reason, reason)


def _objection(votes: list[dict[str, Any]]) -> str:
    reasons = [str(vote["reason"]) for vote in votes if vote["reason"] is not None]
    if reasons:
        return "; ".join(reasons)
    subjects = {str(vote["subject"]): rank for rank, vote in enumerate(votes)}
    if len(subjects) > 1:
        return "the ranks do not speak of the same: " + ", ".join(f"{what} on rank {r}" for what, r in subjects.items())
    return ""


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
