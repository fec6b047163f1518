"""Which relay pulls from which: a tree whose root is the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def ancestors(relays: Sequence[str], children: int) -> dict[str, list[str]]:
    """For each relay those above it, its parent first. At most `children` pull from a relay, and as many from the
    trainer, whose own have nobody above them here. There is no cycle: all of them come earlier in `relays`."""
    above: dict[str, list[str]] = {}
    for position, relay in enumerate(relays):
        parent = position // children - 1
        above[relay] = [] if parent < 0 else [relays[parent], *above[relays[parent]]]
    return above


def sources(trainers: Sequence[str], relays: Sequence[str], children: int) -> dict[str, list[str]]:
    """For each node, the nodes that it pulls from, in order of preference: a relay from those above it and then from
    the trainer, which no failure of relays takes away. Trainer nodes have none."""
    above = ancestors(relays, children)
    return {**{trainer: [] for trainer in trainers}, **{relay: [*above[relay], *trainers] for relay in relays}}


def nodes_to_ask(node: str, parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Where an engine on `node` pulls from, in order of preference: its own node, then where that has it from. Of
    several trainer nodes each knows the others. `parents` is of sources()."""
    trainers = [trainer for trainer, above in parents.items() if not above]
    if node not in parents:
        return trainers
    return list(dict.fromkeys([node, *(parents[node] or trainers)]))
