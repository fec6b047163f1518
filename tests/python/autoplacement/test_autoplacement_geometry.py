"""Arithmetic on regions against enumeration of their elements."""

import itertools
import operator
import random

import pytest

pytest.importorskip("torch")

from deltasync.autoplacement.plan import PlacedSlice, Rect, complement, merge_slices, placed_rects, view_2d  # noqa: E402


def elements(start, shape, src, dst):
    """(element of the HF tensor, byte of the destination) of a copy."""
    steps = itertools.product(*(range(size) for size in shape))
    return sorted((start + sum(map(operator.mul, step, src)), sum(map(operator.mul, step, dst))) for step in steps)


def elements_of(found, columns):
    return sorted(
        ((p.rect.row + r) * columns + p.rect.col + c, p.offset + r * p.row_stride + c * p.col_stride)
        for p in found
        for r in range(p.rect.rows)
        for c in range(p.rect.cols)
    )


def strides(shape, width):
    result = [width]
    for size in reversed(shape[1:]):
        result.insert(0, result[0] * size)
    return tuple(result[: len(shape)])


def test_views_are_2d():
    assert view_2d(()) == (1, 1)
    assert view_2d((5,)) == (1, 5)
    assert view_2d((2, 3, 5)) == (6, 5)
    assert view_2d((2, 0)) == view_2d((0, 2)) == view_2d((0,)) == (0, 0)


@pytest.mark.parametrize(
    ("start", "shape", "src", "dst", "columns", "count"),
    [
        (0, (4, 6), (6, 1), (12, 2), 6, 1),  # whole, dense
        (0, (4, 6), (6, 1), (2, 8), 6, 1),  # transposed
        (12, (2, 6), (6, 1), (12, 2), 6, 1),  # rows
        (3, (4, 3), (6, 1), (6, 2), 6, 1),  # columns
        (0, (24,), (1,), (2,), 6, 1),  # flattened
        (0, (2, 12), (12, 1), (24, 2), 6, 1),  # viewed with other rows
        (2, (20,), (1,), (2,), 6, 3),  # a flat run that begins and ends within rows
        (0, (2, 2, 6), (12, 6, 1), (100, 12, 2), 6, 2),  # experts with a gap between
        (0, (2, 3, 4), (12, 4, 1), (24, 2, 6), 4, 2),  # each expert transposed
        (0, (4, 3), (6, 2), (6, 2), 6, 3),  # every other column
        (0, (), (), (), 1, 1),
        (0, (0, 4), (4, 1), (8, 2), 4, 0),
    ],
)
def test_as_few_rectangles_as_possible(start, shape, src, dst, columns, count):
    found = placed_rects(start, shape, src, dst, columns)
    assert len(found) == count
    assert elements_of(found, columns) == elements(start, shape, src, dst)


def test_random_regions():
    rng = random.Random(5)
    for _ in range(2000):
        tensor = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))]
        src = list(strides(tensor, 1))
        start = 0
        shape = list(tensor)
        for dim, size in enumerate(tensor):  # a slice, maybe with a step
            first = rng.randrange(size)
            step = rng.choice([1, 1, 2])
            shape[dim] = rng.randint(1, (size - first + step - 1) // step)
            start += first * src[dim]
            src[dim] *= step
        order = rng.sample(range(len(shape)), len(shape))
        packed = strides([shape[dim] for dim in order], 2)
        dst = [0] * len(shape)
        for dim, stride in zip(order, packed, strict=True):
            dst[dim] = stride
        columns = view_2d(tensor)[1] if rng.random() < 0.8 else rng.choice([1, 2, 3, 5, 7])
        found = placed_rects(start, tuple(shape), tuple(src), tuple(dst), columns)
        assert elements_of(found, columns) == elements(start, shape, src, dst)
        assert all(p.rect.col + p.rect.cols <= columns for p in found)


def test_complement():
    rng = random.Random(6)
    assert complement([], 0, 0) == []
    assert complement([], 3, 4) == [Rect(0, 0, 3, 4)]
    assert complement([Rect(1, 0, 1, 4)], 3, 4) == [Rect(0, 0, 1, 4), Rect(2, 0, 1, 4)]
    assert complement([Rect(0, 1, 3, 2)], 3, 4) == [Rect(0, 0, 3, 1), Rect(0, 3, 3, 1)]
    for _ in range(500):
        rows, columns = rng.randint(1, 7), rng.randint(1, 7)
        rects = []
        for _ in range(rng.randint(0, 5)):
            row, col = rng.randrange(rows), rng.randrange(columns)
            rects.append(Rect(row, col, rng.randint(1, rows - row), rng.randint(1, columns - col)))
        covered = {(r.row + i, r.col + j) for r in rects for i in range(r.rows) for j in range(r.cols)}
        found = complement(rects, rows, columns)
        rest = [(r.row + i, r.col + j) for r in found for i in range(r.rows) for j in range(r.cols)]
        assert len(rest) == len(set(rest))
        assert set(rest) == {(r, c) for r in range(rows) for c in range(columns)} - covered


def test_neighbours_become_one_slice():
    row = [PlacedSlice("t", Rect(r, c, 1, 2), 0, 100 + 20 * r + 2 * c, 0, 2) for r in range(3) for c in (0, 2)]
    assert merge_slices(row) == [PlacedSlice("t", Rect(0, 0, 3, 4), 0, 100, 20, 2)]
    apart = [PlacedSlice("t", Rect(0, 0, 1, 2), 0, 0, 0, 2), PlacedSlice("t", Rect(1, 0, 1, 2), 1, 4, 0, 2)]
    assert merge_slices(apart) == apart
    backwards = [PlacedSlice("t", Rect(0, 0, 1, 2), 0, 4, 0, 2), PlacedSlice("t", Rect(1, 0, 1, 2), 0, 0, 0, 2)]
    assert merge_slices(backwards) == backwards
