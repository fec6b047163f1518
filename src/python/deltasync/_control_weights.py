"""receiver/control/weights.hpp, of a Receiver."""

from __future__ import annotations

import time

from ._deadlines import left
from ._native import Version
from .errors import Cancelled
from .prepared import Prepared
from .rollout import Receiver


class ReceiverWeights:
    """What the control service does with the weights of one process. One call at a time, but for :meth:`current`."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        #: What was staged and not committed; empty: nothing.
        self.staged = ""
        self._changed = False  # by the last commit
        self._verify = False
        #: Writes live memory until it is done, which may be after the wait for it has ended.
        self._overwriting: Prepared | None = None
        self._ends = False

    @property
    def stages_in_place(self) -> bool:
        return bool(self.receiver._options["full_update_policy"] == "in_place")

    @property
    def wrong(self) -> bool:
        """Live memory may not be what was committed, as this or an earlier service of the receiver found."""
        return self.receiver._bound.wrong

    @wrong.setter
    def wrong(self, found: bool) -> None:
        self.receiver._bound.wrong = found

    def current(self) -> Version | None:
        overwriting = self._overwriting
        overwrites = overwriting is not None and not overwriting.done
        return None if self.wrong or overwrites else self.receiver.version

    def live_names(self) -> list[tuple[str, str]]:
        placement = self.receiver._bound.kept.placement
        if placement is not None:
            return placement.live_names()
        return [(name, name) for name in self.receiver.layout.names()]

    def stage(self, version: str, directory: str, verify: bool, timeout: float) -> Version:
        end = time.monotonic() + timeout
        self.staged = ""
        self._verify = verify or self.wrong
        self.receiver.cancel()  # what was staged before, and never committed, may not be the newest any more
        wanted = int(version) if version.isascii() and version.isdigit() else version or None
        prepared = self.receiver.prepare(wanted, directory=directory or None, timeout=timeout)
        self._overwriting = prepared if self.stages_in_place else None
        if self._ends:  # looked at after there is what cancel() would have cancelled
            self.receiver.cancel()
        found = prepared.wait(left(end)).version
        self.staged = f"the files of {directory}" if directory else f"version {found.number} of epoch {found.epoch:x}"
        return found

    def commit(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        self.staged, self._changed = "", False
        self._changed = self.receiver.commit(timeout=timeout).mode != "up_to_date"
        if self._verify:
            self.wrong = True
            if wrong := self.receiver.attest(timeout=left(end)):
                self.receiver.repair(wrong, timeout=left(end))
            self.wrong = False

    def rollback(self) -> None:
        """The last commit, if it has changed anything; a version may come again with other bytes."""
        if self._changed or self.receiver.lost:
            self.receiver.rollback()

    def release(self, timeout: float) -> None:
        self.staged = ""
        self.receiver.release(timeout=timeout)

    def cancel(self) -> None:
        """For good."""
        self._ends = True
        self.receiver.cancel()

    def fill(self, timeout: float) -> None:
        if self._ends:
            raise Cancelled("the service ends")
        self.receiver.restore(timeout=timeout)
        self.wrong = False
