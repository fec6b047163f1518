"""A LoRA adapter travels alone, and arrives as the directory that peft would have written."""

from __future__ import annotations

import enum
import json
from pathlib import Path

import deltasync
import pytest
from deltasync import errors
from deltasync.adapters import lora

torch = pytest.importorskip("torch")

PREFIX = "base_model.model.model.layers.0.self_attn"


class PeftType(str, enum.Enum):
    LORA = "LORA"


CONFIG = {
    "peft_type": PeftType.LORA,
    "r": 4,
    "lora_alpha": 8,
    "target_modules": {"q_proj", "v_proj"},
    "modules_to_save": ["lm_head"],
    "base_model_name_or_path": "base",
    "bias": "none",
}


class Wrapped(torch.nn.Module):
    """Names as in a module that peft has wrapped."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in {
            f"{PREFIX}.q_proj.base_layer.weight": (16, 16),
            f"{PREFIX}.q_proj.lora_A.default.weight": (4, 16),
            f"{PREFIX}.q_proj.lora_B.default.weight": (16, 4),
            f"{PREFIX}.q_proj.lora_A.other.weight": (2, 16),
            f"{PREFIX}.q_proj.lora_magnitude_vector.default.weight": (16,),
            "base_model.model.model.embed_tokens.lora_embedding_A.default": (4, 32),
            "base_model.model.lm_head.original_module.weight": (32, 16),
            "base_model.model.lm_head.modules_to_save.default.weight": (32, 16),
        }.items():
            *path, last = name.split(".")
            here: torch.nn.Module = self
            for part in path:
                if not hasattr(here, part):
                    here.add_module(part, torch.nn.Module())
                here = getattr(here, part)
            here.register_parameter(last, torch.nn.Parameter(torch.randn(shape, generator=generator)))


IN_FILE = {
    f"{PREFIX}.q_proj.lora_A.weight",
    f"{PREFIX}.q_proj.lora_B.weight",
    f"{PREFIX}.q_proj.lora_magnitude_vector",
    "base_model.model.model.embed_tokens.lora_embedding_A",
    "base_model.model.lm_head.weight",
}


def test_names_are_those_of_the_file() -> None:
    model = Wrapped()
    found = lora.tensors(model)
    assert set(found) == IN_FILE
    own = dict(model.named_parameters())
    assert found[f"{PREFIX}.q_proj.lora_B.weight"] is own[f"{PREFIX}.q_proj.lora_B.default.weight"]
    assert set(lora.tensors(model, "other")) == {f"{PREFIX}.q_proj.lora_A.weight"}
    files_own = {f"{PREFIX}.q_proj.lora_A.weight": torch.zeros(2, 3)}
    assert lora.tensors(files_own) == files_own
    beside = {**files_own, f"{PREFIX}.q_proj.base_layer.bias": torch.zeros(3)}
    assert lora.tensors(beside) == beside  # as peft.get_peft_model_state_dict returns them
    with pytest.raises(errors.InvalidArgument, match="'absent'"):
        lora.tensors(model, "absent")
    with pytest.raises(errors.InvalidArgument, match="lora_"):
        lora.tensors({"model.embed.weight": torch.zeros(2)})
    # Other libraries' names have no adapter's name either, and the base model's tensors beside them.
    other = {"q.weight": torch.zeros(2), "q.lora_A": torch.zeros(1), "q.lora_b.weight": torch.zeros(1)}
    assert set(lora.tensors(other)) == {"q.lora_A", "q.lora_b.weight"}


def test_directory_as_peft_reads_it(segment_name: str, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    model = Wrapped()
    with lora.manager(model, CONFIG, name=segment_name) as manager:
        manager.offload(lora.tensors(model))
        with deltasync.Receiver(manager.endpoint, directory=tmp_path / "adapter") as receiver:
            for step in range(1, 4):
                if step > 1:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.view(-1)[:2] += 0.5
                    manager.offload(lora.tensors(model))
                assert receiver.update(step).mode == ("full" if step == 1 else "delta")
                current = tmp_path / "adapter" / "current"
                assert {file.name for file in current.iterdir()} >= {lora.WEIGHTS_FILE, lora.CONFIG_FILE}
                assert not (current / "model.safetensors").exists()
                read = load_file(current / lora.WEIGHTS_FILE)
                assert set(read) == IN_FILE
                for name, tensor in lora.tensors(model).items():
                    assert torch.equal(read[name], tensor), name
                config = json.loads((current / lora.CONFIG_FILE).read_text())
                assert (config["peft_type"], config["target_modules"]) == ("LORA", ["q_proj", "v_proj"])


def test_config_from_a_file(segment_name: str, tmp_path: Path) -> None:
    model = Wrapped()
    (tmp_path / lora.CONFIG_FILE).write_text('{"peft_type": "LORA", "r": 4}')
    with lora.manager(model, tmp_path, name=segment_name) as manager:
        assert manager.sidecar.others[lora.CONFIG_FILE] == b'{"peft_type": "LORA", "r": 4}'
        assert manager.sidecar.weight_files == [lora.WEIGHTS_FILE]
    with pytest.raises(errors.InvalidArgument, match="peft_type"):
        lora.manager(model, {"r": 4}, name=segment_name)
    with pytest.raises(errors.InvalidArgument, match="config"):
        lora.manager(model, name=segment_name)
    for option in ({"bias": "lora_only"}, {"trainable_token_indices": [1, 2]}):
        with pytest.raises(errors.InvalidArgument, match=next(iter(option))):
            lora.manager(model, {**CONFIG, **option}, name=segment_name)
        with lora.manager(lora.tensors(model), {**CONFIG, **option}, name=segment_name):
            pass  # as peft returned them
