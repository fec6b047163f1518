"""Live memory of a torch module: attested, repaired, and not written while the engine's kernels may compute with it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import deltasync
import numpy as np
import pytest
from deltasync import _native, errors

torch = pytest.importorskip("torch")


def model(fill: float) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 100, bias=False))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(fill)
    return made


def flip(tensor: torch.Tensor) -> None:
    bits = tensor.data.view(-1).view(torch.int32)
    bits[7] ^= 1


@pytest.mark.parametrize("background", [False, True])
def test_a_flipped_bit_is_named_and_repaired(background: bool, segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, background=background) as receiver:
            receiver.update()
            assert receiver.repair().tiles == 0
            flip(served[1].weight)
            wrong = receiver.attest()
            assert [tensor for _, tensor, _ in wrong] == ["1.weight"]
            report = receiver.repair(wrong)
            assert (report.tiles, report.fetched, report.version.number) == (1, 1, 1)
            assert receiver.attest() == []
            assert torch.equal(served[1].weight, trained[1].weight)
            flip(served[0].bias)
            flip(served[1].weight)
            assert receiver.repair(np.array([tile for tile, _, _ in wrong])).tiles == 1
            assert [tensor for _, tensor, _ in receiver.attest()] == ["0.bias"]
            assert receiver.repair().tiles == 1
            with pytest.raises(errors.Error, match="tile 99"):
                receiver.repair([99])
            manager.offload()
            receiver.update(2)
            assert receiver.version is not None and receiver.version.number == 2


def test_repair_needs_the_version_at_the_agent(segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            with pytest.raises(errors.NotFound):
                receiver.repair([0])
            receiver.update()
            manager.offload(model(2.0))
            manager.wait_ready()
            flip(served[0].bias)
            with pytest.raises(errors.VersionGone):
                receiver.repair()
            receiver.update()
            assert receiver.attest() == []


def test_a_forked_child_leaves_the_parents_waiting_pull_alone(segment_name: str) -> None:
    with deltasync.WeightManager(model(1.0), name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=model(0.0), background=True) as receiver:
            receiver.update()
            waiting = receiver.prepare()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    receiver.attest()
                except errors.InvalidArgument:
                    code = 2 if waiting.over else 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            manager.offload()
            assert waiting.wait(30).version.number == 2


def test_a_handler_that_closes_the_receiver_amid_a_call_ends_as_it_wants(segment_name: str) -> None:
    class Asked(Exception):
        pass

    def handler(*_: object) -> None:
        receiver.close()
        raise Asked

    served = model(0.0)
    with deltasync.WeightManager(model(1.0), name=segment_name) as manager:
        manager.offload()
        receiver = deltasync.Receiver(manager.endpoint, module=served, background=True)
        receiver.update()
        real = served.state_dict

        def state_dict(**options: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return real(**options)

        served.state_dict = state_dict
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with pytest.raises(Asked):
                receiver.attest()
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_memory_that_moved_is_neither_attested_nor_written(segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            receiver.update()
            served[0].weight.data = served[0].weight.data.clone()
            calls: list[Any] = [receiver.attest, receiver.repair, lambda: receiver.repair([0]), receiver.rollback]
            for call in calls:
                with pytest.raises(errors.LayoutMismatch, match=r"0.weight: the module keeps it elsewhere"):
                    call()


def test_asyncio_has_the_same(segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)

    async def run(endpoint: str) -> None:
        async with await deltasync.AsyncReceiver.connect(endpoint, module=served) as receiver:
            await receiver.update()
            flip(served[0].weight)
            assert [tensor for _, tensor, _ in await receiver.attest()] == ["0.weight"]
            assert (await receiver.repair()).tiles == 1
            assert await receiver.attest() == []
            assert not receiver.lost
            trained[0].weight.data[3, 3] = 5.0
            manager.offload()
            assert (await receiver.update(2)).mode == "delta"
            assert (await receiver.rollback()).number == 1  # type: ignore[union-attr]
            assert served[0].weight[3, 3].item() == 1.0
            await receiver.rebind()
            await receiver.update()
            other = model(0.0)
            await receiver.load_into(other)
            assert torch.equal(other[0].weight, trained[0].weight)
            assert {name for name, _ in receiver.tensors()} == {name for name, _ in receiver.arrays()}
            receiver.cancel()

    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        asyncio.run(run(manager.endpoint))


def test_every_public_name_of_the_receiver_is_there_for_asyncio() -> None:
    own = {name for name in vars(deltasync.Receiver) if not name.startswith("_")}
    # A coroutine that returns once a version is staged takes the place of both.
    assert own - {name for name in dir(deltasync.AsyncReceiver) if not name.startswith("_")} == {"follow"}


def test_live_memory_is_written_behind_the_kernels_that_were_queued(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is here: the target is one on the host that says it writes devices 0 and 2."""
    waited: list[int] = []
    streams: list[dict[int, list[int]]] = []
    build = _native.placed_target

    def target(placement: Any, live: bool, engine_streams: dict[int, list[int]], shadow: bool) -> Any:
        streams.append(engine_streams)
        return build(placement, live, engine_streams, shadow)

    class OnDevices:
        devices = [0, 1, 2]

        def __init__(self, placement: Any) -> None:
            self.placement = placement

    class Stream:
        cuda_stream = 77

    real = _native.Placement.build
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(_native.Placement, "build", lambda *args: OnDevices(real(*args)))
    monkeypatch.setattr(_native, "placed_target", lambda placement, *rest: target(placement.placement, *rest))
    served = model(0.0)
    with deltasync.WeightManager(model(1.0), name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, engine_streams={1: [Stream(), 78]}) as receiver:
            assert streams == [{0: [0], 1: [77, 78], 2: [0]}]  # where none is named the default one
            receiver.prepare().wait()
            assert waited == []
            receiver.commit()
            assert waited == [0, 2]
            receiver.repair([0])
            assert waited == [0, 2] * 2
            manager.offload(model(2.0))
            receiver.update(2)
            receiver.rollback()
            assert waited == [0, 2] * 4


