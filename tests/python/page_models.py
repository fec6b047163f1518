"""Models in numpy, made from the checkpoint's side: each function makes a module's HuggingFace tensors and fuses them
to what the trainer has. Nothing of it is read from the pages that it tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCAB, EXPERTS, LAYERS = 6, 4, 2, 4, 10, 9, 4, 4

CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
}


@dataclass
class Model:
    architecture: str
    #: 0 and 1: names as of Transformer Engine's layers or of Megatron's own, fused or split, and so on.
    variant: int
    config: dict[str, Any]
    #: Before each of the trainer's names, and how HuggingFace's begin.
    mcore_prefix: str = ""
    hf_prefix: str = "model."
    mcore: dict[str, np.ndarray] = field(default_factory=dict)
    hf: dict[str, np.ndarray] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    _next: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new(self, name: str, *shape: int) -> np.ndarray:
        """A tensor of the checkpoint, of numbers of its own."""
        size = int(np.prod(shape))
        made = np.fromiter(itertools.islice(self._next, size), np.float32, size).reshape(shape)
        self.hf[name] = made
        return made

    def has(self, name: str, tensor: np.ndarray) -> None:
        assert self.mcore_prefix + name not in self.mcore
        self.mcore[self.mcore_prefix + name] = np.ascontiguousarray(tensor)

    def same(self, mcore: str, hf: str, *shape: int) -> None:
        self.has(mcore, self.new(hf, *shape))

    def constant(self, name: str) -> None:
        self.new(name, 3)
        self.constants.add(name)

    def either(self, *names: str) -> str:
        return names[self.variant]


def embeddings(m: Model, head: str = "lm_head.weight", words: str = "embed_tokens", norm: str = "norm") -> None:
    padding = np.full((3, HIDDEN), -1, np.float32)
    m.has(
        "embedding.word_embeddings.weight",
        np.concatenate([m.new(f"{m.hf_prefix}{words}.weight", VOCAB, HIDDEN), padding]),
    )
    if m.config["tie_word_embeddings"]:
        m.hf[head] = m.hf[f"{m.hf_prefix}{words}.weight"]
    else:
        m.has("output_layer.weight", np.concatenate([m.new(head, VOCAB, HIDDEN), padding]))
    m.same(
        m.either("decoder.final_layernorm.weight", "decoder.final_norm.weight"), f"{m.hf_prefix}{norm}.weight", HIDDEN
    )


def attention(
    m: Model, mc: str, at: str, *, gate: bool = False, biases: bool = False, norms: int = 0, norm: bool = True
) -> None:
    mc += ".self_attention"
    for kind, shape in (("weight", (HIDDEN,)), *((("bias", ()),) if biases else ())):
        q = m.new(f"{at}.q_proj.{kind}", (2 if gate else 1) * HEADS * HEAD, *shape)
        k = m.new(f"{at}.k_proj.{kind}", GROUPS * HEAD, *shape)
        v = m.new(f"{at}.v_proj.{kind}", GROUPS * HEAD, *shape)
        each = HEADS // GROUPS
        fused = []
        for group in range(GROUPS):
            rows = q.reshape(HEADS, -1, HEAD, *shape)[group * each : (group + 1) * each]
            fused += [head[part] for part in range(rows.shape[1]) for head in rows]
            fused += [one[group * HEAD : (group + 1) * HEAD] for one in (k, v)]
        m.has(f"{mc}.linear_qkv.{kind}", np.concatenate(fused))
    m.same(f"{mc}.linear_proj.weight", f"{at}.o_proj.weight", HIDDEN, HEADS * HEAD)
    if biases:
        m.same(f"{mc}.linear_proj.bias", f"{at}.o_proj.bias", HIDDEN)
    for which, heads in (("q", HEADS), ("k", GROUPS)):
        if norms == 1:
            m.same(f"{mc}.{which}_layernorm.weight", f"{at}.{which}_norm.weight", HEAD)
        elif norms == 2:  # of all heads
            name = m.either(f"{which}_layernorm", f"{which}_norm")
            m.same(f"{mc}.{name}.weight", f"{at}.{which}_norm.weight", heads * HEAD)


RANK = 4


#: How a module's parts are called on disk; of sparse experts otherwise.
PROJECTIONS = {part: f"{part}_proj" for part in ("q", "k", "v", "gate", "up")}


def adapter(m: Model, mc: str, at: str, kind: str, apart: bool, names: dict[str, str] | None = None) -> None:
    """LoRA of a module with `kind` of parts ("qkv", "gated", "": none). `apart`: each part has one of its own."""
    sizes = {"qkv": {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}, "gated": {"gate": FFN, "up": FFN}}
    mc += ".adapter"
    if not kind:
        m.same(f"{mc}.linear_in.weight", f"{at}.lora_A.weight", RANK, FFN)
        m.same(f"{mc}.linear_out.weight", f"{at}.lora_B.weight", HIDDEN, RANK)
        return
    shared: Any = None
    outs = {}
    for part, size in sizes[kind].items():
        name = f"{at}.{(names or PROJECTIONS)[part]}"
        if apart:
            m.same(f"{mc}.adapter_{part}.linear_in.weight", f"{name}.lora_A.weight", RANK, HIDDEN)
            m.same(f"{mc}.adapter_{part}.linear_out.weight", f"{name}.lora_B.weight", size, RANK)
            continue
        if shared is None:
            shared = m.new(f"{name}.lora_A.weight", RANK, HIDDEN)
            m.has(f"{mc}.linear_in.weight", shared)
        m.hf[f"{name}.lora_A.weight"] = shared
        outs[part] = m.new(f"{name}.lora_B.weight", size, RANK)
    if apart:
        return
    if kind == "gated":
        gated(m, f"{mc}.linear_out", outs["gate"], outs["up"])
        return
    each = [np.split(outs[part], GROUPS) for part in "qkv"]
    m.has(f"{mc}.linear_out.weight", np.concatenate([one[group] for group in range(GROUPS) for one in each]))


def gated_attention_adapter(m: Model, mc: str, at: str) -> None:
    """Of a q whose heads have a gate each: beside it on disk, after all of the group's in the trainer."""
    shared = m.new(f"{at}.q_proj.lora_A.weight", RANK, HIDDEN)
    m.hf |= {f"{at}.{part}_proj.lora_A.weight": shared for part in "kv"}
    m.has(f"{mc}.adapter.linear_in.weight", shared)
    both = m.new(f"{at}.q_proj.lora_B.weight", HEADS * 2 * HEAD, RANK).reshape(GROUPS, -1, 2, HEAD, RANK)
    k, v = (m.new(f"{at}.{part}_proj.lora_B.weight", GROUPS * HEAD, RANK).reshape(GROUPS, HEAD, RANK) for part in "kv")
    rows = [
        part.reshape(-1, RANK)
        for group in range(GROUPS)
        for part in (both[group, :, 0], both[group, :, 1], k[group], v[group])
    ]
    m.has(f"{mc}.adapter.linear_out.weight", np.concatenate(rows))


