"""What a caller may name a version by."""

from __future__ import annotations

import operator
import os
from pathlib import Path
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


def version_label(call: str, number: int, label: Any) -> str:
    """A version's label. InvalidArgument: it is no text; or another version's number, which people would get who ask
    for it."""
    text = _checks.text(f"{call}: label", label)
    if text.isascii() and text.isdigit() and text.lstrip("0") != str(number):
        raise InvalidArgument(
            f"{call}: label={text!r:.40} is another version's number, and this is version {number}",
            f"give it a letter, as in step_{text:.20}",
        )
    return text


#: What a pull may be for: a number, a label, a Version, a directory, or None for the newest.
Asked = int | str | Version | Path | None


def asked_of(call: str, version: Any, directory: str | os.PathLike[str] | None) -> Asked:
    """One of them. InvalidArgument."""
    if directory is None:
        return asked_version(call, version)
    if version is not None:
        raise InvalidArgument(f"{call}: a version or a directory, not both")
    return Path(_checks.path("directory", directory))


def asked_version(call: str, version: Any) -> Asked:
    """The same, where who asks has looked at it before."""
    if version is None or isinstance(version, (Version, Path)):
        return version
    if isinstance(version, str):
        return _checks.text(f"{call}: version", version)
    return version_number(call, version)
