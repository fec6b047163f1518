"""The jobs of test_ray_lab.py, on the head node of its cluster: docs/examples/ray with two trainer nodes and a chain of
two relays, whose processes are killed one after the other. It says what it did, and fails where a version is not what
it has to be: ray_job.py killed|whole"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltasync
import deltasync.ray
import ray
from deltasync.ray import NodeStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from train_and_serve import Job

LONG_S = 120.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, "the deadline has passed"
        time.sleep(0.1)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@ray.remote(num_cpus=0)
def kill_there(pid: int | None, parent: bool) -> None:
    assert pid is not None
    os.kill(parent_of(pid) if parent else pid, signal.SIGKILL)


@ray.remote(num_cpus=0)
def words_there(pid: int | None) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@ray.remote(num_cpus=0)
def connected_there() -> list[str]:
    """With whom that node has connections."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    remote = [row[2].split(":") for row in rows if row[3] == "01"]
    return [f"{socket.inet_ntoa(bytes.fromhex(host)[::-1])}:{int(port, 16)}" for host, port in remote]


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
    until(lambda: runs_again(before, status(job, index)))
    after = status(job, index)
    assert after.endpoint == before.endpoint
    assert after.parents == before.parents


def runs_again(before: NodeStatus, after: NodeStatus) -> bool:
    restarts = (after.actor_restarts, after.restarts) > (before.actor_restarts, before.restarts)
    return restarts and not after.error and after.agent_pid is not None


def killed() -> None:
    """A job that is killed when it has said so."""
    job = Job(trainers=2, engines=2)
    job.step()
    print("kill me", flush=True)
    time.sleep(LONG_S)


def whole() -> None:
    job = Job(trainers=2, engines=2, children=1)
    version, modes = job.step()
    assert modes == ["full", "full"], modes
    trainers, relays = job.fleet.status()[:2], job.fleet.status()[2:]
    assert [node.role for node in trainers + relays] == ["trainer", "trainer", "relay", "relay"]
    assert relays[0].parents == [node.node for node in trainers]
    assert relays[1].parents == [relays[0].node, *relays[0].parents]
    assert from_of(relays[0]) == [node.endpoint for node in trainers]
    assert from_of(relays[1]) == [relays[0].endpoint, *from_of(relays[0])]
    asked = [job.fleet.receiver_options(node.node)["endpoints"] for node in relays]
    assert asked == [[relays[0].endpoint], [relays[1].endpoint, relays[0].endpoint]], asked
    refused(job, relays[0].node)
    grows([node.node for node in trainers + relays])

    def go_on(what: str) -> None:
        version, modes = job.step()
        print(f"{what}: version {version.number} {modes}", flush=True)
        assert version.epoch == epoch
        assert set(modes) == {"delta"}, modes

    epoch = version.epoch
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
    for actor in job.trainers:
        ray.kill(actor)
    job.trainers = job.start_trainers(2)
    version, modes = job.step()
    print(f"the trainer's actors were killed: version {version.number} {modes}", flush=True)
    assert version.epoch > epoch
    epoch = version.epoch
    go_on("with the new trainer")

    # It went over to the trainer when the first relay's agent was killed.
    until(lambda: relays[0].endpoint in ray.get(connected_there.options(**on(relays[1])).remote(), timeout=LONG_S))
    print("cut", relays[0].endpoint, flush=True)
    until(lambda: Path("cut").exists())
    job.engines.pop(0)
    began = time.monotonic()
    go_on("the first relay's node is away")
    print(f"after {time.monotonic() - began:.1f} s", flush=True)
    go_on("still away")
    job.close()
    print("closed", flush=True)


def refused(job: Job, relay: str) -> None:
    for wrong, message in (
        (lambda: job.fleet.trainer_options(relay), "no trainer node"),
        (lambda: deltasync.ray.Fleet(["nobody"]), "no node of this id"),
        (lambda: deltasync.ray.Fleet([relay], name="wrong", agent_args=["--nonsense"]), "--nonsense"),
        (lambda: deltasync.ray.nodes_of(job.group, [4]), "bundle 4"),
    ):
        try:
            wrong()
        except deltasync.Error as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)


def grows(nodes: list[str]) -> None:
    """Another fleet on the same nodes."""
    with deltasync.ray.Fleet([nodes[0]], [nodes[1]], children=1, name="another") as fleet:
        fleet.add([nodes[1], nodes[2]])
        status = fleet.status()
        assert [node.node for node in status] == nodes[:3]
        assert [node.error for node in status] == [""] * 3
        assert from_of(status[2]) == [status[1].endpoint, status[0].endpoint]


ray.init(address="auto")
{"killed": killed, "whole": whole}[sys.argv[1]]()
