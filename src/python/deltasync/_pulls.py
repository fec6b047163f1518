"""The pulls of a receiver, on a thread of their own: one at a time is begun, staged and committed."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.thread
import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ._bound import Bound
from ._deadlines import end_of, left
from ._native import StagedUpdate, StopSource, Version
from ._tries import Tries
from ._versions import Asked, asked_version
from .errors import (
    Cancelled,
    DeadlinePassed,
    Error,
    InternalError,
    InvalidArgument,
    LayoutMismatch,
    Unsupported,
    VersionConflict,
)
from .prepared import LAST_WORDS_S, Lag, Pause, Prepared, PullReport

_log = logging.getLogger("deltasync.rollout")

#: A background pull that failed tries again, after a pause that doubles; but these the next commit() is to tell.
_FINAL = (Cancelled, InternalError, InvalidArgument, LayoutMismatch, Unsupported, VersionConflict)
#: Between two looks of who waits for a pull that is paused.
PAUSE_LOOK_S = 0.01
#: Between two tries of a pull.
_PAUSE_MAX_S = 10.0


class Pulls:
    """``background``: behind each commit the next version is pulled by itself. Thread-safe."""

    def __init__(self, bound: Bound, endpoints: Sequence[str], timeout: float, background: bool) -> None:
        self.timeout = timeout
        self.background = background
        self.closed = False
        #: Begun, and neither committed nor forgotten.
        self.staged: Prepared | None = None
        self._bound = bound
        self._endpoints = endpoints
        self._pulled: Prepared | None = None  # by the thread; the same, unless Ctrl-C came amid begin()
        # What the native receiver has made. Touched, and let go of, with it locked only, as its contract asks.
        self._update: tuple[Prepared, StagedUpdate] | None = None
        self.committed: StagedUpdate | None = None
        #: Ends a restore() that is under way.
        self.restore_stop: StopSource | None = None
        self._tries = Tries(_log, "pull", _PAUSE_MAX_S)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="deltasync-pull")
        _open_pulls.add(self)

    # Beginning and ending.

    def begin(self, version: Asked, end: float, *, newer: bool) -> Prepared:
        self._bound.check_process("")
        if self.closed:
            raise InvalidArgument("this receiver is closed")
        self.interrupt()
        prepared = Prepared(self, version, end, newer)
        try:
            prepared._future = self._thread.submit(self._pull, prepared)
        except RuntimeError:  # shut down
            if not self.closed:
                raise
            raise InvalidArgument("this receiver is closed") from None
        self.staged = prepared
        return prepared

    def join(self, version: Asked, end: float) -> tuple[Prepared, bool]:
        """What is pulled until `end`, for who follows a pause: it may be one that is paused. And whether it was begun
        here."""
        version = asked_version("update", version)
        prepared = self.staged
        while prepared is not None and prepared.asked == version and self._bound.is_of_this_process:
            if not prepared.over or (prepared._is_paused and not prepared._given_up):
                return prepared, False
            if self.staged is prepared:
                break
            prepared = self.staged  # its pause has ended between the two looks: what goes on is staged by now
        return self.begin(version, end, newer=False), True

    def to_update(self, asked: Asked, end: float) -> tuple[Prepared, bool]:
        """What update() commits: as join(), but nothing that was staged of what may be another one by now."""
        staged = self.staged
        newest_again = asked is None and staged is not None and staged.done and not self.background
        if newest_again or isinstance(asked, Path):
            return self.begin(asked, end, newer=False), True
        return self.join(asked, end)

    def begin_next(self) -> None:
        """In the background."""
        self.begin(None, math.inf, newer=True)

    def begin_next_if_idle(self) -> None:
        """After a call that has cancelled the background's pull, unless there is no memory to pull into."""
        if self.background and not self._bound.released and self.staged is None and not self.closed:
            self.begin_next()

    def cancel(self) -> None:
        staged = self.staged
        if staged is not None:
            staged._given_up = True
        self.interrupt()
        self.staged = None

    def interrupt(self) -> None:
        if not self._bound.is_of_this_process:
            return
        for prepared in (self.staged, self._pulled):
            if prepared is not None:
                prepared._interrupt()

    @contextlib.contextmanager
    def restoring(self) -> Iterator[StopSource]:
        """What ends the restore() inside, as cancel_restore() and close() do."""
        stop = StopSource()
        self.restore_stop = stop
        if self.closed:  # looked at after that is set, which close() looks at after it has set `closed`
            stop.request_stop()
        try:
            yield stop
        finally:
            self.restore_stop = None

    def cancel_restore(self) -> None:
        stop = self.restore_stop
        if stop is not None:
            stop.request_stop()

    def forget(self) -> None:
        """What is staged, and how to roll the last commit back. With the receiver locked."""
        self.committed = self._update = None

    def close(self) -> None:
        self.closed = True
        _open_pulls.discard(self)
        self.cancel_restore()
        self.interrupt()
        self._thread.shutdown(wait=True)

    # Pausing for a call that has to have the receiver.

    @contextlib.contextmanager
    def between(self, what: str, timeout: float | None) -> Iterator[float]:
        """As Bound.locked(), until the end that it gives; with `background`, a pull under way is begun again behind
        it."""
        end = end_of(what, timeout, self.timeout)
        waiting = self.staged
        paused: Prepared | None = None
        pause = Pause()
        try:
            # A forked child's pull is the parent's: locked() refuses the call.
            if self.background and waiting is not None and not waiting.done and self._bound.is_of_this_process:
                paused = waiting
                paused._paused_for = weakref.ref(pause)
                paused._interrupt()
            with self._bound.locked(what, end):
                self._bound.kept.check()
                yield end
        finally:
            try:
                if paused is not None:
                    self._resume(paused)
            finally:
                pause.over = True

    def _resume(self, paused: Prepared) -> None:
        """Begins again what was paused, or, where that was given up, the background's; nothing if somebody else has
        ended it, or begun another."""
        try:
            with contextlib.suppress(InvalidArgument):  # closed meanwhile
                if self.staged is not paused or self.closed:
                    return
                if not paused._given_up:
                    paused._next = self.begin(paused.asked, paused._end, newer=paused._newer)
                if paused._given_up:
                    self.begin_next()
        finally:
            paused._resumed = True

    def after_pause(self, paused: Prepared) -> Prepared | None:
        """What goes on in its place; None: not yet. Cancelled: nothing does."""
        if not paused._given_up and not self.closed:
            if paused._is_paused:
                return None
            if not paused._resumed:  # a Ctrl-C has ended the call that it was paused for
                self._resume(paused)
            if paused._next is not None:
                return paused._next
        raise Cancelled(f"the pull of version {paused.asked or 'newest'} was cancelled")

    # Pulling and committing.

    def _pull(self, prepared: Prepared) -> dict[str, Any]:
        """On the thread. Returns the report of what is staged then."""
        self._pulled = prepared
        if self.closed:  # looked at after _pulled is set, which close() looks at after it has set `closed`
            prepared._interrupt()
        number, label, epoch = _want(prepared.asked)
        directory = prepared.asked if isinstance(prepared.asked, Path) else ""
        while True:
            try:
                with self._bound.locked("pull", math.inf, prepared):
                    if prepared.over:  # who cancelled it may have waited for this lock, and seen it free
                        raise Cancelled(f"the pull of version {prepared.asked or 'newest'} was cancelled")
                    self.forget()
                    staged = self._bound.native.pull(
                        number, label, epoch, prepared._newer, left(prepared._end), prepared._stop, directory
                    )
                    self._update = prepared, staged
                    self._tries.succeeded()
                    return dict(staged.report)
            except Error as error:
                if isinstance(error, _FINAL) or not prepared._newer or prepared._stop.stop_requested:
                    raise
                pause = self._tries.failed(error)
            prepared._cancelled.wait(pause)

    def commit(self, prepared: Prepared, end: float) -> PullReport:
        try:
            with self._bound.locked("commit", end, prepared):
                if self._update is None or self._update[0] is not prepared or prepared.over:
                    raise Cancelled(f"version {prepared.asked or 'newest'} is not staged any more; prepare it again")
                staged = self._update[1]
                self._bound.kept.check()
                self._bound.kept.wait_for_kernels(end)
                self.committed = staged  # before: what interrupts behind the commit can still be rolled back
                try:
                    staged.commit(left(end))
                except Exception:
                    self.committed = None
                    raise
                finally:
                    if not staged.is_staged:  # else it had not begun to write: the same commit may do with more time
                        self._update = None
                        if self.staged is prepared:
                            self.staged = None
                return PullReport(**staged.report)
        finally:
            if self.background and self.staged is None and not self.closed:
                self.begin_next()

    def commit_over_pauses(self, prepared: Prepared, end: float) -> PullReport:
        while True:
            try:
                return prepared.commit(timeout=left(end))
            except Cancelled:
                if prepared._paused_for is None:
                    raise
            except (Error, MemoryError):
                if self.background and self.staged is prepared and prepared.failed:  # it is told, and over
                    self.staged = None
                    self.begin_next_if_idle()
                raise
            while (follower := self.after_pause(prepared)) is None:
                if left(end) == 0:
                    raise DeadlinePassed(f"version {prepared.asked or 'newest'}: its pull is paused for another call")
                time.sleep(PAUSE_LOOK_S)
            prepared = follower

    # Asking the agent.

    def is_current(self, prepared: Prepared, asked: int | str, end: float) -> bool:
        """Whether the agent means by `asked` what is staged: after another start of the trainer it may be other weights
        with the same number."""
        number, label, epoch = _want(asked)
        with self._bound.locked("is_current", end):
            if self._update is None or self._update[0] is not prepared or prepared.over:
                return False
            return self._bound.native.is_current(self._update[1], number, label, epoch, left(end))

    def late(self, asked: Asked, timeout: float) -> DeadlinePassed:
        """What is raised when the wait for a pull is over. Asks the agent, for a moment, what it has."""
        failure = self._tries.failure
        why = f"; the last try failed: {failure}" if failure is not None else ""
        native = getattr(self._bound, "native", None)
        if native is not None and not why:
            lag = Lag(**native.lag(LAST_WORDS_S))
            if asked is None and lag.versions == 0:
                return DeadlinePassed(
                    f"{lag.held} is held already, and {', '.join(self._endpoints)} had none newer for {timeout:.1f} s",
                    "a background pull is for the version after the one that is held; lag() says whether there is one",
                )
            why = f"; {lag.last_error}" if lag.newest is None else f"; the agent's newest is {lag.newest}"
        return DeadlinePassed(
            f"version {asked or 'newest'} from {', '.join(self._endpoints)}: not staged after {timeout:.1f} s{why}"
        )


def _want(asked: Asked) -> tuple[int | None, str | None, int]:
    if isinstance(asked, Path):
        return None, None, 0
    if isinstance(asked, Version):
        return asked.number, None, asked.epoch
    if isinstance(asked, str):
        return None, asked, 0
    return asked, None, 0


#: A worker that waits in a pull would keep the interpreter from ending.
_open_pulls: weakref.WeakSet[Pulls] = weakref.WeakSet()


def _end_pulls() -> None:
    for pulls in list(_open_pulls):
        pulls.closed = True
        pulls.interrupt()


# Before the workers of concurrent.futures are joined, which atexit would come after; the last registered comes first.
threading._register_atexit(_end_pulls)  # type: ignore[attr-defined]
