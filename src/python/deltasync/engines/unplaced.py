"""What of a model's weights no placed slice writes: the padding of a vocabulary, what the loader computes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..autoplacement import LoaderTrace
    from ..autoplacement.memory import LiveTensor


class UnplacedWeights:
    """Copies in host memory of the model's tensors that are not placed as a whole, to be written back where they were:
    parameters, buffers, and what shares their memory. What else modules hold, such as an engine's KV cache, has memory
    of its own, which need not be mapped again when the weights are.

    ``element_bytes``: of each of the trainer's tensors. Takes a copy of what it copies, padding and all, at
    construction: once no step and no commit writes any more."""

    def __init__(self, trace: LoaderTrace, model: Any, element_bytes: Mapping[str, int]) -> None:
        from ..autoplacement.memory import live_tensors

        held = list(live_tensors(model))
        weights = {_storage(live) for live in held if _is_registered(live)}
        tensors: dict[tuple[str, int], Any] = {}
        for live in held:
            tensor = live.alias
            if _storage(live) not in weights:
                continue
            start = str(tensor.device), tensor.data_ptr()
            if tensor.numel() > (tensors[start].numel() if start in tensors else 0):  # of views the whole
                tensors[start] = tensor
        starts = sorted(tensors)
        placed = dict.fromkeys(starts, 0)
        for piece in trace.slices:
            memory = trace.memories[piece.memory]
            address = str(memory.device), memory.base + piece.offset
            at = bisect_right(starts, address) - 1
            if at >= 0 and starts[at][0] == address[0]:
                placed[starts[at]] += piece.rect.rows * piece.rect.cols * element_bytes[piece.tensor]
        self._copies = [
            (tensor, tensor.to("cpu", copy=True))
            for start, tensor in tensors.items()
            if placed[start] != tensor.numel() * tensor.element_size() and tensor.device.type != "meta"
        ]

    def write_back(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def _is_registered(live: LiveTensor) -> bool:
    return live.attribute in live.holder._parameters or live.attribute in live.holder._buffers


def _storage(live: LiveTensor) -> tuple[str, int]:
    return str(live.alias.device), live.alias.untyped_storage().data_ptr()
