"""Deadlines of calls: `timeout` in seconds from now, as a moment of the monotonic clock."""

from __future__ import annotations

import math
import numbers
import time
from typing import Any

from . import _checks

#: A timeout of more is one of so many seconds, which threads can wait for.
LONGEST_S = 1e8


def seconds(call: str, timeout: Any) -> float:
    """The `timeout` of a call (or of a constructor). InvalidArgument if it is no number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or math.isnan(timeout) or timeout < 0:
        raise _checks.wrong(f"{call}: timeout", timeout, "number of seconds from 0 on", "such as timeout=60")
    return min(float(timeout), LONGEST_S)


def end_of(call: str, timeout: Any, default: float) -> float:
    """When the `timeout` of a call has passed, or, if it has none, the `default` one. InvalidArgument."""
    return time.monotonic() + (default if timeout is None else seconds(call, timeout))


def left(end: float) -> float:
    """Seconds until then, 0 if it has passed."""
    return max(0.0, end - time.monotonic())