def norms(m: Model, mc: str, layer: str, inner: str = "self_attention.linear_qkv") -> None:
    """`inner`: what the input's norm is fused with, or its whole name."""
    name = inner if inner.endswith("weight") else m.either(f"{inner}.layer_norm_weight", "input_layernorm.weight")
    m.same(f"{mc}.{name}", f"{layer}.input_layernorm.weight", HIDDEN)
    name = m.either("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    m.same(f"{mc}.{name}", f"{layer}.post_attention_layernorm.weight", HIDDEN)


def mlp(m: Model, mc: str, at: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
    """`at`: what comes before the names."""
    gate, up = (m.new(f"{at}.{name}.weight", FFN, HIDDEN) for name in names[:2])
    gated(m, f"{mc}.linear_fc1", gate, up)
    m.same(f"{mc}.linear_fc2.weight", f"{at}.{names[2]}.weight", HIDDEN, FFN)


def gated(m: Model, mc: str, gate: np.ndarray, up: np.ndarray, kind: str = "weight") -> None:
    if m.variant:
        m.has(f"{mc}.{kind}_w", gate)
        m.has(f"{mc}.{kind}_v", up)
    else:
        m.has(f"{mc}.{kind}", np.concatenate([gate, up]))


def experts(
    m: Model, mc: str, at: str, *, packed: str = "", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> None:
    """`packed`: all in one tensor, "as" they are or "transposed"."""
    mc += ".mlp.experts.experts"
    if not packed:
        for expert in range(EXPERTS):
            mlp(m, f"{mc}.{expert}", f"{at}.{expert}", names)
        return
    turned = packed == "transposed"
    both = m.new(f"{at}.gate_up_proj", EXPERTS, *((HIDDEN, 2 * FFN) if turned else (2 * FFN, HIDDEN)))
    down = m.new(f"{at}.down_proj", EXPERTS, *((FFN, HIDDEN) if turned else (HIDDEN, FFN)))
    for expert in range(EXPERTS):
        rows = both[expert].T if turned else both[expert]
        gated(m, f"{mc}.{expert}.linear_fc1", rows[:FFN], rows[FFN:])
        m.has(f"{mc}.{expert}.linear_fc2.weight", down[expert].T if turned else down[expert])


def router(m: Model, mc: str, name: str, bias: str = "") -> None:
    m.same(f"{mc}.mlp.router.weight", name, EXPERTS, HIDDEN)
    if bias:
        m.same(f"{mc}.mlp.router.expert_bias", bias, EXPERTS)


def shared(m: Model, mc: str, at: str, gate: str = "") -> None:
    mlp(m, f"{mc}.mlp.shared_experts", at)
    if gate:
        m.same(f"{mc}.mlp.shared_experts.gate_weight", gate, 1, HIDDEN)


def latent(m: Model, mc: str, at: str, layer: str) -> None:
    """Attention over latents, in its three forms; a layer's number says which."""
    q_rank, kv_rank, rope, nope, value = 8, 4, 2, 3, 7
    form = int(layer.rsplit(".", 1)[1]) % 3
    mc += ".self_attention"
    m.config.update(q_lora_rank=q_rank, kv_lora_rank=kv_rank, qk_rope_head_dim=rope)
    if form == 0:
        m.same(f"{mc}.linear_q_proj.weight", f"{at}.q_proj.weight", HEADS * (rope + nope), HIDDEN)
    else:
        q_down = m.new(f"{at}.q_a_proj.weight", q_rank, HIDDEN)
        m.same(f"{mc}.linear_q_up_proj.weight", f"{at}.q_b_proj.weight", HEADS * (rope + nope), q_rank)
        name = m.either("linear_q_up_proj.layer_norm_weight", "q_layernorm.weight")
        m.same(f"{mc}.{name}", f"{at}.q_a_layernorm.weight", q_rank)
    kv_down = m.new(f"{at}.kv_a_proj_with_mqa.weight", kv_rank + rope, HIDDEN)
    if form == 2:
        m.has(f"{mc}.linear_qkv_down_proj.weight", np.concatenate([q_down, kv_down]))
    else:
        m.has(f"{mc}.linear_kv_down_proj.weight", kv_down)
    if form == 1:
        m.has(f"{mc}.linear_q_down_proj.weight", q_down)
    name = m.either("linear_kv_up_proj.layer_norm_weight", "kv_layernorm.weight")
    m.same(f"{mc}.{name}", f"{at}.kv_a_layernorm.weight", kv_rank)
    m.same(f"{mc}.linear_kv_up_proj.weight", f"{at}.kv_b_proj.weight", HEADS * (nope + value), kv_rank)
    m.same(f"{mc}.linear_proj.weight", f"{at}.o_proj.weight", HIDDEN, HEADS * value)


def indexer(m: Model, mc: str, at: str) -> None:
    heads, half = 4, 2
    m.config.update(index_n_heads=heads, index_head_dim=2 * half)
    if int(at.split(".")[-2]) % 2:  # halves of heads lie the other way round

        def turned(name: str, *shape: int) -> None:
            tensor = m.new(f"{at}.indexer.{name}", *shape)
            blocks = tensor.reshape(-1, 2, half, *shape[1:])
            m.has(f"{mc}.self_attention.{name}", np.stack([blocks[:, 1], blocks[:, 0]], 1).reshape(shape))

        turned("wq_b.weight", heads * 2 * half, 8)
        turned("wk.weight", 2 * half, HIDDEN)
        turned("k_norm.weight", 2 * half)
        turned("k_norm.bias", 2 * half)
        m.same(f"{mc}.self_attention.weights_proj.weight", f"{at}.indexer.weights_proj.weight", heads, HIDDEN)
        return
    mc += ".self_attention.core_attention.indexer"
    for name, shape in {"wq_b": (16, 8), "wk": (4, HIDDEN), "weights_proj": (4, HIDDEN)}.items():
        m.same(f"{mc}.linear_{name}.weight", f"{at}.indexer.{name}.weight", *shape)
    for kind in ("weight", "bias"):
        m.same(f"{mc}.k_norm.{kind}", f"{at}.indexer.k_norm.{kind}", 4)


def delta_net(m: Model, mc: str, at: str, *, apart: bool) -> None:
    """`apart`: its inputs are four tensors on disk, of all heads each; else two, head by head."""
    keys, each, key, value = 2, 3, 4, 6
    m.config.update(
        linear_num_key_heads=keys,
        linear_num_value_heads=keys * each,
        linear_key_head_dim=key,
        linear_value_head_dim=value,
    )
    mc += ".self_attention"
    if int(at.split(".")[-2]) % 4:  # the trainer has it as it is on disk
        rows, mixed = keys * each, keys * (2 * key + each * value)
        two = {"qkvz": mixed + rows * value, "ba": 2 * rows}
        four = {"qkv": mixed, "z": rows * value, "b": rows, "a": rows}
        shapes = {f"in_proj_{n}.weight": (size, HIDDEN) for n, size in (four if apart else two).items()}
        shapes |= {"A_log": (rows,), "dt_bias": (rows,), "conv1d.weight": (mixed, 1, 4), "norm.weight": (value,)}
        for name, shape in {**shapes, "out_proj.weight": (HIDDEN, rows * value)}.items():
            m.same(f"{mc}.linear_attn.{name}", f"{at}.{name}", *shape)
        return
    sizes = {"query": key, "key": key, "value": each * value, "z": each * value, "beta": each, "alpha": each}
    parts: dict[str, np.ndarray]
    if apart:
        mixed = m.new(f"{at}.in_proj_qkv.weight", keys * (2 * key + each * value), HIDDEN)
        parts = dict(zip(sizes, np.split(mixed, [keys * key, 2 * keys * key]), strict=False))
        for part, letter in {"z": "z", "beta": "b", "alpha": "a"}.items():
            parts[part] = m.new(f"{at}.in_proj_{letter}.weight", keys * sizes[part], HIDDEN)
    else:
        wide = m.new(f"{at}.in_proj_qkvz.weight", 2 * keys * (key + each * value), HIDDEN).reshape(keys, -1, HIDDEN)
        thin = m.new(f"{at}.in_proj_ba.weight", 2 * keys * each, HIDDEN).reshape(keys, -1, HIDDEN)
        cuts = np.cumsum([key, key, each * value])
        blocks = [*np.split(wide, cuts, 1), *np.split(thin, 2, 1)]
        parts = {name: block.reshape(-1, HIDDEN) for name, block in zip(sizes, blocks, strict=True)}
    for name, tensor in parts.items():
        m.has(f"{mc}.in_proj.weight.{name}", tensor)
    convolution = m.new(f"{at}.conv1d.weight", keys * (2 * key + each * value), 1, 4)
    for name, rows in zip(sizes, np.split(convolution, [keys * key, 2 * keys * key]), strict=False):
        m.has(f"{mc}.conv1d.weight.{name}", rows)
    for name in ("A_log", "dt_bias"):
        m.same(f"{mc}.{name}", f"{at}.{name}", keys * each)
    m.has(f"{mc}.out_norm.weight", m.new(f"{at}.norm.weight", value) - 1)
    m.same(f"{mc}.out_proj.weight", f"{at}.out_proj.weight", HIDDEN, keys * each * value)


def mamba(m: Model, mc: str, at: str) -> None:
    heads, size, groups, states = 4, 3, 2, 5
    m.config.update(mamba_num_heads=heads, mamba_head_dim=size, n_groups=groups, ssm_state_size=states)
    inner, both = heads * size, groups * states
    whole = m.new(f"{at}.in_proj.weight", 2 * inner + 2 * both + heads, HIDDEN)
    cuts = np.cumsum([inner, inner, both, both])
    for name, rows in zip(("z", "x", "B", "C", "dt"), np.split(whole, cuts), strict=True):
        m.has(f"{mc}.in_proj.weight.{name}", rows)
    for kind, shape in (("weight", (1, 4)), ("bias", ())):
        convolution = m.new(f"{at}.conv1d.{kind}", inner + 2 * both, *shape)
        for name, rows in zip(("x", "B", "C"), np.split(convolution, [inner, inner + both]), strict=True):
            m.has(f"{mc}.{m.either('conv1d.', 'conv1d_')}{kind}.{name}", rows)
    for name in ("A_log", "D", "dt_bias"):
        m.same(f"{mc}.{name}", f"{at}.{name}", heads)
    m.same(f"{mc}.norm.weight", f"{at}.norm.weight", inner)
    m.same(f"{mc}.out_proj.weight", f"{at}.out_proj.weight", HIDDEN, inner)
