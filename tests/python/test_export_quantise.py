"""Codes and scales are those of a slow oracle, bit for bit, on matrices of all kinds."""

from __future__ import annotations

from typing import Any

import fp8_oracle
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltasync import _export_quantise  # noqa: E402
from deltasync._export_quantise import Scheme, dequantise, dequantise_at, quantise  # noqa: E402

SHAPES = [
    (1, 1),
    (1, 128),
    (128, 1),
    (128, 128),
    (127, 129),
    (129, 127),
    (256, 256),
    (1, 1000),
    (1000, 1),
    (64, 64),
    (576, 512),
    (300, 200),
    (384, 130),
    (130, 384),
    (255, 257),
    (2, 3),
    (640, 96),
    (96, 640),
    (512, 768),
    (191, 383),
]


def matrix(shape: tuple[int, int], dtype: Any, seed: int = 1) -> Any:
    """As trained weights, with rows of zeros, of numbers too small to be normal, and of very large ones."""
    torch.manual_seed(seed * 7919 + shape[0] * 1009 + shape[1])
    made = torch.randn(shape) * 0.02
    kinds = [0.0, 1e-40, 3e-6, 1e30, 1.0, 448.0]
    for number, kind in enumerate(kinds):
        rows = slice(number * shape[0] // 9, (number + 1) * shape[0] // 9)
        made[rows] *= kind
    made[-1, -1] = -448.0
    return made.to(dtype)


def all_of(values: Any, scheme: Scheme) -> tuple[Any, Any]:
    """Codes as bytes, scales as fp32 numbers."""
    codes, scales = quantise(lambda begin, end: values[begin:end], values.shape, scheme)
    assert codes.dtype == torch.float8_e4m3fn and tuple(scales.shape) == scheme.scale_shape(values.shape)
    return codes.view(torch.uint8).numpy(), scales.float().numpy()


def same(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{other.itemsize}"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_oracles_codes_and_scales(shape: tuple[int, int], dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_export_quantise, "BAND_ELEMENTS", 40_000)  # several bands
    values = matrix(shape, dtype)
    wide = values.float().numpy()
    for block in [(128, 128), (32, 48)]:
        for stored, powers in [("F32", False), ("BF16", False), ("F32", True), ("BF16", True), ("F8_E8M0", True)]:
            codes, scales = all_of(values, Scheme(block, stored, powers))
            expected = fp8_oracle.by_blocks(wide, *block, powers, bf16_scales=stored == "BF16")
            same(scales, expected[1])
            same(codes, expected[0])
    for stored in ("F32", "BF16"):
        codes, scales = all_of(values, Scheme(None, stored))
        expected = fp8_oracle.by_tensor(wide, bf16_scales=stored == "BF16")
        same(scales, expected[1])
        same(codes, expected[0])


def test_each_bf16_is_coded_as_by_the_oracle() -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = words[words.isfinite()].view(-1, 8)
    for scheme in (Scheme((128, 8), "F32"), Scheme((1, 8), "F8_E8M0", True), Scheme(None, "F32")):
        codes, scales = all_of(finite, scheme)
        wide = finite.float().numpy()
        expected = (
            fp8_oracle.by_blocks(wide, *scheme.block, scheme.powers) if scheme.block else fp8_oracle.by_tensor(wide)
        )
        same(codes, expected[0])
        same(scales, expected[1])


def test_zeros_have_the_least_scale() -> None:
    zeros = torch.zeros(3, 5, dtype=torch.bfloat16)
    codes, scales = all_of(zeros, Scheme((128, 128), "F32"))
    assert not codes.any() and scales.item() == np.float32(1e-4) / np.float32(448)
    codes, scales = all_of(zeros, Scheme((128, 128), "F8_E8M0", True))
    assert not codes.any() and scales.item() == 2.0**-22
    codes, scales = all_of(zeros, Scheme(None, "F32"))
    assert not codes.any() and scales.item() == pytest.approx(1e-12 / 448)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_largest_are_448(dtype: Any) -> None:
    for seed in range(200):
        torch.manual_seed(seed)
        values = (torch.randn(8, 8) * 10.0 ** (seed % 30 - 3)).to(dtype)
        for scheme in (Scheme((8, 8), "F32"), Scheme((8, 8), "BF16"), Scheme(None, "F32"), Scheme(None, "BF16")):
            codes, _ = all_of(values, scheme)
            assert (codes & 127).max() == 126, scheme


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_no_number_is_none_in_its_block(bad: float) -> None:
    values = torch.ones(4, 6, dtype=torch.bfloat16)
    values[1, 1] = bad
    for scheme in (Scheme((2, 3), "F32"), Scheme((2, 3), "F32", True), Scheme((2, 3), "F8_E8M0", True)):
        codes, scales = all_of(values, scheme)
        read = fp8_oracle.dequantised(codes, scales, 2, 3)
        assert not np.isfinite(scales[0, 0]) and np.isnan(read[:2, :3]).all()
        assert np.isfinite(read[:, 3:]).all() and np.isfinite(read[2:]).all()
    codes, scales = all_of(values, Scheme(None, "F32"))
    assert np.isnan(fp8_oracle.dequantised(codes, scales, 4, 6)).all()


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (5, 260)], ids=str)
@pytest.mark.parametrize(
    "scheme", [Scheme((128, 128), "F32"), Scheme((16, 64), "F8_E8M0", True), Scheme(None, "BF16")], ids=str
)
def test_what_engines_read(shape: tuple[int, int], scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_export_quantise, "BAND_ELEMENTS", 10_000)
    values = torch.randn(shape).to(torch.bfloat16)
    codes, scales = quantise(lambda begin, end: values[begin:end], shape, scheme)
    read = dequantise(codes, scales, scheme)
    expected = fp8_oracle.dequantised(codes.view(torch.uint8).numpy(), scales.float().numpy(), *(scheme.block or shape))
    same(read.float().numpy(), expected)
    some = torch.randperm(values.numel())[:500]
    assert torch.equal(dequantise_at(codes.view(-1), scales.view(-1), scheme, shape, some), read.view(-1)[some])
    # Codes have four significant bits; those of scales that are next powers lose one step of the range, no bits.
    near = (read.float() - values.float()).abs() <= values.float().abs() / 16 + scales.float().max() * 2**-9
    assert bool(near.all())
