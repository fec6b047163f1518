"""How the elements of a bucket's tensors come to the ranks that put them together: packed by those that have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ._arrays import torch_dtype
from ._export_copies import target_of
from ._gather_plan import Share, Whole, padded
from ._group import Group


class Elements:
    """What this rank has: the pieces, and the directory's tensors (`constant`)."""

    def __init__(self, views: list[Any], constant: Callable[[int], Any]) -> None:
        self._views, self.constant = views, constant
        self._dense: tuple[int, Any] = (-1, None)
        #: Bytes of copies that were made on the way, at most at a time.
        self.extra_bytes = 0

    def put(self, copy: Any, target: Any) -> None:
        """The copy's elements into memory in the shape of its counts, cast."""
        piece = self._views[copy.piece]
        extra = 0
        if not piece.is_contiguous():
            if self._dense[0] != copy.piece:
                self._dense = copy.piece, piece.contiguous()
            piece = self._dense[1]
            extra = piece.nbytes
        made = piece.as_strided(copy.counts, copy.source_strides, piece.storage_offset() + copy.source_offset)
        if copy.add:
            made = made.float() + copy.add
            extra += 2 * made.nbytes
        self.extra_bytes = max(self.extra_bytes, extra)
        target.copy_(made)

    def end(self) -> None:
        """No more is taken for now."""
        self._dense = -1, None


def _parts(whole: Whole, share: Share, region: Any) -> Iterator[tuple[Any, Any]]:
    """Of packed elements, each copy's, in the shape of its counts."""
    flat, at = region.view(torch_dtype(whole.dtype)), 0
    for copy in share.copies or ():
        count = math.prod(copy.counts)
        yield copy, flat[at : at + count].view(tuple(copy.counts))
        at += count


def _memory(nbytes: int, device: Any) -> Any:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _empty(whole: Whole, device: Any) -> Any:
    import torch

    return torch.empty(math.prod(whole.shape), dtype=torch_dtype(whole.dtype), device=device)


class _Places:
    """Where shares are in a buffer: those that come from, or go to, one rank are beside each other."""

    def __init__(self, shares: Iterable[tuple[int, Whole, Share]]) -> None:
        """`shares`: with the rank that each comes from or goes to."""
        by_rank: dict[int, list[tuple[Whole, Share]]] = {}
        for rank, whole, share in shares:
            by_rank.setdefault(rank, []).append((whole, share))
        self.of: dict[int, list[tuple[Whole, Share, int]]] = {}
        #: By rank: begin and end.
        self.ranges: dict[int, tuple[int, int]] = {}
        self._at: dict[tuple[int, int], int] = {}
        self.nbytes = 0
        for rank in sorted(by_rank):
            begin, places = self.nbytes, []
            for whole, share in by_rank[rank]:
                places.append((whole, share, self.nbytes))
                self._at[whole.index, share.rank] = self.nbytes
                self.nbytes += padded(share.nbytes)
            self.of[rank] = places
            self.ranges[rank] = begin, self.nbytes

    def region(self, buffer: Any, whole: Whole, share: Share) -> Any:
        at = self._at[whole.index, share.rank]
        return buffer[at : at + share.nbytes]

    def sizes(self, ranks: int) -> list[int]:
        return [end - begin for begin, end in (self.ranges.get(rank, (0, 0)) for rank in range(ranks))]


