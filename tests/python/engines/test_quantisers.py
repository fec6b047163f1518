"""Codes and scales are those that the engines themselves make of the same weights, and what they read is what a trainer
holds that began from a quantised directory."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")

from deltasync._export_quantise import Scheme, dequantise, quantise  # noqa: E402
from test_export_quantise import SHAPES, matrix  # noqa: E402

BLOCKS, POWERS = Scheme((128, 128), "F32"), Scheme((128, 128), "F32", powers=True)
EXPONENTS = Scheme((128, 128), "F8_E8M0", powers=True)


def made(values: Any, scheme: Scheme) -> tuple[Any, Any]:
    return quantise(lambda begin, end: values[begin:end], values.shape, scheme)


def same(one: tuple[Any, Any], codes: Any, scales: Any) -> None:
    assert torch.equal(one[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(one[1].float().view(-1), scales.float().view(-1))


@pytest.fixture
def vllm() -> Any:
    pytest.importorskip("vllm", reason="needs vLLM (tools/test_engines.sh vllm)")
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.utils import deep_gemm

    torch._dynamo.config.disable = True  # per_block_cast_to_fp8 as it is written
    yield deep_gemm.per_block_cast_to_fp8, fp8_utils.input_to_float8
    torch._dynamo.config.disable = False


@pytest.fixture
def sglang() -> Any:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang (tools/test_engines.sh sglang)")
    import sglang_model  # operators that other packages have compiled
    from sglang.srt.layers.quantization import fp8_utils

    assert sglang_model.LIBRARY
    return fp8_utils


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_vllm_makes(vllm: Any, shape: tuple[int, int]) -> None:
    by_block, by_tensor = vllm
    for dtype in (torch.bfloat16, torch.float32):
        values = matrix(shape, dtype)
        same(made(values, BLOCKS), *by_block(values, [128, 128], use_ue8m0=False))
        same(made(values, Scheme((32, 48), "F32")), *by_block(values, [32, 48], use_ue8m0=False))
        same(made(values, POWERS), *by_block(values, [128, 128], use_ue8m0=True))
        same(made(values, EXPONENTS), *by_block(values, [128, 128], use_ue8m0=True))
        # Of bf16 it would round the factor to bf16, too.
        same(made(values, Scheme(None, "F32")), *by_tensor(values.float()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_sglang_makes(sglang: Any, shape: tuple[int, int]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        values = matrix(shape, dtype)
        same(made(values, POWERS), *sglang.per_block_cast_to_fp8(values))
        same(made(values, EXPONENTS), *sglang.per_block_cast_to_fp8(values))
        same(made(values, Scheme(None, "F32")), *sglang.input_to_float8(values, torch.float8_e4m3fn))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_sglang_reads(sglang: Any, shape: tuple[int, int]) -> None:
    values = matrix(shape, torch.bfloat16)
    for scheme in (BLOCKS, POWERS):
        codes, scales = made(values, scheme)
        read = sglang.block_quant_dequant(codes, scales, [128, 128], torch.bfloat16)
        assert torch.equal(dequantise(codes, scales, scheme).view(torch.int16), read.view(torch.int16))
