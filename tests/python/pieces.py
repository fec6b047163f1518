"""Parts of a model that trainer nodes serve, put together by the places that the names of their tensors have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

PIECE = re.compile(r"(.*?)(?: rows (\d+)\.\.(\d+))?(?:,? columns (\d+)\.\.(\d+))?")


def put_together(
    parts: Iterable[Mapping[str, torch.Tensor]], like: Mapping[str, torch.Tensor], times: int = 1
) -> dict[str, torch.Tensor]:
    """Tensors as those of `like`. Each element comes so many times at most, and at least once."""
    whole = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    counts = {name: torch.zeros(tensor.shape, dtype=torch.uint8) for name, tensor in like.items()}
    for part in parts:
        for name, piece in part.items():
            said = PIECE.fullmatch(name)
            assert said is not None
            at, count = _place(whole[said[1]], said), _place(counts[said[1]], said)
            piece = piece.reshape(at.shape)
            assert torch.equal(at.where(count > 0, piece), piece), f"{name}: a replica that is none"
            at.copy_(piece)
            count += 1
    assert all(bool(((count > 0) & (count <= times)).all()) for count in counts.values())
    return whole


def _place(tensor: torch.Tensor, said: re.Match[str]) -> torch.Tensor:
    view = tensor.view(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.view(1, -1)
    return view[int(said[2] or 0) : int(said[3] or view.shape[0]), int(said[4] or 0) : int(said[5] or view.shape[1])]


def require_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
