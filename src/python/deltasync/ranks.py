"""One control service for an engine of several processes: rank 0 has it, and tells the others what to do::

    group = deltasync.RankGroup(store, rank, ranks, name="engine-7")  # each rank; a store that all share
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
import weakref
from collections.abc import Callable
from typing import Any

from ._deadlines import left
from ._native import Version
from ._rank import REMEDY, Rank, words_of
from ._rank_store import ANSWER_S, RankGroup
from .errors import Aborted, DeadlinePassed, Error, InvalidArgument, Unsupported
from .rollout import Receiver

__all__ = ["RankFollower", "RankGroup"]

_log = logging.getLogger("deltasync.ranks")

#: A follower looks so often for a command; more often where one is to be expected, since the engine stands still then.
_LOOK_S, _SOON_S = 0.02, 0.001
_EXPECT_S = 30.0
#: Rank 0 looks so often whether the others are who they were.
_WATCH_S = 0.5
_COMMAND = "command"


class LeaderWeights:
    """Rank 0's: every call is told to the others, and ends when all ranks have come to an end of it."""

    stages_in_place = False

    def __init__(self, receiver: Receiver, group: RankGroup) -> None:
        if group.rank != 0:
            raise InvalidArgument(
                f"RolloutControl: ranks: this is rank {group.rank}, and rank 0 has the service", "make a RankFollower"
            )
        self._rank = Rank(receiver, group)
        # Of no leader before: a rank that is late with one of its commands finds nobody who votes with it.
        self._id, self._number, self._forgotten = secrets.token_hex(8), 0, 0
        #: The version that all have come to, and who they were then.
        self._agreed: tuple[Version, list[str]] | None = None
        #: Between what is agreed and what is in doubt.
        self._agreeing = threading.Lock()
        self._stop, self._stands = threading.Event(), threading.Event()
        self._watcher: threading.Thread | None = None

    def begin(self, check: Callable[[], None]) -> None:
        """Once the service stands: one that cannot must not take rank 0's place. `check`: stops the engine if
        :meth:`current` is nothing."""
        self._rank.claim()
        self._stands.set()
        self._watcher = threading.Thread(target=self._watch, args=(check,), name="deltasync-ranks", daemon=True)
        self._watcher.start()

    def current(self) -> Version | None:
        agreed = self._agreed
        version = self._rank.weights.current()
        return version if agreed is not None and not self._rank.doubt and version == agreed[0] else None

    def live_names(self) -> list[tuple[str, str]]:
        return self._rank.weights.live_names()

    def stage(self, version: str, directory: str, verify: bool, timeout: float) -> None:
        if directory:  # its files may be others on each host
            raise Unsupported("directory: the ranks of an engine cannot tell whether they read the same", "publish it")
        end = time.monotonic() + timeout
        if version:
            self._rank.stage(
                self._tell("stage", self._come_together(end), end, version=version, verify=verify),
                version,
                verify,
                end,
            )
        else:
            self._stage_newest(verify, end)
        self._forget()

    def commit(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        members = self._come_together(end)
        self._rank.commit(self._tell("commit", members, end), end)
        self._agree(members)

    def release(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        members = self._come_together(end)  # where that fails nothing was said
        try:
            self._rank.release(self._tell("release", members, end), end)
        except Exception as error:  # some have
            self._rank.doubt = self._rank.doubt or words_of(error)
            raise

    def fill(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        members = self._come_together(end)
        self._rank.fill(self._tell("fill", members, end), end)
        self._agree(members)

    def cancel(self) -> None:
        """For good."""
        self._stop.set()
        self._rank.weights.cancel()
        self._rank.keys.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _stage_newest(self, verify: bool, end: float) -> None:
        """What is the newest may differ from rank to rank, so the others are told which rank 0 found; by then a trainer
        may have published the next."""
        while True:
            number = str(self._rank.weights.stage("", "", verify, left(end)).number)
            try:
                return self._rank.has_staged(
                    self._tell("stage", self._come_together(end), end, version=number, verify=verify), end
                )
            except Aborted as error:
                if "VersionGone" not in str(error) or left(end) == 0:
                    raise

    def _agree(self, members: list[str]) -> None:
        version = self._rank.weights.current()
        with self._agreeing:
            self._agreed = None if version is None else (version, members)
            self._rank.doubt = ""

    def _come_together(self, end: float) -> list[str]:
        members = self._wait_for_members(end)
        self._compare(self._agreed, members)
        return members

    def _tell(self, call: str, members: list[str], end: float, **arguments: Any) -> str:
        """The round's name."""
        self._rank.partners = members
        self._number += 1
        at = f"{self._id}-{self._number}"
        command = {"at": at, "call": call, "to": members, "timeout": left(end), **arguments}
        self._rank.keys.set(_COMMAND, json.dumps(command))
        return at

    def _wait_for_members(self, end: float) -> list[str]:
        ranks = self._rank.group.ranks
        self._stands.wait(left(end))
        while True:
            members = self._rank.members()
            if members[0] != self._rank.id:
                raise Aborted(
                    f"another process is rank 0 of {self._rank.group.name} now", "one RolloutControl for each name"
                )
            missing = [str(rank) for rank, member in enumerate(members) if not member]
            for rank, member in enumerate(members):
                if member and not member.endswith(f" of {ranks}"):
                    raise InvalidArgument(
                        f"rank {rank} takes part in ranks={member.split()[-1]}, and rank 0 in ranks={ranks}",
                        "give all the same",
                    )
            if not missing:
                return members
            if left(end) == 0:
                raise DeadlinePassed(f"rank {', '.join(missing)} of {self._rank.group.name} was never there", REMEDY)
            self._stop.wait(_LOOK_S)

    def _watch(self, check: Callable[[], None]) -> None:
        """A rank that was started again has no weights, while the others go on to compute with it."""
        while not self._stop.wait(_WATCH_S):
            agreed = self._agreed
            try:
                if agreed is not None and not self._rank.doubt:
                    self._compare(agreed, self._rank.members())
                check()
            except Exception as error:  # of the store: the next call says so; of a hook: the service has
                _log.debug("%s: %s", self._rank.group.name, words_of(error))

    def _compare(self, agreed: tuple[Version, list[str]] | None, members: list[str]) -> None:
        with self._agreeing:
            if agreed is None or agreed is not self._agreed or members == agreed[1]:
                return
            others = [str(rank) for rank, (now, then) in enumerate(zip(members, agreed[1], strict=True)) if now != then]
            self._rank.doubt = f"rank {', '.join(others)} was started again after the last update"
            doubt = self._rank.doubt
        _log.warning("%s: %s; nothing is served until an update", self._rank.group.name, doubt)

    def _forget(self) -> None:
        """Rounds before this one, in which all have voted: nobody looks there any more."""
        try:
            for number in range(self._forgotten + 1, self._number):
                for part in ("", "/staged", "/written", "/rolled back"):
                    for key in ("verdict", *(f"vote/{rank}" for rank in range(self._rank.group.ranks))):
                        self._rank.keys.delete(f"{self._id}-{number}{part}/{key}")
                self._forgotten = number
        except Error as error:
            _log.debug("%s: %s", self._rank.group.name, words_of(error))


class RankFollower:
    """A rank other than 0 of ``group``: does what rank 0's :class:`RolloutControl` tells, until it is closed, on a
    thread of its own.

    ``receiver`` keeps this rank's part of the weights, without ``background``; nothing else may update it. A rank that
    starts again takes part from the next update on, with a full pull; until then rank 0 serves nothing."""

    def __init__(self, receiver: Receiver, group: RankGroup) -> None:
        if group.rank == 0:
            raise InvalidArgument("RankFollower: this is rank 0, which has the service", "make a RolloutControl")
        if isinstance(receiver, Receiver) and receiver._pulls.background:
            raise InvalidArgument("RankFollower: the receiver pulls by itself", "make it without background=True")
        self._rank = Rank(receiver, group)
        self._rank.claim()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"deltasync-rank-{group.rank}", daemon=True)
        self._thread.start()
        # Python must not end while the thread is in native code.
        self._end = weakref.finalize(self, _close, self._rank, self._stop, self._thread)

    @property
    def version(self) -> Version | None:
        """What this rank has committed; None before the first update, and while its weights sleep."""
        return self._rank.weights.current()

    @property
    def doubt(self) -> str:
        """Why live memory is not of the version that all ranks have; empty: it is. An update ends it."""
        return self._rank.doubt

    def close(self) -> None:
        """Ends what goes on: rank 0 hears a no, if the store answers. The receiver stays."""
        self._end()

    def __enter__(self) -> RankFollower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> None:
        done, expect, troubled = "", 0.0, False
        while not self._stop.is_set():
            taken = False
            try:
                command = json.loads(self._rank.keys.found(_COMMAND) or "null")
                if command is None or command["at"] == done:
                    self._stop.wait(_SOON_S if time.monotonic() < expect else _LOOK_S)
                    continue
                done, troubled, taken = str(command["at"]), False, True
                expect = time.monotonic() + (_EXPECT_S if command["call"] == "stage" else 0.0)
                self._take(command)
            except Exception as error:
                if not self._stop.is_set() and not troubled:
                    _log.warning("%s of %s: %s", self._rank.name, self._rank.group.name, words_of(error))
                if not taken:  # the store fails, or nobody understands what is there
                    troubled = True
                    self._stop.wait(1.0)

    def _take(self, command: dict[str, Any]) -> None:
        rank = self._rank
        members = list(command["to"])
        if rank.keys.found(f"rank/{rank.group.rank}") != rank.id:
            rank.doubt = f"another process is {rank.name} of {rank.group.name} now"
            self._stop.set()
            raise Aborted(rank.doubt, "one RankFollower for each name and rank")
        if len(members) != rank.group.ranks or members[rank.group.rank] != rank.id:
            return rank.refuse(command, f"{rank.name} was started meanwhile")
        if rank.keys.found("rank/0") != members[0]:
            return rank.refuse(command, "another process is rank 0 now")
        rank.partners = members
        at, call, end = str(command["at"]), command["call"], time.monotonic() + float(command["timeout"])
        if call == "stage":
            rank.stage(at, command["version"], bool(command["verify"]), end)
        elif call == "commit":
            rank.commit(at, end)
        elif call == "release":
            rank.release(at, end)
        elif call == "fill":
            rank.fill(at, end)
        else:
            rank.refuse(command, f"{rank.name} does not know {call!r}: its deltasync is of another version")


def _close(rank: Rank, stop: threading.Event, thread: threading.Thread) -> None:
    """Of a follower, also at the program's end."""
    stop.set()
    rank.weights.cancel()
    thread.join(ANSWER_S / 2)
    rank.keys.close()
    thread.join()
