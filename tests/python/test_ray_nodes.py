"""Nodes of a fleet that are away, by what Ray raises; Ray itself is a stub here."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import deltasync
import pytest


class RayError(Exception):
    pass


class Remote:
    """A method of an actor."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_: Any) -> Any:
        return self._answer


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """deltasync.ray over a stub, which has `killed`."""
    stub: Any = ModuleType("ray")
    names = ("GetTimeoutError", "RayTaskError", "RayActorError", "ActorUnschedulableError")
    stub.exceptions = SimpleNamespace(RayError=RayError, **{name: type(name, (RayError,), {}) for name in names})
    stub.killed = []
    stub.kill = stub.killed.append
    stub.is_initialized = lambda: True

    def get(call: Any, timeout: float) -> Any:
        if isinstance(call, Exception):
            raise call
        return call

    stub.get = get
    placement: Any = ModuleType("ray.util.placement_group")
    placement.PlacementGroup, placement.placement_group_table = type("PlacementGroup", (), {}), None
    strategies: Any = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = None
    for module in (stub, ModuleType("ray.util"), placement, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "deltasync.ray", raising=False)
    made: Any = importlib.import_module("deltasync.ray")
    yield SimpleNamespace(module=made, stub=stub)
    del sys.modules["deltasync.ray"], deltasync.ray


def fleet_of(ray: Any, **actors: Any) -> Any:
    fleet = ray.module.Fleet.__new__(ray.module.Fleet)
    fleet._actors = actors
    fleet._owner_pid = os.getpid()
    fleet._parents = {node: [] for node in actors}
    fleet._places = {node: {"endpoint": f"{node}:1", "socket": ""} for node in actors}
    return fleet


def actor(answer: Any) -> Any:
    return SimpleNamespace(status=Remote(answer), stop=Remote(answer))


STATUS = {"agent_pid": 1, "relay_pid": None, "restarts": 0, "actor_restarts": 0, "error": ""}


def test_a_node_that_is_away_is_in_the_status_and_keeps_no_other_from_its_end(ray: Any) -> None:
    away, here = actor(ray.stub.exceptions.ActorUnschedulableError("the node is dead")), actor(STATUS)
    fleet = fleet_of(ray, away=away, here=here)
    said = fleet.status()
    assert "the node is dead" in said[0].error
    assert (said[1].agent_pid, said[1].error) == (1, "")
    fleet.close()
    assert ray.stub.killed == [away, here]


def test_an_actor_that_cannot_be_killed_keeps_no_other_from_its_end(ray: Any) -> None:
    one, other = actor(ValueError("no such actor")), actor(STATUS)
    kill = ray.stub.kill

    def fail(killed: Any) -> None:
        kill(killed)
        raise ValueError("it is gone")

    ray.stub.kill = fail
    fleet_of(ray, one=one, other=other).close()
    assert ray.stub.killed == [one, other]


def test_a_forked_child_does_not_end_the_fleet(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(ray, here=actor(STATUS))
    own = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: own + 1)
        fleet.close()
    assert ray.stub.killed == []
    fleet.close()
    assert len(ray.stub.killed) == 1
