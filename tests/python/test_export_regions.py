"""What ranks make of their own blocks is, together, what the whole tensor is quantised to."""

from __future__ import annotations

import random
from typing import Any

import pytest
from deltasync import errors

torch = pytest.importorskip("torch")

from deltasync import _export_quantise  # noqa: E402
from deltasync._export_boxes import Place, Run  # noqa: E402
from deltasync._export_quantise import Scheme, quantise  # noqa: E402
from deltasync._export_regions import QuantisedRegion, regions  # noqa: E402
from deltasync._slices import LocalRect  # noqa: E402


def pieces_of(values: Any, chance: random.Random, row_cuts: list[int], col_cuts: list[int]) -> Any:
    """Places of boxes between these cuts, each in a piece of its own, some of them transposed there."""
    made, memory = [], []
    for top, bottom in zip(row_cuts, row_cuts[1:], strict=False):
        for left, right in zip(col_cuts, col_cuts[1:], strict=False):
            box = values[top:bottom, left:right]
            turned = chance.random() < 0.3
            piece = (box.t() if turned else box).contiguous()
            strides = (1, bottom - top) if turned else (right - left, 1)
            rect = LocalRect(top, left, bottom - top, right - left, 0)
            made.append(Place(0, rect, (Run(len(memory), 0, strides),), 0.0))
            memory.append(piece)
    return made, memory


def cuts(size: int, chance: random.Random, count: int) -> list[int]:
    return sorted({0, size, *(chance.randint(1, size) for _ in range(count))})


@pytest.mark.parametrize("seed", range(40))
def test_blocks_of_ranks_make_the_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_export_quantise, "BAND_ELEMENTS", 200)  # several bands
    chance = random.Random(seed)
    torch.manual_seed(seed)
    block = (chance.randint(1, 9), chance.randint(1, 9))
    shape = [chance.randint(1, 40), chance.randint(1, 40)]
    stored = chance.choice(["F32", "BF16", "F8_E8M0"])
    scheme = Scheme(block, stored, powers=stored == "F8_E8M0")
    values = (torch.randn(shape) * 3).to(chance.choice([torch.bfloat16, torch.float32]))
    codes, scales = quantise(lambda begin, end: values[begin:end], shape, scheme)
    got = torch.zeros(shape, dtype=torch.uint8)
    got_scales = torch.full(scheme.scale_shape(shape), -1.0)
    # Ranks share the tensor at the blocks' edges; what a rank has is cut anywhere.
    ranks = [{0, size} for size in shape]
    for dim, size in enumerate(shape):
        ranks[dim] |= {edge for edge in range(0, size, block[dim]) if chance.random() < 0.3}
    row_edges, col_edges = sorted(ranks[0]), sorted(ranks[1])
    for top, bottom in zip(row_edges, row_edges[1:], strict=False):
        for left, right in zip(col_edges, col_edges[1:], strict=False):
            part = values[top:bottom, left:right]
            down, across = cuts(bottom - top, chance, 3), cuts(right - left, chance, 2)
            own, memory = pieces_of(part, chance, down, across)
            mine = [
                Place(0, LocalRect(r.row + top, r.col + left, r.rows, r.cols, 0), place.runs, 0.0)
                for place in own
                for r in [place.rect]
            ]
            chance.shuffle(mine)
            (region,) = regions(mine, shape, scheme, "w")
            boxes = list(QuantisedRegion(region, shape, memory, scheme).boxes(("w", "s"), got_scales.shape))
            if chance.random() < 0.5:
                boxes.reverse()  # in any order
            for name, box in boxes:
                target = got if name == "w" else got_scales
                rect = box.rect
                there = target[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
                memory_of = box.memory()
                assert there.shape == memory_of.shape and box.shape == tuple(target.shape)
                there.copy_(memory_of.view(torch.uint8) if name == "w" else memory_of.float())
    assert torch.equal(got, codes.view(torch.uint8))
    assert torch.equal(got_scales, scales.float())


def place(row: int, col: int, rows: int, cols: int) -> Place:
    return Place(0, LocalRect(row, col, rows, cols, 0), (Run(0, 0, (cols, 1)),), 0.0)


def test_parts_of_blocks_are_refused() -> None:
    scheme = Scheme((4, 8), "F32")
    assert len(regions([place(4, 0, 4, 16), place(12, 0, 1, 16)], [13, 16], scheme, "w")) == 2
    for wrong in (place(2, 0, 2, 16), place(4, 0, 3, 16), place(4, 4, 4, 4), place(4, 0, 4, 12)):
        with pytest.raises(errors.Unsupported, match="w: a rank has rows .* 4 x 8"):
            regions([wrong], [13, 16], scheme, "w")
    with pytest.raises(errors.Unsupported, match="rows 0 to 12 .* 13 x 16"):
        regions([place(0, 0, 12, 16)], [13, 16], Scheme(None, "F32"), "w")
    assert len(regions([place(0, 0, 13, 8), place(0, 8, 13, 8)], [13, 16], Scheme(None, "F32"), "w")) == 1


def test_values_that_something_is_added_to() -> None:
    values = torch.randn(6, 8).to(torch.bfloat16)
    scheme = Scheme((4, 8), "F32")
    half = [
        Place(0, LocalRect(0, 0, 3, 8, 0), (Run(0, 0, (8, 1)),), 1.0),
        Place(0, LocalRect(3, 0, 3, 8, 0), (Run(1, 0, (8, 1)),), 0.0),
    ]
    (region,) = regions(half, [6, 8], scheme, "w")
    made = QuantisedRegion(region, [6, 8], [values[:3], values[3:].contiguous()], scheme)
    (_, codes), _ = made.boxes(("w", "s"), [2, 1])
    wide = values.float()
    wide[:3] += 1
    expected, _ = quantise(lambda begin, end: wide[begin:end], (6, 8), scheme)
    assert torch.equal(codes.memory().view(torch.uint8), expected.view(torch.uint8))
