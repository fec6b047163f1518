"""The receiver for asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from ._deadlines import end_of
from ._native import Layout, PlacementPlan, Version
from ._progress import ProgressLike, Watch
from ._pulls import PAUSE_LOOK_S
from ._versions import Asked, asked_of
from .errors import Cancelled
from .prepared import Lag, Prepared, PullReport, RepairReport, TileMismatch
from .rollout import Receiver

_T = TypeVar("_T")


class AsyncReceiver:
    """:class:`Receiver` for asyncio: what waits or writes is a coroutine, whose call runs on a thread of its own; the
    rest is as there. A coroutine that is cancelled while its call may write ends when the call has."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="deltasync-async")

    @classmethod
    async def connect(cls, endpoints: str | list[str] | tuple[str, ...], **options: Any) -> AsyncReceiver:
        """With the arguments of :class:`Receiver`."""
        return cls(await asyncio.to_thread(Receiver, endpoints, **options))

    @property
    def version(self) -> Version | None:
        """The committed one."""
        return self.receiver.version

    @property
    def lost(self) -> bool:
        """See :attr:`Receiver.lost`."""
        return self.receiver.lost

    @property
    def layout(self) -> Layout:
        """The layout that the agent serves."""
        return self.receiver.layout

    async def prepare(
        self,
        version: int | str | Version | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        progress: ProgressLike = False,
    ) -> PullReport:
        """Returns once the version is staged and verified; commit() makes it visible. ``directory``, ``progress``: see
        :meth:`Receiver.prepare`; a callable is called on a thread of its own, not in the loop."""
        end = end_of("prepare", timeout, self.receiver.timeout)
        asked = asked_of("prepare", version, directory)
        pulls = self.receiver._pulls
        begun = (pulls.begin(asked, end, newer=False), True) if directory is not None else pulls.join(asked, end)
        report, _ = await self._staged(asked, *begun, end, progress)
        return report

    async def _staged(
        self, asked: Asked, prepared: Prepared, own: bool, end: float, progress: ProgressLike
    ) -> tuple[PullReport, Prepared]:
        began = time.monotonic()
        watch = Watch(self.receiver, prepared, progress)
        try:
            while True:
                pull = asyncio.wrap_future(prepared._future)
                pull.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # which wait() tells
                await asyncio.wait([pull], timeout=prepared._patience(end))
                if not prepared.done:
                    raise await asyncio.to_thread(self.receiver._pulls.late, asked, end - began)
                try:
                    report = prepared.wait()
                    if not prepared.over or prepared._paused_for is None:
                        return report, prepared
                except Cancelled:
                    if prepared._paused_for is None:
                        raise
                while (follower := self.receiver._pulls.after_pause(prepared)) is None:
                    if time.monotonic() > end:
                        raise await asyncio.to_thread(self.receiver._pulls.late, asked, end - began)
                    await asyncio.sleep(PAUSE_LOOK_S)
                prepared = follower
        except asyncio.CancelledError:
            if own:  # else somebody else's, or the background's
                prepared.cancel()
            raise
        finally:
            watch.leave()

    async def commit(self, *, timeout: float | None = None) -> PullReport:
        """See :meth:`Receiver.commit`."""
        return await self._run(lambda: self.receiver.commit(timeout=timeout))

    async def update(
        self,
        version: int | str | Version | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        progress: ProgressLike = False,
    ) -> PullReport:
        """See :meth:`Receiver.update`, and :meth:`prepare` for ``progress``."""
        end = end_of("update", timeout, self.receiver.timeout)
        asked = asked_of("update", version, directory)
        pulls = self.receiver._pulls
        _, prepared = await self._staged(asked, *pulls.to_update(asked, end), end, progress)
        return await self._run(lambda: pulls.commit_over_pauses(prepared, end))

    async def rollback(self) -> Version | None:
        """See :meth:`Receiver.rollback`."""
        return await self._run(self.receiver.rollback)

    async def attest(self, *, timeout: float | None = None) -> list[TileMismatch]:
        """See :meth:`Receiver.attest`."""
        return await self._run(lambda: self.receiver.attest(timeout=timeout))

    async def repair(
        self, wrong: Iterable[tuple[int, str, str] | int] | None = None, *, timeout: float | None = None
    ) -> RepairReport:
        """See :meth:`Receiver.repair`."""
        return await self._run(lambda: self.receiver.repair(wrong, timeout=timeout))

    async def release(self, *, timeout: float | None = None) -> None:
        """See :meth:`Receiver.release`."""
        await self._run(lambda: self.receiver.release(timeout=timeout))

    async def restore(self, *, timeout: float | None = None) -> RepairReport:
        """See :meth:`Receiver.restore`."""
        return await self._run(lambda: self.receiver.restore(timeout=timeout), self.receiver._pulls.cancel_restore)

    async def is_current(self, version: int | str, *, timeout: float | None = None) -> bool:
        """See :meth:`Receiver.is_current`."""
        return await self._run(lambda: self.receiver.is_current(version, timeout=timeout))

    async def lag(self, *, timeout: float = 5.0) -> Lag:
        """See :meth:`Receiver.lag`."""
        return await asyncio.to_thread(self.receiver.lag, timeout=timeout)

    async def rebind(
        self,
        plan: PlacementPlan | None = None,
        *,
        live: bool = False,
        part: PlacementPlan | None = None,
        shadow: bool = False,
        timeout: float | None = None,
    ) -> None:
        """See :meth:`Receiver.rebind`."""
        await self._run(lambda: self.receiver.rebind(plan, live=live, part=part, shadow=shadow, timeout=timeout))

    async def load_into(self, module: Any) -> None:
        """See :meth:`Receiver.load_into`."""
        await self._run(lambda: self.receiver.load_into(module))

    def cancel(self) -> None:
        """See :meth:`Receiver.cancel`."""
        self.receiver.cancel()

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """See :meth:`Receiver.arrays`."""
        return self.receiver.arrays()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """See :meth:`Receiver.tensors`."""
        return self.receiver.tensors()

    async def close(self) -> None:
        """See :meth:`Receiver.close`."""
        await asyncio.to_thread(self.receiver.close)  # on another thread: it ends what that one waits for
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> AsyncReceiver:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Callable[[], _T], stop: Callable[[], None] = lambda: None) -> _T:
        """``stop`` makes the call end sooner."""
        work = self._thread.submit(call)
        future = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not work.cancel():  # it has begun
                stop()
                while not future.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([future])
            raise