class ToAll:
    """Each rank sends its elements to all others. A tensor that is all of one rank's travels as it is."""

    def __init__(self, group: Group, wholes: Sequence[Whole], device: Any) -> None:
        self._group, self._device = group, device
        shares = [(share.rank, whole, share) for whole in wholes for share in whole.shares]
        self._kept = _Places(one for one in shares if len(one[1].shares) == 1)
        self._staged = _Places(one for one in shares if len(one[1].shares) > 1)
        #: Memory in bytes: of finished tensors, and of what others are still to be put together of.
        self.kept_bytes, self.staged_bytes = self._kept.nbytes, self._staged.nbytes
        self._buffers: list[Any] = []

    def pack(self, elements: Elements) -> None:
        self._buffers = [_memory(places.nbytes, self._device) for places in (self._kept, self._staged)]
        for whole, share, _ in self._kept.of.get(self._group.rank, []):
            target = self._kept.region(self._buffers[0], whole, share).view(torch_dtype(whole.dtype))
            if share.copies is None:
                target.copy_(elements.constant(whole.index).reshape(-1))
            for copy in share.copies or ():
                elements.put(copy, target_of(copy, target))
        for whole, share, _ in self._staged.of.get(self._group.rank, []):
            for copy, target in _parts(whole, share, self._staged.region(self._buffers[1], whole, share)):
                elements.put(copy, target)

    def send(self) -> list[Any]:
        """What is to be waited for."""
        return [
            self._group.broadcast(buffer[begin:end], rank)
            for buffer, places in zip(self._buffers, (self._kept, self._staged), strict=True)
            for rank, (begin, end) in places.ranges.items()
            if end > begin
        ]

    def is_here(self, whole: Whole) -> bool:
        """Whether this rank gets it."""
        return True

    def making_bytes(self, whole: Whole) -> int:
        """Of memory that it is put together in."""
        return 0 if len(whole.shares) == 1 else padded(whole.nbytes)

    def drop_staged(self) -> None:
        """All tensors were made."""
        self._buffers.clear()

    def whole(self, whole: Whole, elements: Elements) -> Any:
        """Put together. Once the bucket was received."""
        if len(whole.shares) == 1:
            region = self._kept.region(self._buffers[0], whole, whole.shares[0])
            return region.view(torch_dtype(whole.dtype)).view(whole.shape)
        flat = _empty(whole, self._device)
        for share in whole.shares:
            for copy, made in _parts(whole, share, self._staged.region(self._buffers[1], whole, share)):
                target_of(copy, flat).copy_(made)
        return flat.view(whole.shape)


class ToHome:
    """Each rank sends its elements to the one that puts the tensor together."""

    def __init__(self, group: Group, wholes: Sequence[Whole], device: Any) -> None:
        self._group, self._device = group, device
        away = [(whole, share) for whole in wholes for share in whole.shares if share.rank != whole.home]
        self._sent = _Places((whole.home, whole, share) for whole, share in away if share.rank == group.rank)
        self._got = _Places((share.rank, whole, share) for whole, share in away if whole.home == group.rank)
        self.kept_bytes, self.staged_bytes = 0, self._sent.nbytes + self._got.nbytes
        self._buffers: list[Any] = []

    def pack(self, elements: Elements) -> None:
        self._buffers = [_memory(places.nbytes, self._device) for places in (self._sent, self._got)]
        for places in self._sent.of.values():
            for whole, share, _ in places:
                for copy, target in _parts(whole, share, self._sent.region(self._buffers[0], whole, share)):
                    elements.put(copy, target)

    def send(self) -> list[Any]:
        size = self._group.size
        if size == 1:
            return []
        return [self._group.exchange(self._buffers[1], self._buffers[0], self._got.sizes(size), self._sent.sizes(size))]

    def is_here(self, whole: Whole) -> bool:
        return whole.home == self._group.rank

    def making_bytes(self, whole: Whole) -> int:
        return padded(whole.nbytes)

    def drop_staged(self) -> None:
        self._buffers.clear()

    def whole(self, whole: Whole, elements: Elements) -> Any:
        if any(share.copies is None for share in whole.shares):
            return elements.constant(whole.index)
        flat = _empty(whole, self._device)
        for share in whole.shares:
            if share.rank == self._group.rank:
                for copy in share.copies or ():
                    elements.put(copy, target_of(copy, flat))
                continue
            for copy, made in _parts(whole, share, self._got.region(self._buffers[1], whole, share)):
                target_of(copy, flat).copy_(made)
        return flat.view(whole.shape)
