"""The receiver for asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from ._deadlines import end_of
from ._native import Layout, PlacementPlan, Version
from .errors import Cancelled
from .prepared import Lag, PullReport, RepairReport
from .rollout import PAUSE_LOOK_S, Receiver

_T = TypeVar("_T")


class AsyncReceiver:
    """:class:`Receiver` for asyncio: what waits or writes is a coroutine, whose call runs on a thread of its own; the
    rest is as there."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="deltasync-async")

    @classmethod
    async def connect(cls, endpoints: str | list[str] | tuple[str, ...], **options: Any) -> AsyncReceiver:
        """With the arguments of :class:`Receiver`."""
        return cls(await asyncio.to_thread(Receiver, endpoints, **options))

    @property
    def version(self) -> Version | None:
        return self.receiver.version

    @property
    def lost(self) -> bool:
        return self.receiver.lost

    @property
    def layout(self) -> Layout:
        return self.receiver.layout

    async def prepare(self, version: int | str | Version | None = None, *, timeout: float | None = None) -> PullReport:
        """Returns once the version is staged and verified; commit() makes it visible."""
        begin = time.monotonic()
        end = end_of("prepare", timeout, self.receiver.timeout)
        prepared, own = self.receiver._prepare(version, end)
        try:
            while True:
                pull = asyncio.wrap_future(prepared._future)
                pull.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # which wait() tells
                await asyncio.wait([pull], timeout=prepared._patience(end))
                if not prepared.done:
                    raise await asyncio.to_thread(self.receiver._late, version, end - begin)
                try:
                    report = prepared.wait()
                    if not prepared.over or prepared._paused_for is None:
                        return report
                except Cancelled:
                    if prepared._paused_for is None:
                        raise
                while (follower := self.receiver._after_pause(prepared)) is None:
                    if time.monotonic() > end:
                        raise await asyncio.to_thread(self.receiver._late, version, end - begin)
                    await asyncio.sleep(PAUSE_LOOK_S)
                prepared = follower
        except asyncio.CancelledError:
            if own:  # else somebody else's, or the background's
                prepared.cancel()
            raise

    async def commit(self, *, timeout: float | None = None) -> PullReport:
        return await self._run(lambda: self.receiver.commit(timeout=timeout))

    async def update(self, version: int | str | Version | None = None, *, timeout: float | None = None) -> PullReport:
        await self.prepare(version, timeout=timeout)
        return await self.commit(timeout=timeout)

    async def rollback(self) -> Version | None:
        return await self._run(self.receiver.rollback)

    async def attest(self, *, timeout: float | None = None) -> list[tuple[int, str, str]]:
        return await self._run(lambda: self.receiver.attest(timeout=timeout))

    async def repair(
        self, wrong: Iterable[tuple[int, str, str] | int] | None = None, *, timeout: float | None = None
    ) -> RepairReport:
        return await self._run(lambda: self.receiver.repair(wrong, timeout=timeout))

    async def lag(self, *, timeout: float = 5.0) -> Lag:
        return await self._run(lambda: self.receiver.lag(timeout=timeout))

    async def rebind(
        self,
        plan: PlacementPlan | None = None,
        *,
        live: bool = False,
        part: PlacementPlan | None = None,
        timeout: float | None = None,
    ) -> None:
        await self._run(lambda: self.receiver.rebind(plan, live=live, part=part, timeout=timeout))

    async def load_into(self, module: Any) -> None:
        await self._run(lambda: self.receiver.load_into(module))

    def cancel(self) -> None:
        self.receiver.cancel()

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        return self.receiver.arrays()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        return self.receiver.tensors()

    async def close(self) -> None:
        await self._run(self.receiver.close)
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> AsyncReceiver:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
