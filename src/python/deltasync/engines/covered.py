"""The proof of coverage for an engine's model, which may be one of several that share the trainer's tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..coverage import Ignore, log_ignored, require_coverage, unmatched
from ..errors import UnmatchedWeights
from .group import NOTHING, Lacks

if TYPE_CHECKING:
    from ..autoplacement import LoaderTrace

_log = logging.getLogger("deltasync.engines")

#: What old checkpoints have, and every engine computes for itself.
ENGINES_OWN = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached")


class Traced(Protocol):
    """What of an ``EngineReceiver`` is needed here."""

    trace: LoaderTrace | None
    untaken: dict[str, str]


def refused(trace: LoaderTrace) -> dict[str, str]:
    """Tensors whose names the loader refuses → how: it would refuse them in every update, amid its writing."""
    found = {}
    for name, reload in trace.reload.items():
        if reload.reason.startswith("KeyError") or "no module or parameter" in reload.reason:
            found[name] = f"the loader refuses it: {reload.reason}"
    return found


def _quantises(method: Any) -> bool:
    """Whether an engine's method makes quantised weights of others as it loads them. One for checkpoints that are
    quantised would take weights of another dtype, too, and cast them: to numbers that no scale belongs to."""
    if "Online" in type(method).__name__:
        return True
    said = {**getattr(getattr(method, "quant_config", None), "__dict__", {}), **getattr(method, "__dict__", {})}
    comes_quantised = [flag for name, flag in said.items() if re.fullmatch("is_checkpoint_.*_serialized", name)]
    return bool(comes_quantised) and not any(comes_quantised)


def quantised_again(trace: LoaderTrace, model: Any) -> set[str]:
    """Weights of modules that the engine quantises as it loads them, and that no tensor fills: their scales, where what
    comes is in another form. Where all tensors of a module are copied as they are, so have its scales to be: the
    trainer's weights are quantised then."""
    from ..autoplacement.memory import live_tensors

    computed = {module for reload in trace.reload.values() for module in reload.modules}
    modules = model if isinstance(model, Mapping) else {"": model}
    roots = [
        path
        for root, one in modules.items()
        for path, module in one.named_modules(prefix=root)
        if _quantises(getattr(module, "quant_method", None))
    ]
    return {
        live.name
        for live in live_tensors(model)
        if live.name in trace.gaps
        and trace.gaps[live.name].elements == trace.gaps[live.name].of
        and live.module in computed
        and any(f"{live.module}.".startswith(f"{root}." if root else "") for root in roots)
    }


def require_engine_coverage(
    name: str, model: Any, trace: LoaderTrace, unplaced: Mapping[str, str], ignore: Ignore, *, shared: bool
) -> dict[str, str]:
    """What of `unplaced`, the trainer's tensors that this model has no place for, is not ignored. UnmatchedWeights if
    there is something and the tensors are not `shared` with other models; and in any case for weights of the model that
    nothing fills."""
    made = quantised_again(trace, model) if trace.unfilled and trace.reload else set()
    unfilled, weights = ignore.split({key: what for key, what in trace.unfilled.items() if key not in made})
    untaken, tensors = ignore.split(unplaced)
    if unfilled or not shared:
        require_coverage(name, untaken, unfilled, trace.weights)
    log_ignored(_log, name, tensors, weights)
    return untaken


def lacks(models: Sequence[Traced]) -> Lacks:
    """What none of a rank's models, which share the trainer's tensors, has a place for; to be voted about."""
    traces = [model.trace for model in models]
    if not models or None in traces:
        return NOTHING
    trace = traces[0]
    assert trace is not None
    left = [spec.name in models[0].untaken for spec in trace.specs]
    for model in models[1:]:
        left = [lacking and spec.name in model.untaken for lacking, spec in zip(left, trace.specs, strict=True)]

    def words(bits: int) -> str:
        # Digits in base two, the lowest first: shifting a number of so many bits once for each takes a second.
        names = [spec.name for spec, digit in zip(trace.specs, f"{bits:b}"[::-1], strict=False) if digit == "1"]
        untaken = {name: models[0].untaken.get(name, "") for name in names}
        weights = [name for each in traces if each is not None for name in each.weights]
        return f"no rank takes all of it: {unmatched(untaken, {}, weights)} ({UnmatchedWeights.remedy})"

    return Lacks(int("".join("01"[lacking] for lacking in reversed(left)) or "0", 2), words)
