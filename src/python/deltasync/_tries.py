"""What is tried again until it succeeds, or until somebody's deadline."""

from __future__ import annotations

import logging

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
