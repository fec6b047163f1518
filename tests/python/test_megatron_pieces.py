"""What is taken of a trainer's sharded_state_dict(): live memory, once, and nothing that is not the parameters' own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from deltasync import errors

torch = pytest.importorskip("torch")

from deltasync._megatron_fsdp import Rows, rows_of  # noqa: E402
from deltasync._megatron_pieces import RankPieces, as_chunks, is_megatron  # noqa: E402


@dataclass
class Shard:
    """As Megatron's ShardedTensor."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any = (0, 0, 0)
    prepend_axis_num: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


@dataclass
class Factory:
    """As its ShardedTensorFactory."""

    data: Any

    def build(self) -> list[Shard]:
        gate, up = self.data.chunk(2)
        return [Shard("fc1.weight_w", gate, (8, 6), (4, 0)), Shard("fc1.weight_v", up, (8, 6), (4, 0))]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Parameter(torch.arange(48.0).view(8, 6))
        self.norm = torch.nn.Parameter(torch.ones(6))
        self.register_buffer("expert_bias", torch.zeros(4))
        self.metadata: list[dict[str, Any]] = []

    def shards(self) -> dict[str, Any]:
        return {
            "fc1": Factory(self.fc1),
            "norm": Shard("norm.weight", self.norm, (6,), (0,)),
            "copy": Shard("norm.weight", self.norm, (6,), (0,), replica_id=(0, 1, 0)),
            "bias": Shard("router.expert_bias", self.expert_bias, (4,), (0,)),
            "fc1._extra_state": SimpleNamespace(key="fc1._extra_state", data=None),
        }

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        self.metadata.append(metadata)
        return self.shards()


class Wrapper(torch.nn.Module):
    """As Megatron's DistributedDataParallel."""

    def __init__(self, module: Any, overlap: bool) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = SimpleNamespace(overlap_param_gather=overlap)
        self.forced: list[bool] = []

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        self.forced.append(force_sync)


def test_main_copies_are_described_as_the_planner_wants_them() -> None:
    model = Model()
    described = RankPieces(model).described()
    assert [piece["key"] for piece in described] == [
        "fc1.weight_w",
        "fc1.weight_v",
        "norm.weight",
        "router.expert_bias",
    ]
    assert described[1] == {
        "key": "fc1.weight_v",
        "dtype": "F32",
        "global_shape": [8, 6],
        "offset": [4, 0],
        "shape": [4, 6],
    }
    assert model.metadata[0]["singleton_local_shards"] and model.metadata[0]["non_homogeneous_layers"]


def test_views_are_of_the_memory_that_there_is_now() -> None:
    model = Model()
    pieces = RankPieces([Wrapper(model, False)])
    assert torch.equal(pieces.views()[1], torch.arange(24.0, 48.0).view(4, 6))
    with torch.no_grad():
        model.fc1.add_(1)
    assert torch.equal(pieces.views()[1], torch.arange(25.0, 49.0).view(4, 6))
    old = model.fc1.data
    buffer = torch.full((100,), 7.0)  # as a trainer that puts all parameters into one
    model.fc1.data = buffer[10:58].view(8, 6)
    old.fill_(-1)
    assert torch.equal(pieces.views()[1], torch.full((4, 6), 7.0))
    assert pieces.views()[1].data_ptr() == buffer[34:].data_ptr()


def test_what_replaced_a_parameter_or_a_buffer_is_exported() -> None:
    model = Model()
    pieces = RankPieces(Wrapper(model, False))
    model.double()
    model.float()  # parameters get other memory, buffers are other objects
    with torch.no_grad():
        model.expert_bias.fill_(777)
    model.norm = torch.nn.Parameter(torch.full((6,), 9.0))
    assert torch.equal(pieces.views()[2], torch.full((6,), 9.0))
    assert torch.equal(pieces.views()[3], torch.full((4,), 777.0))
    del model.norm
    with pytest.raises(errors.InvalidArgument, match="norm: the model has it no more"):
        pieces.views()


def test_what_is_replaced_when_it_is_asked_for_is_found() -> None:
    model = Model()
    asked = model.sharded_state_dict

    def replaces(metadata: dict[str, Any]) -> dict[str, Any]:  # as a router whose bias is to be fp32
        model.expert_bias.data = torch.full((4,), 3.0)
        return asked(metadata)

    model.sharded_state_dict = replaces  # type: ignore[method-assign]
    assert torch.equal(RankPieces(model).views()[3], torch.full((4,), 3.0))


def test_a_parameter_of_another_form_is_refused() -> None:
    model = Model()
    pieces = RankPieces(model)
    model.norm.data = torch.ones(6, dtype=torch.bfloat16)
    with pytest.raises(errors.InvalidArgument, match="norm.*float32.*bfloat16"):
        pieces.views()


