"""fp8 quantisation once more, slowly, with numpy alone: block by block, each code looked up in the list of all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def _values() -> Any:
    """Of the codes 0 to 126; 127 is no number."""
    out = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        out.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(out)


VALUES = _values()
#: From which value on a code is the next one, if the value is no tie; ties go to the even code.
_MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2


def encode(values: Any) -> Any:
    """To the nearest, ties to even; NaN where there is none."""
    wide = np.abs(values.astype(np.float64))
    codes = np.searchsorted(_MIDDLES, wide, side="left")
    tie = (codes < len(_MIDDLES)) & (_MIDDLES[np.minimum(codes, len(_MIDDLES) - 1)] == wide)
    codes = np.where(tie & (codes % 2 == 1), codes + 1, codes)
    codes = np.where(np.isnan(wide) | (wide > 464), 127, codes)
    return (codes | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def decode(codes: Any) -> Any:
    values = np.append(VALUES, np.nan)[codes & 127].astype(np.float32)
    return np.where(codes & 128, -values, values)


def to_bf16(values: Any) -> Any:
    """To the nearest, in fp32; ties to even."""
    words = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (
        (words + 0x7FFF + (words >> np.uint64(16) & np.uint64(1))) >> np.uint64(16) << np.uint64(16)
    ) & 0xFFFFFFFF
    return np.where(np.isfinite(values), rounded.astype(np.uint32).view(np.float32), values)


def by_blocks(values: Any, down: int, across: int, powers: bool, bf16_scales: bool = False) -> tuple[Any, Any]:
    """Codes (bytes) and scales (fp32)."""
    values = values.astype(np.float32)
    rows, cols = values.shape
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((-(-rows // down), -(-cols // across)), np.float32)
    with np.errstate(all="ignore"):
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = values[i * down : (i + 1) * down, j * across : (j + 1) * across]
                scale = np.float32(np.maximum(np.max(np.abs(block)), np.float32(1e-4))) / np.float32(448)
                if powers:
                    scale = _next_power(scale)
                if bf16_scales:
                    scale = to_bf16(np.array([scale]))[0]
                scales[i, j] = scale
                made = encode(block * (np.float32(1) / scale))
                codes[i * down : (i + 1) * down, j * across : (j + 1) * across] = made
    return codes, scales


def _next_power(scale: Any) -> Any:
    if not np.isfinite(scale):
        return scale
    mantissa, exponent = math.frexp(scale)  # of at least a half, and less than 1
    return np.float32(math.ldexp(1.0, exponent - (mantissa == 0.5)))


def by_tensor(values: Any, bf16_scales: bool = False) -> tuple[Any, Any]:
    values = values.astype(np.float32)
    with np.errstate(all="ignore"):
        largest = np.float32(np.maximum(np.max(np.abs(values)), np.float32(1e-12)))
        factor = np.float32(1) / largest * np.float32(448)
        scale = np.float32(1) / factor
        if bf16_scales:
            scale = to_bf16(np.array([scale]))[0]
            factor = np.float32(1) / scale
        codes = encode(np.clip(values * factor, np.float32(-448), np.float32(448)))
    return codes, np.array([[scale]], np.float32)


def dequantised(codes: Any, scales: Any, down: int, across: int) -> Any:
    """In bf16's numbers, as fp32."""
    wide = np.repeat(np.repeat(scales, down, 0), across, 1)[: codes.shape[0], : codes.shape[1]]
    with np.errstate(all="ignore"):
        return to_bf16(decode(codes) * wide)
