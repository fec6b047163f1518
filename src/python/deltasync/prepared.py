"""A version on its way to a receiver, and what pulls and repairs did."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ._deadlines import LONGEST_S, end_of, left
from ._native import StopSource, Version
from ._versions import Asked
from .errors import Cancelled, DeadlinePassed, Error

#: A pull whose time is over ends soon, unless the machine is busy.
LAST_WORDS_S = 2.0
#: Ends that lie no further apart are of one call.
_SAME_TIME_S = 0.1


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did. Names that end in ``_s`` are seconds.

    ``mode``: up_to_date, delta or full.
    ``version``: what came, never merely what was asked for.
    ``root``: digest of the digests of the tiles that are kept, at that version; 32 hex digits.
    ``wire_bytes``: received over all connections, headers counted.
    ``local_bytes``: copied out of the memory of an agent, or of a trainer's buckets, on this host.
    ``full_bytes``: of all tensors or tiles that are kept, for comparison.
    ``metadata_bytes``: of ``wire_bytes``, what is not of tiles.
    ``tiles``: received. ``changed``: elements, of a delta.
    ``delta_steps``: versions that were stepped through.
    ``replans``: how often the plan was made again, since the lease was lost or the agent replaced.
    ``stream_restarts``: how often a data connection was made again.
    ``repaired_tiles``: those that came damaged, and were fetched again.
    ``packed``: whether tiles of a full update came packed.
    ``transports``: UCX's that carried tiles, such as "posix/memory" (endpoints ``ucx://…``); empty: none did.
    ``wait_s``: for the version to exist.
    ``transfer_s``: from the plan's answer until all is verified and staged.
    ``verify_s``: of that, CPU time for digests, summed over threads.
    ``commit_s``, ``attest_s``: of the commit, and of ``attest_commits`` after it; 0 before.
    """

    mode: str
    version: Version
    root: str
    wire_bytes: int
    local_bytes: int
    full_bytes: int
    metadata_bytes: int
    tiles: int
    changed: int
    delta_steps: int
    replans: int
    stream_restarts: int
    repaired_tiles: int
    packed: bool
    transports: str
    wait_s: float
    transfer_s: float
    verify_s: float
    commit_s: float
    attest_s: float


