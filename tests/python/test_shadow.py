"""An engine sleeps, its memory is another's meanwhile, and wakes: from a shadow without the network, or by a pull."""

from __future__ import annotations

import asyncio
import concurrent.futures
import mmap
import os
import time
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import errors
from deltasync.places import plan_of_module

torch = pytest.importorskip("torch")


def model(fill: float) -> torch.nn.Module:
    made = torch.nn.Linear(300, 200)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(fill)
    return made


def overwrite(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))


@pytest.mark.parametrize("background", [False, True])
def test_release_and_restore(background: bool, segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, shadow=True, background=background) as receiver:
            with pytest.raises(errors.NotFound):
                receiver.restore()
            receiver.update(1)
            receiver.release()
            assert receiver.version is None and not receiver.lost
            overwrite(served)
            with pytest.raises(errors.InvalidArgument, match="restore"):
                receiver.update(1)
            report = receiver.restore()
            assert report.version.number == 1 and report.fetched == 0 and report.wire_bytes == 0
            assert report.tiles == 2 and report.nbytes == 4 * (300 * 200 + 200)
            assert receiver.version is not None and receiver.version.number == 1
            assert torch.equal(served.weight, trained.weight) and torch.equal(served.bias, trained.bias)
            assert receiver.attest() == []
            with torch.no_grad():
                trained.bias.fill_(2.0)
            manager.offload()
            assert receiver.update(2).mode == "delta"
            assert torch.equal(served.bias, trained.bias)


def test_rebind_gives_and_takes_a_shadow(segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint) as receiver:
            plan, _ = plan_of_module(receiver.layout, served)
            with pytest.raises(errors.InvalidArgument, match="rebind: shadow=True without live memory"):
                receiver.rebind(shadow=True)
            receiver.rebind(plan, shadow=True)
            receiver.update(1)
            receiver.release()
            overwrite(served)
            receiver.restore()
            assert torch.equal(served.weight, trained.weight)
            receiver.rebind(plan)
            receiver.update(1)
            assert receiver.repair().fetched == 0  # there is nothing to repair
            overwrite(served)
            assert receiver.repair().fetched == 2


def test_a_repair_comes_from_the_shadow(segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, shadow=True) as receiver:
            receiver.update()
            overwrite(served)
            wrong = receiver.attest()
            assert [str(each) for each in wrong] == ["tile 0 (weight)", "tile 1 (bias)"]
            report = receiver.repair(wrong)
            assert (report.tiles, report.fetched) == (2, 0)
            assert receiver.attest() == []


def test_without_live_memory_nothing_is_released(segment_name: str) -> None:
    with deltasync.WeightManager(model(1.0), name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            for call in (receiver.release, receiver.restore):
                with pytest.raises(errors.Unsupported, match="no module and no plan"):
                    call()
            assert receiver.version is not None
        with pytest.raises(errors.InvalidArgument, match="shadow=True"):
            deltasync.Receiver(manager.endpoint, shadow=True)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("local", ["auto", "never"])
@pytest.mark.parametrize("shadow", [False, True])
def test_memory_that_sleeps_is_given_back_and_has_its_weights_when_it_wakes(
    shadow: bool, local: str, segment_name: str
) -> None:
    rows, cols = 4096, 4096
    trained = torch.nn.Linear(cols, rows, bias=False)
    memory = mmap.mmap(-1, rows * cols * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    served = torch.nn.Linear(cols, rows, bias=False, device="meta")
    served.weight = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(rows, cols))
    address = served.weight.data_ptr()
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, shadow=shadow, local=local) as receiver:
            receiver.update()
            awake = resident_bytes()
            receiver.release()
            memory.madvise(mmap.MADV_DONTNEED)
            assert awake - resident_bytes() > 0.9 * len(memory)
            assert receiver.version is None
            with pytest.raises(errors.InvalidArgument, match="has to be restored first"):
                receiver.update()
            assert not served.weight.any()
            memory.madvise(mmap.MADV_DONTNEED)  # which that has touched
            with torch.no_grad():
                trained.weight.add_(1)
            manager.offload()
            manager.wait_ready()
            report = receiver.restore()
            assert report.version.number == (1 if shadow else 2)
            assert report.tiles == rows * cols // 65536 and report.fetched == (0 if shadow else report.tiles)
            receiver.update(2)
            assert torch.equal(served.weight, trained.weight) and served.weight.data_ptr() == address
            assert receiver.attest() == []


