"""A trainer in bf16 on the real Megatron publishes an fp8 directory: the codes and scales of a slow oracle."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")

import deltasync  # noqa: E402
import numpy as np  # noqa: E402
import tiny_megatron as tiny  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fp8_model import COMPRESSED, PER_TENSOR, POWERS, Fp8, Style, blocks, is_quantised  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_megatron import Parallel  # noqa: E402
from tiny_training import Training  # noqa: E402

STEPS = 3
LONG_S = 300.0

STYLES = {
    "blocks": blocks(8, 8),
    "uneven": blocks(16, 24),
    "bf16": blocks(8, 8, torch.bfloat16),
    "powers": blocks(8, 8, torch.float32, **POWERS),
    "exponents": blocks(8, 8, torch.float8_e8m0fnu, **POWERS),
    "large": blocks(128, 128),
    "tensor": PER_TENSOR,
    "compressed": COMPRESSED,
}
CASES = [
    # Ranks have whole blocks.
    ("qwen3_moe", "blocks", Parallel(tp=2, ep=2, etp=1), "direct"),
    ("qwen3_moe", "large", Parallel(ep=2, dp=2), "direct"),
    ("deepseek", "uneven", Parallel(pp=2, ep=2, dp=2), "direct"),
    ("llama", "powers", Parallel(tp=2, pp=2), "direct"),
    ("llama", "bf16", Parallel(tp=2), "direct"),
    ("qwen3", "compressed", Parallel(dp=2), "direct"),
    # They share some.
    ("llama", "tensor", Parallel(tp=2), "auto"),
    ("llama", "uneven", Parallel(tp=2, pp=2), "auto"),
    ("deepseek", "exponents", Parallel(tp=2, ep=2, etp=1), "auto"),
    ("qwen3_moe", "blocks", Parallel(ep=2, dp=2), "gathered"),
]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's model in a style, made once."""
    return functools.cache(lambda name, style: Fp8(name, tmp_path_factory.mktemp(f"{name}-{style}"), STYLES[style]))


def same_bits(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def raw(tensor: Any) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("name", "style", "layout", "export"), CASES, ids=str)
def test_each_version_is_quantised_as_the_directory(
    fp8: Any, name: str, style: str, layout: Parallel, export: str, tmp_path: Path
) -> None:
    model = fp8(name, style)
    saved = [tmp_path / f"saved-{step}" for step in range(STEPS)]
    received = [tmp_path / f"received-{step}.safetensors" for step in range(STEPS)]

    def train(rank: int) -> Any:
        chunks = model.chunks(layout)
        proof = deltasync.megatron.prove(deltasync.megatron.plan(chunks, model.hf), model.hf)
        training = Training(chunks)
        segment, more = f"pytest-{os.getppid()}-{name}-{style}", {"export": export, "bucket_bytes": 1 << 16}
        with deltasync.WeightManager(training.chunks, hf=model.hf, name=segment, timeout=LONG_S, **more) as manager:
            receiver = deltasync.Receiver(manager.endpoint, timeout=LONG_S) if rank == 0 else None
            for step in range(STEPS):
                if step:
                    training.step(step)
                manager.offload(training.chunks, version=step + 1)
                if receiver is not None:
                    receiver.update(manager.version)
                    save_file({name: tensor.clone() for name, tensor in receiver.tensors()}, received[step])
                    saved[step].mkdir()
                dist.barrier()
                training.gather()
                tiny.save(chunks, str(saved[step]))
            if receiver is not None:
                receiver.close()
        return proof

    for proof in run_ranks(layout.world, train, tmp_path):
        assert proof.identical, str(proof)
        of_codes = load_file(model.hf / "model.safetensors").items()
        assert proof.dequantised == sum(tensor.numel() for name, tensor in of_codes if is_quantised(name)) > 0

    def compare(rank: int) -> list[str]:
        (unsharded,) = model.chunks(Parallel())
        wrong, before = [], None
        for step, directory in enumerate(saved):
            tiny.load([unsharded], str(directory))
            expected, got = model.quantised(model.to_hf(unsharded)), load_file(received[step])
            assert got.keys() == expected.keys()
            wrong += [f"step {step}: {name}" for name in expected if not same_bits(got[name], expected[name])]
            if before is not None:
                codes = filter(is_quantised, got)
                wrong += [f"step {step}: {name} is as before" for name in codes if same_bits(got[name], before[name])]
            before = got
        return wrong

    assert run_ranks(1, compare, tmp_path) == [[]]


def other_directory(model: Fp8, path: Path, edit: Any) -> Path:
    tensors = load_file(model.hf / "model.safetensors")
    edit(tensors)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    shutil.copy(model.hf / "config.json", path)
    return path


OUT = "model.layers.1.self_attn.o_proj.weight"
GATE = "model.layers.2.mlp.experts.{}.gate_proj.weight"


def one_code(tensors: dict[str, Any]) -> None:
    tensors[OUT].view(torch.uint8)[5, 7] ^= 1


def one_scale(tensors: dict[str, Any]) -> None:
    tensors[f"{OUT}_scale_inv"][1, 2] *= 1.02


def other_expert(tensors: dict[str, Any]) -> None:
    for end in ("", "_scale_inv"):
        one, other = GATE.format(0) + end, GATE.format(3) + end
        tensors[one], tensors[other] = tensors[other], tensors[one]


def halves(tensors: dict[str, Any]) -> None:
    for end in ("", "_scale_inv"):
        name = GATE.format(1) + end
        tensors[name] = tensors[name].view(2, -1, tensors[name].shape[1]).flip(0).reshape(tensors[name].shape)


