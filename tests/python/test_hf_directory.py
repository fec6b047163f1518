"""`hf=DIR`: what is published is compared with a model directory before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import errors

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

import hf_models  # noqa: E402


@pytest.fixture
def model() -> Any:
    return hf_models.tiny("qwen3_moe")


@pytest.fixture
def directory(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return tmp_path / "model"


def refused(given: Any, directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """The message; nothing may be started before the comparison."""
    monkeypatch.setenv("DELTASYNC_BIN", "/nowhere")
    with pytest.raises(errors.LayoutMismatch) as caught:
        deltasync.WeightManager(given, hf=directory, **options)
    return str(caught.value)


def test_a_model_of_the_directory_is_published(model: Any, directory: Path, segment_name: str) -> None:
    with deltasync.WeightManager(model, hf=directory, name=segment_name) as manager:
        assert manager.offload().version.number == 1
    masters = hf_models.tiny("qwen3_moe", torch.float32)
    with deltasync.WeightManager(masters, dtype="bf16", hf=directory, name=segment_name) as manager:
        assert manager.offload().version.number == 1


def test_the_modules_own_names_are_not_the_checkpoints(
    model: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(model.state_dict(), directory, monkeypatch)
    assert f"hf='{directory}' has other tensors than what is published" in said
    assert "only published: model.layers.0.mlp.experts.gate_up_proj" in said
    assert "only there: model.layers.0.mlp.experts.0" in said and "and 21 more" in said
    assert "publish the names that save_pretrained writes" in said


def test_dtype_forgotten(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(hf_models.tiny("qwen3_moe", torch.float32), directory, monkeypatch)
    assert "other dtypes: " in said and "(F32, there BF16)" in said and "and 42 more" in said
    assert 'dtype="bfloat16"' in said


def test_names_with_a_prefix(model: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {f"actor.{name}": tensor for name, tensor in deltasync.hf.tensors(model)}
    assert "the trainer's names begin with 'actor.' where the model's begin with nothing" in refused(
        given, directory, monkeypatch
    )


def test_another_model(model: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(deltasync.hf.tensors(model))
    given["lm_head.weight"] = torch.ones(65, 32, dtype=torch.bfloat16)
    del given["model.norm.weight"]
    said = refused(given, directory, monkeypatch)
    assert "only there: model.norm.weight; other shapes: lm_head.weight ([65, 32], there [64, 32])" in said
    assert "publish the tensors that this directory has" in said


def test_what_the_models_class_leaves_alone_may_be_there(directory: Path, segment_name: str, tmp_path: Path) -> None:
    model = hf_models.tiny("qwen3_moe")
    safetensors.save_file({"model.layers.2.eh_proj.weight": torch.ones(2)}, directory / "model-mtp.safetensors")
    (directory / "model.safetensors.index.json").unlink()  # every file counts
    with pytest.raises(errors.LayoutMismatch, match=r"only there: model\.layers\.2\.eh_proj\.weight"):
        deltasync.WeightManager(model, hf=directory, name=segment_name)
    model._keys_to_ignore_on_load_unexpected = [r"^model\.layers\.2\."]
    with deltasync.WeightManager(model, hf=directory, name=segment_name) as manager:
        assert manager.offload().version.number == 1


def test_no_directory(model: Any, tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound, match="nowhere"):
        deltasync.WeightManager(model, hf=tmp_path / "nowhere")
