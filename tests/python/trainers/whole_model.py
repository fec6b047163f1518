"""A family's model as it was before it was cut into pieces."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_megatron as tiny
import torch
from gloo_ranks import run_ranks
from megatron_oracle import to_hf
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES
from tiny_megatron import Parallel


class Whole:
    """A family's unsharded model: its checkpoint as Megatron saves it, and as a HF directory."""

    def __init__(self, name: str, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Its values are numbers of their own for each element, or, if not in float32, as at random."""
        self.family = FAMILIES[name]
        self.dtype = dtype
        self.checkpoint = directory / "checkpoint"
        self.checkpoint.mkdir()
        self.hf = directory / "hf"
        self.hf.mkdir()
        run_ranks(1, self._build, directory)
        self.tensors = load_file(self.hf / "model.safetensors")

    def _build(self, rank: int) -> None:
        tiny.start(Parallel())
        (model,) = tiny.build(self.family, Parallel(), self.dtype)
        if self.dtype == torch.float32:
            tiny.number(model)
        save_file(self.to_hf(model), self.hf / "model.safetensors", {"format": "pt"})
        (self.hf / "config.json").write_text(json.dumps(self.family.hf))
        tiny.save([model], str(self.checkpoint))

    def to_hf(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Of an unsharded model."""
        state = model.state_dict().items()
        return to_hf({name: value for name, value in state if isinstance(value, torch.Tensor)}, self.family.hf)

    def chunks(self, layout: Parallel) -> list[torch.nn.Module]:
        """A rank's, with the checkpoint's values."""
        tiny.start(layout)
        chunks = tiny.build(self.family, layout, self.dtype)
        tiny.load(chunks, str(self.checkpoint))
        return chunks
