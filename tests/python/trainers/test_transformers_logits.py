"""Random models of Megatron, exported into what `transformers` itself saves for the family: it loads them, and makes
the logits that Megatron makes. So names, shapes, the order of fused parts, rotary conventions, norms and routers are
right by a reader that shares nothing with the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")
transformers = pytest.importorskip("transformers", reason="needs transformers (tools/test_engines.sh megatron)")

import deltasync.megatron  # noqa: E402
import tiny_megatron as tiny  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from plan_with_numpy import with_numpy  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_families import FAMILIES, VOCAB, Family, without_predictors  # noqa: E402
from tiny_megatron import Parallel  # noqa: E402

#: Of the largest logit: the two sum in another order, in fp32.
TOLERANCE = 2e-5

#: What is exported from, beside the unsharded model.
LAYOUTS = {
    "llama": [Parallel(tp=2, pp=2)],
    "llama_tied": [Parallel(tp=2)],
    "qwen2": [Parallel(tp=2)],
    "qwen3": [Parallel(pp=2)],
    "qwen3_moe": [Parallel(tp=2, ep=2, etp=1)],
    "qwen2_moe": [Parallel(ep=2, dp=2)],
    "qwen3_5": [Parallel(tp=2), Parallel(pp=2)],
    "qwen3_5_moe": [Parallel(tp=2, pp=2, ep=2, etp=1)],
    "qwen3_next": [Parallel(tp=2, ep=2, etp=1), Parallel(pp=2, ep=2, dp=2)],
    "deepseek": [Parallel(tp=2, ep=2, etp=1)],
    "glm4_moe": [Parallel(tp=2, pp=2)],
    "nemotron_h": [Parallel(tp=2, ep=2, etp=1), Parallel(pp=2)],
    "gpt_oss": [Parallel(tp=2, ep=2, etp=1)],
    "kimi_k25": [Parallel(tp=2, ep=2, etp=1)],
    "glm4_moe_lite": [Parallel(tp=2)],
    "glm_moe_dsa": [Parallel(tp=2, pp=2)],
    "qwen2_5_vl": [Parallel(tp=2)],
    "qwen3_vl": [Parallel(pp=2)],
    "qwen3_vl_moe": [Parallel(tp=2, ep=2, etp=1)],
    "qwen3_5_vl": [Parallel(tp=2, pp=2)],
    "minimax_m2": [Parallel(tp=2, ep=2, etp=1)],
    "mixtral": [Parallel(tp=2, ep=2, etp=2, dp=2)],
}


class Begun:
    """A directory that transformers saved, with random weights, and a Megatron model with other ones."""

    def __init__(self, family: Family, directory: Path) -> None:
        self.family = family
        self.directory = directory
        self.hf = directory / "hf"
        self.checkpoint = directory / "checkpoint"
        self.checkpoint.mkdir(parents=True)
        if family.seeing:
            self.auto = transformers.AutoModelForImageTextToText
            config = transformers.AutoConfig.for_model(**family.seeing, text_config=family.hf)
        else:
            self.auto = transformers.AutoModelForCausalLM
            config = transformers.AutoConfig.for_model(**family.hf)
        self.auto.from_config(config).save_pretrained(self.hf)
        if family.seeing and family.seeing["model_type"] == "kimi_k25":
            # What it reads, and published checkpoints have, are layers; it saves them under the name of the tower's.
            file = self.hf / "model.safetensors"
            saved = {
                n.replace("language_model.model.blocks.", "language_model.model.layers."): t
                for n, t in load_file(file).items()
            }
            save_file(saved, file, {"format": "pt"})
        self.tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
        (logits,) = run_ranks(1, self._megatron, directory)
        self.logits = torch.from_numpy(logits)

    def _megatron(self, rank: int) -> Any:
        tiny.start(Parallel())
        (model,) = tiny.build(self.family, Parallel())
        tiny.randomise(model)
        tiny.save([model], str(self.checkpoint))
        return tiny.logits(model, self.tokens)[..., :VOCAB].numpy()

    def exported(self, layout: Parallel, tables: tuple[Path, ...] = ()) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint."""

        def export(rank: int) -> Any:
            tiny.start(layout)
            chunks = tiny.build(self.family, layout)
            tiny.load(chunks, str(self.checkpoint))
            plan = deltasync.megatron.plan(chunks, self.hf, tables=tables)
            return plan.to_json(), [view.numpy().copy() for view in plan._pieces.views()]

        ranks = run_ranks(layout.world, export, self.directory)
        plan = json.loads(ranks[0][0])
        tensors = {n: torch.from_numpy(t) for n, t in with_numpy(plan, [pieces for _, pieces in ranks]).items()}
        kept = load_file(self.hf / "model.safetensors")
        return {**{plan["tensors"][i]["name"]: kept[plan["tensors"][i]["name"]] for i in plan["constants"]}, **tensors}

    def difference(self, tensors: dict[str, torch.Tensor]) -> float:
        """Between the logits, as a part of the largest."""
        out = self.directory / "exported"
        out.mkdir(exist_ok=True)
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        for other in self.hf.glob("*.json"):
            (out / other.name).write_bytes(other.read_bytes())
        how = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
        model, loading = self.auto.from_pretrained(out, **how)
        assert not any(loading.values()), loading
        with torch.no_grad():
            logits = model(self.tokens, use_cache=False).logits
        return ((logits - self.logits).abs().max() / self.logits.abs().max()).item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_transformers_makes_the_logits_that_megatron_makes(name: str, tmp_path: Path) -> None:
    begun = Begun(without_predictors(FAMILIES[name]), tmp_path)
    tensors = begun.exported(Parallel())
    difference = begun.difference(tensors)
    print(f"{name}: {difference:.1e} of the largest logit")
    assert difference < TOLERANCE
    for layout in LAYOUTS[name]:
        other = begun.exported(layout)
        assert other.keys() == tensors.keys()
        for tensor, expected in tensors.items():
            assert torch.equal(other[tensor], expected), (layout, tensor)


#: Rows that are wrong, in shapes that fit: family and page.
WRONG = {
    "gate and up": (
        "llama",
        'mcore = "decoder.layers.{L}.mlp.linear_fc1.weight_w"\nhf = "model.layers.{L}.mlp.up_proj.weight"\n'
        '[[rows]]\nmcore = "decoder.layers.{L}.mlp.linear_fc1.weight_v"\nhf = "model.layers.{L}.mlp.gate_proj.weight"',
    ),
    "a norm's 1": ("qwen3_5", 'mcore = "decoder.final_layernorm.weight"\nhf = "model.norm.weight"\nadd = 1'),
    "a delta net's own norm": (
        "qwen3_5",
        'mcore = "decoder.layers.{L}.self_attention.out_norm.weight"\nhf = "model.layers.{L}.linear_attn.norm.weight"',
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_row_makes_other_logits(what: str, tmp_path: Path) -> None:
    name, row = WRONG[what]
    family = FAMILIES[name]
    page = tmp_path / "wrong.toml"
    inherits = {"llama": "llama", "qwen3_5": "qwen3.5"}[name]
    architecture = family.hf["architectures"][0]
    page.write_text(f'name = "wrong"\narchitectures = ["{architecture}"]\ninherits = "{inherits}"\n[[rows]]\n{row}\n')
    begun = Begun(family, tmp_path)
    assert begun.difference(begun.exported(Parallel(), (page,))) > 100 * TOLERANCE
