"""Who is whose parent in a fleet, and which agents an engine asks."""

from __future__ import annotations

import pytest
from deltasync._relay_tree import ancestors, nodes_to_ask, sources


def test_few_relays_pull_from_the_trainer() -> None:
    assert ancestors(["a", "b"], 8) == {"a": [], "b": []}
    assert ancestors([], 8) == {}


def test_more_make_a_tree() -> None:
    assert ancestors(list("abcdefg"), 2) == {
        **{"a": [], "b": [], "c": ["a"], "d": ["a"], "e": ["b"], "f": ["b"]},
        "g": ["c", "a"],
    }


@pytest.mark.parametrize("children", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_none_has_more_children_than_may_be_or_is_above_itself(children: int, count: int) -> None:
    relays = [f"r{number}" for number in range(count)]
    above = ancestors(relays, children)
    parents = [chain[0] if chain else "trainer" for chain in above.values()]
    assert max(parents.count(parent) for parent in parents) <= children
    for relay, chain in above.items():
        assert relay not in chain
        assert not chain or chain[1:] == above[chain[0]]


def test_a_relay_falls_back_on_those_above_it_and_at_last_on_the_trainer() -> None:
    assert sources(["t", "u"], ["a", "b"], 1) == {"t": [], "u": [], "a": ["t", "u"], "b": ["a", "t", "u"]}


def test_an_engine_asks_its_own_node_first() -> None:
    parents = sources(["t", "u"], ["a", "b"], 1)
    assert nodes_to_ask("b", parents) == ["b", "a", "t", "u"]
    assert nodes_to_ask("u", parents) == ["u", "t"]
    assert nodes_to_ask("elsewhere", parents) == ["t", "u"]
