"""Which tensors of an export plan are put together at a time, of whose elements, and on which rank. The same on all."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._native import dtype_bytes

#: Between the memory of tensors in one buffer, in bytes.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Form:
    """What is put together of a tensor is of another dtype than the tensor, which is made of it."""

    #: safetensors' name.
    dtype: str
    #: Of the layout: what is made, itself and perhaps others (its scales).
    outputs: tuple[int, ...]
    #: The whole tensor to these. Called by each rank that gets it.
    make: Callable[[Any], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of a tensor."""

    rank: int
    #: None: all of it, as the model directory has it.
    copies: tuple[Any, ...] | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is put together."""

    index: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    #: By rank.
    shares: tuple[Share, ...]
    form: Form | None
    #: Of what is made of it, beyond it.
    made_bytes: int

    @property
    def home(self) -> int:
        """The rank that has most of it; of several each is that of some tensors."""
        most = max((share.nbytes for share in self.shares), default=0)
        ranks = [share.rank for share in self.shares if share.nbytes == most]
        return ranks[self.index % len(ranks)] if ranks else 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors whose elements travel together."""

    wholes: tuple[Whole, ...]
    #: Bytes that this rank needs for it at most.
    cost: int


def wholes_of(
    layout: Any,
    copies: Iterable[Any],
    constants: Iterable[int],
    forms: Mapping[int, Form],
    chosen: Callable[[int], bool] = lambda _: True,
) -> list[Whole]:
    """Of all copies, which are sorted by tensor, and constants, in the layout's order."""
    made_by_others = {index for key, form in forms.items() for index in form.outputs if index != key}
    by_tensor = {index: list(of) for index, of in itertools.groupby(copies, key=lambda copy: copy.tensor)}
    constant = set(constants)
    tensors = list(layout)
    out = []
    for index, tensor in enumerate(tensors):
        if index in made_by_others or not chosen(index):
            continue
        form = forms.get(index)
        dtype = tensor.dtype if form is None else form.dtype
        shape = tuple(tensor.shape)
        width = dtype_bytes(dtype)
        nbytes = math.prod(shape) * width
        shares: list[Share] = []
        if index in constant:
            shares = [Share(0, None, nbytes)]
        else:
            of = sorted(by_tensor.get(index, []), key=lambda copy: copy.rank)
            for rank, group in itertools.groupby(of, key=lambda copy: copy.rank):
                mine = tuple(group)
                count = sum(math.prod(copy.counts) for copy in mine)
                shares.append(Share(rank, mine, count * width))
        made = sum(tensors[output].nbytes for output in form.outputs) if form is not None else 0
        out.append(Whole(index, shape, dtype, nbytes, tuple(shares), form, made))
    return out


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Filling:
    """Buckets of as many tensors as need no more than `most` bytes on any rank; or of one."""

    def __init__(self, needs: Callable[[Whole], tuple[Mapping[int, int], Mapping[int, int]]], most: int) -> None:
        """`needs`: by rank, what the tensor needs as long as the bucket is there, and while it is made."""
        self._needs, self._most = needs, most

    def buckets(self, wholes: Iterable[Whole], rank: int) -> list[Bucket]:
        out: list[Bucket] = []
        here: list[Whole] = []
        steady: Counter[int] = Counter()
        making: Counter[int] = Counter()

        def close() -> None:
            if here:
                # The caller still has the one before when the next is made.
                times = 1 if len(here) == 1 else 2
                out.append(Bucket(tuple(here), steady[rank] + times * making[rank]))
                here.clear()
                steady.clear()
                making.clear()

        for whole in wholes:
            more, needed = self._needs(whole)
            if any(
                steady[at] + more.get(at, 0) + 2 * max(making[at], needed.get(at, 0)) > self._most
                for at in {*more, *needed}
            ):
                close()
            here.append(whole)
            steady.update(more)
            for at, nbytes in needed.items():
                making[at] = max(making[at], nbytes)
        close()
        return out


def for_all(wholes: Sequence[Whole], most: int) -> list[Bucket]:
    """For ranks that all get all tensors, in their order."""

    def needs(whole: Whole) -> tuple[Mapping[int, int], Mapping[int, int]]:
        single = len(whole.shares) == 1
        steady = sum(padded(share.nbytes) for share in whole.shares)
        return {0: steady}, {0: whole.made_bytes + (0 if single else padded(whole.nbytes))}

    return _Filling(needs, most).buckets(wholes, 0)


def for_homes(wholes: Sequence[Whole], most: int, rank: int) -> list[Bucket]:
    """For ranks that each get the tensors that are at home there; of all in turn."""
    seen: Counter[int] = Counter()
    turns = []
    for whole in wholes:
        turns.append((seen[whole.home], whole.home))
        seen[whole.home] += 1
    order = sorted(range(len(wholes)), key=turns.__getitem__)

    def needs(whole: Whole) -> tuple[Mapping[int, int], Mapping[int, int]]:
        steady = {share.rank: padded(share.nbytes) for share in whole.shares if share.rank != whole.home}
        return {**steady, whole.home: sum(steady.values())}, {whole.home: whole.made_bytes + padded(whole.nbytes)}

    return _Filling(needs, most).buckets([wholes[number] for number in order], rank)
