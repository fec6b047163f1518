"""Every row of every page that comes along: it makes the tensors of a checkpoint from what a trainer has, and each of
its rows, changed, is found out: by the plan, which refuses it, or in the bytes."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import deltasync
import numpy as np
import page_models as parts
import pytest
import tomllib
from deltasync import _native
from page_models import Model
from plan_with_numpy import with_numpy

PAGES = {tomllib.loads(text)["name"]: tomllib.loads(text) for _, text in _native.builtin_families()}
TABLES = ("renames", "rows", "constants", "aliases")
Make = Callable[[Model], None]


def layers(m: Model) -> Iterator[tuple[str, str]]:
    for layer in range(parts.LAYERS):
        yield f"decoder.layers.{layer}", f"{m.hf_prefix}layers.{layer}"


def predictor(m: Model) -> tuple[str, str]:
    """A layer for a further token, as most have it on disk: after the last."""
    mc, at = "mtp.layers.0", f"{m.hf_prefix}layers.{parts.LAYERS}"
    for name in ("enorm", "hnorm"):
        m.same(f"{mc}.{name}.weight", f"{at}.{name}.weight", parts.HIDDEN)
    m.same(f"{mc}.eh_proj.weight", f"{at}.eh_proj.weight", parts.HIDDEN, 2 * parts.HIDDEN)
    m.same(f"{mc}.final_layernorm.weight", f"{at}.shared_head.norm.weight", parts.HIDDEN)
    m.hf[f"{at}.embed_tokens.weight"] = m.hf[f"{m.hf_prefix}embed_tokens.weight"]
    m.hf[f"{at}.shared_head.head.weight"] = m.hf["lm_head.weight"]
    return f"{mc}.{m.either('transformer_layer', 'mtp_model_layer')}", at


def llama(m: Model) -> None:
    m.config["tie_word_embeddings"] = m.variant == 1
    parts.embeddings(m)
    for mc, at in layers(m):
        parts.norms(m, mc, at)
        parts.attention(m, mc, f"{at}.self_attn", biases=True, norms=1)
        parts.mlp(m, f"{mc}.mlp", f"{at}.mlp")
        m.constant(f"{at}.self_attn.rotary_emb.inv_freq")


def adapters(apart: bool) -> Make:
    """Of llama's modules: LoRA of the fused ones, or of each by itself."""

    def make(m: Model) -> None:
        for mc, at in layers(m):
            at = f"base_model.model.{at}"
            parts.adapter(m, f"{mc}.self_attention.linear_qkv", f"{at}.self_attn", "qkv", apart)
            parts.adapter(m, f"{mc}.self_attention.linear_proj", f"{at}.self_attn.o_proj", "", apart)
            parts.adapter(m, f"{mc}.mlp.linear_fc1", f"{at}.mlp", "gated", apart)
            parts.adapter(m, f"{mc}.mlp.linear_fc2", f"{at}.mlp.down_proj", "", apart)

    return make


def expert_adapters(apart: bool, where: str, down: str, names: dict[str, str] | None = None, shared: str = "") -> Make:
    """Of experts, one by one, and of those that all tokens take."""

    def make(m: Model) -> None:
        for mc, at in layers(m):
            at = f"base_model.model.{at}"
            for e in range(parts.EXPERTS):
                expert, inner = f"{mc}.mlp.experts.experts.{e}", f"{at}.{where}.{e}"
                parts.adapter(m, f"{expert}.linear_fc1", inner, "gated", apart, names)
                parts.adapter(m, f"{expert}.linear_fc2", f"{inner}.{down}", "", apart)
            if shared:
                expert = f"{mc}.mlp.shared_experts"
                parts.adapter(m, f"{expert}.linear_fc1", f"{at}.{shared}", "gated", apart)
                parts.adapter(m, f"{expert}.linear_fc2", f"{at}.{shared}.down_proj", "", apart)

    return make


def latent_adapters(m: Model) -> None:
    for mc, at in layers(m):
        for mine, theirs in (("q_down", "q_a"), ("q_up", "q_b"), ("kv_up", "kv_b")):
            inner = f"base_model.model.{at}.self_attn.{theirs}_proj"
            parts.adapter(m, f"{mc}.self_attention.linear_{mine}_proj", inner, "", False)


