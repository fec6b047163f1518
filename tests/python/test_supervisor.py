"""The processes of a fleet's nodes, without Ray: supervisors of a trainer node and of a rollout node on this host."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltasync
import numpy as np
import pytest
from deltasync import _supervisor, errors
from deltasync._supervisor import NodeOptions, Supervisor
from deltasync.tls import Tls
from openssl_certificates import Certificates

DEADLINE_S = 60.0
#: A supervisor that is killed: it gets its options, and what it relays.
KILLED = """
import json, pickle, sys, time
from deltasync._supervisor import Supervisor
with open(sys.argv[1], "rb") as file:
    options, parents = pickle.load(file)
supervisor = Supervisor(options)
place = supervisor.start(60)
if parents:
    supervisor.follow(parents)
print(json.dumps(place | supervisor.status()), flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (answer := condition()):
        assert time.monotonic() < end, "the deadline has passed"
        time.sleep(0.02)
    return answer


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Nodes:
    """Supervisors with directories of their own, whose segments the test can tell from others."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.prefix = f"test{os.getpid()}{secrets.token_hex(4)}"
        self.token = secrets.token_hex(32)
        self.tls = Tls()
        self.supervisors: list[Supervisor] = []
        self.children: list[subprocess.Popen[str]] = []

    def options(self, name: str, fleet: str = "f") -> NodeOptions:
        return NodeOptions(f"{self.prefix}-{name}", fleet, "127.0.0.1", 0, self.token, self.tls, "/dev/shm")

    def supervisor(self, name: str, fleet: str = "f") -> Supervisor:
        self.supervisors.append(Supervisor(self.options(name, fleet)))
        return self.supervisors[-1]

    def in_process(self, name: str, parents: Sequence[str] = ()) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """A supervisor that can be killed; its place and status."""
        given = self.directory / f"{name}.given"
        given.write_bytes(pickle.dumps((self.options(name), parents)))
        argv = [sys.executable, "-c", KILLED, str(given)]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.children.append(child)
        assert child.stdout is not None
        return child, json.loads(child.stdout.readline())

    def segments(self) -> list[str]:
        return [path.name for path in Path("/dev/shm").glob(f"deltasync-ray-{os.getuid()}-{self.prefix}*")]

    def receiver(self, *endpoints: str) -> deltasync.Receiver:
        return deltasync.Receiver(list(endpoints), token=self.token, tls=self.tls, timeout=DEADLINE_S)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory() as short:  # the path of a socket has to be
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", short)
        nodes = Nodes(tmp_path)
        yield nodes
        for child in nodes.children:
            child.kill()
            child.communicate()
        for supervisor in nodes.supervisors:
            supervisor.stop()
        assert nodes.segments() == []
        assert list(Path(short).glob("deltasync-ray-*")) == []


class Trainer:
    def __init__(self, place: dict[str, str]) -> None:
        self.weights = {"w": np.zeros((300, 400), np.float32)}
        self.manager = deltasync.WeightManager(self.weights, agent=place["socket"], advertise=place["endpoint"])

    def publish(self) -> deltasync.Version:
        self.weights["w"][7, 8] += 1
        return self.manager.offload(self.weights).version


def has(receiver: deltasync.Receiver, version: deltasync.Version, trainer: Trainer) -> str:
    report = receiver.update(version)
    assert np.array_equal(dict(receiver.arrays())["w"], trainer.weights["w"])
    return report.mode


def test_a_relay_and_an_agent_that_die_are_started_again(nodes: Nodes) -> None:
    root, leaf = nodes.supervisor("root"), nodes.supervisor("leaf")
    place = root.start(DEADLINE_S)
    near = leaf.start(DEADLINE_S)
    leaf.follow([place["endpoint"]])
    trainer = Trainer(place)
    version = trainer.publish()
    with nodes.receiver(near["endpoint"]) as receiver:
        assert has(receiver, version, trainer) == "full"
        for killed in (root, leaf):
            before = killed.status()
            for which in ("agent_pid", "relay_pid"):
                if before[which]:
                    os.kill(before[which], signal.SIGKILL)
            parts = 1 if killed is root else 2
            until(lambda killed=killed, parts=parts: killed.status()["restarts"] == parts)
            assert has(receiver, trainer.publish(), trainer) == "delta"
    trainer.manager.close()
    assert (root.start(DEADLINE_S), leaf.start(DEADLINE_S)) == (place, near)


def test_a_supervisor_that_is_killed_is_followed_by_one_that_goes_on_with_the_segment(nodes: Nodes) -> None:
    root, place = nodes.in_process("root")
    leaf, near = nodes.in_process("leaf", [place["endpoint"]])
    trainer = Trainer(place)
    version = trainer.publish()
    with nodes.receiver(near["endpoint"]) as receiver:
        assert has(receiver, version, trainer) == "full"
        for name, child, was in (("leaf", leaf, near), ("root", root, place)):
            child.kill()
            child.wait()
            follower = nodes.supervisor(name)
            until(lambda follower=follower: follower.status()["actor_restarts"] == 1)
            until(lambda was=was: ended(was["agent_pid"]) and (was["relay_pid"] is None or ended(was["relay_pid"])))
            assert follower.start(DEADLINE_S) == {key: was[key] for key in ("endpoint", "socket")}
            version = trainer.publish()
            assert version.epoch == trainer.manager.epoch
            assert has(receiver, version, trainer) == "delta"
    trainer.manager.close()


def test_a_fleet_takes_away_what_another_one_of_its_name_left(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_supervisor, "_FREE_S", 0.5)
    child, place = nodes.in_process("root")
    trainer = Trainer(place)
    trainer.publish()
    with pytest.raises(errors.AlreadyExists, match="runs on this host already"):
        nodes.supervisor("root", "another").start(DEADLINE_S)
    child.kill()
    child.wait()
    trainer.manager.close()
    until(lambda: ended(place["agent_pid"]))
    assert nodes.segments() != []
    nodes.supervisor("root", "another").start(DEADLINE_S)
    assert [name for name in nodes.segments() if not name.endswith(".lock")] == []


def test_a_fleet_leaves_the_agent_of_another_one_with_other_directories(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_supervisor, "_FREE_S", 0.5)
    one = nodes.supervisor("root")
    trainer = Trainer(one.start(DEADLINE_S))
    trainer.publish()
    before = set(nodes.segments())
    with tempfile.TemporaryDirectory() as other:
        monkeypatch.setattr(tempfile, "tempdir", other)
        late = nodes.supervisor("root", "another")
        with pytest.raises(errors.AlreadyExists, match="runs on this host already"):
            late.start(DEADLINE_S)
        late.stop()
    assert before <= set(nodes.segments())
    with nodes.receiver(trainer.manager.endpoint) as receiver:
        has(receiver, trainer.publish(), trainer)
    trainer.manager.close()


def test_a_fleet_waits_for_one_of_its_name_that_closes(nodes: Nodes) -> None:
    one, other = nodes.supervisor("root"), nodes.supervisor("root", "another")
    one.start(DEADLINE_S)
    closing = threading.Timer(0.5, one.stop)
    closing.start()
    place = other.start(DEADLINE_S)
    closing.join()
    assert Path(place["socket"]).exists()
    assert other.start(DEADLINE_S) == place


@pytest.mark.parametrize("lies", ["link", "file", "open"])
def test_a_directory_that_others_could_change_is_refused(nodes: Nodes, tmp_path: Path, lies: str) -> None:
    supervisor = nodes.supervisor("root")
    directory = supervisor._directory
    try:
        if lies == "link":
            tmp_path.chmod(0o700)
            directory.symlink_to(tmp_path)
        elif lies == "file":
            directory.write_text("")
        else:
            directory.mkdir()
            directory.chmod(0o755)
        with pytest.raises(errors.PermissionDenied, match="remove it, or give another name="):
            supervisor.start(DEADLINE_S)
        assert list(tmp_path.iterdir()) == []
    finally:
        directory.rmdir() if lies == "open" else directory.unlink()


def test_a_port_that_another_program_has_is_named(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_supervisor, "_FREE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = Supervisor(replace(nodes.options("root"), port=other.getsockname()[1]))
        nodes.supervisors.append(taken)
        with pytest.raises(errors.AlreadyExists, match="has this port"):
            taken.start(DEADLINE_S)


def test_a_relay_that_always_ends_says_why(nodes: Nodes) -> None:
    leaf = Supervisor(replace(nodes.options("leaf"), relay_args=("--nonsense",)))
    nodes.supervisors.append(leaf)
    leaf.follow([leaf.start(DEADLINE_S)["endpoint"]])
    assert "--nonsense" in until(lambda: leaf.status()["error"])


def test_an_agent_that_does_not_start_again_says_why(nodes: Nodes) -> None:
    root = nodes.supervisor("root")
    root.start(DEADLINE_S)
    root._token_file.rename(root._token_file.with_suffix(".away"))
    os.kill(root.status()["agent_pid"], signal.SIGKILL)
    until(lambda: "token" in root.status()["error"])
    root._token_file.with_suffix(".away").rename(root._token_file)
    until(lambda: root.status()["error"] == "")


@pytest.mark.parametrize("over", ["plain", "tls"])
def test_a_node_that_is_cut_off_says_so_until_it_is_not(nodes: Nodes, tmp_path: Path, over: str) -> None:
    if over == "tls":
        certificates = Certificates(tmp_path)
        nodes.tls = Tls(*certificates.sign("node", "IP:127.0.0.1"), certificates.ca)
    (root, place), leaf = nodes.in_process("root"), nodes.supervisor("leaf")
    trainer = Trainer(place)
    version = trainer.publish()
    near = leaf.start(DEADLINE_S)
    leaf.follow([place["endpoint"]])
    with nodes.receiver(near["endpoint"]) as receiver:
        has(receiver, version, trainer)
    until(lambda: leaf.status()["error"] == "")
    root.kill()
    root.wait()
    error = until(lambda: leaf.status()["error"])
    assert "cut off for" in error and place["endpoint"] in error
    nodes.supervisor("root")  # goes on
    until(lambda: leaf.status()["error"] == "")
    trainer.manager.close()


@pytest.mark.parametrize("trouble", ["log", "start"])
def test_a_relay_is_started_again_whatever_its_host_lacks(
    nodes: Nodes, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = nodes.supervisor("leaf")
    leaf.follow([leaf.start(DEADLINE_S)["endpoint"]])
    assert leaf._relay is not None
    if trouble == "log":
        leaf._relay._log_file.unlink()
    else:
        start = leaf._relay._start

        def fail() -> None:
            monkeypatch.setattr(leaf._relay, "_start", start)
            raise BlockingIOError("no process can be made")

        monkeypatch.setattr(leaf._relay, "_start", fail)
    os.kill(leaf.status()["relay_pid"], signal.SIGKILL)
    until(lambda: leaf.status()["restarts"] == 1)
