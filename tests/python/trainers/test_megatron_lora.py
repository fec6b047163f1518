"""LoRA in Megatron, as Megatron-Bridge puts it around Megatron's own layers: only the adapter is published, as peft has
it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")

import deltasync  # noqa: E402
import tiny_megatron as tiny  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_megatron import Parallel  # noqa: E402
from two_versions import published, require_both  # noqa: E402

RANK = 4
WRAPPED = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


class Adapter(torch.nn.Module):
    """Bridge's ParallelLinearAdapter: layers of Megatron, and how it saves them."""

    def __init__(self, base: Any, gated: bool, **options: Any) -> None:
        super().__init__()
        column = isinstance(base, ColumnParallelLinear)
        common = {"config": base.config, "init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": True}
        common |= options
        if column:
            self.linear_in = ColumnParallelLinear(base.input_size, RANK, gather_output=True, **common)
        else:
            self.linear_in = RowParallelLinear(base.input_size, RANK, input_is_parallel=True, **common)
        self.linear_out = ColumnParallelLinear(RANK, base.output_size, gather_output=not column, **common)
        self._gated = gated

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        found = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata)
        out = self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata)
        if self._gated:
            key = f"{prefix}linear_out.weight"
            out[key] = apply_swiglu_sharded_factory(out[key], sharded_offsets)
        return {**found, **out}


class Wrapped(torch.nn.Module):
    """Bridge's AdapterWrapper."""

    def __init__(self, base: Any, gated: bool, **options: Any) -> None:
        super().__init__()
        self.to_wrap, self.adapter = base, Adapter(base, gated, **options)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        found = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        return {**found, **self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)}


def wrap(chunks: list[Any]) -> list[Any]:
    with tiny.on_cpu():
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                for name in WRAPPED:
                    parent, _, child = name.partition(".")
                    module = getattr(layer, parent)
                    setattr(module, child, Wrapped(getattr(module, child), child == "linear_fc1"))
    return chunks


def load_adapters(chunks: list[Any], checkpoint: Path) -> None:
    """Megatron loads them into this rank's modules."""
    wanted = [{name: v for name, v in tiny._state(chunk).items() if ".adapter." in name} for chunk in chunks]
    with tiny.on_cpu():
        states = dist_checkpointing.load({str(i): state for i, state in enumerate(wanted)}, str(checkpoint))
    for i, chunk in enumerate(chunks):
        assert not chunk.load_state_dict(states[str(i)], strict=False).unexpected_keys


def as_peft(model: Any, hf: dict[str, Any]) -> dict[str, Any]:
    """Of the unsharded model, in the names and by the formulas of peft's checkpoints."""
    heads, groups, size = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
    out = {}
    for number, layer in enumerate(model.decoder.layers):
        at = f"base_model.model.model.layers.{number}"
        qkv, proj = layer.self_attention.linear_qkv.adapter, layer.self_attention.linear_proj.adapter
        fc1, fc2 = layer.mlp.linear_fc1.adapter, layer.mlp.linear_fc2.adapter
        fused = qkv.linear_out.weight.view(groups, heads // groups + 2, size, RANK)
        b = {
            "self_attn.q_proj": fused[:, :-2],
            "self_attn.k_proj": fused[:, -2],
            "self_attn.v_proj": fused[:, -1],
            "self_attn.o_proj": proj.linear_out.weight,
            "mlp.gate_proj": fc1.linear_out.weight.chunk(2)[0],
            "mlp.up_proj": fc1.linear_out.weight.chunk(2)[1],
            "mlp.down_proj": fc2.linear_out.weight,
        }
        a = {"q_proj": qkv, "k_proj": qkv, "v_proj": qkv, "o_proj": proj, "gate_proj": fc1, "up_proj": fc1}
        for name, tensor in b.items():
            out[f"{at}.{name}.lora_B.weight"] = tensor.reshape(-1, RANK).detach().clone()
            adapter = a.get(name.rpartition(".")[2], fc2)
            out[f"{at}.{name}.lora_A.weight"] = adapter.linear_in.weight.detach().clone()
    return out


@pytest.fixture(scope="module")
def begun(whole: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model, a checkpoint of it with adapters, and these as peft saves them."""
    directory = tmp_path_factory.mktemp("lora")
    model = whole("llama")
    checkpoint, adapter = directory / "checkpoint", directory / "adapter"
    checkpoint.mkdir()
    adapter.mkdir()

    def make(rank: int) -> Any:
        chunks = wrap(model.chunks(Parallel()))
        torch.manual_seed(3)
        with torch.no_grad():
            for name, parameter in chunks[0].named_parameters():
                if ".adapter." in name:
                    parameter.normal_()
        tiny.save(chunks, str(checkpoint))
        return {name: tensor.numpy() for name, tensor in as_peft(chunks[0], model.family.hf).items()}

    (tensors,) = run_ranks(1, make, directory)
    tensors = {name: torch.from_numpy(tensor).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "base_model_name_or_path": str(model.hf)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return model, checkpoint, adapter, tensors


@pytest.mark.parametrize("layout", [Parallel(), Parallel(tp=2, pp=2), Parallel(tp=4), Parallel(dp=2)], ids=str)
@pytest.mark.parametrize("export", ["direct", "gathered"])
def test_the_adapter_is_published_alone(begun: Any, layout: Parallel, export: str, tmp_path: Path) -> None:
    model, checkpoint, adapter, tensors = begun

    def publish(rank: int) -> Any:
        chunks = wrap(model.chunks(layout))
        load_adapters(chunks, checkpoint)
        return published(chunks, hf=adapter, export=export)

    require_both(run_ranks(layout.world, publish, tmp_path)[0], tensors)


def test_the_base_models_directory_has_no_adapter(begun: Any, tmp_path: Path) -> None:
    model, _, adapter, _ = begun
    elsewhere = tmp_path / "adapter"
    elsewhere.mkdir()
    for file in adapter.iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    (elsewhere / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "nowhere/base"}))

    def plan(rank: int) -> Any:
        chunks = wrap(model.chunks(Parallel()))
        said = []
        for directory in (model.hf, elsewhere):
            with pytest.raises(deltasync.errors.Error) as raised:
                deltasync.megatron.plan(chunks, directory)
            said.append(str(raised.value))
        ignoring = deltasync.megatron.plan(chunks, model.hf, ignored=["*.adapter.*"])
        return said, ignoring.report()["tensors"]

    (((coverage, nowhere), count),) = run_ranks(1, plan, tmp_path)
    assert "lora_A" in coverage and "linear_fc1.adapter.linear_in.weight" in coverage and "as ignored" in coverage
    assert "nowhere" in nowhere and "config.json beside adapter_config.json" in nowhere
    assert count == len(model.tensors)
