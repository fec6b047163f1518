"""Tensors that an offload makes on their way: what was cast, added to, put in another order or quantised."""

from __future__ import annotations

from typing import Any


class Made:
    """Of one version, on this rank."""

    def __init__(self) -> None:
        #: Bytes that are kept until the batch is written.
        self.alive = 0
        #: Bytes that were alive at a time, at most.
        self.bytes_max = 0
        #: Seconds that making them took.
        self.seconds = 0.0

    def note(self, own: Any, between: Any, made: Any, seconds: float) -> None:
        """`made` of the trainer's own memory (None: of several tensors), perhaps by way of something in `between`."""
        kept = int(made.nbytes)
        passing = 0 if between is own or between is made or _is_view(between, own) else int(between.nbytes)
        self.bytes_max = max(self.bytes_max, self.alive + kept + passing)
        self.alive += kept
        self.seconds += seconds

    def drop(self) -> None:
        """They were written."""
        self.alive = 0


def _is_view(tensor: Any, own: Any) -> bool:
    return hasattr(own, "untyped_storage") and tensor.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
