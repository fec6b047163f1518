"""Why an exported tensor is not the one in the model directory: guesses from some of its elements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ._export_copies import bits, positions
from ._hf_files import HfFiles

#: Of a copy, that a guess has to explain.
_SAMPLE = 4096
#: Other tensors that are looked at.
_OTHERS = 4096


def guess(name: str, copy: Any, made: Any, files: HfFiles, head_dim: int) -> str:
    """What would explain all elements of the copy (`made`), if anything does. `head_dim`: 0 if not known."""
    chosen, place = positions(copy, _SAMPLE)
    mine = made.reshape(-1)[chosen].cpu()
    shape = files.shape(name)[0]
    wanted = bits(mine)
    if len(wanted.unique()) > 1:
        for why, there in _places(place, shape, head_dim):
            if bool((bits(files.at(name, there)) == wanted).all()):
                return why
        for other in _same_shape(name, files):
            if bool((bits(files.at(other, place)) == wanted).all()):
                return f"it has what the directory has as {other}: another layer, expert or part"
    return _by_value(mine, files.at(name, place))


def _places(place: Any, shape: tuple[int, ...], head_dim: int) -> Iterator[tuple[str, Any]]:
    """Where the elements would be in the directory, and what that means."""
    if len(shape) >= 2:
        rows, cols = shape[-2:]
        inner = place % (rows * cols)
        yield "transposed", place - inner + (inner % cols) * rows + inner // cols
    for dim, size in enumerate(shape):
        step = math.prod(shape[dim + 1 :])
        index = place // step % size
        base = place - index * step
        of = f" along dimension {dim}" if len(shape) > 1 else ""
        if size % 2 == 0 and size > 2:
            half = size // 2
            yield f"halves swapped{of}", base + (index + half) % size * step
            yield f"interleaved in the directory{of}", base + (index % half * 2 + index // half) * step
            yield f"interleaved in the trainer{of}", base + (index // 2 + index % 2 * half) * step
        if dim == 0 and head_dim > 2 and head_dim % 2 == 0 and size % head_dim == 0:
            head, at, half = index // head_dim * head_dim, index % head_dim, head_dim // 2
            yield "rotary halves interleaved in the directory", base + (head + at % half * 2 + at // half) * step
            yield "rotary halves interleaved in the trainer", base + (head + at // 2 + at % 2 * half) * step


def _by_value(mine: Any, theirs: Any) -> str:
    import torch

    if not mine.dtype.is_floating_point:
        return ""
    own, other = mine.double(), theirs.double()
    if not bool(own.any()):
        return "zeros in the trainer: padding, or weights that were never loaded"
    less = other - own
    if bool((less != 0).all()) and bool((less - less[0]).abs().max() <= 1e-2 * less[0].abs()):
        return f"the directory has {less[0].item():+.4g} added"
    if torch.equal(own.to(torch.bfloat16), other.to(torch.bfloat16)):
        return "rounding: the directory or the trainer has these values in a dtype of fewer bits"
    if torch.allclose(own, other, rtol=1e-2, atol=1e-3):
        return "nearly the same: trained on since the directory was loaded, or rounded"
    return ""


def _same_shape(name: str, files: HfFiles) -> list[str]:
    form = files.shape(name)
    alike = [other for other in files.names() if other != name and files.shape(other) == form]
    last = name.rsplit(".", 2)[-2:]
    return sorted(alike, key=lambda other: other.rsplit(".", 2)[-2:] != last)[:_OTHERS]
