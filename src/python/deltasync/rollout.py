"""The rollout side: ``Receiver`` keeps weights identical to the trainer's, into a module, arrays, or a directory."""

from __future__ import annotations

import math
import numbers
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from . import _checks
from ._bound import Bound
from ._connecting import connect, endpoints_of
from ._deadlines import end_of, left, seconds
from ._host_memory import HostMemory
from ._kept import Kept
from ._native import Layout, PlacementPlan, Sidecar, Version
from ._progress import ProgressLike, Watch
from ._pulls import Pulls
from ._versions import asked_of
from .agent import read_token
from .coverage import Ignore
from .errors import Error, InvalidArgument, LayoutMismatch, Unsupported
from .layouts import module_memory
from .places import check_module, is_covered, reaches
from .prepared import Lag, Prepared, PullReport, RepairReport, TileMismatch
from .tls import Tls, TlsLike


class Receiver:
    """Keeps one version of the weights, pulled from an agent.

    ``endpoints``: HOST:PORT of the trainer's agent, or several of them (a relay of this node first, say), of which the
    first that answers is taken; they are tried again until ``timeout``, since the agent may start later, which the log
    says once. If that one is lost the others are tried, and the first again as soon as it is back. Or ``bucket:PATH``:
    the receiver listens on that Unix socket for a trainer of this host (:class:`BucketSender`), and needs no agent.

    Where the version is kept, one of:
      ``module``  a torch module, whose parameters and buffers of the same names, dtypes and shapes are written in
                  place by each commit, on the host or on CUDA. What the module holds at first does not matter. Its
                  memory stays where it is: no ``.to()`` afterwards. Both sides have to match, else UnmatchedWeights
                  names what is left over. ``ignore``: patterns (``*`` and ``?``) of names that need not, and stay out
                  of updates. Without ``strict`` the module may have more than the trainer.
      ``plan``    a :class:`PlacementPlan` of any live memory (or a function that makes one from the layout), such as
                  tracing an engine's loader gives. ``live``: the engine computes with what is there already, so the
                  first full update is staged too.
      ``directory``  HF model directories; engines load the ``realpath`` of the symlink ``current``.
      nothing     host memory: see :meth:`tensors` and :meth:`arrays`.

    ``token``, or a ``token_file``, is the secret shared with the agent; with ``tls`` (a :class:`Tls`, or a mapping) the
    connections are encrypted, and the agent proves by its certificate who it is.

    ``background``: a thread pulls every newer version from the start, verified and staged, so that :meth:`commit` has
    it at once; failures that may pass are logged, and it tries again. Others the next :meth:`commit` raises, and then
    it goes on. Without it a pull begins with :meth:`prepare` or :meth:`update`.

    ``full_update_policy``: what to do when a version has to come whole while one is live: ``stage`` keeps the live one
    until the commit, and needs host memory for a second; ``in_place`` overwrites it, and ``version`` is None until the
    pull is whole; ``refuse`` raises NoSpace.

    ``shadow``: a copy on the host of what ``module`` or ``plan`` has in live memory, which takes as much memory again.
    With it an engine wakes without the network (:meth:`release`, :meth:`restore`), and repairs come from it.

    ``engine_streams``: of CUDA devices by their ordinals, the stream (torch's, or an address), or a list of all, on
    which the engine computes with the weights. A commit comes behind what is queued there, and what is queued there
    after it comes behind the commit. For a device without one, a commit first waits for all that torch has queued on
    it, and a pull that writes in place, as the first does, for what its default stream has.

    ``keep_before``: of a ``directory``, how many versions before the committed one stay. One is enough where only
    processes of this host load them. What other hosts load over NFS cannot be seen: give as many as are committed
    while a model is loaded. Beyond one, each version is written whole.

    ``local``: whether full updates are copied out of the memory of an agent on this host: ``auto`` where they can be,
    ``never``, or ``always``, which raises Unsupported where they cannot.

    ``on_older_epoch``: what to do when the agent serves a version of a trainer whose epoch is older than that of the
    version that is held (that trainer never heard of the other one): ``follow`` takes it, since the agent is the one
    that was pointed to; ``wait`` waits for a later one; ``fail`` raises VersionConflict. The log says so once. It
    concerns the newest version and the next one, not those that are asked for by number or label.

    ``streams``: connections for data, 1 to 64, with a thread each. ``threads``: that verify and apply, the caller among
    them; 0: one for each core, at most 16. ``cores``: CPUs that they run on, such as "0-7,16"; empty: where the caller
    may run. ``link_gbps``: gigabits a second of the link from the agent, by which full updates come packed where that
    is sooner; 0: measured. ``attest_commits``: :meth:`attest` after each commit; what is wrong fails the commit, which
    is rolled back. ``name``: for the agent's log and status. ``timeout``: in seconds, of the start, and of each call
    without a ``timeout`` of its own.

    Errors: ConnectionFailed and DeadlinePassed (no agent, or none with a trainer), Unauthenticated, UnmatchedWeights,
    LayoutMismatch, NoSpace (memory or disk for the version), Unsupported, InvalidArgument; AlreadyExists
    (``directory`` has a model that is not a receiver's, or another receiver).

    Thread-safe. A commit writes live memory: nothing may compute with it meanwhile.
    """

    def __init__(
        self,
        endpoints: str | list[str] | tuple[str, ...],
        *,
        module: Any = None,
        plan: PlacementPlan | Callable[[Layout], PlacementPlan] | None = None,
        directory: str | os.PathLike[str] | None = None,
        keep_before: int = 1,
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
        local: str = "auto",
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
            "local": _checks.text("local", local),
            "tls": Tls.of(tls)._of_receiver(),
            "on_older_epoch": _checks.text("on_older_epoch", on_older_epoch),
            "name": _checks.text("name", name or f"receiver-{os.getpid()}"),
        }
        self._engine_streams = _addresses(engine_streams) if engine_streams is not None else {}
        self._shadow = bool(shadow)
        ignore = Ignore(ignore).patterns
        end = time.monotonic() + self.timeout
        native = connect(self.endpoints, self._options, end)
        self.layout: Layout = native.layout
        self.sidecar: Sidecar = native.sidecar
        kept = self._keep(
            module=module,
            plan=plan,
            directory=directory,
            keep_before=_checks.whole("keep_before", keep_before, least=1),
            live=live,
            strict=strict,
            ignore=ignore,
            shadow=shadow,
        )
        native.bind(kept.target, left(end))
        self._bound = Bound(native, kept)
        self._pulls = Pulls(self._bound, self.endpoints, self.timeout, background)
        if background:
            self._pulls.begin_next()

    # Versions.

    @property
    def version(self) -> Version | None:
        """The committed one."""
        return self._bound.version

    def prepare(
        self,
        version: int | str | Version | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        progress: ProgressLike = False,
    ) -> Prepared:
        """Begins to pull a version in the background and returns at once: its number, its label, or by default the
        newest. See :class:`Prepared`. One that is being prepared already is joined if it is the same, else replaced.

        ``directory``: no version of the trainer's, but what the safetensors files there have now. They must be the same
        tensors: else LayoutMismatch names what is missing, unexpected, or of another shape or dtype, and nothing was
        touched. The version then is of epoch 1, which no trainer has, with the path as its label, and the next pull is
        a full one.

        ``progress``: True shows a full update on a terminal, if tqdm is installed; a callable gets its bytes that are
        verified, and all of them, some times a second, on a thread of its own. Deltas are short, and have none.
        """
        asked = asked_of("prepare", version, directory)
        prepared = self._pulls.staged
        if prepared is None or prepared.asked != asked or prepared.over or directory is not None:
            prepared = self._pulls.begin(asked, end_of("prepare", timeout, self.timeout), newer=False)
        Watch(self, prepared, progress)
        return prepared

    def commit(self, *, timeout: float | None = None) -> PullReport:
        """Makes the prepared version the committed one: waits until it is staged and verified, and writes it. Errors as
        of :meth:`update`; InvalidArgument: nothing is prepared."""
        prepared = self._pulls.staged
        if prepared is None:
            raise InvalidArgument("commit: nothing is prepared; call prepare() first, or update()")
        return self._pulls.commit_over_pauses(prepared, end_of("commit", timeout, self.timeout))

    def update(
        self,
        version: int | str | Version | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        progress: ProgressLike = False,
    ) -> PullReport:
        """prepare() and commit() in one: brings the memory to a version, by default the newest. If that is held it says
        ``up_to_date``, or, with ``background``, waits for a newer one. ``up_to_date`` is about what was committed: what
        somebody has overwritten in the memory since, only attest() finds. ``directory``, ``progress``: see
        :meth:`prepare`.

        Errors, after which the version before is kept, or :attr:`version` is None (``in_place``, or :attr:`lost`):
        VersionGone (a number that is past; a label that is past is waited for), DeadlinePassed, LayoutMismatch (the
        trainer's tensors are others now: make another receiver), NoSpace, ConnectionFailed, CorruptData,
        VersionConflict (``on_older_epoch="fail"``), IoError (a device's), Cancelled."""
        end = end_of("update", timeout, self.timeout)
        prepared, _ = self._pulls.to_update(asked_of("update", version, directory), end)
        with Watch(self, prepared, progress):
            return self._pulls.commit_over_pauses(prepared, end)

    def rollback(self) -> Version | None:
        """Rolls the last commit back, bit for bit, until the next pull begins (with ``background`` that is at once);
        returns the version before it."""
        nothing = "rollback: no commit can be rolled back (a pull has begun since, or there was none)"
        if self._pulls.committed is None:
            raise InvalidArgument(nothing)
        end = time.monotonic() + self.timeout
        with self._bound.locked("rollback", end):
            if self._pulls.committed is None:
                raise InvalidArgument(nothing)
            self._bound.kept.check()
            self._bound.kept.wait_for_kernels(end)
            try:
                self._pulls.committed.rollback()
            finally:
                self._pulls.committed = None
        return self._bound.version

    def attest(self, *, timeout: float | None = None) -> list[TileMismatch]:
        """Reads all live memory and compares it with the committed version: the tiles that differ, in order; empty: all
        is as it was committed. A background pull pauses for it.

        What differs was written by another program, or the memory is broken: :meth:`repair` writes it again. Errors:
        NotFound (nothing is committed), NoSpace, IoError (a device's), DeadlinePassed.
        """
        with self._pulls.between("attest", timeout) as end:
            return [TileMismatch(*found) for found in self._bound.native.attest(left(end))]

    def repair(
        self, wrong: Iterable[tuple[int, str, str] | int] | None = None, *, timeout: float | None = None
    ) -> RepairReport:
        """Writes tiles of the committed version again, and reads them back: those that :meth:`attest` returned
        (``wrong``) or, without them, all that it finds now. Those that the shadow has come from there; of the others
        only these tiles travel. It writes live memory, as a commit does.

        Errors: CorruptData (a tile is wrong again), VersionGone (the agent serves another version by now; the next pull
        brings it whole), NotFound (nothing is committed), OutOfRange and InvalidArgument (no such tile), Unsupported (a
        directory), IoError (a device's: no version is whole any more), ConnectionFailed, DeadlinePassed.
        """
        tiles = [] if wrong is None else _tiles(wrong)
        with self._pulls.between("repair", timeout) as end:
            if wrong is None:
                tiles = _tiles(self._bound.native.attest(left(end)))
            self._bound.kept.wait_for_kernels(end)
            return RepairReport(**self._bound.native.repair(tiles, left(end)))

    def release(self, *, timeout: float | None = None) -> None:
        """Gives live memory up, so that the engine can sleep: nothing touches it once this has returned. A shadow keeps
        its version, ``version`` is None, and nothing can be pulled until :meth:`restore`. A pull that is under way is
        cancelled, and the last commit cannot be rolled back any more.

        Errors: Unsupported (made without ``module`` and ``plan``); DeadlinePassed, IoError: a device may still write to
        the memory, which must be kept until a later call succeeds.
        """
        end = end_of("release", timeout, self.timeout)
        self._need_live_memory("release")
        self.cancel()
        try:
            with self._bound.locked("release", end):
                self._pulls.forget()
                self._bound.kept.wait_for_kernels(end)
                self._bound.native.release(left(end))
                self._bound.released = True
        finally:
            self._pulls.begin_next_if_idle()

    def restore(self, *, timeout: float | None = None) -> RepairReport:
        """Writes all of live memory, verified: after :meth:`release`, once the memory is there again at the same
        addresses, or when no version is whole in it any more (:attr:`lost`). With ``shadow`` from there, and nothing
        comes over the network; without, it is the agent's newest version, out of its memory if it is on this host. A
        pull that is under way is cancelled, and begun again with ``background``.

        Errors: LayoutMismatch (the module is elsewhere), Unsupported (made without ``module`` and ``plan``), NotFound
        (there was no version, or a bucket channel has no shadow: update() then), CorruptData (a tile of the shadow is
        wrong: likewise), IoError (a device's), DeadlinePassed, Cancelled (by :meth:`cancel` or :meth:`close`); without
        ``shadow`` those of :meth:`update`, too.
        """
        end = end_of("restore", timeout, self.timeout)
        self._need_live_memory("restore")
        self._pulls.cancel()
        try:
            with self._bound.locked("restore", end):
                self._pulls.forget()
                self._bound.kept.check()
                self._bound.kept.wait_for_kernels(end)
                self._bound.released = False
                with self._pulls.restoring() as stop:
                    report = RepairReport(**self._bound.native.restore(left(end), stop))
        finally:
            self._pulls.begin_next_if_idle()
        return report

    def is_current(self, version: int | str, *, timeout: float | None = None) -> bool:
        """Whether a version's number, or label, still means to the agent what is staged: a trainer that was started
        again gives the same numbers to other weights. Raises where the agent does not answer in time, and
        InvalidArgument if nothing is prepared."""
        prepared = self._pulls.staged
        if prepared is None:
            raise InvalidArgument("is_current: nothing is prepared; call prepare() first")
        return prepared.is_current(version, timeout=timeout)

    def lag(self, *, timeout: float = 5.0) -> Lag:
        """How far the committed version is behind what the agent serves now, and the last error. Asks the agent, on a
        connection of its own, while a pull goes on; never raises because the agent is away: ``last_error`` says so."""
        self._bound.check_process("lag: ")
        return Lag(**self._bound.opened("lag").lag(seconds("lag", timeout)))

    def follow(self) -> Prepared:
        """Begins to pull the next version after the committed one, whenever it comes, as ``background`` does by itself
        after each commit; returns at once."""
        return self._pulls.begin(None, math.inf, newer=True)

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
        bound = self._bound
        with bound.locked("rebind", end):
            kept: Kept | None = None
            self._pulls.forget()
            try:
                kept = self._keep(plan=plan, live=live, part=part, shadow=shadow)
                bound.native.bind(kept.target, left(end))
                bound.kept, self._shadow = kept, bool(shadow)
                # a loss was the old memory's
                bound.version, bound.lost, bound.released = None, False, False
            except BaseException as error:
                if kept is not None and kept.target.spent and not isinstance(error, Error):
                    # Ctrl-C, which may have come when it was bound already: nothing that may be written is freed
                    self._broken = bound.kept, kept.memory
                    bound.kept, kept.memory = kept, None
                raise

    def cancel(self) -> None:
        """Ends the pull or :meth:`restore` that is under way and forgets what is staged; the committed version is
        untouched."""
        self._pulls.cancel()
        self._pulls.cancel_restore()

    @property
    def lost(self) -> bool:
        """Whether a commit or its rollback failed so that no version is whole any more in the memory."""
        return self._bound.lost

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
        written = reaches(own for name, own in state.items() if name in received)
        missing = [name for name, own in state.items() if name not in received and not is_covered(own, written)]
        if missing or unexpected:
            raise LayoutMismatch(f"load_into: the module lacks {unexpected[:3]}, the version {missing[:3]}")
        for name, tensor in received.items():  # copy_ broadcasts
            if state[name].shape != tensor.shape:
                has, got = tuple(state[name].shape), tuple(tensor.shape)
                raise LayoutMismatch(f"load_into: {name}: the module has shape {has}, the version {got}")
        for name, tensor in received.items():
            state[name].detach().copy_(tensor)

    # Life.

    def close(self) -> None:
        """Ends the background pull, or a :meth:`restore` that waits in another thread, and leaves the agent. The memory
        stays as it is."""
        if not self._bound.is_of_this_process or self._bound.is_closed:
            return
        self._pulls.close()
        with self._bound.lock:
            self._pulls.staged = None
            self._pulls.forget()
            self._bound.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside.

    def _progress(self) -> tuple[int, int]:
        native = getattr(self._bound, "native", None)
        return native.progress if native is not None else (0, 0)

    def _keep(self, **where: Any) -> Kept:
        return Kept(self.layout, self.sidecar, self._engine_streams, **where)

    def _need_live_memory(self, call: str) -> None:
        if self._bound.kept.placement is None:
            raise Unsupported(
                f"{call}: this receiver writes into no module and no plan, whose memory could be given up"
            )

    def _committed_memory(self) -> HostMemory:
        if self._bound.kept.memory is None:
            raise InvalidArgument("this receiver keeps its version elsewhere (module, plan or directory)")
        if self.version is None:
            raise InvalidArgument(f"no version is committed {'any more' if self._bound.lost else 'yet'}; call update()")
        return self._bound.kept.memory