def gated_attention_adapters(m: Model) -> None:
    for mc, at in layers(m):
        parts.gated_attention_adapter(m, f"{mc}.self_attention.linear_qkv", f"base_model.model.{at}.self_attn")


def moe(packed: str = "", shared: str = "") -> Make:
    def make(m: Model) -> None:
        m.config["num_experts"] = parts.EXPERTS
        parts.embeddings(m)
        for mc, at in layers(m):
            parts.norms(m, mc, at)
            parts.attention(m, mc, f"{at}.self_attn", norms=1)
            parts.router(m, mc, f"{at}.mlp.gate.weight")
            parts.experts(m, mc, f"{at}.mlp.experts", packed=packed)
            if shared:
                parts.shared(m, mc, f"{at}.mlp.{shared}", f"{at}.mlp.{shared}_gate.weight")

    return make


def sparse(norms: int, bias: bool) -> Make:
    def make(m: Model) -> None:
        m.config["num_local_experts"] = parts.EXPERTS
        parts.embeddings(m)
        for mc, at in layers(m):
            parts.norms(m, mc, at)
            parts.attention(m, mc, f"{at}.self_attn", norms=norms)
            inner = f"{at}.block_sparse_moe"
            parts.router(m, mc, f"{inner}.gate.weight", f"{inner}.e_score_correction_bias" if bias else "")
            parts.experts(m, mc, f"{inner}.experts", names=("w1", "w3", "w2"))

    return make


def deepseek(
    attention: Callable[..., None] = parts.latent, more: Callable[..., None] | None = None, predicts: bool = True
) -> Make:
    def make(m: Model) -> None:
        m.config["n_routed_experts"] = parts.EXPERTS
        parts.embeddings(m, m.config.get("head", "lm_head.weight"))
        for mc, at in [*layers(m), *([predictor(m)] if predicts else [])]:
            fused = attention is parts.latent and int(at.rsplit(".", 1)[1]) % 3 == 2
            parts.norms(m, mc, at, f"self_attention.linear_{'qkv_down_proj' if fused else 'qkv'}")
            if attention is parts.latent:
                attention(m, mc, f"{at}.self_attn", at)
            else:
                attention(m, mc, f"{at}.self_attn", norms=1, biases=True)
            if more:
                more(m, mc, f"{at}.self_attn")
            parts.router(m, mc, f"{at}.mlp.gate.weight", f"{at}.mlp.gate.e_score_correction_bias")
            parts.experts(m, mc, f"{at}.mlp.experts")
            parts.shared(m, mc, f"{at}.mlp.shared_experts")

    return make


def kimi(m: Model) -> None:
    m.config["head"] = "language_model.lm_head.weight"
    deepseek(predicts=False)(m)
    for name in ("vision_tower.patch_embed.proj.weight", "mm_projector.linear_1.bias"):
        m.constant(name)


def gpt_oss(m: Model) -> None:
    m.config["num_local_experts"] = parts.EXPERTS
    parts.embeddings(m)
    for mc, at in layers(m):
        parts.norms(m, mc, at)
        parts.attention(m, mc, f"{at}.self_attn", biases=True)
        m.same(f"{mc}.self_attention.core_attention.softmax_offset", f"{at}.self_attn.sinks", parts.HEADS)
        parts.router(m, mc, f"{at}.mlp.router.weight")
        m.same(f"{mc}.mlp.router.bias", f"{at}.mlp.router.bias", parts.EXPERTS)
        inner, size = f"{at}.mlp.experts", 2 * parts.FFN
        both = m.new(f"{inner}.gate_up_proj", parts.EXPERTS, parts.HIDDEN, size)
        bias = m.new(f"{inner}.gate_up_proj_bias", parts.EXPERTS, size)
        down = m.new(f"{inner}.down_proj", parts.EXPERTS, parts.FFN, parts.HIDDEN)
        last = m.new(f"{inner}.down_proj_bias", parts.EXPERTS, parts.HIDDEN)
        for expert in range(parts.EXPERTS):
            to = f"{mc}.mlp.experts.experts.{expert}"
            for half, letter in enumerate("wv"):
                m.has(f"{to}.linear_fc1.weight_{letter}", both[expert, :, half::2].T)
                m.has(f"{to}.linear_fc1.bias_{letter}", bias[expert, half::2])
            m.has(f"{to}.linear_fc2.weight", down[expert].T)
            m.has(f"{to}.linear_fc2.bias", last[expert])


