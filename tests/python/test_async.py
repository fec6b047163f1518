"""The receiver for asyncio."""

from __future__ import annotations

import asyncio

import deltasync
import numpy as np
import pytest
from deltasync import errors


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


def test_who_waits_for_the_background_goes_on_waiting_over_an_attestation(segment_name: str) -> None:
    weights = {"w": np.ones((8, 8), np.float32)}

    async def run(manager: deltasync.WeightManager) -> None:
        async with await deltasync.AsyncReceiver.connect(manager.endpoint, background=True) as receiver:
            await receiver.update()
            waiting = asyncio.create_task(receiver.prepare())
            for _ in range(3):
                await asyncio.sleep(0.05)
                assert await receiver.attest() == []
            assert not waiting.done()
            weights["w"][0, 0] = 7
            manager.offload(weights)
            assert (await waiting).version.number == 2
            await receiver.commit()
            for number, call in enumerate((receiver.receiver.update, receiver.receiver.commit), 3):
                updated = asyncio.create_task(asyncio.to_thread(call))
                await asyncio.sleep(0.05)
                assert await receiver.attest() == []
                assert not updated.done()
                manager.offload(weights)
                assert (await updated).version.number == number
            ended = asyncio.create_task(receiver.prepare())
            await asyncio.sleep(0.05)
            receiver.cancel()
            with pytest.raises(errors.Cancelled):
                await ended

    with deltasync.WeightManager(weights, name=segment_name) as manager:
        manager.offload(weights)
        asyncio.run(run(manager))


def test_a_waiter_that_is_cancelled_after_an_attestation_leaves_the_background(segment_name: str) -> None:
    weights = {"w": np.ones((8, 8), np.float32)}

    async def run(manager: deltasync.WeightManager) -> None:
        async with await deltasync.AsyncReceiver.connect(manager.endpoint, background=True) as receiver:
            await receiver.update()
            for _ in range(10):
                waiting = asyncio.create_task(receiver.prepare())
                await asyncio.sleep(0.01)
                assert await receiver.attest() == []
                await asyncio.sleep(0.01)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            manager.offload(weights)
            assert (await receiver.commit(timeout=20)).version.number == 2

    with deltasync.WeightManager(weights, name=segment_name) as manager:
        manager.offload(weights)
        asyncio.run(run(manager))


def test_who_comes_while_a_pull_is_paused_waits_with_the_others(segment_name: str) -> None:
    weights = {"w": np.ones((8, 8), np.float32)}

    async def run(manager: deltasync.WeightManager) -> None:
        async with await deltasync.AsyncReceiver.connect(manager.endpoint, background=True) as receiver:
            await receiver.update()
            receiver.cancel()
            with receiver.receiver._calls:
                waiting = [asyncio.create_task(receiver.prepare(2))]
                await asyncio.sleep(0.01)
                attesting = asyncio.create_task(receiver.attest())
                pull = receiver.receiver._staged
                assert pull is not None
                while not pull._is_paused:
                    await asyncio.sleep(0.01)
                waiting.append(asyncio.create_task(receiver.prepare(2)))
                await asyncio.sleep(0.05)
                assert receiver.receiver._staged is pull, "a pull was begun that the attestation may have to wait for"
            assert await attesting == []
            assert not any(task.done() for task in waiting)
            manager.offload(weights)
            assert [(await task).version.number for task in waiting] == [2, 2]

    with deltasync.WeightManager(weights, name=segment_name) as manager:
        manager.offload(weights)
        asyncio.run(run(manager))
