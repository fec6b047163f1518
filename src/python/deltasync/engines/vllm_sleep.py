"""Whether vLLM's weights sleep. Its weight transfer engines are not told: Worker.sleep and wake_up are observed.

While they sleep their addresses are not mapped, so pulls, which read live memory, have to end before. After level 2
they hold anything.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol


class Sleeper(Protocol):
    def before_sleep(self, level: int) -> None: ...

    def after_wake(self, level: int) -> None: ...


_sleepers: weakref.WeakSet[Any] = weakref.WeakSet()
#: Of this process's worker: 0 while the weights are there.
_level = 0


def level() -> int:
    return _level


def watch(sleeper: Sleeper) -> None:
    """Tells `sleeper` of all that comes. It is kept by a weak reference."""
    from vllm.v1.worker.gpu_worker import Worker

    _observe(Worker)
    _sleepers.add(sleeper)


def _tell(level: int) -> None:
    """One that cannot sleep keeps the weights there: those that were told have them again."""
    told: list[Sleeper] = []
    try:
        for sleeper in list(_sleepers):
            told.append(sleeper)
            sleeper.before_sleep(level)
    except BaseException:
        if _level == 0:
            for sleeper in told:
                sleeper.after_wake(level)
        raise


def _observe(worker: Any) -> None:
    if getattr(worker.sleep, "deltasync_observes", False):
        return
    sleep, wake_up = worker.sleep, worker.wake_up

    @functools.wraps(sleep)
    def observed_sleep(self: Any, level: int = 1) -> Any:
        global _level
        if level > 0:
            _tell(level)
            _level = max(_level, level)  # also if it fails half-way
        return sleep(self, level)

    @functools.wraps(wake_up)
    def observed_wake_up(self: Any, tags: list[str] | None = None) -> Any:
        global _level
        result = wake_up(self, tags)
        if _level and (tags is None or "weights" in tags):
            slept, _level = _level, 0
            for sleeper in list(_sleepers):
                sleeper.after_wake(slept)
        return result

    observed_sleep.deltasync_observes = True  # type: ignore[attr-defined]
    worker.sleep, worker.wake_up = observed_sleep, observed_wake_up