def test_a_deadline_says_from_whom_and_why(segment_name: str) -> None:
    with deltasync.WeightManager(model(1.0), name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, background=True) as receiver:
            receiver.update()
            for late in (receiver.commit, receiver.update):
                with pytest.raises(
                    errors.DeadlinePassed, match=f":1 is held already, and {manager.endpoint} had none newer for 0.3 s"
                ) as waited:
                    late(timeout=0.3)
                assert "failed" not in str(waited.value)
            named = f"version newest from {manager.endpoint}: not staged after 0.3 s"
            native = receiver._bound.native

            class Full:
                def __getattr__(self, name: str) -> Any:
                    return getattr(native, name)

                def pull(self, *_: Any) -> None:
                    raise errors.NoSpace("the disk is full")

            receiver._bound.native = Full()  # type: ignore[assignment]
            receiver.cancel()
            receiver.follow()
            with pytest.raises(errors.DeadlinePassed, match=f"{named}; the last try failed: the disk is full"):
                receiver.commit(timeout=0.3)
            receiver._bound.native = native
            manager.offload()
            assert receiver.commit(timeout=30).version.number == 2


def test_a_device_that_goes_on_computing_ends_no_commit(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, served = model(1.0), model(0.0)
    idle = threading.Event()
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            receiver.update()
            manager.offload(model(2.0))
            receiver.prepare(2)
            monkeypatch.setattr(receiver._bound.kept, "_devices", [0])
            monkeypatch.setattr(torch.cuda, "synchronize", lambda device: idle.wait(60))
            for _ in range(3):
                with pytest.raises(errors.DeadlinePassed, match="cuda:0 was still computing") as refused:
                    receiver.commit(timeout=0.1)
            assert [thread.name for thread in threading.enumerate()].count("deltasync-cuda:0") == 1
            assert "engine_streams" in str(refused.value)
            assert (served[0].bias == 1.0).all()
            idle.set()
            assert receiver.commit().version.number == 2
            assert (served[0].bias == 2.0).all()


def test_kernels_that_failed_end_the_commit(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, served = model(1.0), model(0.0)

    def fail(device: int) -> None:
        raise RuntimeError(f"cuda:{device} is lost")

    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            receiver.prepare(1)
            monkeypatch.setattr(receiver._bound.kept, "_devices", [0])
            monkeypatch.setattr(torch.cuda, "synchronize", fail)
            with pytest.raises(RuntimeError, match="cuda:0 is lost"):
                receiver.commit()
            monkeypatch.undo()
            receiver.commit()
            assert (served[0].bias == 1.0).all()
