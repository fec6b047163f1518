"""Weights as a quantised model directory has them: fp8 codes and their scales, the same bits on every device.

A block (rows, columns), as vLLM, SGLang and DeepGEMM make it, in fp32::

    scale = max(amax, 1e-4) / 448          # of powers of two: the next one up
    code = e4m3(value * (1 / scale))

A whole tensor with one scale, as vLLM's and SGLang's ``input_to_float8``::

    factor = (1 / max(amax, 1e-12)) * 448
    code = e4m3(value * factor);  scale = 1 / factor

A scale that is stored in bf16 is rounded before values are divided by it. A block with a NaN or an infinity is read as
NaNs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ._arrays import torch_dtype

#: The largest number of e4m3.
_MAX = 448.0
_LEAST_OF_BLOCK = 1e-4
_LEAST_OF_TENSOR = 1e-12
#: Of values that are in fp32 at a time, at most; one row of blocks at least.
BAND_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a tensor is quantised."""

    #: Rows and columns that share a scale; None: all of the tensor does.
    block: tuple[int, int] | None
    #: safetensors' dtype of the scales: F32, BF16 or F8_E8M0.
    scales: str
    #: Whether scales are powers of two.
    powers: bool = False

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        if self.block is None:
            return 1, 1
        return math.ceil(shape[0] / self.block[0]), math.ceil(shape[1] / self.block[1])


#: Rows [begin, end) of the values, in any floating dtype.
Rows = Callable[[int, int], Any]


def quantise(rows: Rows, shape: Sequence[int], scheme: Scheme) -> tuple[Any, Any]:
    """Codes and scales of a matrix of whole blocks; scales are in the dtype in which they are stored, and of
    ``scheme.scale_shape(shape)``. Beside these, there is a band of the values at a time."""
    return _by_tensor(rows, shape, scheme) if scheme.block is None else _by_block(rows, shape, scheme)


def dequantise(codes: Any, scales: Any, scheme: Scheme) -> Any:
    """As engines and trainers read it: the product in fp32, rounded to bf16."""
    import torch

    made = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    down, across = scheme.block or (max(codes.shape[0], 1), max(codes.shape[1], 1))
    scales = scales.float().view(scheme.scale_shape(codes.shape))
    for begin, end in _bands(codes.shape, down):
        band = scales[begin // down : math.ceil(end / down)]
        wide = band.repeat_interleave(down, 0)[: end - begin].repeat_interleave(across, 1)[:, : codes.shape[1]]
        made[begin:end] = codes[begin:end].float() * wide
    return made


def dequantise_at(codes: Any, scales: Any, scheme: Scheme, shape: Sequence[int], place: Any) -> Any:
    """The same, of some elements only. `codes`, `scales`: flat; `place`: indices in the whole tensor."""
    import torch

    down, across = scheme.block or (max(shape[0], 1), max(shape[1], 1))
    row, col = place // shape[1] // down, place % shape[1] // across
    factors = scales.float()[row * scheme.scale_shape(shape)[1] + col]
    return (codes[place].float() * factors).to(torch.bfloat16)


def _bands(shape: Sequence[int], down: int) -> Iterator[tuple[int, int]]:
    """Rows of blocks that are few enough together."""
    step = max(BAND_ELEMENTS // max(down * shape[1], 1), 1) * down
    for begin in range(0, shape[0], step):
        yield begin, min(begin + step, shape[0])


def _by_block(rows: Rows, shape: Sequence[int], scheme: Scheme) -> tuple[Any, Any]:
    import torch

    assert scheme.block is not None
    down, across = scheme.block
    codes: Any = None
    scales: list[Any] = []
    for begin, end in _bands(shape, down):
        values = rows(begin, end).float()
        if codes is None:
            codes = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=values.device)
        over = (0, -shape[1] % across, 0, -(end - begin) % down)
        padded = torch.nn.functional.pad(values, over) if any(over) else values
        blocks = padded.view(-1, down, padded.shape[1] // across, across)
        amax = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=_LEAST_OF_BLOCK)
        stored, scale = _stored(amax / _tensor(_MAX, amax), scheme)
        made = (blocks * (1.0 / scale)).view_as(padded)
        codes[begin:end] = made[: end - begin, : shape[1]].to(torch.float8_e4m3fn)
        scales.append(stored.flatten(1))
    return codes, torch.cat(scales)


def _by_tensor(rows: Rows, shape: Sequence[int], scheme: Scheme) -> tuple[Any, Any]:
    import torch

    bands = list(_bands(shape, 1))
    largest = torch.stack([rows(begin, end).float().abs().amax() for begin, end in bands]).amax()
    factor = largest.clamp(min=_LEAST_OF_TENSOR).reciprocal() * _MAX
    stored, scale = _stored(1.0 / factor, scheme)
    if scheme.scales != "F32":
        factor = 1.0 / scale
    codes = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=largest.device)
    for begin, end in bands:
        codes[begin:end] = (rows(begin, end).float() * factor).to(torch.float8_e4m3fn)
    return codes, stored.view(1, 1)


def _tensor(value: float, like: Any) -> Any:
    """On a GPU torch divides by a tensor, but multiplies by the reciprocal of a number."""
    import torch

    return torch.full((), value, dtype=torch.float32, device=like.device)


def _stored(scale: Any, scheme: Scheme) -> tuple[Any, Any]:
    """Scales as they are stored, and what numbers these are."""
    import torch

    if scheme.powers:
        word, finite = scale.view(torch.int32), scale.isfinite()
        exponent = (word >> 23 & 0xFF) + (word & 0x7FFFFF != 0)
        scale = torch.where(finite, (exponent << 23).view(torch.float32), scale)
        if scheme.scales == "F8_E8M0":
            return torch.where(finite, exponent, 255).to(torch.uint8).view(torch_dtype("F8_E8M0")), scale
    stored = scale.to(torch_dtype(scheme.scales))
    return stored, stored.float()
