"""The first connection of a receiver: to whichever agent answers, now or soon."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from . import _native
from ._deadlines import left
from ._tries import Tries
from .errors import ConnectionFailed, DeadlinePassed, Error, InvalidArgument, PeerDied, ProtocolError

_log = logging.getLogger("deltasync.rollout")

#: An agent that starts beside an engine is soon there.
_PAUSE_MAX_S = 1.0


def endpoints_of(given: Any) -> list[str]:
    """HOST:PORT, or several of them, as a list. InvalidArgument."""
    endpoints = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else []
    if not endpoints or not all(isinstance(endpoint, str) for endpoint in endpoints):
        raise InvalidArgument(
            f"endpoints={given!r:.40} is neither HOST:PORT nor a list of such", "WeightManager.endpoint says which"
        )
    return endpoints


def connect(endpoints: list[str], options: dict[str, Any], end: float) -> _native.Receiver:
    """To the first endpoint that answers, and later to others when that is lost. Until then all are tried again:
    trainer and engine start side by side."""
    tries = Tries(_log, f"connecting to {' or '.join(endpoints)}", _PAUSE_MAX_S)
    told: Error | None = None
    while True:
        try:
            return _native.Receiver.connect(endpoint=",".join(endpoints), timeout=left(end), **options)
        except (ConnectionFailed, PeerDied, ProtocolError, DeadlinePassed) as error:
            if told is None or not isinstance(error, DeadlinePassed):  # which says less
                told = error
        if left(end) == 0:
            raise told
        time.sleep(min(tries.failed(told), left(end)))
