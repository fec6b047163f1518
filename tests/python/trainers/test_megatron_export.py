"""Models on the real Megatron, in many parallel layouts, exported: each element is where the unsharded model has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")

import deltasync.megatron  # noqa: E402
import numpy as np  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from plan_with_numpy import with_numpy  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_megatron import Parallel  # noqa: E402
from whole_model import Whole  # noqa: E402

LAYOUTS = [
    ("llama", Parallel()),
    ("llama", Parallel(tp=2, pp=2)),
    ("llama", Parallel(pp=2, vpp=2)),
    ("llama", Parallel(pp=3, stages="Ettt|t|L")),
    ("llama", Parallel(tp=4, padded=256)),  # two ranks have no word of the vocabulary, only padding
    ("llama", Parallel(cp=2, dp=2)),
    ("llama_tied", Parallel(tp=2, pp=2)),
    ("llama_one_group", Parallel(tp=4)),  # a rank has one head and a half
    ("qwen2", Parallel(tp=2)),
    ("qwen3", Parallel(tp=2, dp=2)),
    ("qwen3_moe", Parallel(ep=2, dp=2)),
    ("qwen3_moe", Parallel(tp=2, pp=2, ep=2, etp=1)),
    ("qwen3_moe", Parallel(tp=2, pp=2, ep=2, etp=2, dp=2)),
    ("qwen2_moe", Parallel(tp=2, ep=2, etp=1)),
    ("mixtral", Parallel(pp=2, ep=2, dp=2)),
    ("minimax_m2", Parallel(ep=2, dp=2)),
    ("glm4_moe", Parallel(tp=2, ep=2, etp=1)),
    ("gpt_oss", Parallel(tp=2, pp=2, ep=2, etp=1)),
    ("deepseek", Parallel(tp=2, ep=2, etp=1)),
    ("deepseek", Parallel(pp=2, ep=2, dp=2)),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_each_element_is_where_the_unsharded_model_has_it(
    whole: Any, name: str, layout: Parallel, tmp_path: Path
) -> None:
    model = whole(name)

    def export(rank: int) -> Any:
        plan = deltasync.megatron.plan(model.chunks(layout), model.hf)
        proof = deltasync.megatron.prove(plan, model.hf)
        return plan.to_json(), [view.numpy().copy() for view in plan._pieces.views()], proof

    ranks = run_ranks(layout.world, export, tmp_path)
    assert len({plan for plan, _, _ in ranks}) == 1
    exported = with_numpy(json.loads(ranks[0][0]), [pieces for _, pieces, _ in ranks])
    assert exported.keys() == model.tensors.keys()
    for tensor, expected in model.tensors.items():
        np.testing.assert_array_equal(exported[tensor], expected.numpy(), tensor)
    for _, _, proof in ranks:
        assert proof.identical, str(proof)
        assert proof.elements == sum(tensor.numel() for tensor in model.tensors.values())


def other_directory(model: Whole, path: Path, edit: Any) -> Path:
    tensors = dict(model.tensors)
    edit(tensors)
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    shutil.copy(model.hf / "config.json", path)
    return path


Q = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.2.mlp.gate_proj.weight"
NORM = "model.layers.3.input_layernorm.weight"
SQUARE = "model.layers.0.self_attn.k_proj.weight"


def one_value(tensors: dict[str, Any]) -> None:
    tensors[Q] = tensors[Q].clone()
    tensors[Q][5, 7] = -1.0


def set_to(name: str, change: Any) -> Any:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = change(tensors[name])

    return edit


def swapped(one: str, other: str) -> Any:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return edit


def interleaved(tensor: Any) -> Any:
    half = len(tensor) // 2
    return torch.stack([tensor[:half], tensor[half:]], 1).reshape(tensor.shape)


def rotary(tensor: Any) -> Any:
    return tensor.view(-1, 2, 12, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


EDITS = {
    "one value": (Q, one_value, ""),
    "transposed": (Q, set_to(Q, lambda t: t.t().reshape(t.shape)), "transposed"),
    "halves": (GATE, set_to(GATE, lambda t: torch.cat([t[56:], t[:56]])), "halves swapped along dimension 0"),
    "interleaved": (GATE, set_to(GATE, interleaved), "interleaved in the directory along dimension 0"),
    "rotary": (Q, set_to(Q, rotary), "rotary halves interleaved in the directory"),
    "one more": (NORM, set_to(NORM, lambda t: t + 1), "the directory has +1 added"),
    "another layer": (NORM, swapped(NORM, NORM.replace("3", "2")), "model.layers.2.input_layernorm.weight"),
    "gate and up": (GATE, swapped(GATE, GATE.replace("gate", "up")), "model.layers.2.mlp.up_proj.weight"),
    "rounded": (GATE, set_to(GATE, lambda t: t.bfloat16().float()), "rounding"),
}


def test_a_proof_names_what_differs_and_why(whole: Any, tmp_path: Path) -> None:
    model = whole("llama")
    directories = {name: other_directory(model, tmp_path / name, edit) for name, (_, edit, _) in EDITS.items()}
    layout = Parallel(tp=2)

    def prove(rank: int) -> Any:
        plan = deltasync.megatron.plan(model.chunks(layout), model.hf)
        return {name: deltasync.megatron.prove(plan, directory) for name, directory in directories.items()}

    first, second = run_ranks(layout.world, prove, tmp_path)
    assert first == second
    for name, (tensor, _, why) in EDITS.items():
        found = {difference.tensor: difference for difference in first[name].differs}
        assert tensor in found, name
        assert why in found[tensor].guess, (name, found[tensor])
        assert bool(why) == bool(found[tensor].guess), (name, found[tensor])
    one = first["one value"].differs[0]
    assert (one.index, one.expected, one.elements) == ((5, 7), -1.0, 1)
    assert one.exported == model.tensors[Q][5, 7].item()
    assert "linear_qkv" in one.row or "llama" in one.row


def test_what_has_no_place_is_named_on_both_sides(whole: Any, tmp_path: Path) -> None:
    model = whole("llama")

    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(24)
        del tensors["lm_head.weight"]

    directory = other_directory(model, tmp_path / "other", edit)

    def make(rank: int) -> str:
        with pytest.raises(deltasync.errors.CoverageError) as raised:
            deltasync.megatron.plan(model.chunks(Parallel()), directory)
        return str(raised.value)

    (said,) = run_ranks(1, make, tmp_path)
    assert "model.layers.0.self_attn.q_norm.weight" in said
    assert "output_layer.weight" in said


def test_an_error_on_one_rank_is_one_on_all(whole: Any, tmp_path: Path) -> None:
    model = whole("llama")
    layout = Parallel(dp=2)

    def make(rank: int) -> str:
        chunks = model.chunks(layout)
        with pytest.raises(deltasync.errors.Error) as raised:
            deltasync.megatron.plan(chunks, model.hf if rank == 0 else tmp_path / "nowhere")
        return str(raised.value)

    first, second = run_ranks(layout.world, make, tmp_path)
    assert "rank 1" in first
    assert "nowhere" in first and "nowhere" in second


def test_metadata_is_the_directorys(whole: Any, tmp_path: Path) -> None:
    model = whole("qwen3")

    def make(rank: int) -> Any:
        specs = deltasync.megatron.hf_weight_metadata(model.chunks(Parallel(tp=2)), model.hf)
        return [(spec.name, spec.dtype, tuple(spec.shape)) for spec in specs]

    first, _ = run_ranks(2, make, tmp_path)
    assert sorted(first) == sorted((name, "F32", tuple(tensor.shape)) for name, tensor in model.tensors.items())
