"""All ranks of a replica, or none: the group commit of ``src/commit/machine.hpp`` over a store that they share.

What is decided, and when, is said there. Here is what it does not do itself: the store, the clock, and the weights. A
collective would do while nothing fails. But one that a rank has left at its deadline leaves the group out of step for
ever, and it carries no reasons.

What the engine's loader has done, or begun to do, cannot be rolled back: such a rank's weights are of no version
(:attr:`EngineReceiver.doubt` says why), and its next commit loads all of them.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .._native import GroupCommit, GroupReport, GroupVote
from ..errors import Error

_log = logging.getLogger("deltasync.engines")

REMEDY = "do not resume before an update has succeeded: it loads all weights again where they are of no version"

#: A rank looks so often for the others, less often the longer it waits. (Store.wait with a timeout would hold the
#: store's connection, which others of the process use too, and logs a warning each time.)
_LOOK_MIN_S = 0.0005
_LOOK_MAX_S = 0.02
#: And so often whether they are still there.
_IN_VAIN_LOOK_S = 0.5


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


class WeightsUnknown(Error):
    """The ranks of this replica may have different versions, or weights of no version."""

    code = "weights_unknown"
    remedy = REMEDY


class Committed(Protocol):
    """What of an ``EngineReceiver`` is needed here."""

    name: str
    doubt: str

    def rollback(self) -> None: ...

    def void(self, reason: str) -> None: ...


@dataclass
class Work:
    """What this rank does for an update. `commit`: writes, notes in `committed` who has written, returns what failed or
    None. `receivers`: all of this rank that take part."""

    commit: Callable[[], str | None]
    receivers: Sequence[Committed]
    committed: list[Any]

    def roll_back(self) -> None:
        for receiver in reversed(self.committed):
            try:
                receiver.rollback()
            except Exception as error:  # it is void now
                _log.error("%s: %s", receiver.name, error)

    def void(self, reason: str) -> None:
        for receiver in self.committed:
            receiver.void(reason)

    @property
    def doubts(self) -> str:
        return doubts(self.receivers)


@dataclass(frozen=True, slots=True)
class Ending:
    """Of an update."""

    #: All ranks have it.
    kept: bool
    #: Why this rank has written nothing; None: it has.
    unwritten: Verdict | None
    #: Every rank is known to have the weights of before.
    as_before: bool
    #: Of an update that was written, and is not kept.
    text: str


class Group:
    """One rank's. ``store``: of torch.distributed, or None where it is the only one. ``in_vain``: whether who is waited
    for will not come; then it is as if the deadline had passed. Not thread-safe."""

    def __init__(self, store: Any, rank: int, ranks: int, in_vain: Callable[[], bool] = lambda: False) -> None:
        self._store, self.rank, self.ranks = store, rank, ranks
        self._in_vain = in_vain
        self._machine = GroupCommit(rank, ranks)

    def vote(
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
        self._machine.vote(_vote(reason, subject, doubt, lacks), at)
        return _verdict(self._run(time.monotonic() + timeout, 0.0, math.inf, lacks))

    def update(
        self,
        reason: str | None,
        work: Work,
        *,
        subject: str = "",
        end: float,
        margin: float,
        patience: float = math.inf,
        at: str = "",
        doubt: str = "",
        lacks: Lacks = NOTHING,
    ) -> Ending:
        """A vote about what is staged, as :meth:`vote`; then `work` is done, kept by all or rolled back by all. Each
        vote waits for the others until `margin` seconds after `end`, or after it has begun where that is later; but
        not for more than `patience` seconds."""
        self._machine.update(_vote(reason, subject, doubt, lacks), at)
        report = self._run(end, margin, patience, lacks, work)
        unwritten = _verdict(report) if report.ending == "unwritten" else None
        return Ending(report.ending == "kept", unwritten, report.ending == "as_before", report.text)

    def _run(self, end: float, margin: float, patience: float, lacks: Lacks, work: Work | None = None) -> GroupReport:
        try:
            while True:
                now = time.monotonic()
                self._vote(min(max(now, end) + margin, now + patience), lacks)
                if self._machine.action.kind == "done":
                    return self._machine.report
                assert work is not None
                self._do(work)
        except BaseException:  # Ctrl-C: the others may have read a "yes"
            self._machine.interrupted()
            if work is not None and self._machine.action.kind == "void_weights":
                self._do(work)
            raise

    def _vote(self, end: float, lacks: Lacks) -> None:
        """Until this round is decided."""
        machine = self._machine
        pause, look = _LOOK_MIN_S, time.monotonic() + _IN_VAIN_LOOK_S
        while True:
            action = machine.action
            if action.kind in ("read", "write"):
                self._ask(action.kind, action.registers, action.value)
            elif action.kind == "wait":
                if time.monotonic() >= look:
                    end = time.monotonic() if self._in_vain() else end
                    look = time.monotonic() + _IN_VAIN_LOOK_S
                left = end - time.monotonic()
                if left > 0:
                    time.sleep(min(pause, left))
                    pause = min(pause * 2, _LOOK_MAX_S)
                machine.go_on(time.monotonic() >= end)
            elif action.kind == "word":
                machine.worded(_text(lacks.words(int(action.value, 16))))
            else:
                return

    def _ask(self, kind: str, registers: list[str], value: str) -> None:
        try:
            if kind == "write":
                found = [self._store.compare_set(registers[0], "", value).decode()]
            else:
                found = [self._store.get(name).decode() for name in registers] if self._store.check(registers) else []
        except Exception as error:  # DistError and its kind
            self._machine.failed(_text(str(error)))
            return
        if kind == "write":
            self._machine.stands(found[0])
        elif found:
            self._machine.found(found)
        else:
            self._machine.absent()

    def _do(self, work: Work) -> None:
        machine = self._machine
        action = machine.action
        if action.kind == "commit":
            problem = work.commit()
            machine.committed(None if problem is None else _text(problem))
        elif action.kind == "roll_back":
            work.roll_back()
            machine.rolled_back(_text(work.doubts))
        else:
            assert action.kind == "void_weights", action.kind
            work.void(action.value)
            machine.voided(_text(work.doubts))


def doubts(receivers: Sequence[Committed]) -> str:
    """Whose weights are of no version, and since when; empty: nobody's."""
    return "; ".join(f"the weights of {one.name} are of no version: {one.doubt}" for one in receivers if one.doubt)


def _vote(reason: str | None, subject: str, doubt: str, lacks: Lacks) -> GroupVote:
    return GroupVote(None if reason is None else _text(reason), _text(subject), _text(doubt), f"{lacks.bits:x}")


def _verdict(report: GroupReport) -> Verdict:
    return Verdict(Outcome(report.outcome), report.reason, report.doubt)


def _text(words: str) -> str:
    """Well-formed, whatever an error says."""
    return words.encode("utf-8", "backslashreplace").decode()
