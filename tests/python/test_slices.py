"""Blocks of N-d tensors as rectangles of their 2-D view, and which block a rank of a DTensor's mesh has."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from deltasync._arrays import rows_cols
from deltasync._slices import LocalRect, local_block, local_rects
from deltasync.errors import Unsupported


def write(view: np.ndarray, block: np.ndarray, parts: list[LocalRect]) -> None:
    """What the writer does with the pieces: copies the block's rows to the rectangles."""
    local = block.reshape(rows_cols(block.shape))
    for part in parts:
        rows = local[part.local_row : part.local_row + part.rows]
        assert rows.shape == (part.rows, part.cols)
        place = view[part.row : part.row + part.rows, part.col : part.col + part.cols]
        assert place.shape == rows.shape
        assert not place.any(), "written twice"
        place[...] = rows


def random_block(rng: random.Random) -> tuple[list[int], list[int], list[int]]:
    shape = [rng.choice([1, 1, 2, 3, 5]) for _ in range(rng.randrange(5))]
    offset, size = [], []
    for extent in shape:
        whole = rng.random() < 0.4
        begin = 0 if whole else rng.randrange(extent + 1)
        offset.append(begin)
        size.append(extent if whole else rng.randrange(extent - begin + 1))
    return shape, offset, size


def test_pieces_cover_each_element_of_the_block_once() -> None:
    rng = random.Random(1)
    empty = 0
    for _ in range(3000):
        shape, offset, size = random_block(rng)
        whole = np.arange(1, math.prod(shape) + 1).reshape(shape)
        block = whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
        view = np.zeros(rows_cols(shape), whole.dtype)
        parts = local_rects(shape, offset, size)
        write(view, np.ascontiguousarray(block), parts)
        expected = np.zeros_like(whole)
        expected[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] = block
        assert np.array_equal(view.reshape(shape), expected), (shape, offset, size)
        assert block.size == sum(part.rows * part.cols for part in parts)
        empty += not parts
    assert 0 < empty < 2500


def test_whole_tensors_and_runs_of_rows_are_one_piece() -> None:
    assert local_rects((), (), ()) == [LocalRect(0, 0, 1, 1, 0)]
    assert local_rects((4, 5, 6), (0, 0, 0), (4, 5, 6)) == [LocalRect(0, 0, 20, 6, 0)]
    assert local_rects((4, 5, 6), (1, 0, 0), (2, 5, 6)) == [LocalRect(5, 0, 10, 6, 0)]
    assert local_rects((4, 5, 6), (0, 0, 2), (4, 5, 3)) == [LocalRect(0, 2, 20, 3, 0)]
    assert local_rects((2, 5, 6), (0, 1, 0), (2, 3, 6)) == [LocalRect(1, 0, 3, 6, 0), LocalRect(6, 0, 3, 6, 3)]
    assert local_rects((0, 3), (0, 0), (0, 3)) == []


torch = pytest.importorskip("torch")


