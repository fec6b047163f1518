"""What a caller may name a version by."""

from __future__ import annotations

import operator
from typing import Any

from . import _checks
from ._native import Version
from .errors import InvalidArgument

_NUMBER_MAX = 2**64 - 1
_NUMBERS = "a whole one from 1 to 2**64 - 1, or a Version"


def version_number(call: str, version: Any) -> int:
    """A version's number; any integer type will do (a step counted by numpy or torch, say). InvalidArgument."""
    try:
        number = -1 if isinstance(version, (bool, str)) else operator.index(version)
    except TypeError:
        number = -1
    if not 0 < number <= _NUMBER_MAX:
        raise InvalidArgument(f"{call}: version={version!r:.40} is no version's number", _NUMBERS)
    return number


def asked_version(call: str, version: Any) -> int | str | Version | None:
    """What a receiver may ask for: a number, a label, a Version, or None for the newest. InvalidArgument."""
    if version is None or isinstance(version, Version):
        return version
    if isinstance(version, str):
        return _checks.text(f"{call}: version", version)
    return version_number(call, version)