#: cudaStreamPerThread. A commit runs in threads of deltasync, whose stream that would be.
_PER_THREAD = 2


def _addresses(streams: Mapping[int, Any]) -> dict[int, list[int]]:
    """Of the streams, by the ordinals of their devices. InvalidArgument."""
    _checks.of_type("engine_streams", streams, Mapping, "mapping of devices to streams, such as {0: stream}")
    addresses = {
        _checks.whole("engine_streams: device", device): [
            _checks.whole(
                f"engine_streams: stream of device {device}", getattr(stream, "cuda_stream", stream), most=2**64 - 1
            )
            for stream in (of_device if isinstance(of_device, (list, tuple)) else [of_device])
        ]
        for device, of_device in streams.items()
    }
    for device, of_device in addresses.items():
        if _PER_THREAD in of_device:
            raise InvalidArgument(
                f"engine_streams: {_PER_THREAD}, of device {device}, is another stream in each thread",
                "let the engine compute on a stream that it makes, and give that one",
            )
    return addresses


def _tiles(wrong: Iterable[tuple[int, str, str] | int]) -> list[int]:
    """The tiles that attest() names, or that are given as such. InvalidArgument."""
    if isinstance(wrong, str) or not isinstance(wrong, Iterable):
        raise _checks.wrong("repair: wrong", wrong, "list of tiles, such as attest() returns")
    tiles = (tile[0] if isinstance(tile, tuple) and tile else tile for tile in wrong)
    return sorted({_checks.whole("repair: a tile of wrong", tile, most=2**64 - 1) for tile in tiles})


def _check_shadow(call: str, shadow: bool, live_memory: bool) -> None:
    if shadow and not live_memory:
        raise InvalidArgument(f"{call}: shadow=True without live memory: it is a copy of a module's or a plan's")
