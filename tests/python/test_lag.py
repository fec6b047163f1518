"""How far a receiver is behind, as its user asks."""

from __future__ import annotations

import asyncio
import threading
import time

import deltasync
import numpy as np
import pytest
from deltasync import errors


def weights(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 32), value, dtype=np.float32)}


def lag_when_newest_is(receiver: deltasync.Receiver, label: str) -> deltasync.Lag:
    """An offload returns before its version is served."""
    end = time.monotonic() + 60
    while True:
        lag = receiver.lag()
        if lag.newest is not None and lag.newest.label == label:
            return lag
        assert time.monotonic() < end, lag
        time.sleep(0.01)


def test_lag_counts_versions_and_seconds(segment_name: str, shm_files: set[str]) -> None:
    with deltasync.WeightManager(weights(0), name=segment_name) as manager:
        manager.offload(weights(1), label="one")
        with deltasync.Receiver(manager.endpoint) as receiver:
            before = lag_when_newest_is(receiver, "one")
            assert (before.held, before.versions) == (None, 1)
            receiver.update()
            now = receiver.lag()
            assert (now.versions, now.seconds, now.last_error) == (0, 0.0, "")
            assert now.held == now.newest == receiver.version
            manager.offload(weights(2), label="two")
            manager.offload(weights(3), label="three")
            late = lag_when_newest_is(receiver, "three")
            assert late.versions == 2
            assert late.held is not None and late.held.label == "one"
            assert late.newest is not None and late.newest.label == "three"
            assert late.seconds is not None and late.newest_age_s is not None
            assert late.heard_newest == late.newest and late.heard_s is not None
            assert late.seconds > late.newest_age_s >= 0
            with pytest.raises(AttributeError):
                late.versions = 0  # type: ignore[misc]
        with pytest.raises(errors.InvalidArgument, match="closed"):
            receiver.lag()


def test_lag_while_a_pull_waits_and_without_an_agent(segment_name: str, shm_files: set[str]) -> None:
    manager = deltasync.WeightManager(weights(0), name=segment_name)
    try:
        manager.offload(weights(1))
        receiver = deltasync.Receiver(manager.endpoint)
        receiver.update()
        receiver.follow()
        seen: list[deltasync.Lag] = []
        asks = threading.Thread(target=lambda: seen.append(receiver.lag()))
        asks.start()
        asks.join(60)
        assert [lag.versions for lag in seen] == [0]
    finally:
        manager.close()
    away = receiver.lag()
    assert (away.versions, away.seconds, away.newest) == (None, None, None)
    assert away.held == receiver.version
    assert receiver.endpoints[0] in away.last_error
    receiver.close()


def test_lag_of_an_async_receiver(segment_name: str, shm_files: set[str]) -> None:
    async def ask(endpoint: str) -> deltasync.Lag:
        async with await deltasync.AsyncReceiver.connect(endpoint) as receiver:
            await receiver.update()
            return await receiver.lag()

    with deltasync.WeightManager(weights(0), name=segment_name) as manager:
        manager.offload(weights(1))
        assert asyncio.run(ask(manager.endpoint)).versions == 0
