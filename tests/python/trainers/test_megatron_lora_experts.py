"""LoRA of experts, as Megatron-Bridge has it: of each expert, of all of a rank's in one tensor, or one that all experts
share. Published is what peft, vLLM and SGLang take: an adapter of each expert."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")

import tiny_megatron as tiny  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from test_megatron_lora import RANK, Wrapped  # noqa: E402
from tiny_megatron import Parallel  # noqa: E402
from two_versions import published, require_both  # noqa: E402

SIDES = [(module, side) for module in ("linear_fc1", "linear_fc2") for side in ("linear_in", "linear_out")]


def whole(hf: dict[str, Any], layer: int, expert: Any, module: str, side: str) -> Any:
    """An adapter's tensor; of gate and up beside each other."""
    hidden, ffn = hf["hidden_size"], hf["moe_intermediate_size"]
    shape = {
        ("linear_fc1", "linear_in"): (RANK, hidden),
        ("linear_fc1", "linear_out"): (2, ffn, RANK),
        ("linear_fc2", "linear_in"): (RANK, ffn),
        ("linear_fc2", "linear_out"): (hidden, RANK),
    }[module, side]
    seed = zlib.crc32(f"{layer} {expert} {module} {side}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensor_axis(module: str, side: str) -> int:
    """Which axis is cut by expert tensor parallelism."""
    return int((module == "linear_fc1") == (side == "linear_out"))


def mine(tensor: Any, module: str, side: str) -> Any:
    """A rank's part of it, as Megatron has it: gate before up."""
    at = parallel_state.get_expert_tensor_parallel_rank()
    part = tensor.chunk(parallel_state.get_expert_tensor_parallel_world_size(), tensor_axis(module, side))[at]
    return part.reshape(-1, RANK) if tensor.ndim == 3 else part.contiguous()


class Packed(torch.nn.Module):
    """Bridge's adapters of a grouped module: GroupedExpertLinearAdapter, and ParallelLinearAdapter, which all share."""

    def __init__(self, hf: dict[str, Any], layer: int, module: str, first: int, count: int, shared: bool) -> None:
        super().__init__()
        self._module, self._first, self._count, self._experts = module, first, count, hf["num_experts"]
        self._shared = shared
        for side in ("linear_in", "linear_out"):
            experts = ["all"] if shared else range(first, first + count)
            parts = [mine(whole(hf, layer, expert, module, side), module, side) for expert in experts]
            inner = torch.nn.Module()
            inner.weight = torch.nn.Parameter(parts[0] if shared else torch.stack(parts))
            setattr(self, side, inner)

    def sharded_state_dict(self, prefix: str) -> dict[str, Any]:
        return {f"{prefix}{side}": self._shards(f"{prefix}{side}.weight", side) for side in ("linear_in", "linear_out")}

    def _shards(self, key: str, side: str) -> list[Any]:
        tensor = getattr(self, side).weight
        at, of = (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        gated = self._module == "linear_fc1" and side == "linear_out"
        copy = (0, 0, parallel_state.get_expert_data_parallel_rank())
        axis = 1 if gated or side == "linear_out" else 1 + tensor_axis(self._module, side)
        if not self._shared:
            ep = (0, self._first // self._count, self._experts // self._count)
            parts = zip(("_w", "_v"), tensor.chunk(2, 1), strict=True) if gated else [("", tensor)]
            return [
                ShardedTensor.from_rank_offsets(key + end, part, ep, (axis, at, of), replica_id=copy)
                for end, part in parts
            ]
        out = []
        for expert in range(self._first, self._first + self._count):
            parts = tensor.chunk(2) if gated else [tensor]
            for number, part in enumerate(parts):
                cut = (axis, at + number * of, of * len(parts))
                options = {"replica_id": copy, "prepend_axis_num": 1}
                out.append(ShardedTensor.from_rank_offsets(key, part, (0, expert, self._experts), cut, **options))
        return out


class Grouped(torch.nn.Module):
    """Experts with adapters of its modules, which are called as TEGroupedMLP's are."""

    def __init__(self, experts: Any, adapters: dict[str, Packed]) -> None:
        super().__init__()
        self.experts, self.adapters = experts, torch.nn.ModuleDict(adapters)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        found = self.experts.sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, adapter in self.adapters.items():
            found.update(adapter.sharded_state_dict(f"{prefix}experts.{name}.adapter."))
        return found


def wrap(chunks: list[Any], hf: dict[str, Any], kind: str) -> list[Any]:
    first = parallel_state.get_expert_model_parallel_rank()
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        experts, number = layer.mlp.experts, layer.layer_number - 1
        count = len(experts.local_experts)
        if kind != "modules":
            adapters = {
                module: Packed(hf, number, module, first * count, count, kind == "shared")
                for module in ("linear_fc1", "linear_fc2")
            }
            layer.mlp.experts = Grouped(experts, adapters)
            continue
        for at, expert in enumerate(experts.local_experts):
            for module in ("linear_fc1", "linear_fc2"):
                with tiny.on_cpu():
                    wrapped = Wrapped(getattr(expert, module), module == "linear_fc1", is_expert=True)
                setattr(expert, module, wrapped)
                for side in ("linear_in", "linear_out"):
                    made = mine(whole(hf, number, first * count + at, module, side), module, side)
                    getattr(wrapped.adapter, side).weight.data.copy_(made)
    return chunks


def as_peft(hf: dict[str, Any], kind: str) -> dict[str, Any]:
    out = {}
    for layer in range(hf["num_hidden_layers"]):
        for expert in range(hf["num_experts"]):
            at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}"
            parts = {pair: whole(hf, layer, "all" if kind == "shared" else expert, *pair) for pair in SIDES}
            for number, name in enumerate(("gate_proj", "up_proj")):
                out[f"{at}.{name}.lora_A.weight"] = parts["linear_fc1", "linear_in"].clone()
                out[f"{at}.{name}.lora_B.weight"] = parts["linear_fc1", "linear_out"][number].clone()
            out[f"{at}.down_proj.lora_A.weight"] = parts["linear_fc2", "linear_in"]
            out[f"{at}.down_proj.lora_B.weight"] = parts["linear_fc2", "linear_out"]
    return out


@pytest.mark.parametrize(
    "layout", [Parallel(tp=2, pp=2, ep=2, etp=1), Parallel(tp=2, ep=2, etp=2, dp=2)], ids=lambda layout: str(layout)
)
@pytest.mark.parametrize("kind", ["modules", "packed", "shared"])
def test_each_expert_has_its_adapter(
    request: pytest.FixtureRequest, kind: str, layout: Parallel, tmp_path: Path
) -> None:
    model = request.getfixturevalue("whole")("qwen3_moe")
    hf = model.family.hf
    tensors = as_peft(hf, kind)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "base_model_name_or_path": str(model.hf)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    def publish(rank: int) -> Any:
        tiny.start(layout)
        return published(wrap(tiny.build(model.family, layout), hf, kind), hf=adapter)

    require_both(run_ranks(layout.world, publish, tmp_path)[0], tensors)
