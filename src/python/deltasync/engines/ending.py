"""How a commit of several ranks ends: kept by all, rolled back by all, or neither, which is said.

====================  ============================================================================================
the ranks decide      this rank
====================  ============================================================================================
yes                   keeps it
no                    rolls it back; then all vote once more, on whether every rank has the weights of before
unknown (votes.py)    others may keep it or have rolled it back: its weights count as void, whatever they are
====================  ============================================================================================

What the engine's loader has done, or begun to do, cannot be rolled back: such a rank's weights are of no version
(:attr:`EngineReceiver.doubt` says why), and its next commit loads all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import Error
from .votes import Outcome, Verdict

_log = logging.getLogger("deltasync.engines")

REMEDY = "do not resume before an update has succeeded: it loads all weights again where they are of no version"

#: (why this rank votes no, or None; what about; the round's name)
Decide = Callable[[str | None, str, str], Verdict]


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


@dataclass(frozen=True)
class Ending:
    """Of a commit that was not kept."""

    #: Every rank is known to have the weights of before.
    as_before: bool
    text: str


def conclude(
    receivers: Sequence[Committed], committed: Sequence[Committed], failed: str | None, subject: str, decide: Decide
) -> Ending | None:
    """The vote about a commit, and what follows from it; None: all keep it. ``receivers``: of this rank;
    ``committed``: those that have written; ``failed``: why not all have."""
    try:
        verdict = decide(failed, f"{subject} is written", "written")
    except BaseException:  # Ctrl-C: the others may have read a "yes"
        _void(committed, subject)
        raise
    if verdict.yes:
        return None
    if verdict.outcome is Outcome.UNKNOWN:
        _void(committed, subject)
        return Ending(False, f"THE OUTCOME IS UNKNOWN: {verdict.reason}; {doubts(receivers)}")
    for receiver in reversed(committed):
        try:
            receiver.rollback()
        except Exception as error:  # it is void now
            _log.error("%s: %s", receiver.name, error)
        except BaseException:
            _void(committed, subject)
            raise
    settled = decide(doubts(receivers) or None, f"{subject} is rolled back", "rolled back")
    if settled.yes:
        return Ending(True, f"all was rolled back, the weights of all ranks are as before: {verdict.reason}")
    known = "NOT ALL RANKS" if settled.outcome is Outcome.NO else "PERHAPS NOT ALL RANKS"
    return Ending(False, f"{known} HAVE THE WEIGHTS OF BEFORE: {settled.reason}; what failed: {verdict.reason}")


def doubts(receivers: Sequence[Committed]) -> str:
    """Whose weights are of no version, and since when; empty: nobody's."""
    return "; ".join(f"the weights of {one.name} are of no version: {one.doubt}" for one in receivers if one.doubt)


def _void(committed: Sequence[Committed], subject: str) -> None:
    for receiver in committed:
        receiver.void(f"whether the other ranks keep {subject} is unknown")