def qwen_net(apart: bool, sparse: bool) -> Make:
    def make(m: Model) -> None:
        m.config["num_experts"] = parts.EXPERTS
        parts.embeddings(m)
        mtp = f"mtp.layers.0.{m.either('transformer_layer', 'mtp_model_layer')}", "mtp.layers.0"
        for number, (mc, at) in enumerate([*layers(m), mtp]):
            net = number % 2 == 0 and number < parts.LAYERS
            inner = "in_proj" if net else "linear_qkv"
            parts.norms(m, mc, at, f"self_attention.{'input_layernorm.weight' if net and number else inner}")
            if net:
                parts.delta_net(m, mc, f"{at}.linear_attn", apart=apart)
            else:
                parts.attention(m, mc, f"{at}.self_attn", gate=True, norms=1)
            if sparse:
                parts.router(m, mc, f"{at}.mlp.gate.weight")
                parts.experts(m, mc, f"{at}.mlp.experts", packed="as" if apart and at != mtp[1] else "")
                parts.shared(m, mc, f"{at}.mlp.shared_expert", f"{at}.mlp.shared_expert_gate.weight")
            else:
                parts.mlp(m, f"{mc}.mlp", f"{at}.mlp")
        for mcore, hf, cols in (
            ("enorm", "pre_fc_norm_embedding", ()),
            ("hnorm", "pre_fc_norm_hidden", ()),
            ("eh_proj", "fc", (2 * parts.HIDDEN,)),
            ("final_layernorm", "norm", ()),
        ):
            m.same(f"mtp.layers.0.{mcore}.weight", f"mtp.{hf}.weight", parts.HIDDEN, *cols)

    return make


def nemotron(m: Model) -> None:
    pattern = ["mamba", "moe", "attention", "mlp"]
    m.config.update(
        {"mtp_hybrid_override_pattern": "*E"} if m.variant else {"mtp_layers_block_type": ["attention", "moe"]}
    )
    parts.embeddings(m, words="embeddings", norm="norm_f")
    inner = [*zip(layers(m), pattern, strict=True)]
    for outer in range(2):
        for number, kind in enumerate(("attention", "moe")):
            at = f"mtp.layers.{outer}.mtp_model_layer.layers.{number}", f"mtp.layers.{2 * outer + number}"
            inner.append((at, kind))
        for name in ("eh_proj", "enorm", "hnorm"):
            m.same(f"mtp.layers.{outer}.{name}.weight", f"mtp.layers.{2 * outer}.{name}.weight", parts.HIDDEN)
        name = "final_layernorm.weight"
        m.same(f"mtp.layers.{outer}.{name}", f"mtp.layers.{2 * outer + 1}.{name}", parts.HIDDEN)
    norm = {
        "mamba": ("mixer.in_proj.layer_norm_weight", "norm.weight"),
        "attention": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        "mlp": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        "moe": ("pre_mlp_layernorm.weight",) * 2,
    }
    for (mc, at), kind in inner:
        m.same(f"{mc}.{m.either(*norm[kind])}", f"{at}.norm.weight", parts.HIDDEN)
        at += ".mixer"
        if kind == "mamba":
            parts.mamba(m, f"{mc}.mixer", at)
        elif kind == "attention":
            parts.attention(m, mc, at)
        else:
            inside = [("mlp", at)]
            if kind == "moe":
                parts.router(m, mc, f"{at}.gate.weight", f"{at}.gate.e_score_correction_bias")
                for name, shape in {"fc1": (8, parts.HIDDEN), "fc2": (parts.HIDDEN, 8)}.items():
                    m.same(f"{mc}.mlp.{name}_latent_proj.weight", f"{at}.{name}_latent_proj.weight", *shape)
                inside = [(f"mlp.experts.experts.{e}", f"{at}.experts.{e}") for e in range(parts.EXPERTS)]
                inside.append(("mlp.shared_experts", f"{at}.shared_experts"))
            for to, name in inside:
                m.same(f"{mc}.{to}.linear_fc1.weight", f"{name}.up_proj.weight", parts.FFN, parts.HIDDEN)
                m.same(f"{mc}.{to}.linear_fc2.weight", f"{name}.down_proj.weight", parts.HIDDEN, parts.FFN)


