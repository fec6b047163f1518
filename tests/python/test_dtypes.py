"""What `dtype=` casts, what it never does, and every dtype that safetensors files have."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import errors
from deltasync._programs import find

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


def dtypes(tensors: dict[str, Any], dtype: Any) -> dict[str, str]:
    layout, _ = deltasync.layout_of(tensors, dtype=dtype)
    return {tensor.name: tensor.dtype for tensor in layout}


def f8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def test_the_compute_dtype_is_cast_and_no_other() -> None:
    mixed = {
        "proj.weight": torch.ones(64, 64, dtype=torch.bfloat16),
        "norm.weight": torch.ones(64, dtype=torch.bfloat16),
        "router.e_score_correction_bias": torch.ones(8),
        "position": torch.ones(4, dtype=torch.int64),
    }
    kept = {**dict.fromkeys(mixed, "F16"), "router.e_score_correction_bias": "F32", "position": "I64"}
    assert dtypes(mixed, "float16") == kept
    masters = {name: tensor.float() for name, tensor in mixed.items() if name != "position"}
    assert set(dtypes(masters, "bf16").values()) == {"BF16"}


def test_quantised_data_and_its_scales_are_never_cast() -> None:
    quantised = {
        "embed.weight": torch.ones(999, 8),
        "q.weight": f8(64, 64),
        "q.weight_scale_inv": torch.ones(1, 1),
        "q.input_scale": torch.ones(()),
        "q.bias": torch.ones(64),
        "experts.gate_up_proj": f8(2, 8, 8),
        "experts.gate_up_proj_scale_inv": torch.ones(2, 1, 1),
        "packed.qweight": torch.ones(4, 4, dtype=torch.int32),
        "packed.scales": torch.ones(4, 4),
        "packed.qzeros": torch.ones(4, 4, dtype=torch.int32),
        "mx.blocks": torch.ones(4, 4, dtype=torch.uint8),
        "mx.scales": torch.ones(4, dtype=torch.uint8),
        "norm.scale": torch.ones(8),  # a norm's weight: nothing beside it is quantised
    }
    cast = {"embed.weight", "q.bias", "norm.scale"}
    own = dtypes(quantised, None)
    for dtype in ("bfloat16", {"*": "bfloat16"}):
        assert dtypes(quantised, dtype) == {name: "BF16" if name in cast else own[name] for name in own}


def test_patterns_and_functions_choose() -> None:
    tensors = {"a.weight": torch.ones(4), "a.bias": torch.ones(4), "gate.bias": torch.ones(4), "n": torch.ones(4)}
    first = {"gate.*": None, "*.bias": "float64", "*.weight": torch.bfloat16}
    assert dtypes(tensors, first) == {"a.weight": "BF16", "a.bias": "F64", "gate.bias": "F32", "n": "F32"}
    asked: list[tuple[str, str]] = []

    def choose(name: str, dtype: str) -> str | None:
        asked.append((name, dtype))
        return "bf16" if name == "n" else None

    assert dtypes(tensors, choose) == {"a.weight": "F32", "a.bias": "F32", "gate.bias": "F32", "n": "BF16"}
    assert asked == [(name, "F32") for name in tensors]


def test_a_cast_is_no_quantisation() -> None:
    for dtype in ("float8_e4m3fn", "int8", {"*": "F4"}, lambda name, dtype: "float8_e5m2"):
        with pytest.raises(errors.InvalidArgument, match="quantise"):
            dtypes({"a": torch.ones(4)}, dtype)
    with pytest.raises(errors.InvalidArgument, match="a: dtype= would cast F8_E4M3"):
        dtypes({"a": f8(4)}, lambda name, dtype: "bfloat16")


def test_a_dtype_that_numpy_does_not_know_is_named_with_what_brings_it() -> None:
    class Array:
        def astype(self, name: str) -> None:
            raise TypeError(f"data type '{name}' not understood")  # as numpy says it before ml_dtypes is imported

    with pytest.raises(errors.InvalidArgument, match=r"w: .* F32 to BF16: .*'bfloat16'.*import ml_dtypes"):
        deltasync._arrays.cast_to(Array(), "w", "F32", "BF16")


def test_a_quantised_layout_takes_no_other_numbers(segment_name: str) -> None:
    with deltasync.WeightManager({"a": f8(4)}, name=segment_name) as manager:
        with pytest.raises(errors.InvalidArgument, match="a: its dtype is BF16, the layout's F8_E4M3"):
            manager.offload({"a": torch.ones(4, dtype=torch.bfloat16)})


def test_the_report_says_what_was_cast(segment_name: str) -> None:
    tensors = {"a": torch.ones(64), "b": torch.ones(4, dtype=torch.float64), "c": torch.ones(4, dtype=torch.bfloat16)}
    with deltasync.WeightManager(tensors, dtype={"a": "bf16", "b": "f32"}, name=segment_name) as manager:
        for _ in range(2):
            report = manager.offload(tensors)
            assert report.cast == {"a": ("F32", "BF16"), "b": ("F64", "F32")}
        assert "1 cast from F32 to BF16, 1 cast from F64 to F32" in str(report)
        assert manager.offload({**tensors, "a": tensors["a"].bfloat16()}).cast == {"b": ("F64", "F32")}


def every_dtype() -> dict[str, torch.Tensor]:
    """Of all dtypes that safetensors' torch module saves, with random bits."""
    generator = torch.Generator().manual_seed(9)
    tensors: dict[str, torch.Tensor] = {}
    for dtype in safetensors._SIZE:
        if dtype is None:
            continue
        bits = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 48), generator=generator, dtype=torch.uint8)
        tensors[str(dtype)] = bits.view(dtype)
        tensors[f"{dtype}.columns"] = bits.view(dtype)[:, 1:3]
    return tensors


def test_every_dtype_arrives_bit_for_bit_and_as_the_file_that_safetensors_writes(
    segment_name: str, tmp_path: Path
) -> None:
    tensors = every_dtype()
    assert len(tensors) == 40
    with deltasync.WeightManager(tensors, name=segment_name) as manager:
        with deltasync.Receiver(manager.endpoint) as receiver:
            for _ in range(2):
                receiver.update(manager.offload(tensors).version)
                received = dict(receiver.tensors())
                assert set(received) == set(tensors)
                for name, tensor in tensors.items():
                    wanted = tensor.contiguous()
                    assert (received[name].dtype, received[name].shape) == (wanted.dtype, wanted.shape), name
                    assert torch.equal(received[name].view(torch.uint8), wanted.view(torch.uint8)), name
                for tensor in tensors.values():
                    tensor.view(torch.uint8)[-1] ^= 1
        manager.offload(tensors)
        manager.wait_ready()
        command = [find("deltasync"), "pull", "--from", manager.endpoint, "--out", tmp_path / "out"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    pulled = (tmp_path / "out" / "current" / "model.safetensors").read_bytes()
    wanted = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.save_file(wanted, tmp_path / "ours.safetensors")
    ours = (tmp_path / "ours.safetensors").read_bytes()
    assert safetensors_entries(pulled) == safetensors_entries(ours)


def safetensors_entries(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    import json

    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[8 + size :][slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def test_conjugates_are_written_as_they_read(segment_name: str) -> None:
    value = torch.complex(torch.ones(3), torch.ones(3))
    with deltasync.WeightManager({"a": value}, name=segment_name) as manager:
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update(manager.offload({"a": value.conj()}).version)
            assert [complex(item) for _, tensor in receiver.tensors() for item in tensor] == [1 - 1j] * 3
