"""What one version cost the trainer."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import _native
from ._gathering import Gathering
from ._native import Version


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What one version cost the trainer. Times in seconds."""

    version: Version
    #: Waiting until the inactive half was free.
    guard_s: float
    copy_s: float
    seal_s: float
    total_s: float
    nbytes: int
    tensors: int
    #: The tensors that were cast here on their way, with safetensors' names of their own dtype and of the layout's.
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict, repr=False)
    #: Of tensors that ranks of Megatron put together, on this rank: waiting for other ranks' elements; packing own ones
    #: and making tensors; bytes that were alive for it at most. 0 if there were none.
    gather_s: float = 0.0
    convert_s: float = 0.0
    temporary_bytes_max: int = 0

    @classmethod
    def of(
        cls, report: _native.OffloadReport, cast: Mapping[str, tuple[str, str]], gathering: Gathering | None
    ) -> OffloadReport:
        """Of what the writer reported; ``cast`` has the tensors that were published in another dtype."""
        gathered = (gathering.gather_s, gathering.convert_s, gathering.temporary_bytes_max) if gathering else ()
        return cls(
            report.version,
            report.guard_s,
            report.copy_s,
            report.seal_s,
            report.total_s,
            report.nbytes,
            report.tensors,
            dict(cast),
            *gathered,
        )

    def __str__(self) -> str:
        kinds = collections.Counter(self.cast.values())
        cast = "".join(f", {count} cast from {own} to {wanted}" for (own, wanted), count in sorted(kinds.items()))
        return f"{self.version}: {self.tensors} tensors{cast}, {self.nbytes} bytes in {self.total_s:.3f} s"