@pytest.mark.parametrize("shadow", [False, True])
def test_a_module_that_woke_elsewhere_is_not_written(shadow: bool, segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, shadow=shadow) as receiver:
            receiver.update()
            receiver.release()
            before = served.weight.data
            overwrite(served)
            served.weight.data = torch.zeros_like(before)
            with pytest.raises(errors.LayoutMismatch, match="weight: the module keeps it elsewhere"):
                receiver.restore()
            assert before.isnan().all() and not served.weight.any()
            served.weight.data = before
            receiver.restore()
            assert torch.equal(served.weight, trained.weight)


@pytest.mark.parametrize("background", [False, True])
def test_who_slept_before_the_first_version_wakes(background: bool, segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, shadow=True, background=background) as receiver:
            receiver.release()
            with pytest.raises(errors.NotFound):
                receiver.restore()
            assert (receiver._pulls.staged is not None) == background
            receiver.update()
            assert torch.equal(served.weight, trained.weight) and receiver.attest() == []


@pytest.mark.parametrize("again", ["restore", "update"])
def test_a_restore_that_fails_is_asked_for_again(again: str, segment_name: str, held_port: Any) -> None:
    trained, served = model(1.0), model(0.0)
    listen = held_port.endpoint
    with deltasync.WeightManager(trained, name=segment_name, listen=listen) as manager:
        manager.offload()
        receiver = deltasync.Receiver(manager.endpoint, module=served, timeout=60)
        receiver.update()
        receiver.release()
        overwrite(served)
    with receiver:
        with pytest.raises(errors.Error):
            receiver.restore(timeout=0.5)
        assert receiver.version is None
        with deltasync.WeightManager(trained, name=f"{segment_name}-again", listen=listen) as manager:
            manager.offload()
            getattr(receiver, again)()
            assert torch.equal(served.weight, trained.weight)


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_a_restore_that_waits_for_the_agent_ends(end: str, segment_name: str, held_port: Any) -> None:
    trained, served = model(1.0), model(0.0)
    listen = held_port.endpoint
    with deltasync.WeightManager(trained, name=segment_name, listen=listen) as manager:
        manager.offload()
        receiver = deltasync.Receiver(manager.endpoint, module=served, timeout=60)
        receiver.update()
        receiver.release()
    with receiver, concurrent.futures.ThreadPoolExecutor(1) as thread:
        waits = thread.submit(receiver.restore)
        while receiver._pulls.restore_stop is None:
            time.sleep(0.01)
        getattr(receiver, end)()
        with pytest.raises(errors.Cancelled):
            waits.result()
        if end == "cancel":
            with deltasync.WeightManager(trained, name=f"{segment_name}-again", listen=listen) as manager:
                manager.offload()
                receiver.restore()
                assert torch.equal(served.weight, trained.weight)


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_the_same_restore_for_asyncio(end: str, segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        receiver = deltasync.Receiver(manager.endpoint, module=served, timeout=60)
        receiver.update()
        receiver.release()

    async def run() -> None:
        async with deltasync.AsyncReceiver(receiver) as same:
            waits = asyncio.create_task(same.restore())
            while receiver._pulls.restore_stop is None:
                await asyncio.sleep(0.01)
            began = time.monotonic()
            assert "127.0.0.1" in (await same.lag(timeout=1)).last_error
            if end == "close":
                await same.close()
            else:
                waits.cancel()
            with pytest.raises(errors.Cancelled if end == "close" else asyncio.CancelledError):
                await waits
            assert time.monotonic() - began < 20 and receiver._pulls.restore_stop is None

    asyncio.run(run())


def test_what_is_staged_is_current_until_the_trainer_begins_again(segment_name: str) -> None:
    with deltasync.WeightManager(model(1.0), name=segment_name) as manager:
        manager.offload(label="first")
        with deltasync.Receiver(manager.endpoint, module=model(0.0)) as receiver:
            with pytest.raises(errors.InvalidArgument, match="nothing is prepared"):
                receiver.is_current(1)
            receiver.prepare(1).wait()
            assert receiver.is_current(1) and receiver.is_current("first")
            assert not receiver.is_current(2)


def test_the_same_for_asyncio(segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)

    async def sleep_and_wake(endpoint: str) -> None:
        async with await deltasync.AsyncReceiver.connect(endpoint, module=served, shadow=True) as receiver:
            await receiver.update()
            await receiver.release()
            overwrite(served)
            assert (await receiver.restore()).version.number == 1
            assert await receiver.attest() == []

    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        asyncio.run(sleep_and_wake(manager.endpoint))
    assert torch.equal(served.weight, trained.weight)
