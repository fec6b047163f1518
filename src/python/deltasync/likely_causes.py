"""Why names of trainer and model do not match: guesses from the names alone, for messages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

_EXPERT = re.compile(r"experts\.\d+\.")
_FUSED_EXPERTS = re.compile(r"experts\.(?!\d)[^.]*(proj|w13|w2|w1|w3)")
_SCALE = re.compile(
    r"(_scale|_scale_inv|\.scales?|_scale_2|global_scale|_scales|\.qweight|\.qzeros|\.g_idx|_packed|_blocks|zero_point)$"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_DRAFT = re.compile(r"(^|\.)(mtp|nextn|eagle|draft|medusa|eh_proj|enorm|hnorm|shared_head)(\.|_|$|\d)")

#: (the trainer's tensors without a place, the model's weights that nothing fills, all of the model's weights)
_Guess = Callable[[Sequence[str], Sequence[str], Sequence[str]], str]


def likely_causes(untaken: Sequence[str], unfilled: Sequence[str], weights: Sequence[str]) -> list[str]:
    """The likely causes of what is left over on both sides, the likeliest first; each says what to do."""
    guesses = (guess(untaken, unfilled, weights or unfilled) for guess in _GUESSES)
    return [guess for guess in guesses if guess]


def _wrapped(untaken: Sequence[str], unfilled: Sequence[str], weights: Sequence[str]) -> str:
    found: list[str] = sorted(
        {part for name in untaken for part in ("_orig_mod", "_fsdp_wrapped_module") if part in name.split(".")}
    )
    if any(name.startswith("module.") for name in untaken) and not any(name.startswith("module.") for name in weights):
        found.append("module")
    if not found:
        return ""
    return (
        f"the trainer's names have the prefix '{found[0]}.' of a wrapper (torch.compile, DDP): publish the inner module"
    )


def _fused_experts(untaken: Sequence[str], unfilled: Sequence[str], weights: Sequence[str]) -> str:
    fused = next((name for name in untaken if _FUSED_EXPERTS.search(name)), None)
    single = next((name for name in untaken if _EXPERT.search(name)), None)
    wanting = any("experts" in name for name in unfilled)
    if fused and not single:
        return (
            f"the trainer has all experts in one tensor ({fused}, as transformers from 5 on does in memory), the "
            "engine's loader takes one for each expert (….experts.0.gate_proj.weight): publish the names that "
            "save_pretrained writes"
        )
    if single and wanting:
        return f"the trainer has one tensor for each expert ({single}), and the model names its experts otherwise"
    return ""


def _other_prefix(untaken: Sequence[str], unfilled: Sequence[str], weights: Sequence[str]) -> str:
    """The same name behind other first parts."""
    ends: dict[str, str] = {}
    for name in unfilled:
        parts = name.split(".")
        for at in range(min(4, len(parts) - 1)):
            ends.setdefault(".".join(parts[at:]), ".".join(parts[:at]))
    pairs: Counter[tuple[str, str]] = Counter()
    for name in untaken:
        parts = name.split(".")
        for at in range(min(4, len(parts) - 1)):
            end = ".".join(parts[at:])
            if end in ends:
                pairs[".".join(parts[:at]), ends[end]] += 1
                break
    if not pairs:
        return ""
    (theirs, ours), _ = pairs.most_common(1)[0]
    return f"the trainer's names begin with {_quoted(theirs)} where the model's begin with {_quoted(ours)}"


def _quoted(prefix: str) -> str:
    return f"'{prefix}.'" if prefix else "nothing"


def _scales(untaken: Sequence[str], unfilled: Sequence[str], weights: Sequence[str]) -> str:
    ours = next((name for name in unfilled if _SCALE.search(name)), None)
    theirs = next((name for name in untaken if _SCALE.search(name)), None)
    if ours:
        return f"the model's weights are quantised ({ours}), and the trainer publishes no such scales or packed weights"
    if theirs:
        return f"the trainer's weights are quantised ({theirs}), and the model's are not, or otherwise"
    return ""


def _tied(untaken: Sequence[str], unfilled: Sequence[str], weights: Sequence[str]) -> str:
    theirs, ours = (any(name.endswith("lm_head.weight") for name in names) for names in (untaken, unfilled))
    if theirs and not ours:
        return (
            "the engine ties lm_head to the embedding, and takes the latter for both: publish one of them, as "
            "save_pretrained does"
        )
    if ours and not theirs:
        return (
            "the trainer ties lm_head to the embedding and publishes only that, the engine has one of its own: set "
            "tie_word_embeddings"
        )
    return ""


def _drafts(untaken: Sequence[str], unfilled: Sequence[str], weights: Sequence[str]) -> str:
    last = max(_layers(weights), default=None)
    drafts = [name for name in untaken if _DRAFT.search(name)]
    if last is not None and _layers(untaken) == {last + 1}:
        drafts += [name for name in untaken if _layers([name])]
    if drafts and not any(_DRAFT.search(name) for name in weights):
        return f"{drafts[0]} is of a draft (MTP, EAGLE) that this engine does not run"
    return ""


def _stages(untaken: Sequence[str], unfilled: Sequence[str], weights: Sequence[str]) -> str:
    ours, theirs = _layers(unfilled), _layers(untaken)
    if ours and not theirs and len(ours) < len(_layers(weights)):
        return f"no tensor is of layer(s) {_ranges(ours)}: does only one stage of the trainer's pipeline publish?"
    if theirs and not ours and not theirs & _layers(weights):
        return f"the model has no layer(s) {_ranges(theirs)}: are they another stage's of the engine's pipeline?"
    return ""


def _layers(names: Sequence[str]) -> set[int]:
    return {int(found.group(1)) for found in map(_LAYER.search, names) if found}


def _ranges(numbers: set[int]) -> str:
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first} to {last}"


_GUESSES: tuple[_Guess, ...] = (_wrapped, _fused_experts, _other_prefix, _scales, _tied, _drafts, _stages)
