"""A background pull that pauses for attest() and repair(): who waits waits on, and neither holds the other up."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import deltasync
import numpy as np
import pytest
from deltasync import errors
from deltasync.prepared import Prepared

LIMIT_S = 60.0  # no wait of a test that passes comes near it
WEIGHTS = {"w": np.ones((8, 8), np.float32)}


@dataclasses.dataclass
class Rig:
    """A receiver with a background pull, which has committed version 1."""

    manager: deltasync.WeightManager
    receiver: deltasync.Receiver
    threads: concurrent.futures.Executor

    def offload(self) -> None:
        self.manager.offload(WEIGHTS)

    @contextlib.contextmanager
    def paused(self, call: Callable[[], Any]) -> Iterator[concurrent.futures.Future[Any]]:
        """The future of a call that waits for a pull, which an attestation has interrupted and which has not ended."""
        self.receiver.cancel()
        with self.receiver._bound.lock:
            future = self.threads.submit(call)
            eventually(lambda: self.receiver._pulls.staged is not None)
            pull = self.receiver._pulls.staged
            assert pull is not None
            attesting = self.threads.submit(self.receiver.attest)
            eventually(lambda: pull._is_paused)
            yield future
        assert attesting.result(LIMIT_S) == []


@pytest.fixture
def rig(segment_name: str) -> Iterator[Rig]:
    with (
        deltasync.WeightManager(WEIGHTS, name=segment_name) as manager,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
        deltasync.Receiver(manager.endpoint, background=True, timeout=LIMIT_S) as receiver,
    ):
        made = Rig(manager, receiver, threads)
        made.offload()
        receiver.update()
        yield made


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_neither_starves_the_other(rig: Rig) -> None:
    waiting = [rig.threads.submit(rig.receiver.update) for _ in range(3)]
    for _ in range(300):
        assert rig.receiver.attest() == []
    assert not any(future.done() for future in waiting)
    rig.offload()
    eventually(lambda: rig.receiver.version == rig.manager.version)
    # One has committed it; who waited for the same pull finds it gone, or waits for the next.
    rig.receiver.cancel()
    concurrent.futures.wait(waiting, LIMIT_S)
    assert 2 in [future.result().version.number for future in waiting if future.exception() is None]
    assert {type(future.exception()) for future in waiting} <= {type(None), errors.Cancelled}


def test_who_comes_as_a_pause_ends_waits_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    with rig.paused(rig.receiver._pulls.begin_next):
        pull = rig.receiver._pulls.staged
        over = Prepared.over.fget  # type: ignore[attr-defined]

        def over_while_the_pause_ends(prepared: Prepared) -> bool:
            result: bool = over(prepared)
            if prepared is pull and result and not looked.is_set():
                looked.set()
                eventually(lambda: prepared._resumed)
            return result

        monkeypatch.setattr(Prepared, "over", property(over_while_the_pause_ends))
        coming = rig.threads.submit(rig.receiver.update)
        assert looked.wait(LIMIT_S)
    eventually(lambda: pull is not None and pull._resumed)
    time.sleep(0.05)
    assert not coming.done(), coming.result()
    rig.offload()
    assert coming.result(LIMIT_S).version.number == 2


@pytest.mark.parametrize("call", ["update", "commit"])
def test_who_waits_waits_on(rig: Rig, call: str) -> None:
    waiting = rig.threads.submit(getattr(rig.receiver, call))
    time.sleep(0.05)
    assert rig.receiver.attest() == []
    assert not waiting.done()
    rig.offload()
    assert waiting.result(LIMIT_S).version.number == 2


def test_what_was_asked_for_stays(rig: Rig) -> None:
    with rig.paused(rig.receiver.update) as updated:
        pass
    assert updated.result(LIMIT_S).mode == "up_to_date"


def test_it_can_be_cancelled_meanwhile(rig: Rig) -> None:
    with rig.paused(rig.receiver.update) as updated:
        rig.receiver.cancel()
    with pytest.raises(errors.Cancelled):
        updated.result(LIMIT_S)
    assert rig.receiver.update().mode == "up_to_date"


def test_what_is_given_up_meanwhile_does_not_come_back(rig: Rig) -> None:
    with rig.paused(lambda: rig.receiver.update(7)) as updated:
        assert rig.receiver._pulls.staged is not None
        rig.receiver._pulls.staged.cancel()
    with pytest.raises(errors.Cancelled):
        updated.result(LIMIT_S)
    rig.offload()
    assert rig.receiver.commit().version.number == 2


def test_what_goes_on_in_its_place_is_given_up_with_it(rig: Rig) -> None:
    with rig.paused(lambda: rig.receiver.update(7)) as updated:
        pull = rig.receiver._pulls.staged
    assert pull is not None
    time.sleep(0.2)  # until who waits has seen it
    assert not updated.done()
    pull.cancel()
    with pytest.raises(errors.Cancelled):
        updated.result(LIMIT_S)


@pytest.mark.parametrize("where", ["_pulls._resume", "_bound.locked", "_bound.kept.check"])
def test_ctrl_c_leaves_no_pause(rig: Rig, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        *owners, name = where.split(".")
        patch.setattr(functools.reduce(getattr, owners, rig.receiver), name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.receiver.attest()
    rig.offload()
    assert rig.receiver.update(2).version.number == 2
    assert rig.receiver.attest() == []


def test_who_waits_begins_what_ctrl_c_left_paused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = rig.threads.submit(rig.receiver.update, 2)
    eventually(lambda: rig.receiver._pulls.staged is not None and rig.receiver._pulls.staged.asked == 2)
    resume, interrupts = rig.receiver._pulls._resume, [KeyboardInterrupt]

    def interrupted(paused: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        resume(paused)

    monkeypatch.setattr(rig.receiver._pulls, "_resume", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.receiver.attest()
    rig.offload()
    assert waiting.result(LIMIT_S).version.number == 2


# ---- asyncio


def test_asyncio_waits_on_too(rig: Rig) -> None:
    async def run() -> None:
        receiver = deltasync.AsyncReceiver(rig.receiver)
        waiting = asyncio.create_task(receiver.prepare())
        for _ in range(3):
            await asyncio.sleep(0.05)
            assert await receiver.attest() == []
        assert not waiting.done()
        rig.offload()
        assert (await waiting).version.number == 2
        await receiver.commit()
        waiting = asyncio.create_task(receiver.prepare())
        await asyncio.sleep(0.05)
        receiver.cancel()
        with pytest.raises(errors.Cancelled):
            await waiting

    asyncio.run(run())


def test_a_task_that_is_cancelled_behind_a_pause_leaves_the_background(rig: Rig) -> None:
    async def run() -> None:
        receiver = deltasync.AsyncReceiver(rig.receiver)
        for _ in range(10):
            waiting = asyncio.create_task(receiver.prepare())
            await asyncio.sleep(0.01)
            assert await receiver.attest() == []
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        rig.offload()
        assert (await receiver.commit(timeout=LIMIT_S)).version.number == 2

    asyncio.run(run())


def test_who_comes_meanwhile_begins_nothing(rig: Rig) -> None:
    prepare = deltasync.AsyncReceiver(rig.receiver).prepare
    with rig.paused(lambda: asyncio.run(prepare(2))) as first:
        pull = rig.receiver._pulls.staged
        second = rig.threads.submit(lambda: asyncio.run(prepare(2)))
        time.sleep(0.1)
        assert rig.receiver._pulls.staged is pull, "a pull was begun that the attestation may have to wait for"
    assert not first.done()
    rig.offload()
    assert [future.result(LIMIT_S).version.number for future in (first, second)] == [2, 2]
