"""Placement by tracing an engine's own loader. docs/guides/autoplacement.md is normative. Needs torch."""

from .memory import Memory, TraceError, model_signature
from .native import placement_plan
from .plan import IgnoredSlice, PlacedSlice, Rect
from .policy import whole_leaves
from .proof import HfBytes, prove, replay
from .recording import RecordingTensor, UnsupportedError
from .result import LoaderTrace, Reload
from .specs import Spec
from .tracer import trace_loader

__all__ = [
    "HfBytes",
    "IgnoredSlice",
    "LoaderTrace",
    "Memory",
    "PlacedSlice",
    "RecordingTensor",
    "Rect",
    "Reload",
    "Spec",
    "TraceError",
    "UnsupportedError",
    "model_signature",
    "placement_plan",
    "prove",
    "replay",
    "trace_loader",
    "whole_leaves",
]