@pytest.fixture
def fake_ranks() -> Iterator[object]:
    """Calls a function as each rank of a mesh in turn, in this process: collectives do nothing."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist = torch.distributed

    def as_each(mesh_shape: tuple[int, ...]) -> Iterator[object]:
        world = math.prod(mesh_shape)
        for rank in range(world):
            dist.init_process_group("fake", rank=rank, world_size=world, store=fake.FakeStore())
            try:
                yield dist.init_device_mesh("cpu", mesh_shape)
            finally:
                dist.destroy_process_group()

    yield as_each


def random_placements(rng: random.Random, mesh_dims: int, ndim: int) -> list[object]:
    from torch.distributed.tensor import Replicate, Shard

    return [Shard(rng.randrange(ndim)) if ndim and rng.random() < 0.7 else Replicate() for _ in range(mesh_dims)]


def test_ranks_of_a_mesh_write_each_element_once(fake_ranks) -> None:
    from torch.distributed.tensor import distribute_tensor

    rng = random.Random(2)
    for _ in range(20):
        mesh_shape = tuple(rng.choice([1, 2, 3]) for _ in range(rng.choice([1, 1, 2])))
        shapes = [[rng.choice([1, 2, 3, 4, 7]) for _ in range(rng.randrange(4))] for _ in range(6)]
        placed = [(shape, random_placements(rng, len(mesh_shape), len(shape))) for shape in shapes]
        views = [np.zeros(rows_cols(shape), np.int64) for shape in shapes]
        for mesh in fake_ranks(mesh_shape):
            for view, (shape, placements) in zip(views, placed, strict=True):
                whole = torch.arange(1, math.prod(shape) + 1).reshape(shape)
                tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                block = local_block(tensor, "w")
                if block is not None:
                    local, offset, size = block
                    write(view, local.numpy(), local_rects(shape, offset, size))
        for view, (shape, placements) in zip(views, placed, strict=True):
            whole = np.arange(1, math.prod(shape) + 1).reshape(shape)
            assert np.array_equal(view.reshape(shape), whole), (mesh_shape, shape, placements)


@pytest.mark.parametrize("rows", [8, 16, 12])
def test_fsdp_over_tensor_parallelism(fake_ranks, rows: int) -> None:
    """The mesh dimension to the left cuts what the one to the right of it has cut before."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = torch.arange(1, rows * 3 + 1).reshape(rows, 3)
    view = np.zeros((rows, 3), np.int64)
    firsts = []
    for mesh in fake_ranks((2, 2)):
        tensor = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2), Shard(0)], src_data_rank=None)
        local, offset, size = local_block(tensor, "w")
        firsts.append(offset[0])
        write(view, local.numpy(), local_rects((rows, 3), offset, size))
    assert np.array_equal(view, whole.numpy())
    assert firsts == [0, rows // 2, rows // 4, rows * 3 // 4]


def said(tensor: object, offset: Sequence[int]) -> object:
    """As Megatron-FSDP says of a DTensor where its part lies."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    local = tensor._local_tensor
    chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=local.shape)
    local.__create_chunk_list__ = lambda: [chunk]
    return tensor


@pytest.mark.parametrize("rows", [[1, 5, 0], [0, 6, 0], [2, 2, 2], [0, 0, 6], [3, 1, 2]])
@pytest.mark.parametrize("replicas", [1, 2])
def test_uneven_parts_that_say_where_they_lie(fake_ranks, rows: list[int], replicas: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = torch.arange(1, 19).reshape(6, 3)
    view = np.zeros((6, 3), np.int64)
    writers = []
    for mesh in fake_ranks((replicas, 3) if replicas > 1 else (3,)):
        at = mesh.get_coordinate()[-1]
        first = sum(rows[:at])
        placements = [Replicate(), Shard(0)][-mesh.ndim :]
        part = whole[first : first + rows[at]]
        make = functools.partial(DTensor.from_local, part, mesh, placements, run_check=False)
        tensor = make(shape=whole.shape, stride=whole.stride())
        if replicas == 1 and rows[at] != 2:  # as torch would divide them
            with pytest.raises(Unsupported, match="uneven_dtensor"):
                local_block(tensor, "w")
        block = local_block(said(tensor, (first, 0)), "w")
        if block is not None:
            local, offset, size = block
            writers.append((mesh.get_rank(), at))
            write(view, local.numpy(), local_rects(whole.shape, offset, size))
    assert np.array_equal(view, whole.numpy())
    assert writers == [(at, at) for at in range(3) if rows[at]]  # of the first replica


def test_parts_that_are_no_block_are_refused(fake_ranks) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for mesh in fake_ranks((2,)):
        for placement in (Partial(), _StridedShard(0, split_factor=2)):
            tensor = DTensor.from_local(torch.zeros(4, 2), mesh, [placement], run_check=False)
            with pytest.raises(Unsupported, match="layers.0.w"):
                local_block(tensor, "layers.0.w")
        wrong = DTensor.from_local(
            torch.zeros(3, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size([4, 2]), stride=(2, 1)
        )
        with pytest.raises(Unsupported, match=r"w: its local part is \[3, 2\]"):
            local_block(wrong, "w")
        with pytest.raises(Unsupported, match=r"beyond its \[4, 2\]"):
            local_block(said(wrong, (2, 0)), "w")
        with pytest.raises(Unsupported, match="only Shard and Replicate"):
            part = DTensor.from_local(torch.zeros(4, 2), mesh, [Partial()], run_check=False)
            local_block(said(part, (0, 0)), "w")
