"""engines/session.py while an engine sleeps: who touches the weights, what is lost, and what comes back."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from deltasync import errors

torch = pytest.importorskip("torch")

from deltasync.engines.session import EngineReceiver  # noqa: E402
from engine_rig import WAIT, Rig, update  # noqa: E402
from engine_support import HIDDEN, VOCABULARY, Engine, assert_bits, bits  # noqa: E402


def test_void_loads_all_again(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    update(receiver, 1)
    receiver.void("level-2 sleep")
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.fill_(float("nan"))
    rig.publish(2)
    report = update(receiver, 2)
    assert report.mode == "loaded"
    assert_bits(engine, engine.expected(rig.weights))


def fill(engine: Engine) -> None:
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.fill_(float("nan"))


def test_what_was_lost_comes_back_from_the_shadow(rig: Rig) -> None:
    engine, loader, receiver = rig.engine(shadow=True)
    rig.reach(receiver, 2)
    before = bits(engine)
    for _ in range(2):
        receiver.lose()
        fill(engine)
        receiver.regain("level-2 sleep")
        assert receiver.version is not None and receiver.version.number == 2 and not receiver.doubt
        assert loader.reloaded[-1] == ["mlp.down.weight"]  # of which the shadow has what the loader takes
        assert_bits(engine, before)
    rig.publish(3)
    assert update(receiver, 3).mode == "delta"
    assert_bits(engine, engine.expected(rig.weights))


def test_what_the_shadow_cannot_bring_back_is_loaded_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, receiver = rig.engine(shadow=True)
    rig.reach(receiver, 2)
    receiver.lose()
    fill(engine)

    def damaged(timeout: float) -> None:
        raise errors.CorruptData("tile 3 of the shadow")

    monkeypatch.setattr(receiver._receiver, "restore", damaged)
    receiver.regain("level-2 sleep")
    assert receiver.version is None
    assert receiver.doubt.startswith("level-2 sleep, and the shadow did not bring them back: tile 3 of the shadow")
    monkeypatch.undo()
    rig.publish(3)
    assert update(receiver, 3).mode == "loaded"
    assert_bits(engine, engine.expected(rig.weights))


def test_without_a_shadow_what_was_lost_is_loaded_again(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    rig.reach(receiver, 2)
    receiver.lose()
    fill(engine)
    receiver.regain("level-2 sleep")
    assert (receiver.version, receiver.doubt) == (None, "level-2 sleep")


def test_what_no_tensor_fills_comes_back_too(rig: Rig) -> None:
    """The padding of a vocabulary, and the engine's own buffers, are in no shadow."""
    engine, _, receiver = rig.engine(shadow=True)
    padded = torch.full((VOCABULARY + 28, HIDDEN), 5.0, dtype=torch.bfloat16)
    engine.embed.weight = torch.nn.Parameter(padded[:VOCABULARY], requires_grad=False)
    engine.embed.padded = padded
    engine.norm.register_buffer("scale", torch.tensor([7.0]), persistent=False)
    rig.reach(receiver, 2)
    receiver.lose()
    fill(engine)
    engine.embed.padded.fill_(0), engine.norm.scale.fill_(0)
    receiver.regain("level-2 sleep")
    assert receiver.version is not None and engine.norm.scale.item() == 7.0
    assert torch.equal(padded[VOCABULARY:], torch.full((28, HIDDEN), 5.0, dtype=torch.bfloat16))
    assert_bits(engine, engine.expected(rig.weights))


def test_caches_stay_out_of_the_shadow(rig: Rig) -> None:
    """They sleep, too, and may not be mapped again when the weights are."""
    engine, _, receiver = rig.engine(shadow=True, permutes=False)
    engine.qkv.kv_cache, engine.down.kv_cache = torch.ones(2, 8), [torch.ones(8)]
    rig.reach(receiver, 2)
    receiver.lose()
    assert receiver._lost is not None and not receiver._lost[1]._copies
    fill(engine)
    caches = [engine.qkv.kv_cache, engine.down.kv_cache[0]]
    for cache in caches:
        cache.fill_(2)
    receiver.regain("level-2 sleep")
    assert receiver.version is not None and all(bool((cache == 2).all()) for cache in caches)
    assert_bits(engine, engine.expected(rig.weights))


