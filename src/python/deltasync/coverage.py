"""The proof that an update reaches everything: no tensor of the trainer is left over, and no weight of the model.

Both sides are compared when a receiver binds, by name. What one side may lack is said by the user, as patterns; what it
lacks beyond that is an error, since weights that stay old without a word look like training that does not work.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from .errors import InvalidArgument, UnmatchedWeights
from .likely_causes import likely_causes

#: The way out that every message of leftovers names.
LISTED = 'what shall stay as it is, on either side, is listed as ignore=["PATTERN", ...]'
#: Names of one side in a message.
_NAMES_MAX = 8


class Ignore:
    """What may stay unmatched: names of the trainer's tensors and of the model's weights, with ``*``, ``?`` and
    ``[...]`` as in file names. Case counts."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        if isinstance(patterns, str):
            raise InvalidArgument(f"ignore: a list of patterns, not the string {patterns!r}")
        if not isinstance(patterns, Iterable):
            raise InvalidArgument(f"ignore: a list of patterns, not {patterns!r:.40}")
        self.patterns = tuple(patterns)
        for pattern in self.patterns:
            if not isinstance(pattern, str) or not pattern:
                raise InvalidArgument(f"ignore: {pattern!r} is no pattern of names")

    def __contains__(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def split(self, names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
        """What of `names` no pattern matches, and the names that one does."""
        left = {name: why for name, why in names.items() if name not in self}
        return left, [name for name in names if name not in left]


def require_coverage(
    owner: str,
    untaken: Mapping[str, str],
    unfilled: Mapping[str, str],
    weights: Iterable[str] = (),
    remedy: str | None = None,
) -> None:
    """UnmatchedWeights unless both are empty. `owner`: whose model, for the message; `untaken`: the trainer's tensors
    that it has no place for → why; `unfilled`: its weights that no tensor fills → what of each; `weights`: the names of
    all of its weights."""
    if untaken or unfilled:
        raise UnmatchedWeights(f"{owner}: {unmatched(untaken, unfilled, weights)}", remedy)


def unmatched(untaken: Mapping[str, str], unfilled: Mapping[str, str], weights: Iterable[str] = ()) -> str:
    """What is left over on both sides, and why it may be."""
    parts = []
    if unfilled:
        parts.append(f"{len(unfilled)} weight(s) of the model would stay as they are: {some(unfilled)}")
    if untaken:
        parts.append(f"{len(untaken)} tensor(s) of the trainer have no place: {some(untaken)}")
    causes = likely_causes(list(untaken), list(unfilled), list(weights))
    if causes:
        parts.append("likely: " + "; ".join(causes))
    return ". ".join(parts)


def log_ignored(log: logging.Logger, owner: str, tensors: list[str], weights: list[str]) -> None:
    """Once for each binding: what stays out of every update because the user, or deltasync, lists it."""
    if tensors:
        log.warning("%s: %d tensor(s) of the trainer are ignored: %s", owner, len(tensors), some(tensors))
    if weights:
        log.warning("%s: %d weight(s) of the model are ignored, and stay: %s", owner, len(weights), some(weights))


def some(names: Iterable[str] | Mapping[str, str]) -> str:
    """The first names, with what a mapping says of each where it is another thing than of the one before, and how many
    more there are."""
    listed = list(names.items()) if isinstance(names, Mapping) else [(name, "") for name in names]
    shown, last = [], ""
    for name, why in listed[:_NAMES_MAX]:
        shown.append(f"{name} ({why})" if why and why != last else name)
        last = why
    more = len(listed) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
