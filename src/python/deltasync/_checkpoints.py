"""Whether a layout has the tensors of a model directory: what ``hf=DIR`` asks before the first version."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from . import _native
from ._arrays import COMPUTED, NAMES
from ._native import Layout
from .errors import LayoutMismatch
from .likely_causes import likely_causes

#: So many tensors of each kind are named in a message.
_NAMED = 3


def check_checkpoint(layout: Layout, directory: str | os.PathLike[str], ignored: Callable[[str], bool]) -> None:
    """LayoutMismatch unless the layout has the names, shapes and dtypes of the directory's tensors, but for those that
    are `ignored`; the message names tensors of both sides, and the likely cause. NotFound, CorruptData: as a directory
    that cannot be read."""
    theirs, _ = _native.read_hf_directory(directory, 1)
    own_specs = {tensor.name: (list(tensor.shape), tensor.dtype) for tensor in layout}
    their_specs = {tensor.name: (list(tensor.shape), tensor.dtype) for tensor in theirs}
    more = [name for name in own_specs if name not in their_specs]
    fewer = [name for name in their_specs if name not in own_specs and not ignored(name)]
    both = [(name, own, their_specs[name]) for name, own in own_specs.items() if name in their_specs]
    shapes = [f"{name} ({own[0]}, there {their[0]})" for name, own, their in both if own[0] != their[0]]
    dtypes = [f"{name} ({own[1]}, there {their[1]})" for name, own, their in both if own[1] != their[1]]
    kinds = {"only published": more, "only there": fewer, "other shapes": shapes, "other dtypes": dtypes}
    said = [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if said:
        pairs = {(own[1], their[1]) for _, own, their in both if own[1] != their[1]}
        raise LayoutMismatch(
            f"hf='{os.fspath(directory)}' has other tensors than what is published: {'; '.join(said)}",
            _remedy(more, fewer, their_specs, pairs),
        )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def _remedy(more: list[str], fewer: list[str], theirs: Iterable[str], dtypes: set[tuple[str, str]]) -> str:
    if more or fewer:
        causes = likely_causes(more, fewer, list(theirs))
        return "likely: " + "; ".join(causes) if causes else "publish the tensors that this directory has"
    if dtypes and all(own in COMPUTED and their in COMPUTED for own, their in dtypes):
        wanted = sorted({NAMES[their] for _, their in dtypes})
        return f'say in what the weights travel: dtype="{wanted[0]}"' if len(wanted) == 1 else "dtype= can be patterns"
    return "publish the tensors that this directory has"
