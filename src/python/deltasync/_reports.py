"""What one version cost the trainer."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import _native
from ._gathering import Gathering
from ._made import Made
from ._native import Version


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What one version cost the trainer, on this rank. Names that end in ``_s`` are seconds.

    ``version``: that was offloaded.
    ``guard_s``: waiting until the inactive half was free.
    ``copy_s``: writing the tensors into it.
    ``seal_s``: checking that nothing is missing, waiting for the other ranks, publishing.
    ``total_s``: all of it.
    ``nbytes``, ``tensors``: what this rank wrote.
    ``cast``: by tensor, the dtypes from and to which it was cast here, as safetensors spells them.
    ``gather_s``, ``convert_s``: of tensors of Megatron, waiting for other ranks' elements; of all, making tensors that
    are no memory of the trainer's (cast, added to, quantised, put together).
    ``temporary_bytes_max``: bytes of these and of buckets that were alive at a time, at most. What is quantised needs a
    band of fp32 values beside them.
    """

    version: Version
    guard_s: float
    copy_s: float
    seal_s: float
    total_s: float
    nbytes: int
    tensors: int
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict, repr=False)
    gather_s: float = 0.0
    convert_s: float = 0.0
    temporary_bytes_max: int = 0

    @classmethod
    def of(
        cls, report: _native.OffloadReport, cast: Mapping[str, tuple[str, str]], made: Made, gathering: Gathering | None
    ) -> OffloadReport:
        """Of what the writer reported; ``cast`` has the tensors that were published in another dtype."""
        gather_s, convert_s, bytes_max = 0.0, made.seconds, made.bytes_max
        if gathering:  # which begins when the others are written
            gather_s, convert_s = gathering.gather_s, convert_s + gathering.convert_s
            bytes_max = max(bytes_max, gathering.temporary_bytes_max)
        return cls(
            report.version,
            report.guard_s,
            report.copy_s,
            report.seal_s,
            report.total_s,
            report.nbytes,
            report.tensors,
            dict(cast),
            gather_s,
            convert_s,
            bytes_max,
        )

    def __str__(self) -> str:
        kinds = collections.Counter(self.cast.values())
        cast = "".join(f", {count} cast from {own} to {wanted}" for (own, wanted), count in sorted(kinds.items()))
        return f"{self.version}: {self.tensors} tensors{cast}, {self.nbytes} bytes in {self.total_s:.3f} s"
