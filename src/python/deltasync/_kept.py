"""Where a receiver keeps its version: a module's memory, an engine's, host memory of its own, or directories."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import _checks, _native
from ._deadlines import left
from ._host_memory import HostMemory
from ._native import Layout, Placement, PlacementPlan, Sidecar
from .errors import DeadlinePassed
from .places import check_module_places, plan_of_module

#: CUDA's, of the device that it is named for.
_DEFAULT_STREAM = 0


class Kept:
    """What the target of a native receiver writes, kept alive for as long as it may."""

    #: Bound once, by the receiver.
    target: _native.Target

    def __init__(
        self,
        layout: Layout,
        sidecar: Sidecar,
        engine_streams: Mapping[int, list[int]],
        *,
        module: Any = None,
        plan: PlacementPlan | Callable[[Layout], PlacementPlan] | None = None,
        directory: str | os.PathLike[str] | None = None,
        keep_before: int = 1,
        live: bool = False,
        strict: bool = True,
        ignore: Iterable[str] = (),
        part: PlacementPlan | None = None,
        shadow: bool = False,
    ) -> None:
        """As of :class:`Receiver`, at most one of `module`, `plan` and `directory`; else host memory, with `part` only
        for what that plan places. Errors: the module's, the plan's or the directory's."""
        #: None: it is not host memory of the receiver's own.
        self.memory: HostMemory | None = None
        self._given = module, plan  # which may hold the memory
        self._places: list[tuple[str, Any]] = []  # the module's tensors where the target writes
        #: Of live memory: the module's, or the plan's.
        self.placement: Placement | None = None
        self._devices: list[int] = []  # that a commit writes, and that have no stream
        if directory is not None:
            self.target = _native.hf_target(layout, sidecar, os.fspath(directory), keep_before=keep_before)
            return
        if module is not None:
            plan, self._places = plan_of_module(layout, module, strict=strict, ignore=ignore)
        elif callable(plan):
            plan = plan(layout)
        for argument, given in (("plan", plan), ("part", part)):
            if given is not None:
                _checks.of_type(argument, given, PlacementPlan, "PlacementPlan")
        if plan is None:
            self.memory = HostMemory(layout)
            self.target = self.memory.target(part)
            return
        self.placement = Placement.build(layout, plan)
        self._devices = [device for device in self.placement.devices if device not in engine_streams]
        # Pulls that write in place come behind what torch's default stream has: what made the weights, for example.
        streams = {**dict.fromkeys(self._devices, [_DEFAULT_STREAM]), **engine_streams}
        self.target = _native.placed_target(self.placement, live, streams, shadow)

    def check(self) -> None:
        """LayoutMismatch where the module's memory is not any more what the target writes."""
        if self._places:
            check_module_places(self._given[0], self._places)

    def wait_for_kernels(self, end: float) -> None:
        """Before live memory is written: what was queued may still compute with it. DeadlinePassed, naming the device,
        if it goes on until then."""
        torch: Any = sys.modules.get("torch")
        for device in self._devices if torch is not None else ():
            _synchronize(torch, device, end)


#: By device. One that a call gave up may still wait; the next call waits for that one first.
_waiters: dict[int, threading.Thread] = {}


def _synchronize(torch: Any, device: int, end: float) -> None:
    """On a thread of its own: torch's call knows no deadline."""
    began = time.monotonic()
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
        except BaseException as error:
            failures.append(error)

    def join(waiter: threading.Thread) -> None:
        waiter.join(min(left(end), threading.TIMEOUT_MAX))
        if waiter.is_alive():
            raise DeadlinePassed(
                f"cuda:{device} was still computing after {time.monotonic() - began:.1f} s; nothing was written",
                "pass engine_streams to wait for the streams that use the weights, not for the whole device",
            )

    before = _waiters.get(device)
    if before is not None:
        join(before)
    waiter = threading.Thread(target=wait, name=f"deltasync-cuda:{device}", daemon=True)
    _waiters[device] = waiter
    waiter.start()
    join(waiter)
    for failure in failures:
        raise failure
