"""The receiver for asyncio."""

from __future__ import annotations

import asyncio
import threading
import time

import deltasync
import numpy as np
import pytest
from deltasync import errors


def test_an_update_is_to_the_newest_whatever_is_staged(segment_name: str) -> None:
    weights = {"w": np.ones((8, 8), np.float32)}

    async def run(manager: deltasync.WeightManager) -> None:
        async with await deltasync.AsyncReceiver.connect(manager.endpoint) as receiver:
            assert (await receiver.prepare()).version.number == 1
            manager.offload(weights)
            manager.wait_ready()
            assert (await receiver.update()).version.number == 2

    with deltasync.WeightManager(weights, name=segment_name) as manager:
        manager.offload(weights)
        asyncio.run(run(manager))


def test_versions_come_while_the_loop_runs(segment_name: str) -> None:
    weights = {"w": np.ones((8, 8), np.float32)}

    async def run(manager: deltasync.WeightManager) -> None:
        async with await deltasync.AsyncReceiver.connect(manager.endpoint) as receiver:
            assert (await receiver.update()).version.number == 1
            with pytest.raises(errors.DeadlinePassed):
                await receiver.prepare(99, timeout=0.1)
            waiting = asyncio.create_task(receiver.prepare(2))
            await asyncio.sleep(0)
            weights["w"][0, 0] = 7
            manager.offload(weights)
            assert (await waiting).version.number == 2
            assert receiver.version is not None
            assert receiver.version.number == 1
            await receiver.commit()
            assert dict(receiver.receiver.arrays())["w"][0, 0] == 7
            cancelled = asyncio.create_task(receiver.update(3, timeout=600))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert receiver.version.number == 2

    with deltasync.WeightManager(weights, name=segment_name) as manager:
        manager.offload(weights)
        asyncio.run(run(manager))


def test_a_cancelled_commit_writes_nothing_afterwards(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": np.ones((8, 8), np.float32)}

    async def run(manager: deltasync.WeightManager) -> None:
        async with await deltasync.AsyncReceiver.connect(manager.endpoint) as receiver:
            await receiver.prepare()
            waits = threading.Event()

            def wait(end: float) -> None:
                waits.set()
                time.sleep(1)

            monkeypatch.setattr(receiver.receiver._bound.kept, "wait_for_kernels", wait)
            committing = asyncio.create_task(receiver.commit())
            await asyncio.to_thread(waits.wait)
            queued = asyncio.create_task(receiver.rollback())
            await asyncio.sleep(0)
            queued.cancel()  # before it has begun
            committing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await committing
            assert receiver.version is not None
            with pytest.raises(asyncio.CancelledError):
                await queued
            assert receiver.version is not None

    with deltasync.WeightManager(weights, name=segment_name) as manager:
        manager.offload(weights)
        asyncio.run(run(manager))
