"""One control service for an engine of several processes: rank 0 has it, and tells the others what to do::

    group = deltasync.RankGroup(store, rank, ranks)  # each rank; a store of torch.distributed that all share
    receiver = deltasync.Receiver("trainer:7070", module=my_part)
    if rank == 0:
        control = deltasync.RolloutControl(Engine(), receiver, ranks=group)
    else:
        follower = deltasync.RankFollower(receiver, group)

All ranks come to a version, or none does (docs/reference/commit_protocol.md).
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from . import _checks
from ._control_weights import ReceiverWeights
from ._deadlines import left
from ._native import Version
from .engines.group import Group, Outcome, Verdict, WeightsUnknown, Work
from .errors import Aborted, Cancelled, Error, InvalidArgument, IoError
from .rollout import Receiver

__all__ = ["RankFollower", "RankGroup"]

_log = logging.getLogger("deltasync.ranks")

#: Who has voted waits so much longer for the others than they have for their work.
_MARGIN_S = 5.0
#: A follower looks so often for a command; more often where one is to be expected, since the engine stands still then.
_LOOK_S, _SOON_S = 0.02, 0.001
_EXPECT_S = 30.0
_COMMAND = "command"
_REMEDY = "the rank says why; the next update tries again"
#: So many rounds back nobody looks any more.
_ROUNDS_KEPT = 16


class RankGroup:
    """The processes of one engine. ``store``: of torch.distributed (a TCPStore, say), with a connection of its own for
    this object; all ranks share it. ``rank`` in 0..``ranks`` - 1. ``name``: of this engine, where several share the
    store."""

    def __init__(self, store: Any, rank: int, ranks: int, *, name: str = "deltasync") -> None:
        self.store, self.name = store, _checks.text("name", name)
        self.rank, self.ranks = _checks.whole("rank", rank), _checks.whole("ranks", ranks)
        if not 0 <= self.rank < self.ranks:
            raise InvalidArgument(f"RankGroup: rank={rank} of ranks={ranks}: ranks are 0 to {self.ranks - 1}")


class _Keys:
    """The store, until it is closed, which ends a wait for something in it."""

    def __init__(self, group: RankGroup) -> None:
        self._store, self._prefix, self.closed = group.store, f"{group.name}/", False

    def _open(self, key: str) -> str:
        if self.closed:
            raise Cancelled(f"{key}: this rank is being closed")
        return self._prefix + key

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return bytes(self._store.compare_set(self._open(key), expected, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._open(key) for key in keys]))

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._open(key)))

    def set(self, key: str, value: str) -> None:
        self._store.set(self._open(key), value)

    def delete(self, key: str) -> None:
        self._store.delete_key(self._prefix + key)


class _Rank:
    """One rank's part of what all do. Errors are of this rank's view: the same on all but for an unknown outcome."""

    def __init__(self, receiver: Receiver, group: RankGroup) -> None:
        if not isinstance(receiver, Receiver):
            raise InvalidArgument(f"receiver={receiver!r:.80} is no Receiver")
        self.weights, self.keys = ReceiverWeights(receiver), _Keys(group)
        if self.weights.stages_in_place:
            raise InvalidArgument(
                "a receiver with full_update_policy='in_place' cannot roll back, as all ranks may have to",
                "make it without",
            )
        self.name = f"rank {group.rank}"
        #: Why live memory is not of the version that all ranks have; empty: it is.
        self.doubt = ""
        self.votes = Group(self.keys, group.rank, group.ranks)

    # Of a committed receiver (engines/group.py).

    def rollback(self) -> None:
        try:
            self.weights.rollback()
        except Exception as error:
            self.doubt = f"a rollback failed: {error}"
            raise

    def void(self, reason: str) -> None:
        self.doubt = reason

    # Rounds. `at`: their name.

    def stage(self, at: str, version: str, directory: str, verify: bool, end: float) -> None:
        def work() -> str:
            self.weights.stage(version, directory, verify, left(end))
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
                return _words(error)
            return None

        staged = self.weights.staged
        ending = self.votes.update(
            None if staged else "nothing is staged",
            Work(work, [self], committed),
            subject=staged,
            end=end,
            margin=_MARGIN_S,
            at=at,
            doubt=self.doubt,
        )
        if ending.kept:
            self.doubt = ""
        elif ending.unwritten is not None:
            raise _error(ending.unwritten)
        elif ending.as_before:
            raise Aborted(f"{ending.text}; all ranks have the weights of before", _REMEDY)
        else:
            self.doubt = self.doubt or ending.text
            raise WeightsUnknown(ending.text)

    def release(self, at: str, end: float) -> None:
        def work() -> str:
            self.weights.release(left(end))
            return "sleep"

        self._all(at, work, end, doubtful=True)

    def fill(self, at: str, end: float) -> None:
        def work() -> str:
            self.weights.fill(left(end))
            version = self.weights.current()
            return f"version {version.number} of epoch {version.epoch:x}" if version else "no version"

        self._all(at, work, end, doubtful=True)
        self.doubt = ""

    def refuse(self, at: str, reason: str) -> None:
        """For who waits for this rank."""
        self.votes.vote(reason, timeout=0.0, at=at)

    def _all(self, at: str, work: Callable[[], str], end: float, *, doubtful: bool = False) -> None:
        """`work` says what about it was. `doubtful`: where not all have done it, the ranks differ."""
        failed: Exception | None = None
        subject = ""
        try:
            subject = work()
        except Exception as error:
            failed = error
        wait = left(end) + _MARGIN_S
        reason = None if failed is None else _words(failed)
        verdict = self.votes.vote(reason, subject=subject, timeout=wait, at=at, doubt=self.doubt)
        if verdict.yes:
            return
        if doubtful:
            self.doubt = verdict.reason
        if isinstance(failed, Error):
            raise failed
        raise _error(verdict)


class LeaderWeights:
    """Rank 0's: every call is told to the others, and ends when all ranks have come to an end of it."""

    stages_in_place = False

    def __init__(self, receiver: Receiver, group: RankGroup) -> None:
        if group.rank != 0:
            raise InvalidArgument(
                f"RolloutControl: ranks: this is rank {group.rank}, and rank 0 has the service", "make a RankFollower"
            )
        self._rank = _Rank(receiver, group)
        # Of no leader before: a rank that is late with one of its commands finds nobody who votes with it.
        self._id, self._number, self._names = secrets.token_hex(8), 0, range(group.ranks)

    def current(self) -> Version | None:
        return None if self._rank.doubt else self._rank.weights.current()

    def live_names(self) -> list[tuple[str, str]]:
        return self._rank.weights.live_names()

    def stage(self, version: str, directory: str, verify: bool, timeout: float) -> None:
        end = time.monotonic() + timeout
        arguments: dict[str, Any] = {"version": version, "directory": directory, "verify": verify}
        if version or directory:
            self._rank.stage(self._tell("stage", end, **arguments), version, directory, verify, end)
        else:  # what is the newest may differ from rank to rank
            arguments["version"] = str(self._rank.weights.stage(version, directory, verify, timeout).number)
            self._rank.has_staged(self._tell("stage", end, **arguments), end)

    def commit(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._rank.commit(self._tell("commit", end), end)

    def release(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._rank.release(self._tell("release", end), end)

    def fill(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._rank.fill(self._tell("fill", end), end)

    def cancel(self) -> None:
        """For good."""
        self._rank.keys.closed = True
        self._rank.weights.cancel()

    def _tell(self, call: str, end: float, **arguments: Any) -> str:
        """The round's name."""
        self._number += 1
        at = f"{self._id}-{self._number}"
        command = {"at": at, "call": call, "timeout": left(end), **arguments}
        try:
            self._rank.keys.set(_COMMAND, json.dumps(command))
            self._forget(self._number - _ROUNDS_KEPT)
        except Error:
            raise
        except Exception as error:  # DistError and its kind
            raise IoError(f"the store of the ranks does not answer: {error}") from error
        return at

    def _forget(self, number: int) -> None:
        for part in ("", "/staged", "/written", "/rolled back") if number > 0 else ():
            for key in ("verdict", *(f"vote/{rank}" for rank in self._names)):
                self._rank.keys.delete(f"{self._id}-{number}{part}/{key}")


class RankFollower:
    """A rank other than 0: does what rank 0's :class:`RolloutControl` tells, on its own thread, until it is closed.

    ``receiver`` keeps this rank's part of the weights, without ``background``. A rank that starts again takes part from
    the next update on, with a full pull."""

    def __init__(self, receiver: Receiver, group: RankGroup) -> None:
        if group.rank == 0:
            raise InvalidArgument("RankFollower: this is rank 0, which has the service", "make a RolloutControl")
        self._rank = _Rank(receiver, group)
        if receiver._pulls.background:
            raise InvalidArgument("RankFollower: the receiver pulls by itself", "make it without background=True")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"deltasync-rank-{group.rank}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> Version | None:
        """What this rank has committed; None before the first update, and while its weights sleep."""
        return self._rank.weights.current()

    @property
    def doubt(self) -> str:
        """Why live memory is not of the version that all ranks have; empty: it is. An update ends it."""
        return self._rank.doubt

    def close(self) -> None:
        """Ends what goes on; the others hear so. The receiver stays."""
        self._stop.set()
        self._rank.keys.closed = True
        self._rank.weights.cancel()
        self._thread.join()

    def __enter__(self) -> RankFollower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> None:
        done, expect, troubled = "", 0.0, False
        first = True
        while not self._stop.is_set():
            try:
                command = self._look()
                troubled = False
            except Exception as error:
                if not troubled and not self._stop.is_set():
                    _log.warning("%s: the store of the ranks does not answer, looking on: %s", self._rank.name, error)
                troubled, command = True, None
                self._stop.wait(1.0)
            if command is None or command["at"] == done:
                self._stop.wait(_SOON_S if time.monotonic() < expect else _LOOK_S)
                first = first and command is None
                continue
            done = str(command["at"])
            expect = time.monotonic() + (_EXPECT_S if command["call"] == "stage" else 0.0)
            try:
                self._do(command, first)
            except Exception as error:
                _log.warning("%s: %s: %s", self._rank.name, command["call"], error)
            first = False

    def _look(self) -> dict[str, Any] | None:
        keys = self._rank.keys
        return dict(json.loads(keys.get(_COMMAND))) if keys.check([_COMMAND]) else None

    def _do(self, command: dict[str, Any], first: bool) -> None:
        at, call, end = command["at"], command["call"], time.monotonic() + float(command["timeout"])
        if call == "stage":
            self._rank.stage(at, command["version"], command["directory"], bool(command["verify"]), end)
        elif first:  # of before this rank was there
            self._rank.refuse(f"{at}/staged" if call == "commit" else at, f"{self._rank.name} was started meanwhile")
        elif call == "commit":
            self._rank.commit(at, end)
        elif call == "release":
            self._rank.release(at, end)
        elif call == "fill":
            self._rank.fill(at, end)
        else:
            self._rank.refuse(at, f"{self._rank.name} does not know {call!r}: its deltasync is of another version")


def _error(verdict: Verdict) -> Error:
    if verdict.outcome is Outcome.UNKNOWN:
        return WeightsUnknown(verdict.reason)
    return Aborted(verdict.reason, _REMEDY)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