def test_memory_that_a_device_may_still_write_to_has_to_stay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, receiver = rig.engine(shadow=True)
    rig.reach(receiver, 2)

    def busy(timeout: float) -> None:
        raise errors.IoError("the device is lost")

    monkeypatch.setattr(receiver._receiver, "release", busy)
    with pytest.raises(errors.IoError):
        receiver.lose()
    receiver.regain("level-2 sleep")
    assert receiver.version is None


def test_a_pause_ends_the_pull_and_keeps_the_version(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    update(receiver, 1)
    receiver.pause()
    rig.publish(2)
    assert receiver._receiver._pulls.staged is None
    receiver.follow()
    update(receiver, 2)
    rig.publish(3)
    assert update(receiver, 3).mode == "delta"
    assert_bits(engine, engine.expected(rig.weights))


def test_a_pause_waits_for_what_pulls_have_given_to_the_device(rig: Rig) -> None:
    _, loader, receiver = rig.engine()
    update(receiver, 1)
    before = loader.synchronized
    receiver.pause()
    assert loader.synchronized > before


class Held:
    """The native receiver; its pulls go on until they are let go."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def pull(self, *arguments: Any) -> Any:
        self.begun.set()
        assert self.goes_on.wait(WAIT)
        return self.native.pull(*arguments)


def held_pull(rig: Rig) -> tuple[EngineReceiver, Held]:
    """A receiver in the middle of a pull."""
    _, _, receiver = rig.engine()
    update(receiver, 1)
    receiver.pause()
    assert receiver._receiver is not None
    held = Held(receiver._receiver._bound.native)
    receiver._receiver._bound.native = held
    receiver.follow()
    assert held.begun.wait(WAIT)
    return receiver, held


def test_a_pause_waits_for_a_pull_that_another_one_has_replaced(rig: Rig) -> None:
    receiver, held = held_pull(rig)
    first = receiver._receiver._pulls.staged
    receiver.prepare(timeout=WAIT)
    while receiver._receiver._pulls.staged is first:
        time.sleep(0.01)
    threading.Timer(0.5, held.goes_on.set).start()
    receiver.pause()
    assert held.goes_on.is_set()


def test_memory_that_a_pull_still_reads_has_to_stay(rig: Rig) -> None:
    receiver, held = held_pull(rig)
    receiver.timeout = 0.1
    for call in (receiver.pause, receiver.lose):
        with pytest.raises(errors.DeadlinePassed):
            call()
    held.goes_on.set()
    receiver.pause(WAIT)


def test_a_pull_that_was_cancelled_while_it_waited_for_the_receiver_is_not_begun(rig: Rig) -> None:
    _, _, receiver = rig.engine()
    update(receiver, 1)
    receiver.pause()
    bound = receiver._receiver._bound
    held = bound.native = Held(bound.native)
    held.goes_on.set()
    with bound.lock:
        waits = receiver._receiver.follow()
        while not waits._future.running():
            time.sleep(0.01)
        time.sleep(0.1)
        receiver._receiver.cancel()
    with pytest.raises(errors.Cancelled):
        waits.wait(WAIT)
    assert not held.begun.is_set()


def test_nothing_is_pulled_while_the_model_cannot_be_written(rig: Rig) -> None:
    _, loader, receiver = rig.engine()
    update(receiver, 1)
    receiver.pause()
    loader.refuse = "the weights sleep: wake them first"
    receiver.follow()
    assert receiver._following is None and receiver._receiver._pulls.staged is None
    loader.refuse = ""
    receiver.follow()
    assert receiver._following is not None


def test_memory_that_moved_is_traced_again(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    update(receiver, 1)
    engine.qkv.weight.data = torch.zeros_like(engine.qkv.weight.data)
    rig.publish(2)
    assert update(receiver, 2).mode == "loaded"
    assert_bits(engine, engine.expected(rig.weights))