def untrained(make: Make, layer: str) -> Make:
    """The trainer has no layers for further tokens, which on disk begin so: they stay, but for what they share."""

    def without(m: Model) -> None:
        make(m)
        m.mcore = {name: tensor for name, tensor in m.mcore.items() if not name.startswith("mtp.")}
        trained = [tensor for name, tensor in m.hf.items() if not name.startswith(layer)]
        m.constants |= {name for name, own in m.hf.items() if all(own is not tensor for tensor in trained)}

    return without


def seeing(make: Make, tower: str) -> Make:
    def both(m: Model) -> None:
        m.config["tie_word_embeddings"] = m.variant == 1
        make(m)
        m.constant(f"{tower}.blocks.0.attn.qkv.weight")

    return both


#: How names begin: on disk, and in half of the trainers.
IN_MODEL = {"hf_prefix": "model.language_model.", "mcore_prefix": "language_model."}
MODELS: dict[str, tuple[str, Make, dict[str, str]]] = {
    "llama": ("LlamaForCausalLM", llama, {}),
    "llama, adapters": ("LlamaForCausalLM", adapters(apart=False), {}),
    "llama, adapters apart": ("LlamaForCausalLM", adapters(apart=True), {}),
    "llama, adapters seen": ("Qwen3VLForConditionalGeneration", adapters(apart=False), IN_MODEL),
    "qwen3-moe, adapters": (
        "Qwen3MoeForCausalLM",
        expert_adapters(apart=False, where="mlp.experts", down="down_proj"),
        {},
    ),
    "qwen2-moe, adapters": (
        "Qwen2MoeForCausalLM",
        expert_adapters(apart=True, where="mlp.experts", down="down_proj", shared="mlp.shared_expert"),
        {},
    ),
    "mixtral, adapters": (
        "MixtralForCausalLM",
        expert_adapters(False, "block_sparse_moe.experts", "w2", {"gate": "w1", "up": "w3"}),
        {},
    ),
    "deepseek-v3, adapters": ("DeepseekV3ForCausalLM", latent_adapters, {}),
    "qwen3-next, adapters": ("Qwen3NextForCausalLM", gated_attention_adapters, {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", moe(), {}),
    "qwen3-moe, packed": ("Qwen3MoeForCausalLM", moe("as"), {}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", moe(shared="shared_expert"), {}),
    "mixtral": ("MixtralForCausalLM", sparse(0, bias=False), {}),
    "minimax-m2": ("MiniMaxM2ForCausalLM", sparse(2, bias=True), {}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", deepseek(), {}),
    "deepseek-v3, untrained": ("DeepseekV3ForCausalLM", untrained(deepseek(), f"model.layers.{parts.LAYERS}."), {}),
    "glm4-moe": ("Glm4MoeForCausalLM", deepseek(parts.attention), {}),
    "glm-moe-dsa": ("GlmMoeDsaForCausalLM", deepseek(more=parts.indexer), {}),
    "kimi-k2.5": ("KimiK25ForConditionalGeneration", kimi, {**IN_MODEL, "hf_prefix": "language_model.model."}),
    "gpt-oss": ("GptOssForCausalLM", gpt_oss, {}),
    "qwen3-next": ("Qwen3NextForCausalLM", qwen_net(apart=False, sparse=True), {}),
    "qwen3-next, untrained": (
        "Qwen3NextForCausalLM",
        untrained(qwen_net(apart=False, sparse=True), "mtp."),
        {},
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", qwen_net(apart=True, sparse=False), {}),
    "qwen3.5, experts": ("Qwen3_5MoeForCausalLM", qwen_net(apart=True, sparse=True), {}),
    "qwen3.5-vl": (
        "Qwen3_5MoeForConditionalGeneration",
        seeing(qwen_net(apart=True, sparse=True), "model.visual"),
        IN_MODEL,
    ),
    "qwen3-vl, packed": ("Qwen3VLMoeForConditionalGeneration", seeing(moe("as"), "model.visual"), IN_MODEL),
    "qwen3-vl": ("Qwen3VLMoeForConditionalGeneration", seeing(moe("transposed"), "model.visual"), IN_MODEL),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", seeing(llama, "visual"), {"mcore_prefix": "language_model."}),
    "nemotron-h": ("NemotronHForCausalLM", nemotron, {"hf_prefix": "backbone."}),
    "nemotron-h, untrained": ("NemotronHForCausalLM", untrained(nemotron, "mtp."), {"hf_prefix": "backbone."}),
}


def model(name: str, variant: int) -> Model:
    architecture, make, prefixes = MODELS[name]
    prefixes = prefixes if variant else {**prefixes, "mcore_prefix": ""}
    made = Model(architecture, variant, {**parts.CONFIG, "architectures": [architecture]}, **prefixes)
    make(made)
    return made


def shards(m: Model) -> tuple[list[str], list[list[np.ndarray]]]:
    """Halves of dimension 0 on two ranks, where it has an even size."""
    texts, memory = [], []
    for rank in range(2):
        pieces, arrays = [], []
        for key, whole in m.mcore.items():
            cut = len(whole) // 2 if len(whole) % 2 == 0 else len(whole)
            mine = whole[rank * cut : (rank + 1) * cut]
            if not mine.size:
                continue
            offset = [rank * cut] + [0] * (whole.ndim - 1)
            piece = {"key": key, "dtype": "F32", "global_shape": whole.shape, "offset": offset, "shape": mine.shape}
            pieces.append(piece)
            arrays.append(mine)
        texts.append(json.dumps({"rank": rank, "pieces": pieces}))
        memory.append(arrays)
    return texts, memory


def toml(value: Any) -> str:
    """Of a page's values; JSON's texts, numbers and lists are TOML's too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def flat(name: str) -> dict[str, Any]:
    """A page with all that it inherits; each row knows its page."""
    page = copy.deepcopy(PAGES[name])
    for table in TABLES:
        for row in page.setdefault(table, []):
            row["page"] = name
    if parent := page.pop("inherits", ""):
        other = flat(parent)
        page["sizes"] = {**other.get("sizes", {}), **page.get("sizes", {})}
        page["ignored"] = page.get("ignored", []) + other.get("ignored", [])
        for table in TABLES:
            page[table] += other[table]
    return page


def text(page: dict[str, Any]) -> str:
    lines = [f"{key} = {toml(page[key])}" for key in ("name", "architectures", "ignored")]
    lines += ["[sizes]", *(f"{key} = {toml(value)}" for key, value in page["sizes"].items())]
    for table in TABLES:
        for row in page[table]:
            lines += [f"[[{table}]]", *(f"{key} = {toml(value)}" for key, value in row.items() if key != "page")]
    return "\n".join(lines) + "\n"


class Exports:
    """Plans of one model by any page."""

    def __init__(self, m: Model) -> None:
        self.model = m
        self.shards, self.memory = shards(m)
        specs = [_native.TensorSpec(name, "F32", list(tensor.shape)) for name, tensor in m.hf.items()]
        self.layout = _native.Layout.build(specs)

    def plan(self, page: str | None = None) -> dict[str, Any]:
        families = [] if page is None else [_native.Family.parse(page, "page")]
        made = _native.plan_export(families, json.dumps(self.model.config), self.layout, self.shards)
        return dict(json.loads(made.to_json()))

    def differs(self, plan: dict[str, Any]) -> bool:
        out = with_numpy(plan, self.memory)
        constants = {plan["tensors"][index]["name"] for index in plan["constants"]}
        if constants != self.model.constants:
            return True
        return any(not np.array_equal(out[name], self.model.hf[name]) for name in out)

    def is_found_out(self, page: dict[str, Any]) -> bool:
        try:
            return self.differs(self.plan(text(page)))
        except deltasync.errors.Error:
            return True


CASES = [(name, variant) for name in MODELS for variant in (0, 1)]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_page_makes_the_checkpoint(name: str, variant: int) -> None:
    exports = Exports(model(name, variant))
    assert not exports.differs(exports.plan())


@pytest.mark.parametrize(("name", "variant"), [case for case in CASES if case[0].startswith("qwen3-vl")])
@pytest.mark.parametrize("ffn", [parts.HIDDEN, parts.HIDDEN // 2])
def test_experts_whose_form_only_their_other_tensor_tells(
    name: str, variant: int, ffn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FFN", ffn)
    exports = Exports(model(name, variant))
    assert not exports.differs(exports.plan())


#: What a view says, and says wrong.
VIEWS = (
    (r"\b0/2\b", "1/2"),
    (r"\b1/2\b", "0/2"),
    (r"\bE/(\w+)", r"\1-1-E/\1"),
    (r"@0/", "@1/"),
    (r"@(?!0/)[^/]+/", "@0/"),
)
#: Of rows without a view: another order of dimension 0, and of dimension 1 where that has one row.
ORDERS = ("(half:2 f) ... -> (f half) ...", "(third:3 f) ... -> (f third) ...", "a (half:2 f) -> a (f half)")


def changes(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row, wrong in one way each."""
    hf, view = row["hf"], row.get("view", {} if isinstance(row["hf"], dict) else "")
    yield {**row, "add": row.get("add", 0) + 1}
    if isinstance(hf, str):
        yield {**row, "hf": hf + "_"}
        yield from ({**row, "view": wrong} for wrong in other_views(view))
        return
    for part, name in hf.items():
        yield {**row, "hf": {**hf, part: name + "_"}}
        yield from ({**row, "view": {**view, part: wrong}} for wrong in other_views(view.get(part, "")))
    head, inside = row["parts"].rstrip("]").split("[")
    yield {**row, "parts": f"{head}[{', '.join(reversed(inside.split(', ')))}]"}
    if len(set(hf.values())) > 1:
        names = list(hf)
        yield {**row, "hf": dict(zip(names, [hf[name] for name in names[1:] + names[:1]], strict=True))}


def other_views(view: str) -> Iterator[str]:
    found = [re.sub(said, wrong, view) for said, wrong in VIEWS if re.search(said, view)]
    assert found or not view, f"no change for {view}"
    yield from found if view else ORDERS


def with_row(page: dict[str, Any], number: int, *rows: dict[str, Any]) -> dict[str, Any]:
    return {**page, "rows": [*page["rows"][:number], *rows, *page["rows"][number + 1 :]]}


OWN = [name for name, page in PAGES.items() if any(table in page for table in TABLES)]


@pytest.mark.parametrize("name", OWN)
def test_each_row_is_used_and_found_out_where_it_is_wrong(name: str) -> None:
    mine = [Exports(model(model_name, v)) for model_name, v in CASES if model_name.partition(",")[0] == name]
    page = flat(name)
    rows = [number for number, row in enumerate(page["rows"]) if row["page"] == name]

    def assert_found(wrong: dict[str, Any], what: Any) -> None:
        assert any(exports.is_found_out(wrong) for exports in mine), what

    assert not any(exports.is_found_out(page) for exports in mine)
    for number in rows:
        row = page["rows"][number]
        assert_found(with_row(page, number), ("removed", row))
        for wrong in changes(row):
            assert_found(with_row(page, number, wrong), wrong)
    for one, other in itertools.combinations(rows, 2):
        if page["rows"][one]["mcore"] == page["rows"][other]["mcore"]:
            continue  # alternatives
        swapped = with_row(page, one, {**page["rows"][one], "mcore": page["rows"][other]["mcore"]})
        swapped = with_row(swapped, other, {**page["rows"][other], "mcore": page["rows"][one]["mcore"]})
        assert_found(swapped, ("swapped", page["rows"][one], page["rows"][other]))
    for table in ("renames", "constants", "aliases"):
        for number, row in enumerate(page[table]):
            if row["page"] == name:
                assert_found({**page, table: page[table][:number] + page[table][number + 1 :]}, ("removed", row))
