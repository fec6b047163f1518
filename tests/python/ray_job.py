"""The job of test_ray_lab.py, on the head node of its cluster: docs/examples/ray with two trainer nodes and a chain of
two relays, whose processes are killed one after the other. Says what it did; fails where a version is not what it has
to be."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from deltasync.ray import NodeStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from train_and_serve import Job

LONG_S = 120.0


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@ray.remote(num_cpus=0)
def kill_there(pid: int | None, parent: bool) -> None:
    assert pid is not None
    os.kill(parent_of(pid) if parent else pid, signal.SIGKILL)


@ray.remote(num_cpus=0)
def words_there(pid: int | None) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def on(node: NodeStatus) -> dict[str, Any]:
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node, soft=False)}


def from_of(relay: NodeStatus) -> list[str]:
    """What it was told to pull from."""
    words: list[str] = ray.get(words_there.options(**on(relay)).remote(relay.relay_pid), timeout=LONG_S)
    return words[words.index("--from") + 1].split(",")


def status(job: Job, index: int) -> NodeStatus:
    return job.fleet.status(timeout=LONG_S)[index]


def kill(job: Job, index: int, which: Callable[[NodeStatus], int | None], parent: bool = False) -> None:
    """Of the node of this index, a process, or its parent. Returns when it has been started again."""
    before = status(job, index)
    ray.get(kill_there.options(**on(before)).remote(which(before), parent), timeout=LONG_S)
    end = time.monotonic() + LONG_S
    while not runs_again(before, after := status(job, index)):
        assert time.monotonic() < end, after
        time.sleep(0.2)
    assert after.endpoint == before.endpoint
    assert after.parents == before.parents


def runs_again(before: NodeStatus, after: NodeStatus) -> bool:
    restarts = (after.actor_restarts, after.restarts) > (before.actor_restarts, before.restarts)
    return restarts and not after.error and after.agent_pid is not None


def main() -> None:
    ray.init(address="auto")
    job = Job(trainers=2, engines=2, children=1)
    version, modes = job.step()
    assert modes == ["full", "full"], modes
    trainers, relays = job.fleet.status()[:2], job.fleet.status()[2:]
    assert [node.role for node in trainers + relays] == ["trainer", "trainer", "relay", "relay"]
    assert relays[0].parents == [node.node for node in trainers]
    assert relays[1].parents == [relays[0].node, *relays[0].parents]
    assert from_of(relays[0]) == [node.endpoint for node in trainers]
    assert from_of(relays[1]) == [relays[0].endpoint, *from_of(relays[0])]
    for node in relays:
        asked = job.fleet.receiver_options(node.node)["endpoints"]
        assert asked == [node.endpoint, *from_of(node)], asked
    epoch = version.epoch

    def go_on(what: str) -> None:
        version, modes = job.step()
        print(f"{what}: version {version.number} {modes}", flush=True)
        assert version.epoch == epoch
        assert modes == ["delta", "delta"], modes

    go_on("as it is")
    kill(job, 1, lambda node: node.agent_pid)
    go_on("a trainer node's agent was killed")
    kill(job, 2, lambda node: node.relay_pid)
    go_on("a relay was killed")
    kill(job, 2, lambda node: node.agent_pid)
    go_on("a relay's agent was killed")
    kill(job, 0, lambda node: node.agent_pid, parent=True)
    go_on("a trainer node's actor was killed")
    kill(job, 2, lambda node: node.agent_pid, parent=True)
    go_on("a relay's actor was killed")
    go_on("as it was")
    print([(node.restarts, node.actor_restarts) for node in job.fleet.status()], flush=True)
    job.close()
    print("closed", flush=True)


main()
