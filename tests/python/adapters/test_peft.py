"""LoRA adapters of real peft: trained in one process's model, published, and loaded by peft into another's."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import errors
from deltasync.adapters import lora

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.engines

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "ranks": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora_embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "lora_bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "own_bias": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "all_bias": {"target_modules": ["q_proj"], "bias": "all"},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2]}},
    "parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
}


def base_model(kind: str = "Qwen2") -> Any:
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


TOKENS = torch.arange(1, 17).reshape(2, 8)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=TOKENS, labels=TOKENS.flip(1)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_arrives_as_peft_would_have_saved_it(kind: str, segment_name: str, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    model = peft.get_peft_model(base_model(), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **KINDS[kind]))
    logits: list[torch.Tensor] = []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    wanted = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    published = lora.tensors(model)
    assert set(published) == set(wanted)
    assert set(lora.tensors(wanted)) == set(wanted)
    with lora.manager(model, name=segment_name) as manager:
        with deltasync.Receiver(manager.endpoint, directory=tmp_path / "adapter") as receiver:
            for step in range(3):
                if step:
                    train(model, optimizer)
                manager.offload(lora.tensors(model))
                receiver.update(step + 1)
                loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "adapter" / "current")
                with torch.no_grad():
                    mine, theirs = (each.eval()(input_ids=TOKENS).logits for each in (model, loaded))
                assert torch.equal(mine, theirs), (mine - theirs).abs().max()
                assert all(not torch.equal(mine, before) for before in logits)
                logits.append(mine)
                model.train()
        model.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
        saved, received = (
            json.loads((tmp_path / directory / "adapter_config.json").read_text())
            for directory in ("saved", "adapter/current")
        )
        differ = {key for key in saved.keys() | received.keys() if _norm(saved.get(key)) != _norm(received.get(key))}
        assert differ <= {"inference_mode"}  # saved adapters do not train until they are told to


def _norm(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def test_two_adapters(segment_name: str) -> None:
    model = peft.get_peft_model(base_model(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    assert all(".v_proj." in name for name in lora.tensors(model, "other"))
    assert all(".q_proj." in name for name in lora.tensors(model))
    with pytest.raises(errors.InvalidArgument, match="'third'.*default, other"):
        lora.tensors(model, "third")
    with lora.manager(model, adapter="other", name=segment_name) as manager:
        manager.offload(lora.tensors(model, "other"))
        assert json.loads(manager.sidecar.others["adapter_config.json"])["r"] == 2


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_a_base_model_without_biases(bias: str, segment_name: str) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], bias=bias)
    model = peft.get_peft_model(base_model("Llama"), config)
    with lora.manager(model, name=segment_name) as manager:
        manager.offload(lora.tensors(model))


def test_an_adapter_that_transformers_added(segment_name: str, tmp_path: Path) -> None:
    model = base_model()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with lora.manager(model, name=segment_name) as manager:
        manager.offload(lora.tensors(model))
        with deltasync.Receiver(manager.endpoint, directory=tmp_path) as receiver:
            receiver.update()
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "current")
    with torch.no_grad():
        assert torch.equal(model(input_ids=TOKENS).logits, loaded(input_ids=TOKENS).logits)
        assert not torch.equal(model(input_ids=TOKENS).logits, base_model()(input_ids=TOKENS).logits)


def test_wrappers_do_not_change_names() -> None:
    model = peft.get_peft_model(base_model(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    wanted = set(lora.tensors(model))
    assert set(lora.tensors(torch.compile(model))) == wanted
    assert set(lora.tensors(torch.nn.DataParallel(model))) == wanted


def test_trained_biases_of_a_state_dict_are_not_left_out(segment_name: str) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], bias="lora_only")
    model = peft.get_peft_model(base_model(), config)
    with pytest.raises(errors.InvalidArgument, match="bias='lora_only'"):
        lora.manager(model.state_dict(), model.peft_config["default"].to_dict(), name=segment_name)
