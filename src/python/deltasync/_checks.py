"""What an argument has to be: asked here, where its name is known, before a library below says it in its own words."""

from __future__ import annotations

import operator
import os
from typing import Any, TypeVar

from .errors import InvalidArgument

_T = TypeVar("_T")


def of_type(argument: str, value: _T, kind: type[Any], expected: str) -> _T:
    """The value. InvalidArgument with the `argument`'s name, and what was `expected`, unless it is of this kind."""
    if not isinstance(value, kind):
        raise wrong(argument, value, expected)
    return value


def text(argument: str, value: Any) -> str:
    """A str that has a form in UTF-8, in which names travel. InvalidArgument."""
    try:
        of_type(argument, value, str, "str").encode()
    except UnicodeEncodeError:
        raise wrong(argument, value, "text of Unicode characters", "half of a surrogate pair is none") from None
    return str(value)


def secret(argument: str, value: Any) -> str:
    """As text(); the message does not show it. InvalidArgument."""
    try:
        return text(argument, value)
    except InvalidArgument:
        raise InvalidArgument(f"{argument}: {type(value).__name__} is no str of Unicode characters") from None


def path(argument: str, value: Any) -> str:
    """A path as str. InvalidArgument."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise wrong(argument, value, "path") from None


def whole(argument: str, value: Any, least: int = 0, most: int = 2**32 - 1) -> int:
    """A whole number, of any integer type. InvalidArgument."""
    expected = f"whole number from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong(argument, value, expected) from None
    if isinstance(value, bool) or not least <= number <= most:
        raise wrong(argument, value, expected)
    return number


def wrong(argument: str, value: Any, expected: str, remedy: str | None = None) -> InvalidArgument:
    return InvalidArgument(f"{argument}={value!r:.40} is no {expected}", remedy)
