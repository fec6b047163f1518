"""The result of a trace: where each HF tensor is, and which ones only the engine's loader can bring there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from .coverage import Gap
from .memory import Memory, Modules, model_signature
from .plan import IgnoredSlice, PlacedSlice, complement
from .specs import Spec


class Reload(NamedTuple):
    """Why a tensor has to go through the engine's loader, and which modules it reaches, as far as is known."""

    reason: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class LoaderTrace:
    """Every tensor of the specs is in exactly one of `placed`, `reload` and `unplaced`. Immutable.

    The memories' bytes stay allocated as long as the trace lives; drop it when `is_current` says no.

    `memories`: that a slice may name.
    `placed`: tensor → where each slice of it is. `modules`: tensor → modules that own these places.
    `reload`: tensor → why only the engine's loader can bring it.
    `unplaced`: tensor that the engine has no place for → why.
    `weights`: the model's parameters and persistent buffers.
    `gaps`: those of them that are not filled by the specs' tensors, or not all of them.
    """

    specs: tuple[Spec, ...]
    memories: tuple[Memory, ...]
    placed: Mapping[str, tuple[PlacedSlice, ...]]
    reload: Mapping[str, Reload]
    unplaced: Mapping[str, str]
    modules: Mapping[str, frozenset[str]]
    weights: tuple[str, ...]
    gaps: Mapping[str, Gap]
    _signature: str = field(repr=False)

    @cached_property
    def slices(self) -> list[PlacedSlice]:
        """Of all placed tensors, in the order of the specs."""
        return [placed for spec in self.specs for placed in self.placed.get(spec.name, ())]

    @cached_property
    def ignored(self) -> list[IgnoredSlice]:
        """What `slices` leave: the other ranks' parts, and the tensors that are not placed as a whole."""
        ignored: list[IgnoredSlice] = []
        for spec in self.specs:
            rows, columns = spec.rows_columns
            if spec.name not in self.placed:
                ignored.append(IgnoredSlice(spec.name, None))
            elif rows:
                rects = (placed.rect for placed in self.placed[spec.name])
                ignored.extend(IgnoredSlice(spec.name, rect) for rect in complement(rects, rows, columns))
        return ignored

    @cached_property
    def unfilled(self) -> dict[str, str]:
        """Weights that would stay as they are, whole or in part → what of them. A buffer of which no tensor fills
        anything is the engine's own: if the trainer has a tensor for it, under another name, that is unplaced."""
        return {name: str(gap) for name, gap in self.gaps.items() if not (gap.is_buffer and gap.elements == gap.of)}

    def signature(self) -> str:
        """Digest of names, devices, addresses, shapes, strides and dtypes when the trace was made (32 hex digits)."""
        return self._signature

    def is_current(self, modules: Modules) -> bool:
        """Whether the modules' memory still is where it was. Says nothing of the bytes in it: see `prove`."""
        return model_signature(modules) == self._signature

    def drop(self, reasons: Mapping[str, str]) -> LoaderTrace:
        """The trace with tensors made "unplaced": name → reason."""
        return replace(
            self,
            placed={name: slices for name, slices in self.placed.items() if name not in reasons},
            modules={name: modules for name, modules in self.modules.items() if name not in reasons},
            reload={name: reload for name, reload in self.reload.items() if name not in reasons},
            unplaced={**self.unplaced, **reasons},
        )

    def demote(self, reasons: Mapping[str, str]) -> LoaderTrace:
        """The trace with placed tensors made "reload": name → reason. KeyError: a tensor that is not placed."""
        demoted = {name: Reload(reason, tuple(sorted(self.modules[name]))) for name, reason in reasons.items()}
        return replace(
            self,
            placed={name: slices for name, slices in self.placed.items() if name not in demoted},
            modules={name: modules for name, modules in self.modules.items() if name not in demoted},
            reload={**self.reload, **demoted},
        )
