"""A shadow beside live memory: the engine sleeps, its memory is another's meanwhile, and wakes without the network."""

from __future__ import annotations

import asyncio

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
            with pytest.raises(errors.Unsupported, match="no shadow"):
                receiver.release()


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


def test_without_a_shadow_nothing_is_released(segment_name: str) -> None:
    with deltasync.WeightManager(model(1.0), name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=model(0.0)) as receiver:
            receiver.update()
            for call in (receiver.release, receiver.restore):
                with pytest.raises(errors.Unsupported, match="shadow=True"):
                    call()
            assert receiver.version is not None
        with pytest.raises(errors.InvalidArgument, match="shadow=True"):
            deltasync.Receiver(manager.endpoint, shadow=True)


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
