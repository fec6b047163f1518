"""The rectangles of a copy have its elements, each once, where it has them."""

from __future__ import annotations

import functools
import random

import pytest
from deltasync import errors
from deltasync._native import ExportCopy

torch = pytest.importorskip("torch")

from deltasync._export_boxes import ExportedBox, places  # noqa: E402
from deltasync._export_copies import Sources, positions, target_of  # noqa: E402

Copy = functools.partial(ExportCopy, row="mine:3")


def written(copies: list[ExportCopy], shape: list[int], pieces: list[torch.Tensor]) -> torch.Tensor:
    """What the rectangles write into a tensor of this shape."""
    out = torch.full(shape, -1.0)
    rows = out.view(-1, shape[-1])
    for place in places(copies, shape, "t"):
        box = ExportedBox(shape, pieces, place)
        rect = place.rect
        there = rows[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
        assert there.shape == (rect.rows, rect.cols)
        assert bool((there == -1).all())
        there.copy_(box.memory())
    return out


def random_copy(seed: int) -> tuple[ExportCopy, list[int], torch.Tensor]:
    """A box of a tensor, perhaps with dimensions in another order in the piece, as few steps as possible."""
    chance = random.Random(seed)
    shape = [chance.randint(1, 6) for _ in range(chance.randint(1, 4))]
    begin = [chance.randrange(size) if chance.random() < 0.6 else 0 for size in shape]
    size = [
        chance.randint(1, whole - at) if chance.random() < 0.6 else whole - at
        for whole, at in zip(shape, begin, strict=True)
    ]
    steps = torch.empty(shape).stride()
    order = list(range(len(shape)))
    if chance.random() < 0.3:
        chance.shuffle(order)
    piece = torch.arange(1.0, 1.0 + torch.Size(size).numel()).view([size[dim] for dim in order])
    strides = dict(zip(order, piece.stride(), strict=True))
    merged: list[list[int]] = []
    for dim in range(len(shape)):
        count, source, target = size[dim], strides[dim], steps[dim]
        if count == 1:
            continue
        if merged and merged[-1][1] == source * count and merged[-1][2] == target * count:
            merged[-1] = [merged[-1][0] * count, source, target]
        else:
            merged.append([count, source, target])
    counts, sources, targets = ([step[i] for step in merged] for i in range(3))
    first = sum(at * step for at, step in zip(begin, steps, strict=True))
    add = 1000.0 if chance.random() < 0.2 else 0.0
    return Copy(counts, sources, targets, 0, first, add), shape, piece


@pytest.mark.parametrize("seed", range(300))
def test_random_boxes(seed: int) -> None:
    copy, shape, piece = random_copy(seed)
    expected = torch.full(shape, -1.0)
    target_of(copy, expected.view(-1)).copy_(Sources([piece]).read(copy, torch.float32))
    assert (expected != -1).sum() == piece.numel()
    assert torch.equal(written([copy], shape, [piece]), expected)
    chosen, place = positions(copy, 1 << 20)
    assert torch.equal(expected.view(-1)[place], Sources([piece]).read(copy, torch.float32).reshape(-1)[chosen])


def test_few_rectangles_where_memory_is_in_order() -> None:
    heads = Copy([4, 6, 8], [3 * 48, 8, 1], [48, 8, 1])  # query heads of each group, with keys and values between them
    assert len(places([heads], [24, 8], "q")) == 4
    whole = Copy([24 * 8], [1], [1])
    assert len(places([whole], [24, 8], "w")) == 1
    columns = Copy([24, 4], [4, 1], [8, 1], 0, 4)  # the right half
    assert len(places([columns], [24, 8], "w")) == 1


def test_elements_that_lie_apart_are_refused() -> None:
    interleaved = Copy([512, 512], [1, 512], [1024, 2])
    with pytest.raises(errors.Unsupported, match="gate_up.*mine:3"):
        places([interleaved], [512, 1024], "gate_up")


@pytest.mark.parametrize("seed", range(100))
def test_copies_whose_elements_alternate_are_rectangles_together(seed: int) -> None:
    chance = random.Random(seed)
    ways, experts, rows, cols = chance.randint(2, 3), chance.randint(1, 3), chance.randint(1, 4), chance.randint(1, 5)
    first = chance.randrange(cols)
    here = chance.randint(1, cols - first)  # columns of each that this rank has
    shape = [experts, rows, cols * ways]
    pieces, copies = [], []
    expected = torch.full(shape, -1.0)
    for expert in range(experts):
        for way in range(ways):
            piece = torch.arange(float(rows * here)).view(here, rows) + 100 * len(pieces)
            place = (expert * rows * cols + first) * ways + way
            copies.append(Copy([rows, here], [1, rows], [cols * ways, ways], 0, place, piece=len(pieces)))
            pieces.append(piece)
            expected[expert, :, first * ways + way : (first + here) * ways : ways] = piece.t()
    chance.shuffle(copies)
    assert torch.equal(written(copies, shape, pieces), expected)
    assert len(places(copies, shape, "t")) == experts


def test_what_alternates_with_nothing_is_alone() -> None:
    one = Copy([4], [1], [2], 0, 0)
    assert len(places([one], [8], "t")) == 4
    other = Copy([3], [1], [2], 0, 1, piece=1)
    assert len(places([one, other], [8], "t")) == 7
