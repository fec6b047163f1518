"""The tensors of a HuggingFace model directory, as they lie in its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._arrays import torch_dtype
from ._export_quantise import Scheme, dequantise, dequantise_at
from ._native import Layout, Sidecar
from .errors import CorruptData


class HfFiles:
    """Maps the files of a directory that ``read_hf_directory()`` took. Needs torch. Tensors that are in `quantised`
    (with their scales' name) are read as a trainer reads them: dequantised, in BF16."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        layout: Layout,
        sidecar: Sidecar,
        quantised: Mapping[str, tuple[str, Scheme]] | None = None,
    ) -> None:
        self._shapes = {tensor.name: (tuple(tensor.shape), tensor.dtype) for tensor in layout}
        self._quantised = quantised or {}
        self._last: tuple[str, Any] = ("", None)
        self._places: dict[str, tuple[Any, int]] = {}
        for file in sidecar.weight_files:
            mapped = np.memmap(Path(directory) / file, np.uint8, "c")  # torch wants it writable
            length = int.from_bytes(mapped[:8].tobytes(), "little")
            header = json.loads(mapped[8 : 8 + length].tobytes())
            for name, entry in header.items():
                if name != "__metadata__":
                    self._places[name] = mapped, 8 + length + entry["data_offsets"][0]

    def names(self) -> list[str]:
        return list(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[tuple[int, ...], str]:
        """And dtype."""
        shape, dtype = self._shapes[name]
        return shape, "BF16" if name in self._quantised else dtype

    def flat(self, name: str) -> Any:
        """Its elements, a torch tensor of one dimension over the file's pages, if it is not dequantised. CorruptData if
        the file is shorter."""
        if name not in self._quantised:
            return self._stored(name)
        if self._last[0] != name:
            scale, scheme = self._quantised[name]
            codes = self._stored(name).view(self._shapes[name][0])
            self._last = name, dequantise(codes, self._stored(scale), scheme).view(-1)
        return self._last[1]

    def at(self, name: str, place: Any) -> Any:
        """Some of its elements, by their indices."""
        if name not in self._quantised:
            return self._stored(name)[place]
        scale, scheme = self._quantised[name]
        return dequantise_at(self._stored(name), self._stored(scale), scheme, self._shapes[name][0], place)

    def _stored(self, name: str) -> Any:
        import torch

        mapped, begin = self._places[name]
        shape, dtype = self._shapes[name]
        kind = torch_dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if begin + count * kind.itemsize > len(mapped):
            raise CorruptData(f"{name}: its file ends before it does")
        # Of any alignment, other than what torch's view() takes.
        return torch.frombuffer(mapped, dtype=kind, count=count, offset=begin) if count else torch.empty(0, dtype=kind)
