"""The store that the ranks of an engine, or of a trainer, share, asked within a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import _checks
from .errors import Cancelled, InvalidArgument, IoError

#: For an answer of the store.
ANSWER_S = 5.0
_REMEDY = "start the store and all ranks again"


class RankGroup:
    """The processes of one engine. ``store``: of torch.distributed (a TCPStore, say), with a connection of its own for
    this object; all ranks share it. ``rank`` in 0..``ranks`` - 1. ``name``: of this engine; no other one that uses the
    store may have it."""

    def __init__(self, store: Any, rank: int, ranks: int, *, name: str) -> None:
        self.store, self.name = store, _checks.text("name", name)
        self.rank, self.ranks = _checks.whole("rank", rank), _checks.whole("ranks", ranks)
        if not 0 <= self.rank < self.ranks:
            raise InvalidArgument(f"RankGroup: rank={rank} of ranks={ranks}: ranks are 0 to {self.ranks - 1}")


class RankStore:
    """The store. It is asked on a thread of its own, since it may stand still for longer than anybody may wait."""

    def __init__(self, group: RankGroup) -> None:
        self._store, self._prefix, self._name = group.store, f"{group.name}/", group.name
        #: Ends every wait for it.
        self.closed = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._ask, name=f"deltasync-store-{group.rank}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def add(self, key: str, amount: int) -> int:
        return int(self._call(lambda: self._store.add(self._prefix + key, amount)))

    def compare_set(self, key: str, expected: str, value: str | bytes) -> bytes:
        return bytes(self._call(lambda: self._store.compare_set(self._prefix + key, expected, value)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call(lambda: self._store.check([self._prefix + key for key in keys])))

    def get(self, key: str) -> bytes:
        return bytes(self._call(lambda: self._store.get(self._prefix + key)))

    def set(self, key: str, value: str | bytes) -> None:
        self._call(lambda: self._store.set(self._prefix + key, value))

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(self._prefix + key))

    def found(self, key: str) -> str:
        """Empty if it is not there."""
        return self.get(key).decode() if self.check([key]) else ""

    def close(self) -> None:
        self.closed = True
        self._calls.put(lambda: None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(ANSWER_S)

    def _call(self, ask: Callable[[], Any]) -> Any:
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        given_up = threading.Event()

        def call() -> None:
            if given_up.is_set():  # it would come after what the caller did instead
                return
            try:
                answer.put((ask(), None))
            except Exception as error:  # DistError and its kind
                answer.put((None, error))

        self._calls.put(call)
        end = time.monotonic() + ANSWER_S
        while not self.closed:
            try:
                value, error = answer.get(timeout=0.1)
            except queue.Empty:
                if time.monotonic() < end:
                    continue
                given_up.set()
                raise IoError(
                    f"the store of the ranks of {self._name} has not answered for {ANSWER_S:.0f} s", _REMEDY
                ) from None
            if error is not None:
                raise IoError(f"the store of the ranks of {self._name}: {error}", _REMEDY) from error
            return value
        raise Cancelled(f"{self._name}: this rank is being closed")

    def _ask(self) -> None:
        while not self.closed:
            self._calls.get()()
