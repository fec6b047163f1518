"""A family's model that was loaded from a quantised directory: its weights are the directory's, dequantised."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fp8_oracle
import numpy as np
import tiny_megatron as tiny
import torch
from safetensors.torch import save_file
from tiny_megatron import Parallel
from whole_model import Whole


@dataclass(frozen=True)
class Style:
    """How a directory is quantised."""

    #: None: a tensor has one scale.
    block: tuple[int, int] | None
    dtype: torch.dtype
    end: str
    config: dict[str, Any]
    powers: bool = False

    def of(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales, by the oracle."""
        wide, bf16 = values.float().numpy(), self.dtype == torch.bfloat16
        if self.block is None:
            codes, scales = fp8_oracle.by_tensor(wide, bf16)
            scales = scales.reshape([] if self.dtype == torch.float32 else [1])
        else:
            codes, scales = fp8_oracle.by_blocks(wide, *self.block, self.powers, bf16)
        return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(np.asarray(scales)).to(self.dtype)

    def dequantised(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        wide = scales.float().reshape(-1, scales.shape[-1] if self.block else 1).numpy()
        read = fp8_oracle.dequantised(codes.view(torch.uint8).numpy(), wide, *(self.block or codes.shape))
        return torch.from_numpy(read).bfloat16()


def blocks(down: int, across: int, dtype: torch.dtype = torch.float32, **more: Any) -> Style:
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [down, across], **more}
    return Style((down, across), dtype, "_scale_inv", config, powers="scale_fmt" in more)


POWERS = {"scale_fmt": "ue8m0"}
PER_TENSOR = Style(None, torch.float32, "_scale", {"quant_method": "fp8", "activation_scheme": "dynamic"})
COMPRESSED = Style(
    None,
    torch.bfloat16,
    "_scale",
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
            }
        },
    },
)


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight")


class Fp8(Whole):
    def __init__(self, name: str, directory: Path, style: Style) -> None:
        self.style = style
        super().__init__(name, directory, torch.bfloat16)

    def _build(self, rank: int) -> None:
        tiny.start(Parallel())
        (numbered,) = tiny.build(self.family, Parallel(), torch.float32)
        tiny.number(numbered)
        places = self.to_hf(numbered)
        (model,) = tiny.build(self.family, Parallel(), torch.bfloat16)
        # Of all elements, in the order of their numbers.
        state = [tensor for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)]
        flat = torch.cat([tensor.float().view(-1) for tensor in state])
        directory = self.quantised(self.to_hf(model))
        for name in filter(is_quantised, list(directory)):
            read = self.style.dequantised(directory[name], directory[name + self.style.end])
            flat[places[name].long() - 1] = read.float()
        with torch.no_grad():
            for tensor, values in zip(state, flat.split([tensor.numel() for tensor in state]), strict=True):
                tensor.copy_(values.view(tensor.shape))
        save_file(directory, self.hf / "model.safetensors", {"format": "pt"})
        (self.hf / "config.json").write_text(json.dumps({**self.family.hf, "quantization_config": self.style.config}))
        tiny.save([model], str(self.checkpoint))

    def quantised(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As the directory has them."""
        out: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if is_quantised(name):
                out[name], out[name + self.style.end] = self.style.of(tensor)
            else:
                out[name] = tensor
        return out
