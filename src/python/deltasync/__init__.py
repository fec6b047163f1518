"""deltasync keeps the weights of LLM rollout engines identical to a trainer's, every step, for the price of the bytes
that changed.

The trainer::

    manager = deltasync.WeightManager(model, listen="0.0.0.0:7070", token_file="token")
    ...
    manager.offload(version=step)              # after each optimizer step; returns when the copy is made

The rollout server::

    receiver = deltasync.Receiver("trainer:7070", module=model, token_file="token")
    ...
    receiver.update()                          # pulls what changed, verifies it, writes it into the parameters

Importing it needs numpy, but no torch.
"""

from __future__ import annotations

import os as _os

from . import _native, errors, families, hf, megatron
from ._native import (
    Layout,
    Placement,
    PlacementPlan,
    Sidecar,
    Tensor,
    TensorSpec,
    Version,
    VersionSpans,
    make_epoch,
    start_timeline,
    stop_timeline,
    write_timeline,
)
from ._native import version as __version__
from ._reports import OffloadReport
from .agent import AgentProcess
from .async_rollout import AsyncReceiver
from .buckets import BucketSender
from .control import RolloutControl, RolloutEngine
from .errors import Error
from .layouts import layout_of
from .prepared import Lag, Prepared, PullReport, RepairReport, TileMismatch
from .ranks import RankFollower, RankGroup
from .rollout import Receiver
from .tls import Tls
from .trainer import WeightManager

#: The library's own log lines go to stderr; DELTASYNC_LOG is trace, debug, info, warn (without it), error or off.
_native.init_log("deltasync", _os.environ.get("DELTASYNC_LOG", "warn"))

__all__ = [
    "AgentProcess",
    "AsyncReceiver",
    "BucketSender",
    "Error",
    "Lag",
    "Layout",
    "OffloadReport",
    "Placement",
    "PlacementPlan",
    "Prepared",
    "PullReport",
    "RankFollower",
    "RankGroup",
    "Receiver",
    "RepairReport",
    "RolloutControl",
    "RolloutEngine",
    "Sidecar",
    "Tensor",
    "TensorSpec",
    "TileMismatch",
    "Tls",
    "Version",
    "VersionSpans",
    "WeightManager",
    "__version__",
    "errors",
    "families",
    "hf",
    "layout_of",
    "make_epoch",
    "megatron",
    "start_timeline",
    "stop_timeline",
    "write_timeline",
]
