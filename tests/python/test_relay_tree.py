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
def test_none_has_more_children_than_may_be_or_pulls_from_who_pulls_from_it(children: int, count: int) -> None:
    relays = [f"r{number}" for number in range(count)]
    found = sources(["t"], relays, children)
    parents = [found[relay][0] for relay in relays]
    assert max(parents.count(parent) for parent in parents) <= children
    above = {"t": 0}
    for relay in relays:
        above[relay] = above[found[relay][0]] + 1
    for relay in relays:
        assert all(above[source] < above[relay] for source in found[relay])
        assert len(set(found[relay])) == len(found[relay])


def test_a_relay_falls_back_on_those_above_it_then_on_others_and_at_last_on_the_trainer() -> None:
    assert sources(["t", "u"], ["a", "b"], 1) == {"t": [], "u": [], "a": ["t", "u"], "b": ["a", "t", "u"]}
    found = sources(["t"], [f"r{number}" for number in range(24)], 4)
    assert found["r3"] == ["t"]
    assert found["r16"] == ["r3", "r0", "r1", "t"]
    assert found["r23"] == ["r4", "r0", "r1", "r2", "t"]


def test_a_node_of_both_has_no_relay_and_later_relays_change_no_parent() -> None:
    before = sources(["t"], ["a", "t", "a", "b"], 1)
    assert before == {"t": [], "a": ["t"], "b": ["a", "t"]}
    after = sources(["t"], [*before, "c"], 1)
    assert after == {**before, "c": ["b", "a", "t"]}


def test_an_engine_asks_its_own_node_first() -> None:
    parents = sources(["t"], ["a", "b", "c", "d"], 3)
    assert nodes_to_ask("a", parents) == ["a", "b", "c", "t"]
    assert nodes_to_ask("c", parents) == ["c", "a", "b", "t"]
    assert nodes_to_ask("d", parents) == ["d", "a", "b", "c", "t"]
    assert nodes_to_ask("t", parents) == ["t"]
    assert nodes_to_ask("elsewhere", parents) == ["t"]


def test_an_engine_does_not_go_from_a_whole_model_to_parts() -> None:
    parents = sources(["t", "u"], ["a", "b"], 1)
    assert nodes_to_ask("a", parents) == ["a"]
    assert nodes_to_ask("b", parents) == ["b", "a"]
    assert nodes_to_ask("u", parents) == ["u", "t"]
    assert nodes_to_ask("elsewhere", parents) == ["t", "u"]