class TileMismatch(NamedTuple):
    """A tile of live memory that is not the committed version's.

    ``tile``: its number in the layout, for :meth:`Receiver.repair`.
    ``tensor``: the name of its tensor.
    ``copy_in``: empty: it is wrong where it is read. Else that is right, and the memory of this name has a copy that is
    not.
    """

    tile: int
    tensor: str
    copy_in: str = ""

    def __str__(self) -> str:
        return f"tile {self.tile} ({self.tensor})" + (f", the copy in {self.copy_in}" if self.copy_in else "")


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair wrote into live memory, or a restoration.

    ``version``: that live memory has now, the committed one.
    ``tiles``, ``nbytes``: written.
    ``fetched``: tiles that came from the agent; the others came from the shadow.
    ``wire_bytes``: received, headers counted. ``metadata_bytes``: of these, what is not of tiles.
    ``total_s``: seconds, for all of it. ``attest_s``: of these, reading live memory again.
    """

    version: Version
    tiles: int
    nbytes: int
    fetched: int
    wire_bytes: int
    metadata_bytes: int
    total_s: float
    attest_s: float


@dataclass(frozen=True, slots=True)
class Lag:
    """How far what a receiver holds is behind what its agent serves. Durations are in seconds, by the agent's monotonic
    clock: what time it is on either host does not matter.

    ``versions``: published after the one that is held; 0: it is the newest. At most 4,096, which the agent remembers;
    all of these if nothing is held. None: no version is served, or the agent could not be asked (``last_error`` says
    why).
    ``seconds``: since the first of these was published; 0: it is the newest.
    ``held``: the committed version; None before the first commit.
    ``newest``: what the agent serves. ``newest_age_s``: since that was published.
    ``heard_newest``: what ``newest`` was when the agent answered last, to this question or one before; None: it never
    has. ``heard_s``: how long ago that was.
    ``last_error``: why the agent could not be asked; else of the last pull or commit, if that failed. Empty: all is
    well. A pull that was cancelled, or that waited for something newer in vain, has not failed.
    """

    versions: int | None
    seconds: float | None
    held: Version | None
    newest: Version | None
    newest_age_s: float | None
    heard_newest: Version | None
    heard_s: float | None
    last_error: str


class _Puller(Protocol):
    """Who pulls what is prepared, and commits it."""

    timeout: float

    def commit(self, prepared: Prepared, end: float) -> PullReport: ...

    def is_current(self, prepared: Prepared, asked: int | str, end: float) -> bool: ...

    def late(self, asked: Asked, timeout: float) -> DeadlinePassed: ...


class Pause:
    """A call that has to have the receiver between two pulls."""

    def __init__(self) -> None:
        self.over = False


class Prepared:
    """A version on its way. All methods may be called from any thread."""

    def __init__(self, puller: _Puller, asked: Asked, end: float, newer: bool) -> None:
        self._puller = puller
        #: What prepare() was asked for.
        self.asked = asked
        self._end = end
        self._newer = newer
        self._stop = StopSource()
        self._cancelled = threading.Event()
        self._future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        # Interrupted for a call that has to have the receiver, as long as that is alive: a Ctrl-C may end it anywhere.
        # Once it is `_resumed`, `_next` goes on in its place, or nothing does.
        self._paused_for: weakref.ref[Pause] | None = None
        self._resumed = False
        self._next: Prepared | None = None
        self._given_up = False

    @property
    def done(self) -> bool:
        """Whether the pull has ended: staged and verified, or failed."""
        return self._future.done()

    @property
    def failed(self) -> bool:
        """Whether the pull has ended without a version."""
        return self._future.done() and (self._future.cancelled() or self._future.exception() is not None)

    @property
    def over(self) -> bool:
        """Whether it failed or was cancelled: nothing can be committed."""
        return self._cancelled.is_set() or self.failed

    def wait(self, timeout: float | None = None) -> PullReport:
        """Until it is staged and verified. Raises what the pull raised, DeadlinePassed after `timeout` seconds."""
        return PullReport(**self._result(end_of("wait", timeout, LONGEST_S)))

    def commit(self, *, timeout: float | None = None) -> PullReport:
        """Waits for it, and makes it the committed version. On error the version before is the committed one, or, where
        the message says so, none. What was staged is forgotten; but if the time was over before the memory was free to
        be written, it stays staged, and commit() may be called again."""
        end = end_of("commit", timeout, self._puller.timeout)
        self._result(end)
        return self._puller.commit(self, end)

    def is_current(self, version: int | str, *, timeout: float | None = None) -> bool:
        """Whether a version's number, or label, means to the agent what is staged here: a trainer that was started
        again gives the same numbers to other weights. Asks the agent; raises where it does not answer in time."""
        end = end_of("is_current", timeout, self._puller.timeout)
        return self._puller.is_current(self, version, end)

    def cancel(self) -> None:
        """Ends the pull, or gives up what it staged (its memory goes with the next pull); what is committed stays."""
        each: Prepared | None = self
        while each is not None:
            each._given_up = True  # before `_next` is looked at: _resume() does it the other way round
            each._interrupt()
            each = each._next

    @property
    def _is_paused(self) -> bool:
        pause = self._paused_for() if self._paused_for is not None else None
        return pause is not None and not pause.over and not self._resumed

    def _interrupt(self) -> None:
        self._stop.request_stop()
        self._cancelled.set()
        self._future.cancel()

    def _patience(self, end: float) -> float:
        """For how long who waits until `end` waits for the pull: a moment longer where its own time is over then too,
        since it says what it waited for, and what the agent has."""
        return left(end) + (LAST_WORDS_S if self._end < end + _SAME_TIME_S else 0.0)

    def _result(self, end: float) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            return self._future.result(self._patience(end))
        except concurrent.futures.TimeoutError as error:
            if isinstance(error, Error):
                raise
            raise self._puller.late(self.asked, max(0.0, end - begin)) from None
        except concurrent.futures.CancelledError:
            raise Cancelled(f"the pull of version {self.asked or 'newest'} was cancelled") from None