EDITS = {
    "code": (one_code, OUT, 1, ""),
    "scale": (one_scale, OUT, 64, ""),
    "expert": (other_expert, GATE.format(0), 40 * 64, f"the directory has as {GATE.format(3)}"),
    "halves": (halves, GATE.format(1), 40 * 64, "halves swapped along dimension 0"),
}


def test_a_proof_finds_a_wrong_code_scale_or_place(fp8: Any, tmp_path: Path) -> None:
    model = Fp8("qwen3_moe", tmp_path, blocks(4, 8))
    directories = {name: other_directory(model, tmp_path / name, edit) for name, (edit, _, _, _) in EDITS.items()}
    layout = Parallel(tp=2, ep=2, etp=1)

    def prove(rank: int) -> Any:
        plan = deltasync.megatron.plan(model.chunks(layout), model.hf)
        return {name: deltasync.megatron.prove(plan, directory) for name, directory in directories.items()}

    first, second = run_ranks(layout.world, prove, tmp_path)
    assert first == second
    for name, (_, tensor, most, why) in EDITS.items():
        found = {difference.tensor: difference for difference in first[name].differs}
        assert tensor in found, name
        assert 0 < found[tensor].elements <= most, found[tensor]
        assert why in found[tensor].guess, (name, found[tensor])
    one = first["code"].differs[0]
    assert (one.index, one.elements) == ((5, 7), 1)


def test_the_plans_values_quantised_as_the_page_says(fp8: Any, tmp_path: Path) -> None:
    """What docs/reference/export.md says of a plan's JSON, carried out with numpy."""
    model = fp8("qwen3_moe", "blocks")
    layout = Parallel(tp=2, ep=2, etp=1)

    def export(rank: int) -> Any:
        plan = deltasync.megatron.plan(model.chunks(layout), model.hf)
        return plan.to_json(), [view.float().numpy().copy() for view in plan._pieces.views()]

    ranks = run_ranks(layout.world, export, tmp_path)
    plan = json.loads(ranks[0][0])
    assert len(plan["quantised"]) == sum(map(is_quantised, load_file(model.hf / "model.safetensors")))
    file = tmp_path / "unsharded.safetensors"
    run_ranks(1, lambda rank: save_file(model.quantised(model.to_hf(model.chunks(Parallel())[0])), file), tmp_path)
    unsharded = load_file(file)
    for one in plan["quantised"]:
        tensor = plan["tensors"][one["tensor"]]
        values = np.full(int(np.prod(tensor["shape"])), np.nan, np.float32)
        for copy in plan["copies"]:
            if copy["tensor"] != one["tensor"]:
                continue
            pieces = ranks[copy["rank"]][1][copy["piece"]].reshape(-1)
            from_steps, to_steps = ([4 * step for step in copy[f"{side}_strides"]] for side in ("source", "target"))
            view = np.lib.stride_tricks.as_strided
            target = view(values[copy["target_offset"] :], copy["counts"], to_steps)
            assert np.isnan(target).all()
            target[...] = view(pieces[copy["source_offset"] :], copy["counts"], from_steps)
        assert (one["formula"], one["powers_of_two"]) == ("block", False)
        style = Style(tuple(one["block"]), torch.float32, "", {})
        codes, scales = style.of(torch.from_numpy(values.reshape(tensor["shape"])))
        assert same_bits(codes, unsharded[tensor["name"]])
        assert same_bits(scales, unsharded[plan["tensors"][one["scale"]]["name"]])


@pytest.mark.parametrize(("style", "why"), [("uneven", "16 x 24"), ("tensor", "64 x 112"), ("large", "128 x 128")])
def test_ranks_with_parts_of_blocks_are_refused(fp8: Any, style: str, why: str, tmp_path: Path) -> None:
    model = fp8("llama", style)

    def publish(rank: int) -> str:
        plan = deltasync.megatron.plan(model.chunks(Parallel(tp=2)), model.hf)
        with pytest.raises(deltasync.errors.Error) as raised:
            plan.tensors()
        return str(raised.value)

    for said in run_ranks(2, publish, tmp_path):
        assert "_proj.weight: a rank has rows" in said and why in said and "auto" in said


def test_each_rank_gets_codes_and_scales(fp8: Any, tmp_path: Path) -> None:
    model = fp8("llama", "uneven")
    files = [tmp_path / f"{who}.safetensors" for who in ("0", "1", "unsharded")]

    def export(rank: int) -> None:
        plan = deltasync.megatron.plan(model.chunks(Parallel(tp=2)), model.hf)
        named = deltasync.megatron.export_hf_named_params(plan, bucket_bytes=1 << 16)
        save_file({name: tensor.clone().contiguous() for name, tensor in named}, files[rank])

    run_ranks(2, export, tmp_path)
    run_ranks(1, lambda rank: save_file(model.quantised(model.to_hf(model.chunks(Parallel())[0])), files[2]), tmp_path)
    first, second, expected = map(load_file, files)
    assert first.keys() == second.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(first[name], tensor) and same_bits(second[name], tensor), name


def test_formats_that_are_not_exported_are_refused_before_the_first_version(fp8: Any, tmp_path: Path) -> None:
    model = fp8("llama", "tensor")
    directory = other_directory(model, tmp_path / "other", lambda tensors: None)
    said = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**said, "quantization_config": {"quant_method": "awq"}}))

    def make(rank: int) -> str:
        with pytest.raises(deltasync.errors.Unsupported) as raised:
            deltasync.WeightManager(model.chunks(Parallel()), hf=directory, name=f"pytest-{os.getppid()}-awq")
        return str(raised.value)

    (message,) = run_ranks(1, make, tmp_path)
    assert "'awq'" in message and "fp8" in message
