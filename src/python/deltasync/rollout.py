"""The rollout side: ``Receiver`` keeps weights identical to the trainer's, into a module, arrays, or a directory."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.thread
import contextlib
import logging
import math
import numbers
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from . import _checks, _native
from ._connecting import connect, endpoints_of
from ._deadlines import end_of, left, seconds
from ._host_memory import HostMemory
from ._kept import Kept
from ._native import Layout, PlacementPlan, Sidecar, StagedUpdate, Version
from ._progress import ProgressLike, Watch
from ._tries import Tries
from ._versions import asked_version
from .agent import read_token
from .coverage import Ignore
from .errors import (
    Cancelled,
    ConnectionFailed,
    CorruptData,
    DeadlinePassed,
    Error,
    InvalidArgument,
    LayoutMismatch,
    LeaseRevoked,
    NoSpace,
    PeerDied,
    Unsupported,
)
from .layouts import module_memory
from .places import check_module
from .prepared import LAST_WORDS_S, Lag, Pause, Prepared, PullReport, RepairReport, TileMismatch
from .tls import Tls, TlsLike

_log = logging.getLogger("deltasync.rollout")

#: A background pull that failed by these tries again, after a pause that doubles.
_MAY_PASS = (ConnectionFailed, CorruptData, DeadlinePassed, LeaseRevoked, NoSpace, PeerDied)
#: How often who waits for the receiver looks whether it still has to.
_LOOK_S = 0.2
#: The same of who waits for a pull that is paused.
PAUSE_LOOK_S = 0.01
#: Between two tries of a pull.
_PAUSE_MAX_S = 10.0


class Receiver:
    """Keeps one version of the weights, pulled from an agent.

    ``endpoints``: HOST:PORT of the trainer's agent, or several of them (a relay of this node first, say), of which the
    first that answers is taken; they are tried again until ``timeout``, since the agent may start later, which the log
    says once. It reconnects to that one by itself.

    Where the version is kept, one of:
      ``module``  a torch module, whose parameters and buffers of the same names, dtypes and shapes are written in
                  place by each commit, on the host or on CUDA. What the module holds at first does not matter. Its
                  memory stays where it is: no ``.to()`` afterwards. Both sides have to match, else UnmatchedWeights
                  names what is left over. ``ignore``: patterns (``*`` and ``?``) of names that need not, and stay out
                  of updates. Without ``strict`` the module may have more than the trainer.
      ``plan``    a :class:`PlacementPlan` of any live memory (or a function that makes one from the layout), such as
                  tracing an engine's loader gives. ``live``: the engine computes with what is there already, so the
                  first full update is staged too.
      ``directory``  HF model directories, and the symlink ``current`` to the committed one.
      nothing     host memory: see :meth:`tensors` and :meth:`arrays`.

    ``token``, or a ``token_file``, is the secret shared with the agent; with ``tls`` (a :class:`Tls`, or a mapping) the
    connections are encrypted, and the agent proves by its certificate who it is.

    ``background``: a thread pulls every newer version from the start, verified and staged, so that :meth:`commit` has
    it at once; failures that may pass are logged, and it tries again. Without it a pull begins with :meth:`prepare` or
    :meth:`update`.

    ``full_update_policy``: what to do when a version has to come whole while one is live: ``stage`` keeps the live one
    until the commit, and needs host memory for a second; ``in_place`` overwrites it, and ``version`` is None until the
    pull is whole; ``refuse`` raises NoSpace.

    ``shadow``: a copy on the host of what ``module`` or ``plan`` has in live memory, which takes as much memory again.
    With it an engine can sleep and wake without the network (:meth:`release`, :meth:`restore`), and repairs come from
    it.

    ``engine_streams``: of CUDA devices by their ordinals, the streams (torch's, or addresses) on which the engine
    computes with the weights. A commit comes behind what is queued there, and what is queued there after it comes
    behind the commit. For a device without one, a commit first waits for all that torch has queued on it.

    ``on_older_epoch``: what to do when the agent serves a version of a trainer whose epoch is older than that of the
    version that is held (that trainer never heard of the other one): ``follow`` takes it, since the agent is the one
    that was pointed to; ``wait`` waits for a later one; ``fail`` raises VersionConflict. The log says so once. It
    concerns the newest version and the next one, not those that are asked for by number or label.

    Thread-safe. A commit writes live memory: nothing may compute with it meanwhile.
    """

    def __init__(
        self,
        endpoints: str | list[str] | tuple[str, ...],
        *,
        module: Any = None,
        plan: PlacementPlan | Callable[[Layout], PlacementPlan] | None = None,
        directory: str | os.PathLike[str] | None = None,
        live: bool = False,
        token: str = "",
        token_file: str | os.PathLike[str] | None = None,
        tls: TlsLike = None,
        background: bool = False,
        streams: int = 4,
        threads: int = 0,
        cores: str = "",
        full_update_policy: str = "stage",
        shadow: bool = False,
        engine_streams: Mapping[int, Any] | None = None,
        attest_commits: bool = False,
        link_gbps: float = 0.0,
        on_older_epoch: str = "follow",
        name: str | None = None,
        strict: bool = True,
        ignore: Iterable[str] = (),
        timeout: float = 60.0,
    ) -> None:
        if sum(choice is not None for choice in (module, plan, directory)) > 1:
            raise InvalidArgument("Receiver: one of module, plan and directory")
        _check_shadow("Receiver", shadow, module is not None or plan is not None)
        self.timeout = seconds("Receiver", timeout)
        if directory is not None:
            directory = _checks.path("directory", directory)
        self.endpoints = endpoints_of(endpoints)
        if token_file is not None:
            token = read_token(token_file)
        self._options: dict[str, Any] = {
            "token": _checks.secret("token", token),
            "streams": _checks.whole("streams", streams),
            "threads": _checks.whole("threads", threads),
            "cores": _checks.text("cores", cores),
            "full_update_policy": _checks.text("full_update_policy", full_update_policy),
            "attest_commits": bool(attest_commits),
            "link_gbps": _checks.of_type("link_gbps", link_gbps, numbers.Real, "number"),
            "tls": Tls.of(tls)._of_receiver(),
            "on_older_epoch": _checks.text("on_older_epoch", on_older_epoch),
            "name": _checks.text("name", name or f"receiver-{os.getpid()}"),
        }
        self._engine_streams = _addresses(engine_streams) if engine_streams is not None else {}
        self._tries = Tries(_log, "pull", _PAUSE_MAX_S)
        #: Serialises calls of the native receiver.
        self._calls = threading.RLock()
        self._staged: Prepared | None = None
        self._pulled: Prepared | None = None  # by the puller's thread; the same, unless Ctrl-C came amid _begin()
        # What the native receiver has made. Touched, and let go of, with `_calls` only, as its contract asks.
        self._update: tuple[Prepared, StagedUpdate] | None = None
        self._committed: StagedUpdate | None = None
        self._closed = False
        self._lost = False
        self._released = False
        self._shadow = bool(shadow)
        self._pid = os.getpid()
        ignore = Ignore(ignore).patterns
        end = time.monotonic() + self.timeout
        self._native: _native.Receiver = connect(self.endpoints, self._options, end)
        self.layout: Layout = self._native.layout
        self.sidecar: Sidecar = self._native.sidecar
        self._kept = self._keep(
            module=module, plan=plan, directory=directory, live=live, strict=strict, ignore=ignore, shadow=shadow
        )
        self._native.bind(self._kept.target, left(end))
        self._version: Version | None = self._native.current
        self._puller = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="deltasync-pull")
        self._background = background
        _open_receivers.add(self)
        if background:
            self._next_background()

    # Versions.

    @property
    def version(self) -> Version | None:
        """The committed one."""
        return self._version

    def prepare(
        self,
        version: int | str | Version | None = None,
        *,
        timeout: float | None = None,
        progress: ProgressLike = False,
    ) -> Prepared:
        """Begins to pull a version in the background and returns at once: its number, its label, or by default the
        newest. See :class:`Prepared`. One that is being prepared already is joined if it is the same, else replaced.

        ``progress``: True shows a full update on a terminal, if tqdm is installed; a callable gets its bytes that are
        verified, and all of them, some times a second, on a thread of its own. Deltas are short, and have none.
        """
        version = asked_version("prepare", version)
        prepared = self._staged
        if prepared is None or prepared.asked != version or prepared.over:
            prepared = self._begin(version, end_of("prepare", timeout, self.timeout), newer=False)
        Watch(self, prepared, progress)
        return prepared

    def _prepare(self, version: int | str | Version | None, end: float) -> tuple[Prepared, bool]:
        """As prepare(), until `end`, for who follows a pause: it may be one that is paused. And whether it was begun
        here."""
        version = asked_version("update", version)
        prepared = self._staged
        if prepared is not None and prepared.asked == version and os.getpid() == self._pid:
            if not prepared.over or (prepared._is_paused and not prepared._given_up):
                return prepared, False
        return self._begin(version, end, newer=False), True

    def commit(self, *, timeout: float | None = None) -> PullReport:
        """Makes the prepared version the committed one: waits until it is staged and verified, and writes it."""
        prepared = self._staged
        if prepared is None:
            raise InvalidArgument("commit: nothing is prepared; call prepare() first, or update()")
        return self._commit_over_pauses(prepared, end_of("commit", timeout, self.timeout))

    def update(
        self,
        version: int | str | Version | None = None,
        *,
        timeout: float | None = None,
        progress: ProgressLike = False,
    ) -> PullReport:
        """prepare() and commit() in one: brings the memory to a version, by default the newest. If that is held it says
        ``up_to_date``, or, with ``background``, waits for a newer one. ``up_to_date`` is about what was committed: what
        somebody has overwritten in the memory since, only attest() finds. ``progress``: see :meth:`prepare`."""
        end = end_of("update", timeout, self.timeout)
        staged = self._staged
        if version is None and staged is not None and staged.done and not self._background:
            prepared = self._begin(None, end, newer=False)  # there may be a newer one by now
        else:
            prepared, _ = self._prepare(version, end)
        with Watch(self, prepared, progress):
            return self._commit_over_pauses(prepared, end)

    def rollback(self) -> Version | None:
        """Rolls the last commit back, bit for bit, until the next pull begins (with ``background`` that is at once);
        returns the version before it."""
        nothing = "rollback: no commit can be rolled back (a pull has begun since, or there was none)"
        if self._committed is None:
            raise InvalidArgument(nothing)
        with self._locked("rollback", time.monotonic() + self.timeout):
            if self._committed is None:
                raise InvalidArgument(nothing)
            try:
                self._kept.check()
                self._kept.wait_for_kernels()
                self._committed.rollback()
            finally:
                self._committed = None
        return self._version

    def attest(self, *, timeout: float | None = None) -> list[TileMismatch]:
        """Reads all live memory and compares it with the committed version: the tiles that differ, in order; empty: all
        is as it was committed. A background pull pauses for it.

        What differs was written by another program, or the memory is broken: :meth:`repair` writes it again. Errors:
        NotFound (nothing is committed), NoSpace, IoError (a device's), DeadlinePassed.
        """
        with self._between_pulls("attest", timeout) as end:
            return [TileMismatch(*found) for found in self._native.attest(left(end))]

    def repair(
        self, wrong: Iterable[tuple[int, str, str] | int] | None = None, *, timeout: float | None = None
    ) -> RepairReport:
        """Writes tiles of the committed version again, and reads them back: those that :meth:`attest` returned or,
        without them, all that it finds now. Those that the shadow has come from there; of the others only these tiles
        travel. It writes live memory, as a commit does.

        Errors: CorruptData (a tile is wrong again), VersionGone (the agent serves another version by now; the next pull
        brings it whole), NotFound (nothing is committed), OutOfRange and InvalidArgument (no such tile), Unsupported (a
        directory), IoError (a device's: no version is whole any more), ConnectionFailed, DeadlinePassed.
        """
        tiles = [] if wrong is None else _tiles(wrong)
        with self._between_pulls("repair", timeout) as end:
            if wrong is None:
                tiles = _tiles(self._native.attest(left(end)))
            self._kept.wait_for_kernels()
            return RepairReport(**self._native.repair(tiles, left(end)))

    def release(self, *, timeout: float | None = None) -> None:
        """Gives live memory up, so that the engine can sleep: nothing touches it once this has returned. The shadow
        keeps its version, ``version`` is None, and nothing can be pulled until :meth:`restore`. A pull that is under
        way is cancelled, and the last commit cannot be rolled back any more.

        Errors: Unsupported (made without ``shadow``); DeadlinePassed, IoError: a device may still write to the memory,
        which must be kept until a later call succeeds.
        """
        end = end_of("release", timeout, self.timeout)
        self._need_shadow("release")
        self.cancel()
        try:
            with self._locked("release", end):
                self._committed = self._update = None
                self._kept.wait_for_kernels()
                self._native.release(left(end))
                self._released = True
        finally:
            self._resume_background()

    def restore(self, *, timeout: float | None = None) -> RepairReport:
        """Writes all of live memory from the shadow, verified: after :meth:`release`, once the memory is there again at
        the same addresses, or when no version is whole in it any more (:attr:`lost`). Nothing comes over the network. A
        pull that is under way is cancelled, and begun again with ``background``.

        Errors: Unsupported (made without ``shadow``), NotFound (the shadow has no version), CorruptData (a tile of the
        shadow is wrong: update() then), IoError (a device's), DeadlinePassed.
        """
        end = end_of("restore", timeout, self.timeout)
        self._need_shadow("restore")
        self.cancel()
        try:
            with self._locked("restore", end):
                self._committed = self._update = None
                report = RepairReport(**self._native.restore(left(end)))
                self._released = False
        finally:
            self._resume_background()
        return report

    def is_current(self, version: int | str, *, timeout: float | None = None) -> bool:
        """Whether a version's number, or label, still means to the agent what is staged: a trainer that was started
        again gives the same numbers to other weights. Raises where the agent does not answer in time, and
        InvalidArgument if nothing is prepared."""
        prepared = self._staged
        if prepared is None:
            raise InvalidArgument("is_current: nothing is prepared; call prepare() first")
        return prepared.is_current(version, timeout=timeout)

    def lag(self, *, timeout: float = 5.0) -> Lag:
        """How far the committed version is behind what the agent serves now, and the last error. Asks the agent, on a
        connection of its own, while a pull goes on; never raises because the agent is away: ``last_error`` says so."""
        if os.getpid() != self._pid:
            raise InvalidArgument(f"lag: this receiver belongs to process {self._pid}; a forked child makes its own")
        native = getattr(self, "_native", None)
        if native is None:
            raise InvalidArgument("lag: this receiver is closed")
        return Lag(**native.lag(seconds("lag", timeout)))

    def follow(self) -> Prepared:
        """Begins to pull the next version after the committed one, whenever it comes, as ``background`` does by itself
        after each commit; returns at once."""
        return self._begin(None, math.inf, newer=True)

    def rebind(
        self,
        plan: PlacementPlan | None = None,
        *,
        live: bool = False,
        part: PlacementPlan | None = None,
        shadow: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Keeps the version elsewhere from now on, and forgets the one that it had: the next pull is a full one.

        ``plan``, ``live``, ``shadow``: as for the constructor; else host memory, with ``part`` only for what that
        plan places (the rest of :meth:`tensors` is undefined). A pull that is under way is cancelled and waited for; on
        error the version stays where it was."""
        end = end_of("rebind", timeout, self.timeout)
        _check_shadow("rebind", shadow, plan is not None)
        self.cancel()
        with self._locked("rebind", end):
            kept: Kept | None = None
            self._committed = self._update = None
            try:
                kept = self._keep(plan=plan, live=live, part=part, shadow=shadow)
                self._native.bind(kept.target, left(end))
                self._kept, self._shadow = kept, bool(shadow)
                # a loss was the old memory's
                self._version, self._lost, self._released = None, False, False
            except BaseException as error:
                if kept is not None and kept.target.spent and not isinstance(error, Error):
                    # Ctrl-C, which may have come when it was bound already: nothing that may be written is freed
                    self._broken = self._kept, kept.memory
                    self._kept, kept.memory = kept, None
                raise

    def cancel(self) -> None:
        """Ends the pull that is under way and forgets what is staged; the committed version is untouched."""
        staged = self._staged
        if staged is not None:
            staged._given_up = True
        self._end_pull()
        self._staged = None

    @property
    def lost(self) -> bool:
        """Whether a commit or its rollback failed so that no version is whole any more in the memory."""
        return self._lost

    # What was received.

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """(name, read-only numpy array) of the committed version, without a copy; bf16 and fp8 as ml_dtypes has them
        if that is installed, else as raw uint16 and uint8. They change with the next commit. Host memory only."""
        return self._committed_memory().arrays()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """The same as torch tensors. Clone what must outlive the next commit."""
        return self._committed_memory().tensors()

    def load_into(self, module: Any) -> None:
        """Copies the committed version into a torch module, on whatever device and of whatever dtype (names must match,
        the module's or its checkpoint's; tied ones may be missing). For each version again; a receiver with ``module``
        writes in place instead."""
        check_module("load_into", module)
        received = dict(self.tensors())
        state = module_memory(module, received)
        unexpected = [name for name in received if name not in state]
        given = {own.data_ptr() or id(own) for name, own in state.items() if name in received}
        missing = [name for name, own in state.items() if (own.data_ptr() or id(own)) not in given]
        if missing or unexpected:
            raise LayoutMismatch(f"load_into: the module lacks {unexpected[:3]}, the version {missing[:3]}")
        for name, tensor in received.items():
            state[name].detach().copy_(tensor)

    # Life.

    def close(self) -> None:
        """Ends the background pull and leaves the agent. The memory stays as it is."""
        if os.getpid() != self._pid or not hasattr(self, "_native"):
            return
        self._closed = True
        _open_receivers.discard(self)
        self._end_pull()
        self._puller.shutdown(wait=True)
        with self._calls:
            self._staged = None
            self._committed = self._update = None
            del self._native

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside.

    @contextlib.contextmanager
    def _locked(self, what: str, end: float, prepared: Prepared | None = None) -> Iterator[None]:
        """The native receiver for this thread alone; afterwards it is looked at again what it has. For `prepared`:
        until that is cancelled, so that close() ends also where a Ctrl-C came between the lock and its release."""
        if os.getpid() != self._pid:
            raise InvalidArgument(f"{what}: this receiver belongs to process {self._pid}; a forked child makes its own")
        while not self._calls.acquire(timeout=min(left(end), _LOOK_S)):
            if prepared is not None and prepared._cancelled.is_set():
                raise Cancelled(f"{what}: cancelled while another call had the receiver")
            if left(end) == 0:
                raise DeadlinePassed(f"{what}: a pull is under way; cancel() ends it")
        try:
            if not hasattr(self, "_native"):
                raise InvalidArgument(f"{what}: this receiver is closed")
            try:
                yield
            finally:
                if hasattr(self, "_native"):  # else a signal's handler has closed it
                    current = self._native.current
                    self._lost = current is None and not self._released and (self._lost or self._version is not None)
                    self._version = current
        finally:
            self._calls.release()

    @contextlib.contextmanager
    def _between_pulls(self, what: str, timeout: float | None) -> Iterator[float]:
        """As _locked(), until the end that it gives; with `background`, a pull under way is begun again behind it."""
        end = end_of(what, timeout, self.timeout)
        waiting = self._staged
        paused: Prepared | None = None
        pause = Pause()
        try:
            # A forked child's pull is the parent's: _locked() refuses the call.
            if self._background and waiting is not None and not waiting.done and os.getpid() == self._pid:
                paused = waiting
                paused._paused_for = weakref.ref(pause)
                paused._interrupt()
            with self._locked(what, end):
                self._kept.check()
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
                if self._staged is not paused or self._closed:
                    return
                if not paused._given_up:
                    paused._next = self._begin(paused.asked, paused._end, newer=paused._newer)
                if paused._given_up:
                    self._next_background()
        finally:
            paused._resumed = True

    def _after_pause(self, paused: Prepared) -> Prepared | None:
        """What goes on in its place; None: not yet. Cancelled: nothing does."""
        if not paused._given_up and not self._closed:
            if paused._is_paused:
                return None
            if not paused._resumed:  # a Ctrl-C has ended the call that it was paused for
                self._resume(paused)
            if paused._next is not None:
                return paused._next
        raise Cancelled(f"the pull of version {paused.asked or 'newest'} was cancelled")

    def _late(self, asked: int | str | Version | None, timeout: float) -> DeadlinePassed:
        """What is raised when the wait for a pull is over. Asks the agent, for a moment, what it has."""
        failure = self._tries.failure
        why = f"; the last try failed: {failure}" if failure is not None else ""
        native = getattr(self, "_native", None)
        if native is not None and not why:
            lag = Lag(**native.lag(LAST_WORDS_S))
            if asked is None and lag.versions == 0:
                return DeadlinePassed(
                    f"{lag.held} is held already, and {', '.join(self.endpoints)} had none newer for {timeout:.1f} s",
                    "a background pull is for the version after the one that is held; lag() says whether there is one",
                )
            why = f"; {lag.last_error}" if lag.newest is None else f"; the agent's newest is {lag.newest}"
        return DeadlinePassed(
            f"version {asked or 'newest'} from {', '.join(self.endpoints)}: not staged after {timeout:.1f} s{why}"
        )

    def _progress(self) -> tuple[int, int]:
        native = getattr(self, "_native", None)
        return native.progress if native is not None else (0, 0)

    def _end_pull(self) -> None:
        if os.getpid() != self._pid:  # a forked child shares the connections of the parent's pull
            return
        for prepared in (self._staged, self._pulled):
            if prepared is not None:
                prepared._interrupt()

    def _keep(self, **where: Any) -> Kept:
        return Kept(self.layout, self.sidecar, self._engine_streams, **where)

    def _begin(self, version: int | str | Version | None, end: float, *, newer: bool) -> Prepared:
        if os.getpid() != self._pid:
            raise InvalidArgument(f"this receiver belongs to process {self._pid}; a forked child makes its own")
        if self._closed:
            raise InvalidArgument("this receiver is closed")
        self._end_pull()
        prepared = Prepared(self, version, end, newer)
        try:
            prepared._future = self._puller.submit(self._pull, prepared)
        except RuntimeError:  # shut down
            if not self._closed:
                raise
            raise InvalidArgument("this receiver is closed") from None
        self._staged = prepared
        return prepared

    def _next_background(self) -> None:
        self._begin(None, math.inf, newer=True)

    def _pull(self, prepared: Prepared) -> dict[str, Any]:
        """On the puller's thread. Returns the report of what is staged then."""
        self._pulled = prepared
        if self._closed:  # looked at after _pulled is set, which close() looks at after it has set _closed
            prepared._interrupt()
        number, label, epoch = _want(prepared.asked)
        while True:
            try:
                with self._locked("pull", math.inf, prepared):
                    self._committed = self._update = None
                    staged = self._native.pull(
                        number, label, epoch, prepared._newer, left(prepared._end), prepared._stop
                    )
                    self._update = prepared, staged
                    self._tries.succeeded()
                    return dict(staged.report)
            except _MAY_PASS as error:
                if not prepared._newer or prepared._stop.stop_requested:
                    raise
                pause = self._tries.failed(error)
            prepared._cancelled.wait(pause)

    def _commit(self, prepared: Prepared, end: float) -> PullReport:
        try:
            with self._locked("commit", end, prepared):
                if self._update is None or self._update[0] is not prepared or prepared.over:
                    raise Cancelled(f"version {prepared.asked or 'newest'} is not staged any more; prepare it again")
                staged = self._update[1]
                self._kept.check()
                self._kept.wait_for_kernels()
                self._update = None
                if self._staged is prepared:
                    self._staged = None
                self._committed = staged  # before: what interrupts behind the commit can still be rolled back
                try:
                    staged.commit(left(end))
                except Exception:
                    self._committed = None
                    raise
                return PullReport(**staged.report)
        finally:
            if self._background and self._staged is None and not self._closed:
                self._next_background()

    def _commit_over_pauses(self, prepared: Prepared, end: float) -> PullReport:
        while True:
            try:
                return prepared.commit(timeout=left(end))
            except Cancelled:
                if prepared._paused_for is None:
                    raise
            while (follower := self._after_pause(prepared)) is None:
                if left(end) == 0:
                    raise DeadlinePassed(f"version {prepared.asked or 'newest'}: its pull is paused for another call")
                time.sleep(PAUSE_LOOK_S)
            prepared = follower

    def _resume_background(self) -> None:
        """After a call that has cancelled its pull, unless there is no memory to pull into."""
        if self._background and not self._released and self._staged is None and not self._closed:
            self._next_background()

    def _need_shadow(self, call: str) -> None:
        if not self._shadow:
            raise Unsupported(f"{call}: this receiver has no shadow", "make it with shadow=True")

    def _is_current(self, prepared: Prepared, asked: int | str, end: float) -> bool:
        """Whether the agent means by `asked` what is staged: after another start of the trainer it may be other weights
        with the same number."""
        number, label, epoch = _want(asked)
        with self._locked("is_current", end):
            if self._update is None or self._update[0] is not prepared or prepared.over:
                return False
            return self._native.is_current(self._update[1], number, label, epoch, left(end))

    def _committed_memory(self) -> HostMemory:
        if self._kept.memory is None:
            raise InvalidArgument("this receiver keeps its version elsewhere (module, plan or directory)")
        if self.version is None:
            raise InvalidArgument(f"no version is committed {'any more' if self._lost else 'yet'}; call update()")
        return self._kept.memory


def _want(asked: int | str | Version | None) -> tuple[int | None, str | None, int]:
    if isinstance(asked, Version):
        return asked.number, None, asked.epoch
    if isinstance(asked, str):
        return None, asked, 0
    return asked, None, 0


def _addresses(streams: Mapping[int, Any]) -> dict[int, int]:
    """Of the streams, by the ordinals of their devices. InvalidArgument."""
    _checks.of_type("engine_streams", streams, Mapping, "mapping of devices to streams, such as {0: stream}")
    return {
        _checks.whole("engine_streams: device", device): _checks.whole(
            f"engine_streams: stream of device {device}", getattr(stream, "cuda_stream", stream), most=2**64 - 1
        )
        for device, stream in streams.items()
    }


def _tiles(wrong: Iterable[tuple[int, str, str] | int]) -> list[int]:
    """The tiles that attest() names, or that are given as such. InvalidArgument."""
    if isinstance(wrong, str) or not isinstance(wrong, Iterable):
        raise _checks.wrong("repair: wrong", wrong, "list of tiles, such as attest() returns")
    tiles = (tile[0] if isinstance(tile, tuple) and tile else tile for tile in wrong)
    return sorted({_checks.whole("repair: a tile of wrong", tile, most=2**64 - 1) for tile in tiles})


def _check_shadow(call: str, shadow: bool, live_memory: bool) -> None:
    if shadow and not live_memory:
        raise InvalidArgument(f"{call}: shadow=True without live memory: it is a copy of a module's or a plan's")


#: A worker that waits in a pull would keep the interpreter from ending.
_open_receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


def _end_pulls() -> None:
    for receiver in list(_open_receivers):
        receiver._closed = True
        receiver._end_pull()


# Before the workers of concurrent.futures are joined, which atexit would come after; the last registered comes first.
threading._register_atexit(_end_pulls)  # type: ignore[attr-defined]
