"""The native receiver and the memory that it writes, for one thread at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from . import _native
from ._deadlines import left
from ._kept import Kept
from ._native import Version
from .errors import Cancelled, DeadlinePassed, InvalidArgument
from .prepared import Prepared

#: How often who waits for the receiver looks whether it still has to.
_LOOK_S = 0.2


class Bound:
    """What it has is looked at after each call: any thread may read ``version`` and ``lost``."""

    def __init__(self, native: _native.Receiver, kept: Kept) -> None:
        #: Until it is closed. By its name alone, since an error's frames would keep it alive beyond that. Called with
        #: locked(), but for what any thread may ask.
        self.native = native
        self.kept = kept
        #: The committed one.
        self.version: Version | None = native.current
        #: No version is whole any more, though one was.
        self.lost = False
        #: The memory was given up, so that having no version is no loss.
        self.released = False
        #: It was found not to be what was committed, and is not served until it is that again.
        self.wrong = False
        self.lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """A forked child shares the connections of its parent, and has to leave them alone."""
        return os.getpid() == self._pid

    def check_process(self, what: str) -> None:
        if not self.is_of_this_process:
            raise InvalidArgument(f"{what}this receiver belongs to process {self._pid}; a forked child makes its own")

    @property
    def is_closed(self) -> bool:
        return not hasattr(self, "native")

    def close(self) -> None:
        """With the lock."""
        if not self.is_closed:
            del self.native

    def opened(self, what: str) -> _native.Receiver:
        native: _native.Receiver | None = getattr(self, "native", None)
        if native is None:
            raise InvalidArgument(f"{what}: this receiver is closed")
        return native

    @contextlib.contextmanager
    def locked(self, what: str, end: float, prepared: Prepared | None = None) -> Iterator[None]:
        """The native receiver for this thread alone; afterwards it is looked at again what it has. For `prepared`:
        until that is cancelled, so that close() ends also where a Ctrl-C came between the lock and its release."""
        self.check_process(f"{what}: ")
        while not self.lock.acquire(timeout=min(left(end), _LOOK_S)):
            if prepared is not None and prepared._cancelled.is_set():
                raise Cancelled(f"{what}: cancelled while another call had the receiver")
            if left(end) == 0:
                raise DeadlinePassed(f"{what}: a pull is under way; cancel() ends it")
        try:
            self.opened(what)
            try:
                yield
            finally:
                if not self.is_closed:  # else a signal's handler has closed it
                    current = self.native.current
                    self.lost = current is None and not self.released and (self.lost or self.version is not None)
                    self.version = current
        finally:
            self.lock.release()
