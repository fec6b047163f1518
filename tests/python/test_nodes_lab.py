"""Trainers on hosts of a lab (tools/lab.py): network namespaces, two ranks of gloo on each, one agent a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltasync
import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "lab")]
from lab import Lab, Process, missing, until  # noqa: E402
from topology import Topology  # noqa: E402

DEADLINE_S = 300.0
PORT = 29400
WORKER = Path(__file__).with_name("lab_rank.py")
BINARIES = Path(deltasync.__file__).parent / "bin"

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class Ranks:
    """Processes that do the same, each in its part."""

    def __init__(self, processes: list[Process]) -> None:
        self.processes = processes
        self.lines = 0
        self._answers()

    def ask(self, line: str) -> list[dict[str, Any]]:
        for process in self.processes:
            process.say(line)
        return self._answers()

    def start_again(self) -> None:
        for process in self.processes:
            if not process.runs:
                process.start()
        self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        self.lines += 1
        return [until(lambda p=process: self._line(p), process.name, DEADLINE_S) for process in self.processes]

    def _line(self, process: Process) -> Any:
        said = process.log.read_text(errors="replace")
        lines = [line for line in said.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]
        if len(lines) < self.lines:
            assert process.runs, f"{process.name}: {said[-3000:]}"
            return None
        return json.loads(lines[self.lines - 1])


AGENT = "deltasync-agent --name job --socket agent.sock --listen 0.0.0.0:7070 --token-file ../token"


RELAY = "deltasync --log-level info relay --from {} --agent agent.sock --token-file ../token"


class Job:
    def __init__(self, lab: Lab, hosts: int, with_agents: bool) -> None:
        self.lab = lab
        self.hosts = [f"trainer{number}" for number in range(hosts)]
        environment = {
            **{"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            **{"MASTER_ADDR": self.hosts[0], "MASTER_PORT": str(PORT), "WORLD_SIZE": str(2 * hosts)},
        }
        trainers = []
        for rank in range(2 * hosts):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
            words = ["trainer", *(["with-agent"] if with_agents else [])]
            trainers.append(self._run(lab, self.hosts[rank // 2], f"rank{rank}", words, {**environment, **own}))
        self.endpoints = [f"{host if with_agents else lab.topology.hosts[host].address}:7070" for host in self.hosts]
        rollout = self._run(lab, "rollout", "receiver", ["rollout"], environment)
        self.trainers = Ranks(trainers)
        self.rollout = Ranks([rollout])

    @staticmethod
    def _run(lab: Lab, host: str, name: str, words: list[str], environment: dict[str, str]) -> Process:
        return lab.run(host, name, [sys.executable, str(WORKER), *words], stdin=subprocess.PIPE, env=environment)

    def publish(self, number: int, connect: bool = False, source: str = "") -> str:
        """The version comes out on all ranks alike, and the rollout host has it bit for bit. How it came."""
        said = self.trainers.ask("offload")
        assert said[0].get("number") == number, said
        assert all(one == said[0] for one in said), said
        assert said[0]["endpoints"] == self.endpoints
        if connect:
            self.rollout.ask(f"connect {source or self.endpoints[0]}")
        return str(self.rollout.ask(f"pull {number}")[0]["mode"])

    def end(self) -> None:
        self.rollout.ask("end")
        self.trainers.ask("end")


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    hosts, with_agents, *relays = request.param
    trainers = {
        "names": [f"trainer{number}" for number in range(hosts)],
        "run": {"agent": AGENT} if with_agents else {},
    }
    others = [{"names": ["rollout"]}, *({"names": [relay], "run": {"agent": AGENT}} for relay in relays)]
    with Lab(Topology({"hosts": [trainers, *others]}), BINARIES) as lab:
        lab.run_all()
        yield Job(lab, hosts, with_agents)


@pytest.mark.parametrize("job", [(2, False), (4, False)], indirect=True)
def test_versions_of_several_hosts(job: Job) -> None:
    assert job.publish(1, connect=True) == "full"
    assert job.publish(2) == "delta"
    assert job.publish(3) == "delta"
    job.end()


@pytest.mark.parametrize("job", [(2, False)], indirect=True)
def test_a_rank_fails_and_an_agent_dies(job: Job) -> None:
    job.publish(1, connect=True)
    for number, broken in ((3, 3), (5, 0)):
        job.trainers.ask(f"fail_next {broken}")
        said = job.trainers.ask("offload")
        for rank, one in enumerate(said):
            assert one["soon"], one
            assert one["error"] == ("Broken" if rank == broken else "Aborted"), one
            # Those of the same host may have heard of it there first.
            assert rank // 2 == broken // 2 or f"rank {broken}" in one["why"] or f"rank {broken ^ 1}" in one["why"], one
        job.publish(number)
    for number in (6, 7):
        job.trainers.ask("end_agent 2")
        job.publish(number)
    job.end()


@pytest.mark.parametrize("job", [(2, True)], indirect=True)
def test_a_trainer_host_is_rebooted(job: Job) -> None:
    """The job begins again with the agents that there are: one has the versions before, the other one nothing."""
    job.publish(1, connect=True)
    job.publish(2)
    for rank in (0, 1):
        job.lab.kill(f"trainer0.rank{rank}")
    job.lab.reboot("trainer1")
    job.trainers.start_again()
    job.publish(1)
    assert job.publish(2) == "delta"
    job.end()


@pytest.mark.parametrize("job", [(2, False, "near", "far")], indirect=True)
def test_a_relay_goes_on_at_the_trainer_hosts_and_comes_back(job: Job) -> None:
    """Where it goes from one agent with the whole model to two with parts."""
    job.trainers.ask("offload")
    job.lab.run("near", "relay", RELAY.format("trainer0:7070"))
    far = job.lab.run("far", "relay", RELAY.format("near:7070,trainer0:7070"))
    job.publish(2, connect=True, source="far:7070")
    job.lab.kill("near")
    assert job.publish(3) == "delta"
    job.lab.start("near")
    until(lambda: "preferred_agent_back" in far.log.read_text(), "the relay near by", DEADLINE_S)
    assert job.publish(4) == "delta"
    for host in job.hosts:  # which are not asked any more
        job.lab.cut("far", host)
    assert job.publish(5) == "delta"
    job.end()
