"""Who is told of vLLM's sleep, by a worker that is played; and ranks that agree on it, without vLLM."""

from __future__ import annotations

import concurrent.futures
import weakref
from typing import Any

import pytest
from deltasync import errors
from deltasync.engines import vllm_sleep
from deltasync.engines.group import Group
from played_vllm import config, engine_class


class Sleeper:
    def __init__(self, heard: list[str], busy: bool = False) -> None:
        self.heard, self.busy = heard, busy

    def before_sleep(self, level: int) -> None:
        self.heard.append(f"sleep {level}")
        if self.busy:
            raise RuntimeError("a device may still write")

    def after_wake(self, level: int) -> None:
        self.heard.append(f"wake {level}")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Worker:
        slept = 0

        def sleep(self, level: int = 1) -> None:
            self.slept += 1

        def wake_up(self, tags: list[str] | None = None) -> None:
            pass

    monkeypatch.setattr(vllm_sleep, "_sleepers", weakref.WeakSet())
    monkeypatch.setattr(vllm_sleep, "_level", 0)
    vllm_sleep._observe(Worker)
    vllm_sleep._observe(Worker)  # by the second engine of the process
    return Worker()


def test_the_weights_sleep_until_they_are_woken(worker: Any) -> None:
    heard: list[str] = []
    sleeper = Sleeper(heard)
    vllm_sleep._sleepers.add(sleeper)
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert (heard, vllm_sleep.level(), worker.slept) == (["sleep 2"], 2, 1)
    worker.wake_up(["weights"])
    assert (heard, vllm_sleep.level()) == (["sleep 2", "wake 2"], 0)


def test_where_one_cannot_sleep_those_that_were_told_go_on(worker: Any) -> None:
    heard: list[str] = []
    sleeper = Sleeper(heard, busy=True)
    vllm_sleep._sleepers.add(sleeper)
    with pytest.raises(RuntimeError, match="may still write"):
        worker.sleep(2)
    assert (heard, vllm_sleep.level(), worker.slept) == (["sleep 2", "wake 2"], 0, 0)


class Receiver:
    """Of one rank; ``busy``: it cannot give its memory up."""

    name, doubt, busy = "receiver", "", False

    def lose(self) -> None:
        if self.busy:
            raise errors.IoError("a device may still write")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two ranks' weight transfer engines over a store that they share."""
    torch = pytest.importorskip("torch")
    engine_of, store = engine_class(monkeypatch), torch.distributed.HashStore()
    made = [engine_of(None, config(2), None, None) for _ in range(2)]
    for rank, engine in enumerate(made):
        engine._target, engine._ranks = Receiver(), Group(store, rank, 2)
    return made


def test_where_a_rank_cannot_sleep_none_does(engines: list[Any]) -> None:
    """vLLM would not wake the others."""

    def sleep(busy: bool) -> list[str]:
        engines[1]._target.busy = busy
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(engine.before_sleep, 2) for engine in engines]
        return [str(one.exception() or "") for one in asked]

    others, own = sleep(True)
    assert "rank 1: IoError" in others and "a device may still write" in others
    assert "a device may still write" in own
    assert sleep(False) == ["", ""]
