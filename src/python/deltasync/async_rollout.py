"""The receiver for asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Callable
from typing import Any, TypeVar

from ._native import Version
from .errors import DeadlinePassed, Error
from .prepared import PullReport
from .rollout import Receiver

_T = TypeVar("_T")


class AsyncReceiver:
    """:class:`Receiver` for asyncio: the same methods as coroutines, the calls on a thread of its own."""

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

    async def prepare(self, version: int | str | Version | None = None, *, timeout: float | None = None) -> PullReport:
        """Returns once the version is staged and verified; commit() makes it visible."""
        before = self.receiver._staged
        prepared = self.receiver.prepare(version, timeout=timeout)
        limit = self.receiver.timeout if timeout is None else timeout
        pull = asyncio.shield(asyncio.wrap_future(prepared._future))
        try:
            await asyncio.wait_for(pull, None if limit == math.inf else limit)
        except TimeoutError as error:
            if isinstance(error, Error):
                raise
            raise DeadlinePassed(f"version {version or 'newest'}: not staged after {limit:.1f} s") from None
        except asyncio.CancelledError:
            if prepared is not before:  # else somebody else's, or the background's
                prepared.cancel()
            raise
        return prepared.wait()

    async def commit(self, *, timeout: float | None = None) -> PullReport:
        return await self._run(lambda: self.receiver.commit(timeout=timeout))

    async def update(self, version: int | str | Version | None = None, *, timeout: float | None = None) -> PullReport:
        await self.prepare(version, timeout=timeout)
        return await self.commit(timeout=timeout)

    async def rollback(self) -> Version | None:
        return await self._run(self.receiver.rollback)

    async def close(self) -> None:
        await self._run(self.receiver.close)
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> AsyncReceiver:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
