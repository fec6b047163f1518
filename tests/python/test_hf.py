"""Models of transformers travel as `save_pretrained` writes them, without a copy of what is only seen otherwise."""

from __future__ import annotations

import gc
import subprocess
import weakref
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import errors, hf
from deltasync._programs import find

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

import hf_models  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402


def saved(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = safetensors.load_file(directory / "model.safetensors")
    return tensors


def assert_same(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        own = found[name].detach()
        assert (own.dtype, own.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(own.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def step(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[..., -1:] += 1


@pytest.mark.parametrize("config", hf_models.CONFIGS)
def test_names_shapes_dtypes_and_bits_of_save_pretrained(config: str, tmp_path: Path) -> None:
    model = hf_models.tiny(config)
    for _ in range(2):
        assert_same(dict(hf.tensors(model)), saved(model, tmp_path))
        step(model)


@pytest.mark.parametrize("config", hf_models.CONFIGS)
def test_a_published_model_is_pulled_as_the_directory_that_save_pretrained_writes(
    config: str, segment_name: str, tmp_path: Path, shm_files: set[str]
) -> None:
    model = hf_models.tiny(config)
    out = tmp_path / "pulled"
    with deltasync.WeightManager(model, name=segment_name) as manager:
        for version in (1, 2):
            manager.offload()
            manager.wait_ready()
            command = [find("deltasync"), "pull", "--from", manager.endpoint, "--out", out, "--number", str(version)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            pulled = safetensors.load_file(out / "current" / "model.safetensors")
            assert_same(pulled, saved(model, tmp_path / "saved"))
            step(model)


@pytest.mark.parametrize("config", [name for name in hf_models.CONFIGS if name != "joined"])
def test_what_is_a_view_is_not_copied(config: str) -> None:
    model = hf_models.tiny(config)
    memory = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    for name, tensor in hf.tensors(model):
        assert tensor.untyped_storage().data_ptr() in memory, name


def test_what_is_made_lives_one_group_at_a_time() -> None:
    model = hf_models.tiny("joined")
    memory = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    alive: list[weakref.ref[Any]] = []
    made = most = 0
    for _, tensor in hf.tensors(model):
        if tensor.untyped_storage().data_ptr() not in memory:
            made += 1
            alive.append(weakref.ref(tensor))
        del tensor
        most = max(most, sum(reference() is not None for reference in alive))
    assert made == model.config.num_hidden_layers  # one joined projection for each
    assert most <= 1


def test_the_form_of_a_model_is_made_once_and_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_models.tiny("mixtral")
    form, _ = hf.form_of(model)
    assert hf.form_of(model)[0] is form
    model.float()  # other strides, shapes or dtypes are another form
    assert hf.form_of(model)[0] is not form
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_memory_that_the_model_has_left_is_not_kept(segment_name: str) -> None:
    """A trainer that shares its device with an engine moves its model away after each version."""
    model = hf_models.tiny("qwen3_moe")
    with deltasync.WeightManager(model, name=segment_name) as manager:
        manager.offload(version=1)
        left = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        assert all(storage.expired() for storage in left)
        manager.offload(version=2)


def test_a_model_with_computed_tensors_is_published(segment_name: str, tmp_path: Path) -> None:
    model = hf_models.tiny("joined")
    with deltasync.WeightManager(model, name=segment_name) as manager, deltasync.Receiver(manager.endpoint) as receiver:
        for _ in range(2):
            receiver.update(manager.offload().version)
            assert_same(dict(receiver.tensors()), saved(model, tmp_path))
            step(model)


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel], ids=["compile", "parallel"])
def test_a_wrapped_model_has_the_names_of_the_model(wrap: Any, tmp_path: Path) -> None:
    model = hf_models.tiny("qwen3_moe")
    assert_same(dict(hf.tensors(wrap(model))), saved(model, tmp_path))


def test_compiled_layers_leave_no_trace_in_names(tmp_path: Path) -> None:
    model = hf_models.tiny("qwen3_moe")
    wanted = saved(model, tmp_path)
    model.model.layers[0].self_attn = torch.compile(model.model.layers[0].self_attn)
    assert any("_orig_mod" in name for name in model.state_dict())
    assert_same(dict(hf.tensors(model)), wanted)


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel], ids=["compile", "parallel"])
def test_names_of_any_module_and_of_its_state_are_without_wrappers(wrap: Any, segment_name: str) -> None:
    model = small()
    wrapped = wrap(model)
    names = list(model.state_dict())
    for given in (wrapped, wrapped.state_dict(), model):
        assert deltasync.layout_of(given)[0].names() == names
    with deltasync.WeightManager(wrapped, name=segment_name) as manager:
        with deltasync.Receiver(manager.endpoint) as receiver:
            for given in (None, wrapped.state_dict(), iter(wrapped.state_dict().items()), model.state_dict()):
                with torch.no_grad():
                    model[0].weight += 1
                receiver.update(manager.offload(given).version)
                assert_same(dict(receiver.tensors()), model.state_dict())


def test_a_module_called_module_keeps_its_name() -> None:
    model = torch.nn.ModuleDict({"module": small(), "other": small()})
    assert deltasync.layout_of(model)[0].names() == list(model.state_dict())
    assert deltasync.layout_of(model.state_dict())[0].names() == list(model.state_dict())


def test_fp32_masters_travel_as_the_checkpoints_dtypes(segment_name: str) -> None:
    """DeepSeek's class keeps the router's bias in fp32, whatever the rest is."""
    model = hf_models.tiny("deepseek_v3", torch.float32)
    with deltasync.WeightManager(model, dtype="bfloat16", name=segment_name) as manager:
        dtypes = {tensor.name: tensor.dtype for tensor in manager.layout}
        kept = {name for name in dtypes if name.endswith("e_score_correction_bias")}
        assert kept and {dtypes[name] for name in kept} == {"F32"}
        assert {dtype for name, dtype in dtypes.items() if name not in kept} == {"BF16"}
        assert set(manager.offload().cast) == set(dtypes) - kept


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="Sequential is no model of transformers"):
        hf.tensors(small())
    model = hf_models.tiny("gpt2")
    model._hf_peft_config_loaded = True
    with pytest.raises(errors.InvalidArgument, match=r"deltasync\.adapters\.lora"):
        deltasync.WeightManager(model)


def test_one_tensor_under_two_names_that_the_class_does_not_tie_is_refused() -> None:
    model = hf_models.tiny("mixtral")
    model.model.layers[1].input_layernorm.weight = model.model.layers[0].input_layernorm.weight
    with pytest.raises(errors.Unsupported, match=r"layers\.0\.input_layernorm\.weight, model\.layers\.1"):
        hf.tensors(model)


@pytest.mark.parametrize("config", [name for name in hf_models.CONFIGS if name != "joined"])
def test_into_a_module_of_the_same_class(config: str, segment_name: str) -> None:
    """The trainer has the checkpoint's names, the module its own: parts of its parameters are written in place."""
    trained, served, loaded = (hf_models.tiny(config, seed=seed) for seed in range(3))
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with (
            deltasync.Receiver(manager.endpoint, module=served) as receiver,
            deltasync.Receiver(manager.endpoint) as own,
        ):
            for _ in range(2):
                receiver.update(manager.offload().version)
                assert_same(dict(served.state_dict()), dict(trained.state_dict()))
                assert receiver.attest() == []
                own.update(manager.version)
                own.load_into(loaded)
                assert_same(dict(loaded.state_dict()), dict(trained.state_dict()))
                step(trained)
            served.float()
            with pytest.raises(errors.LayoutMismatch, match="make another Receiver"):
                receiver.update(manager.offload().version)


def test_into_a_module_that_lacks_an_expert_or_has_more(segment_name: str) -> None:
    """One parameter of the module holds all experts, so that each of its parts has to be looked at."""
    model = hf_models.tiny("mixtral")
    some = {name: tensor for name, tensor in hf.tensors(model) if ".experts.2.w2" not in name}
    with deltasync.WeightManager(some, name=segment_name) as manager:
        manager.offload(some)
        with pytest.raises(errors.LayoutMismatch, match=r"experts\.2\.w2\.weight"):
            deltasync.Receiver(manager.endpoint, module=model)
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            with pytest.raises(errors.LayoutMismatch, match=r"experts\.2\.w2\.weight"):
                receiver.load_into(model)


def test_a_module_takes_its_own_names_too(segment_name: str) -> None:
    trained, served = hf_models.tiny("qwen3_moe"), hf_models.tiny("qwen3_moe", seed=1)
    state = trained.state_dict()
    with deltasync.WeightManager(state, name=segment_name) as manager:
        manager.offload(state)
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            receiver.update()
            assert_same(dict(served.state_dict()), state)
