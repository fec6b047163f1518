"""slime's full weights over deltasync, without a change in slime. In a module of your own::

    from deltasync.adapters.slime import Publish

    publish = Publish(host="10.0.0.5", token_file="/etc/deltasync/token")

and slime's options ``--update-weight-mode full --update-weight-transport disk --update-weight-local-checkpoint-dir ANY
--custom-update-weight-post-write-path my_module.publish``. Engines behind a :class:`~deltasync.RolloutControl` then
take what slime calls ``/pull_weights`` from the trainer's agent: the tiles that changed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._hf_files import HfFiles
from .._native import read_hf_directory
from .._reports import OffloadReport
from ..errors import InvalidArgument, Unsupported
from .publisher import Publisher

_VERSION = re.compile(r"weight_v(\d+)")


class Publish:
    """What slime calls on every rank when a version's files are written; the first rank publishes them.

    Options are :class:`~deltasync.adapters.publisher.Publisher`'s. The agent starts with the first version."""

    def __init__(self, *, timeout: float = 600.0, **publisher: Any) -> None:
        self.timeout = timeout
        self.publisher: Publisher | None = None
        #: Of the last version.
        self.report: OffloadReport | None = None
        self._options = publisher

    def __call__(self, args: Any, directory: str, rollout_engines: Any) -> None:
        """Raises what the offload raises, and Unsupported where slime has written deltas of its own."""
        if _rank() != 0:
            return
        named = _VERSION.fullmatch(Path(directory).name)
        if named is None or getattr(args, "update_weight_mode", "full") != "full":
            raise Unsupported(f"{directory}: no whole version of slime's", "--update-weight-mode full")
        number = int(named[1])
        if self.publisher is None:
            self.publisher = Publisher(**self._options)
        if number < self.publisher.next_number:
            raise InvalidArgument(
                f"{directory}: version {number} comes after version {self.publisher.next_number - 1}",
                "a trainer that begins again starts a process of its own",
            )
        self.report = self.publisher.offload(_pairs(directory), version=number, timeout=self.timeout)
        self.publisher.wait_ready(timeout=self.timeout)

    @property
    def endpoint(self) -> str:
        """HOST:PORT for receivers; empty before the first version."""
        return self.publisher.endpoint if self.publisher is not None else ""

    def close(self) -> None:
        """Ends the agent."""
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None


def _pairs(directory: str) -> Iterator[tuple[str, Any]]:
    layout, sidecar = read_hf_directory(directory, 1)
    files = HfFiles(directory, layout, sidecar)
    for name in files.names():
        yield name, files.flat(name).view(files.shape(name)[0])


def _rank() -> int:
    """slime's hook is called where torch.distributed is there."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    return int(torch.distributed.get_rank())
