"""What a model's modules hold before a loader runs, to be compared and put back afterwards."""

from __future__ import annotations

import torch
from torch import nn

from .guard import Taint
from .memory import LiveTensor, Modules, TraceError, live_tensors
from .recording import RecordingTensor, TracedTensor


class ModelState:
    """The tensors that modules hold, where each one's memory was, and what they may have been exchanged for."""

    def __init__(self, modules: Modules, before: list[LiveTensor], taint: Taint) -> None:
        self._modules = modules
        self._before = before
        self._held = {(id(live.holder), live.attribute): live for live in before}
        self._taint = taint

    def restore(self) -> list[tuple[LiveTensor, frozenset[TracedTensor]]]:
        """Puts back parameters whose memory was exchanged: these, and the HF tensors that what was put there comes
        from, if that is known."""
        exchanged = []
        for live in self._before:
            if _geometry(live.tensor) != _geometry(live.alias):
                exchanged.append((live, self._taint.origin([live.tensor])))
        for live, _ in exchanged:
            live.tensor.data = live.alias
        return exchanged

    def fail_derived(self) -> set[str]:
        """Fails HF tensors that are held by a module now, or that a tensor was derived from that is. Returns the
        names of derived ones.

        Attributes that were exchanged are put back, and those with recording tensors removed. TraceError: one of these
        inside of a list, tuple or dict.
        """
        replaced: set[str] = set()
        for live in list(live_tensors(self._modules)):
            earlier = self._held.get((id(live.holder), live.attribute))
            if isinstance(live.tensor, RecordingTensor):
                for source in live.tensor.sources:
                    source.fail(f"it becomes {live.name}")
                    source.modules.add(live.module)
                    source.unseen = True
                _put_back(live, earlier)
            elif earlier is None or earlier.tensor is not live.tensor:
                for source in self._taint.sources(live.tensor):
                    source.fail(f"{live.name} is derived from it")
                    source.modules.add(live.module)
                    replaced.add(live.name)
                if earlier is not None and "[" not in live.attribute and _is_parameter(earlier) == _is_parameter(live):
                    _put_back(live, earlier)
        return replaced


def _is_parameter(live: LiveTensor) -> bool:
    return isinstance(live.tensor, nn.Parameter)


def _put_back(live: LiveTensor, earlier: LiveTensor | None) -> None:
    if "[" in live.attribute:
        raise TraceError(f"the loader keeps an HF tensor in {live.name}: it cannot be traced")
    if earlier is None:
        delattr(live.holder, live.attribute)
    elif live.attribute in live.holder._parameters:
        assert isinstance(earlier.tensor, nn.Parameter)
        live.holder._parameters[live.attribute] = earlier.tensor
    elif live.attribute in live.holder._buffers:
        live.holder._buffers[live.attribute] = earlier.tensor
    else:
        setattr(live.holder, live.attribute, earlier.tensor)


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a recording tensor's memory, which is none
        address = -1
    strides = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
    return address, tuple(tensor.shape), strides, tensor.dtype
