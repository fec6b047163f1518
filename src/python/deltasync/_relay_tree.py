"""Which relay pulls from which: a tree whose root is the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Relays of the first level that are asked when those above are away: they never pull from whom they help out.
_OTHERS_MAX = 2


def ancestors(relays: Sequence[str], children: int) -> dict[str, list[str]]:
    """For each relay those above it, its parent first. At most `children` pull from a relay, and as many from the
    trainer, whose own have nobody above them here. There is no cycle: all of them come earlier in `relays`."""
    above: dict[str, list[str]] = {}
    for position, relay in enumerate(relays):
        parent = position // children - 1
        above[relay] = [] if parent < 0 else [relays[parent], *above[relays[parent]]]
    return above


def sources(trainers: Sequence[str], relays: Sequence[str], children: int) -> dict[str, list[str]]:
    """For each node, the nodes that it pulls from, in order of preference: a relay from those above it, then from
    others of the first level, and then from the trainer, which no failure of relays takes away. Trainer nodes have
    none, and no relay."""
    relays = [relay for relay in dict.fromkeys(relays) if relay not in trainers]
    found: dict[str, list[str]] = {trainer: [] for trainer in trainers}
    for relay, above in ancestors(relays, children).items():
        others = _others(relays[:children], above[-1]) if above else []
        found[relay] = [*above, *others, *trainers]
    return found


def nodes_to_ask(node: str, parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Where an engine on `node` pulls from, in order of preference: its own node, where that has it from, and other
    relays. `parents` is of sources(). Of several trainer nodes each has a part of the model and names the others; an
    engine that was connected to a relay, which has the whole, does not go on there."""
    trainers = [trainer for trainer, above in parents.items() if not above]
    if node not in parents:
        return trainers
    if node in trainers:
        return [node, *(trainer for trainer in trainers if trainer != node)]
    first_level = [relay for relay, above in parents.items() if above and above[0] in trainers]
    above = [parent for parent in parents[node] if parent not in trainers]
    others = _others(first_level, node) if node in first_level else []
    return [node, *above, *others, *(trainers if len(trainers) == 1 else [])]


def _others(relays: Sequence[str], relay: str) -> list[str]:
    """The next ones after it."""
    at = relays.index(relay) + 1
    return [*relays[at:], *relays[: at - 1]][:_OTHERS_MAX]
