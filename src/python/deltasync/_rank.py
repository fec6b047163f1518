"""One rank's part in what all ranks of an engine do together: its weights, and its votes (engines/group.py)."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from ._control_weights import ReceiverWeights
from ._deadlines import left
from ._rank_store import RankGroup, RankStore
from .engines.group import Group, Outcome, WeightsUnknown, Work
from .errors import Aborted, Error, InvalidArgument
from .rollout import Receiver

#: Who has voted waits so much longer for the others than they have for their work.
_MARGIN_S = 5.0
#: But so long at most while the engine stands still for a commit.
_PATIENCE_S = 30.0
_SEE = "see to the rank that it names (one that is away: start it again), then "
REMEDY = f"{_SEE}update"
_REMEDY_ASLEEP = f"{_SEE}wake the weights; where that fails, update"


class Rank:
    """One rank's part of what all do. Errors are of this rank's view: the same on all but for an unknown outcome."""

    def __init__(self, receiver: Receiver, group: RankGroup) -> None:
        if not isinstance(receiver, Receiver):
            raise InvalidArgument(f"receiver={receiver!r:.80} is no Receiver")
        self.weights, self.group = ReceiverWeights(receiver), group
        if self.weights.stages_in_place:
            raise InvalidArgument(
                "a receiver with full_update_policy='in_place' cannot roll back, as all ranks may have to",
                "make it without",
            )
        self.name = f"rank {group.rank}"
        #: Why live memory is not of the version that all ranks have; empty: it is.
        self.doubt = ""
        #: Of this process. The last one that says which rank it is, is that rank.
        self.id = f"{secrets.token_hex(8)} of {group.ranks}"
        self.keys = RankStore(group)
        #: Of what goes on: who takes part.
        self.partners: list[str] = []
        self.votes = Group(self.keys, group.rank, group.ranks, self._in_vain)

    def claim(self) -> None:
        """From now on this process is the rank; the one before has no part any more."""
        try:
            self.keys.begin()
            self.keys.set(f"rank/{self.group.rank}", self.id)
        except BaseException:
            self.keys.close()
            raise

    def members(self) -> list[str]:
        """Who the ranks are; empty: nobody yet."""
        return [self.keys.found(f"rank/{rank}") for rank in range(self.group.ranks)]

    def _in_vain(self) -> bool:
        """A process that is not the rank any more does not vote, and who is it now has no part in this."""
        try:
            return self.members() != self.partners
        except Error:  # who votes says so
            return False

    # Of a committed receiver (engines/group.py).

    def rollback(self) -> None:
        try:
            self.weights.rollback()
        except Exception as error:
            self.doubt = f"a rollback failed: {error}"
            raise
        if self.weights.wrong:
            self.doubt = "live memory was not what was committed, and could not be repaired"

    def void(self, reason: str) -> None:
        self.doubt = reason

    # Rounds. `at`: their name.

    def stage(self, at: str, version: str, verify: bool, end: float) -> None:
        def work() -> str:
            self.weights.stage(version, "", verify, left(end))
            return self.weights.staged

        self._all(at, work, end)

    def has_staged(self, at: str, end: float) -> None:
        """For the others to stage the same."""
        self._all(at, lambda: self.weights.staged, end)

    def commit(self, at: str, end: float) -> None:
        committed: list[Any] = []

        def work() -> str | None:
            committed.append(self)  # at first: one that fails half-way is rolled back, too
            try:
                self.weights.commit(left(end))
            except Exception as error:
                return words_of(error)
            return None

        staged = self.weights.staged
        ending = self.votes.update(
            None if staged else "nothing is staged",
            Work(work, [self], committed),
            subject=staged,
            end=end,
            margin=_MARGIN_S,
            patience=_PATIENCE_S,
            at=at,
            doubt=self.doubt,
        )
        if ending.kept:
            self.doubt = ""
        elif ending.unwritten is not None:
            if ending.unwritten.outcome is Outcome.UNKNOWN:  # the others may have written
                self.doubt = ending.unwritten.reason
                raise WeightsUnknown(ending.unwritten.reason)
            raise Aborted(ending.unwritten.reason, REMEDY)
        elif ending.as_before:
            raise Aborted(f"{ending.text}; all ranks have the weights of before", REMEDY)
        else:
            self.doubt = self.doubt or ending.text
            raise WeightsUnknown(ending.text)

    def release(self, at: str, end: float) -> None:
        def work() -> str:
            self.weights.release(left(end))
            return "sleep"

        self._all(at, work, end, asleep=True)

    def fill(self, at: str, end: float) -> None:
        def work() -> str:
            self.weights.fill(left(end))
            version = self.weights.current()
            return f"version {version.number} of epoch {version.epoch:x}" if version else "no version"

        self._all(at, work, end, asleep=True)
        self.doubt = ""

    def refuse(self, command: dict[str, Any], reason: str) -> None:
        """For who waits for this rank."""
        at = str(command["at"])
        self.votes.vote(reason, timeout=0.0, at=f"{at}/staged" if command["call"] == "commit" else at)

    def _all(self, at: str, work: Callable[[], str], end: float, *, asleep: bool = False) -> None:
        """`work` says what about it was. `asleep`: where not all have done it, the weights of some are."""
        failed: Exception | None = None
        subject = ""
        try:
            subject = work()
        except Exception as error:
            failed = error
        reason = None if failed is None else words_of(failed)
        verdict = self.votes.vote(reason, subject=subject, timeout=left(end) + _MARGIN_S, at=at, doubt=self.doubt)
        if verdict.yes:
            return
        if asleep:
            self.doubt = verdict.reason
        if isinstance(failed, Error):
            raise failed
        raise Aborted(verdict.reason, _REMEDY_ASLEEP if asleep else REMEDY)


def words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
