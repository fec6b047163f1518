"""A receiver beside an engine's model: pulls on threads of its own, writes on the thread that runs the engine's steps.

The life of an :class:`EngineReceiver` (docs/internals/engines.md has the reasons):

1. ``connecting``: a thread of its own connects, from construction on.
2. ``loading``: the loader is traced (:meth:`attach`). What this rank needs is pulled into host memory. The first commit
   hands all of it to the engine's own loader, then compares live memory with it through the traced plan.
3. ``placed``: what was equal is written in place from now on; all else goes through the engine's loader, whole leaf
   modules, from host memory that is part of the same placement: one pull, one commit, one version.

Whatever makes live memory's content doubtful (:meth:`void`) leads back to 2.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .._deadlines import end_of, left, seconds
from .._native import Version
from ..coverage import Ignore
from ..errors import (
    Cancelled,
    CorruptData,
    DeadlinePassed,
    Error,
    InvalidArgument,
    LayoutMismatch,
    UnmatchedWeights,
    Unsupported,
)
from ..prepared import Prepared
from ..rollout import Receiver
from .covered import ENGINES_OWN, refused, require_engine_coverage
from .doubt import ModelDoubt
from .loader import EngineLoader
from .placed import HostCopies, places, plan_of, without_shared
from .staging import CommitReport, Staging, words
from .unplaced import UnplacedWeights

if TYPE_CHECKING:
    from ..autoplacement import LoaderTrace

_log = logging.getLogger("deltasync.engines")

__all__ = ["CLOSED", "CONNECTING", "LOADING", "PLACED", "CommitReport", "EngineReceiver", "Staging"]

CONNECTING, LOADING, PLACED, CLOSED = "connecting", "loading", "placed", "closed"


class EngineReceiver:
    """Keeps one model of one rank at the trainer's versions.

    ``model``: a torch module (or several by name); ``loader``: see :class:`EngineLoader`; ``endpoints``: agents, as for
    :class:`deltasync.Receiver`, connected to from here on. ``beside``: a model whose receiver writes what the two share
    (a draft's embedding). ``ignore``: patterns of names that need not match, of the trainer's tensors and of the
    model's weights. ``shared``: what this model has no place for may be another's, a rank's or a draft's: what that is
    says :attr:`untaken`, and the caller looks whether somebody takes it. ``shadow``: a copy of the weights in host
    memory, from which they come back after :meth:`lose`. ``name``: of this rank, for messages and the agent's log.

    The engine's step thread calls :meth:`attach`, :meth:`prepare`, :meth:`commit`, :meth:`rollback`, :meth:`void`,
    :meth:`pause`, :meth:`lose`, :meth:`regain` and :meth:`close`, one at a time. Live memory is written by `commit`,
    `rollback` and `regain` and by nothing else, whatever fails.
    """

    #: Why live memory is of no version; empty: it is of one, or never was written.
    doubt = ModelDoubt()

    def __init__(
        self,
        model: Any,
        loader: EngineLoader,
        endpoints: str | list[str],
        *,
        beside: Any = None,
        ignore: Iterable[str] = (),
        shared: bool = False,
        shadow: bool = False,
        name: str = "engine",
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        self._beside, self._endpoints = beside, endpoints
        self.model, self.loader, self.name, self.timeout = model, loader, name, seconds(name, timeout)
        self.state = CONNECTING
        #: Of the engine's memory; None until a commit has succeeded, and after :meth:`void`.
        self.version: Version | None = None
        self.trace: LoaderTrace | None = None
        #: Tensors of the trainer that this model has no place for, and that are not ignored → why.
        self.untaken: dict[str, str] = {}
        self._ignore, self._shared, self._shadow = Ignore((*ENGINES_OWN, *ignore)), shared, shadow
        self._lost: tuple[Version, UnplacedWeights] | None = None  # that regain() writes again
        self._connect = lambda: Receiver(endpoints, name=name, timeout=timeout, **options)
        #: The receiver's tensors are not the model's, or not the trainer's any more: the next call connects again.
        self._stale = False
        self._places: dict[str, tuple[object, ...]] = {}
        self._copies: HostCopies | None = None
        self._staging: Staging | None = None
        self._following: Prepared | None = None
        self._before: Version | None = None
        self._mode = ""  # what rollback() would roll back
        self._bound = False  # to where the state says: a pull may begin
        self._receiver: Receiver | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"deltasync-{name}")
        self._connected = self._thread.submit(self._connect)

    # On the engine's step thread.

    def attach(self, timeout: float | None = None) -> None:
        """Waits for the connection, traces the loader, and begins to pull. Does nothing where that is done.

        The model is not written, but nothing else may use it meanwhile. Unsupported: the engine cannot be written;
        UnmatchedWeights: the trainer's tensors are not the model's weights, and what is left over on both sides;
        DeadlinePassed, ConnectionFailed: no agent answered."""
        if self._stale and self.state != CLOSED:
            self._connect_again()
        if self.state != CONNECTING:
            return
        self.check()
        wait = self.timeout if timeout is None else seconds("attach", timeout)
        try:
            self._receiver = self._connected.result(wait)
        except concurrent.futures.TimeoutError as error:
            if self._connected.done():
                raise
            raise DeadlinePassed(f"{self.name}: no connection to {self._endpoints} after {wait:.1f} s") from error
        self._retrace(wait)
        self.follow()

    def prepare(self, version: int | str | None = None, *, timeout: float | None = None) -> Staging:
        """Begins to stage a version (its number, its label, or the newest) and returns at once; the first call attaches
        first. One that was pulled in the background already is taken as it is."""
        end = end_of("prepare", timeout, self.timeout)
        self.attach(left(end))
        self.check()
        assert self.trace is not None
        if self._places != places(self.trace, self.model):
            self.void("the engine has given its parameters other memory")
            self._retrace(left(end))
        if not self._bound:
            self._bind_host(left(end))
        self._drop_staging()
        self._adopt(left(end))
        staging = Staging(version)
        staging.future = self._thread.submit(self._stage, staging, end)
        self._staging = staging
        return staging

    def commit(self, staging: Staging, *, timeout: float | None = None, verify: bool = False) -> CommitReport:
        """Writes the staged version. What raises leaves the version before in place, unless :attr:`doubt` says why not.

        ``verify``: reads back and compares what is written in place; what differs is of no version (CorruptData names
        it). The first load is compared in any case, and what is not equal then goes through the engine's loader from
        there on, compared by nobody (:attr:`CommitReport.unattested`)."""
        begin = time.monotonic()
        end = end_of("commit", timeout, self.timeout)
        if staging is not self._staging or not staging.done:
            raise InvalidArgument("commit: nothing is staged by this prepare()")
        staging.wait(0)
        self.check()
        self.loader.synchronize()  # steps that still read the weights
        self._mode = ""
        mode = self._mode = self._load_all() if self.state == LOADING else self._write(staging, end)
        report, receiver = staging.report, self._receiver
        assert report is not None and receiver is not None and self.trace is not None
        if verify:
            self._attest(report.version, left(end))
        self.version, self.doubt = report.version, ""
        return CommitReport(
            version=report.version,
            mode=mode,
            direct=0 if mode == "loaded" else len(self.trace.placed),
            reloaded=len(self._names()) if mode == "loaded" else len(self.trace.reload),
            unattested=len(self.trace.reload) if verify or mode == "loaded" else len(self._names()),
            tensors=len(self.trace.specs),
            wire_bytes=report.wire_bytes,
            commit_s=time.monotonic() - begin,
        )

    def rollback(self) -> None:
        """Rolls the last commit back, bit for bit, until :meth:`follow` or :meth:`prepare`. After one that the engine's
        loader did cannot be rolled back: the memory counts as void, and the next commit loads all of it."""
        if self._mode == "loaded":
            self.void("its first load was rolled back")
        if self._mode in ("", "loaded", "up_to_date"):
            self._mode = ""
            return
        self._mode = ""
        assert self._receiver is not None
        try:
            self._receiver.rollback()
            self._reload_copies()
            self.loader.synchronize()
        except BaseException as error:
            self.void(f"a rollback failed: {error}")
            raise
        self.version = self._before
        self._drop_staging()

    def follow(self) -> None:
        """Goes on to pull whatever comes next, in the background, if the model can be written now. After a commit: once
        it need not be rolled back."""
        self._drop_staging()
        self._mode = ""
        receiver = self._receiver
        if receiver is None or self.state == CLOSED or not self._bound or self.loader.refusal() is not None:
            return  # a pull reads live memory, which may not be there while it sleeps
        if receiver.lost:
            self.void("a commit and its rollback failed")
            return
        # One that is staged and was not committed is kept: the next prepare() may want it.
        if self._following is None or self._following.failed:
            self._following = None
            self._following = receiver.follow()

    def pause(self, timeout: float | None = None) -> None:
        """Ends all pulls, and waits for them and for what they have given to the device: nothing of this receiver
        touches live memory until :meth:`follow` or :meth:`prepare`. What was staged is forgotten.

        DeadlinePassed: a pull still goes on."""
        end = end_of("pause", timeout, self.timeout)
        self._drop_staging()
        self._following = None
        if self._receiver is not None:
            self._receiver.cancel()
            with self._receiver._bound.locked("pause", end):  # as each pull has it, to its end
                self.loader.synchronize()

    def void(self, reason: str, *, doubt: bool = True) -> None:
        """Live memory is no longer this version's (lost in sleep, re-allocated, half loaded): the next commit is a full
        one, by the engine's loader. ``doubt``: nor is it anything else that may be served; without it, what there was
        to doubt stays. Never raises."""
        if self.state in (CONNECTING, CLOSED):
            return
        _log.warning("%s: the next update loads all weights again: %s", self.name, reason)
        try:
            self.pause()
        except Exception as error:  # what follows waits, too
            _log.error("%s: %s", self.name, error)
        self.version = self._before = None
        self.doubt, self.state, self._mode = reason if doubt else self.doubt, LOADING, ""
        try:
            self._bind_host(self.timeout)
        except Exception as error:  # prepare() tries again
            _log.error("%s: %s", self.name, error)

    def lose(self, timeout: float | None = None) -> None:
        """Live memory goes, and its content with it, until :meth:`regain`: ends all pulls, and waits for them.

        IoError, DeadlinePassed: a device may still write there, so the memory has to stay."""
        end = end_of("lose", timeout, self.timeout)
        self._lost = None
        if self._shadow:
            try:
                self._adopt(left(end))
            except Error as error:  # the shadow has no version then
                _log.warning("%s: %s", self.name, error)
        self.pause(left(end))
        self._mode = ""  # there is nothing left to roll back to
        receiver, trace, version = self._receiver, self.trace, self.version
        if not self._shadow or self.state != PLACED or receiver is None or trace is None or version is None:
            return
        if receiver.version == version:
            unplaced = UnplacedWeights(trace, self.model, {one.name: one.element_bytes for one in receiver.layout})
            receiver.release(timeout=left(end))
            self._lost = version, unplaced

    def regain(self, reason: str, timeout: float | None = None) -> None:
        """Live memory is there again, with any content: it gets that of before :meth:`lose` from the shadow, if there
        is one, without the network. Else, or if that fails, it is void for this `reason`. Pulls
        begin again. Never raises."""
        lost, self._lost = self._lost, None
        if lost is None or self._receiver is None or self.trace is None:
            self.void(reason)
        else:
            try:
                if self._places != places(self.trace, self.model):
                    raise Unsupported("the engine has given its parameters other memory")
                version, unplaced = lost
                unplaced.write_back()
                self._receiver.restore(timeout=self.timeout if timeout is None else timeout)
                self._reload_copies()
                self.loader.synchronize()
                _log.info("%s: version %s is there again, from the shadow", self.name, _shown(version))
            except Exception as error:
                self.void(f"{reason}, and the shadow did not bring them back: {error}")
        self.follow()

    def check(self) -> None:
        """Unsupported, with the reason, if the model cannot be written now."""
        if self.state == CLOSED:
            raise InvalidArgument(f"{self.name}: this receiver is closed")
        reason = self.loader.refusal()
        if reason is not None:
            raise Unsupported(reason)

    def close(self) -> None:
        """Leaves the agent. The model keeps its weights."""
        if self.state == CLOSED:
            return
        self._drop_staging()
        self.state = CLOSED
        self._leave()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.trace, self._copies, self.version = None, None, None

    def _connect_again(self) -> None:
        """For the tensors that the trainer has now. The model keeps its weights, of a version that is no base."""
        self._drop_staging()
        self._leave()
        self.state, self.trace, self.version, self._before = CONNECTING, None, None, None
        self._copies, self._following, self._mode, self._bound = None, None, "", False
        self._stale = False
        self._connected = self._thread.submit(self._connect)

    def _leave(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        else:
            self._connected.add_done_callback(_close_what_connected)
            self._connected.cancel()
        self._receiver = None

    # Tracing, loading, writing.

    def _retrace(self, timeout: float) -> None:
        from ..autoplacement import trace_loader, whole_leaves

        receiver = self._receiver
        assert receiver is not None
        specs = [(tensor.name, tensor.dtype, tensor.shape) for tensor in receiver.layout]
        found = trace_loader(self.model, self.loader.load_traced, specs)
        found = found.drop(refused(found))
        untaken = found.unplaced
        if self._beside is not None:
            found = without_shared(found, self.model, self._beside)
        self.trace = found
        try:
            self.untaken = require_engine_coverage(
                self.name, self.model, found, untaken, self._ignore, shared=self._shared
            )
        except UnmatchedWeights:
            self._stale = True
            raise
        self.trace = whole_leaves(found, self.loader.reload_modules())
        self._places = places(self.trace, self.model)
        self._bind_host(timeout)
        self.state = LOADING

    def _bind_host(self, timeout: float) -> None:
        """What this rank needs, into host memory, laid out as the trainer's."""
        assert self._receiver is not None and self.trace is not None
        self._bound = False
        plan, copies = plan_of(self._receiver.layout, self.trace)
        self._receiver.rebind(part=plan, timeout=timeout)
        del copies  # the plan is built; what was bound before has let go of self._copies only now
        self._copies = self._following = None
        self._bound = True

    def _names(self) -> set[str]:
        assert self.trace is not None
        return {*self.trace.placed, *self.trace.reload}

    def _adopt(self, timeout: float) -> None:
        """After a load by the engine: the same version came once more, to be committed where the engine has it. That
        writes the bytes that are there, and is the base of the deltas to come."""
        following, receiver = self._following, self._receiver
        if self.state != PLACED or following is None or not following.done or following.failed:
            return
        if receiver is None or receiver.version is not None or following.wait(0).version != self.version:
            return
        self.loader.synchronize()
        self._following = None
        following.commit(timeout=timeout)

    def _host_tensors(self) -> Iterator[tuple[str, Any]]:
        assert self._receiver is not None
        names = self._names()
        return ((name, tensor) for name, tensor in self._receiver.tensors() if name in names)

    def _load_all(self) -> str:
        """Through the engine's loader; then what is equal byte for byte is bound in place."""
        from ..autoplacement import prove, whole_leaves

        assert self._receiver is not None and self.trace is not None
        self.version = self._before = None
        self.doubt = f"the engine's loader has not come to the end of version {_shown(self._receiver.version)}"
        self.loader.reload(self._host_tensors())
        self.loader.synchronize()
        if self._places != places(self.trace, self.model):
            raise Unsupported(f"{self.name}: loading has moved the engine's parameters to other memory")
        tensors = dict(self._receiver.tensors())
        proved = whole_leaves(prove(self.trace, tensors.__getitem__), self.loader.reload_modules())
        demoted = [name for name in proved.reload if name not in self.trace.reload]  # not the loader's reload_modules()
        if demoted:
            _log.warning(
                "%s: %d tensor(s) are not in live memory as the trainer has them, so the engine's loader loads them "
                "each time, and nobody compares them: %s",
                self.name,
                len(demoted),
                "; ".join(f"{name} ({proved.reload[name].reason})" for name in demoted),
            )
        del tensors
        plan, copies = plan_of(self._receiver.layout, proved)
        self._bound, self._copies = False, copies  # whatever interrupts: what is bound is kept, and no pull goes there
        self._receiver.rebind(plan, live=True, shadow=self._shadow, timeout=self.timeout)
        self.trace, self._following = proved, None
        self._places = places(proved, self.model)
        self.state, self._bound = PLACED, True
        return "loaded"

    def _write(self, staging: Staging, end: float) -> str:
        assert self._receiver is not None and staging.report is not None
        if staging.prepared is None:
            return "up_to_date"
        self._before = self.version
        had = self._receiver.version
        self._mode = "written"
        try:
            report = staging.prepared.commit(timeout=left(end))
        except BaseException:
            self._mode = ""
            if self._receiver.lost:
                self.void("a commit failed and could not be rolled back")
            elif self._receiver.version != had:
                self.void("a commit was interrupted when it had written")
            raise
        try:
            self._reload_copies()
            self.loader.synchronize()
        except BaseException as error:
            try:
                self.rollback()
            except Exception as second:  # void by now; the first error says why
                _log.error("%s: %s", self.name, second)
            raise error
        return report.mode

    def _reload_copies(self) -> None:
        if self._copies is not None and self._copies.names:
            self.loader.reload(self._copies.tensors())

    def _attest(self, version: Version, timeout: float) -> None:
        assert self._receiver is not None
        if self._mode == "loaded":
            return  # compared by the proof, which has bound in place what was equal and nothing else
        try:
            wrong = self._receiver.attest(timeout=timeout)
        except BaseException:
            self.rollback()  # written, but nothing more is known
            raise
        if wrong:
            tile, tensor, memory = wrong[0]
            found = (
                f"{tensor}: tile {tile} of version {_shown(version)} differs in {memory or 'live memory'}, "
                f"{len(wrong)} tile(s) in all"
            )
            self.void(found)
            raise CorruptData(found)

    # On the thread of its own.

    def _stage(self, staging: Staging, end: float) -> None:
        try:
            self._pull(staging, end)
        except LayoutMismatch:
            self._stale = True
            raise

    def _pull(self, staging: Staging, end: float) -> None:
        receiver = self._receiver
        assert receiver is not None
        prepared = self._join(staging, end)
        if staging.cancelled:
            raise Cancelled(f"version {words(staging.asked)}: another one was asked for")
        if prepared is None:
            self._following = None
            receiver.cancel()
            prepared = receiver.prepare(staging.asked, timeout=left(end))
            if staging.cancelled:
                prepared.cancel()
        report = prepared.wait(left(end))
        if self.state == LOADING:
            # Host memory of our own, which nobody sees: committed there at once.
            report = prepared.commit(timeout=left(end))
        elif report.mode != "up_to_date":
            staging.prepared = prepared
        staging.report = report

    def _join(self, staging: Staging, end: float) -> Prepared | None:
        """The background's pull, if it brings what is asked for."""
        following, current = self._following, self._receiver.version if self._receiver else None
        if following is None or following.failed or (staging.asked is None and self.state == PLACED):
            return None  # there may be a newer one than it has
        if not following.done:
            newer = isinstance(staging.asked, int) and (current is None or staging.asked > current.number)
            if not newer:
                return None
        found = following.wait(left(end)).version
        if self.state == LOADING and staging.asked not in (found.number, found.label):
            following.commit(timeout=left(end))  # as the base of what is asked for
            self._following = None
            return None
        if staging.asked is None or staging.asked not in (found.number, found.label):
            return None
        self._following = None
        # It may have been staged before the trainer was started again.
        return following if following.is_current(staging.asked, timeout=left(end)) else None

    def _drop_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is None:
            return
        if staging.done:
            if self._receiver is not None and staging.prepared is not None:
                if staging.prepared is self._receiver._pulls.staged and not staging.prepared.failed:
                    self._following = staging.prepared  # not committed
            return
        staging.cancelled = True
        if not staging.future.cancel() and self._receiver is not None:
            self._following = None
            self._receiver.cancel()
            concurrent.futures.wait([staging.future], self.timeout)


def _close_what_connected(connected: concurrent.futures.Future[Receiver]) -> None:
    if not connected.cancelled() and connected.exception() is None:
        connected.result().close()


def _shown(version: Version | None) -> str:
    return "unknown" if version is None else str(version.number)