def test_a_parameter_that_was_put_aside_is_refused() -> None:
    model = Model()
    pieces = RankPieces(model)
    model.norm.data.untyped_storage().resize_(0)
    with pytest.raises(errors.InvalidArgument, match="norm.*freed"):
        pieces.views()


def test_a_parameter_whose_storage_was_shrunk_is_refused_by_name() -> None:
    model = Model()
    pieces = RankPieces(model)
    model.norm.data.untyped_storage().resize_(23)
    with pytest.raises(errors.InvalidArgument, match="norm: the source has no memory .24 bytes .* has 23"):
        pieces.check()


def test_a_piece_that_is_a_copy_is_refused() -> None:
    model = Model()
    shards = model.shards()
    copied = replace(shards["norm"], data=shards["norm"].data.detach().clone())
    model.shards = lambda: {**shards, "norm": copied}  # type: ignore[method-assign]
    with pytest.raises(errors.Unsupported, match="norm.weight.*no view"):
        RankPieces(model)


class Quantised(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nothing is asked of it")


def test_a_parameter_whose_memory_is_not_its_dtypes_is_refused() -> None:
    model = Model()
    quantised = torch.Tensor._make_wrapper_subclass(Quantised, (6,), dtype=torch.bfloat16)
    model._parameters["norm"] = quantised
    with pytest.raises(errors.Unsupported, match="norm.*Quantised.*bfloat16"):
        RankPieces(model)


def test_adapters_of_all_experts_are_those_of_each() -> None:
    model = Model()
    key = "decoder.layers.0.mlp.experts.experts.linear_fc2.adapter.linear_in.weight"
    packed = model.fc1.view(2, 4, 6)
    model.shards = lambda: {  # type: ignore[method-assign]
        "packed": Shard(key, packed, (4, 4, 6), (2, 0, 0)),
        "shared": Shard(key.replace("_in", "_out"), model.norm, (4, 6), (3, 0), prepend_axis_num=1),
    }
    pieces = RankPieces(model)
    described = {piece["key"]: (piece["global_shape"], piece["offset"]) for piece in pieces.described()[:2]}
    assert described == {key.replace("experts.linear", f"experts.{e}.linear"): ([4, 6], [0, 0]) for e in (2, 3)}
    assert all(torch.equal(view, packed[expert]) for expert, view in enumerate(pieces.views()[:2]))
    assert pieces.described()[2]["key"] == key.replace("_in", "_out")  # of another form: no row will be for it


def test_rows_follow_those_of_the_ranks_before() -> None:
    said = [[[0, "w", rows, 7, [4, 2, 9]]] for rows in (5, 0, 2)]  # what ranks 4, 9 and 2 say
    numbers = {4: 0, 9: 1, 2: 2}
    rows = [rows_of(said, number, numbers)[0, "w"] for number in range(3)]
    assert rows == [Rows(0, 5), Rows(7, 7), Rows(5, 7)]
    said[1] = [[0, "w", 0, 7, []]]  # as another rank has
    assert rows_of(said, 1, numbers)[0, "w"] == Rows(0, 0)
    with pytest.raises(errors.InvalidArgument, match="rank 9 has rows of w"):
        rows_of(said, 0, {4: 0, 2: 2})
    said[2][0][2] = 1
    with pytest.raises(errors.LayoutMismatch, match=r"\[5, 1, 0\] rows, and it has 7"):
        rows_of(said, 0, numbers)


def test_a_model_around_modules_of_megatron_is_one_only_with_a_directory() -> None:
    around = torch.nn.Sequential(Model())
    assert is_megatron(Model(), plain=False) and is_megatron([Wrapper(Model(), False)], plain=False)
    assert is_megatron(around, plain=True) and not is_megatron(around, plain=False)
    assert not is_megatron(torch.nn.Sequential(torch.nn.Linear(2, 2)), plain=True)


def test_chunks_of_a_virtual_pipeline_are_told_apart() -> None:
    second = Model()
    second.shards = lambda: {"head": Shard("head.weight", second.norm, (6,), (0,))}  # type: ignore[method-assign]
    pieces = RankPieces([Model(), second])
    assert [piece["key"] for piece in pieces.described()][-1] == "head.weight"
    second.norm.data = torch.ones(7)
    with pytest.raises(errors.InvalidArgument, match="chunk 1: norm"):
        pieces.views()


@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_that_the_next_forward_would_gather_are_gathered(overlap: bool) -> None:
    wrapper = Wrapper(Model(), overlap)
    RankPieces([wrapper]).bring_up_to_date()
    assert wrapper.forced == ([True] if overlap else [])


@pytest.mark.parametrize("chunks", [None, [], 3, [torch.nn.Linear(2, 2)], torch.nn.Linear(2, 2), [None]])
def test_what_is_no_model_of_megatron_is_refused(chunks: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="model_chunks"):
        as_chunks(chunks)
