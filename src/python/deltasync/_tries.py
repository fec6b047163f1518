"""What is tried again until it succeeds, or until somebody's deadline; processes that are started again."""

from __future__ import annotations

import logging
import time

_PAUSE_MIN_S = 0.2


class Tries:
    """One line in the log when failures begin, and one when they become others; pauses that double."""

    def __init__(self, log: logging.Logger, what: str, longest_pause_s: float) -> None:
        self._log, self._what, self._longest_pause_s = log, what, longest_pause_s
        #: Of the last try; None: it succeeded, or there was none.
        self.failure: Exception | None = None
        self._pause_s = _PAUSE_MIN_S

    def failed(self, error: Exception) -> float:
        """Seconds to wait before the next try."""
        pause = self._pause_s
        if type(self.failure) is not type(error):
            self._log.warning("%s failed, trying again in %.1f s, later less often: %s", self._what, pause, error)
        self.failure = error
        self._pause_s = min(pause * 2, self._longest_pause_s)
        return pause

    def succeeded(self) -> None:
        self.failure, self._pause_s = None, _PAUSE_MIN_S


class Restarts:
    """Of a process that is to run for ever: started again at once; one that ends soon after its start, after a pause
    that doubles. Each end is a line in the log. One that lived longer than the longest pause is started at once again.
    """

    def __init__(self, log: logging.Logger, longest_pause_s: float) -> None:
        self._log, self._longest_pause_s = log, longest_pause_s
        self._in_a_row = 0
        self._pause_s = 0.0
        self._since: float | None = time.monotonic()  # None: it does not run

    def started(self) -> None:
        """It runs."""
        self._since = time.monotonic()

    def ended(self, why: str) -> float:
        """Seconds to wait before the next start. Also of a start that failed."""
        if self._since is not None and time.monotonic() - self._since > self._longest_pause_s:
            self._in_a_row, self._pause_s = 0, 0.0
        self._since = None
        self._in_a_row += 1
        pause = self._pause_s
        self._pause_s = min(max(_PAUSE_MIN_S, pause * 2), self._longest_pause_s)
        self._log.warning("%s; %d in a row, starting it again in %.1f s", why, self._in_a_row, pause)
        return pause
