"""What an engine's receiver hands out: a version on its way, and what its commit did."""

from __future__ import annotations

import concurrent.futures
import math
from dataclasses import dataclass

from .._native import Version
from ..errors import DeadlinePassed
from ..prepared import Prepared, PullReport


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did. Times in seconds."""

    version: Version
    #: loaded (all by the engine's loader), delta, full, or up_to_date.
    mode: str
    #: Tensors written in place, and through the engine's loader.
    direct: int
    reloaded: int
    #: Tensors whose live bytes were not compared with the version. Never are those that go through the engine's loader,
    #: which keeps them in a form of its own.
    unattested: int
    #: Of the trainer. Those that are neither are other ranks', another model's, or ignored.
    tensors: int
    #: Received for it.
    wire_bytes: int
    #: On the engine's thread, from the call to the end of the device's work.
    commit_s: float

    @property
    def placed(self) -> str:
        """How many of the trainer's tensors this rank has taken, and not compared, in words."""
        unseen = f", {self.unattested} unattested" if self.unattested else ""
        return f"placed {self.direct + self.reloaded} of {self.tensors}{unseen}"


class Staging:
    """A version on its way to this rank; any thread may look at it."""

    def __init__(self, asked: int | str | None) -> None:
        self.asked = asked
        self.prepared: Prepared | None = None
        self.report: PullReport | None = None
        self.future: concurrent.futures.Future[None]
        self.cancelled = False

    @property
    def done(self) -> bool:
        """Whether it is staged and verified, or has failed."""
        return self.future.done()

    def wait(self, timeout: float) -> Version:
        """The version, once it is staged and verified; raises what the pull raised, DeadlinePassed after `timeout`."""
        try:
            self.future.result(None if timeout == math.inf else timeout)
        except concurrent.futures.TimeoutError as error:
            if self.future.done():
                raise
            raise DeadlinePassed(f"version {words(self.asked)}: not staged after {timeout:.1f} s") from error
        assert self.report is not None
        return self.report.version


def words(asked: int | str | None) -> str:
    return "newest" if asked is None else repr(asked)
