"""Data over UCX: an agent with --ucx, and receivers at ucx://HOST:PORT. The library is PyPI's libucx-cu12, which needs
no device; what carries the bytes is fixed by UCX_TLS, and allowed by DELTASYNC_UCX_TRANSPORTS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltasync
import numpy as np
import pytest
from deltasync import _programs, errors
from openssl_certificates import Certificates

libucx = pytest.importorskip("libucx", reason="libucx-cu12 is not installed")

#: An agent that ends removes its segment.
pytestmark = pytest.mark.usefixtures("shm_files")
LIBRARY = str(Path(libucx.__file__).parent / "lib" / "libucp.so.0")

Weights = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(params=["tcp", "posix"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fixed for the agent and for the receivers that the test starts, which are processes of their own."""
    name: str = request.param
    monkeypatch.setenv("UCX_TLS", name)
    monkeypatch.setenv("DELTASYNC_UCX_LIBRARY", LIBRARY)
    monkeypatch.setenv("DELTASYNC_UCX_TRANSPORTS", name)
    return name


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("DELTASYNC_UCX_LIBRARY", LIBRARY)


@pytest.fixture
def weights() -> Weights:
    random = np.random.default_rng(3)
    return {f"layer.{i}": random.standard_normal((1024, 1024), dtype=np.float32) for i in range(12)}


@pytest.fixture
def manager(segment_name: str, weights: Weights) -> Iterator[deltasync.WeightManager]:
    with deltasync.WeightManager(weights, name=segment_name, agent_args=["--ucx"]) as made:
        yield made


def command(endpoint: str, out: Path) -> list[str]:
    program = str(_programs.find("deltasync"))
    return [program, "pull", "--from", endpoint, "--out", str(out), "--local", "never", "--json"]


def pull(endpoint: str, out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command(endpoint, out), *args], capture_output=True, text=True, timeout=120, check=False)


def start(endpoint: str, out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(endpoint, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def pull_once_it_is_there(endpoint: str, out: Path) -> subprocess.CompletedProcess[str]:
    """An agent that has been killed is started again within a while."""
    end = time.monotonic() + 60
    while (done := pull(endpoint, out)).returncode == 2 and time.monotonic() < end:
        time.sleep(0.1)
    return done


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_has(out: Path, weights: Weights) -> None:
    from safetensors.numpy import load_file

    got: Weights = {}
    for file in sorted((out / "current").glob("*.safetensors")):
        got |= load_file(file)
    assert got.keys() == weights.keys()
    for name, wanted in weights.items():
        assert np.array_equal(got[name].view(np.uint32), wanted.view(np.uint32)), name


def change(weights: Weights) -> None:
    for tensor in weights.values():
        tensor.reshape(-1)[::97] += 1


@pytest.mark.parametrize("streams", ["1", "4"])
def test_a_full_and_a_delta_cross_by_what_was_asked_for(
    transport: str, streams: str, manager: deltasync.WeightManager, weights: Weights, tmp_path: Path
) -> None:
    manager.offload(weights)
    for mode in ("full", "delta"):
        said = report(pull(f"ucx://{manager.endpoint}", tmp_path / "out", "--streams", streams))
        assert said["mode"] == mode
        assert said["transports"].split("/")[0] == transport
        assert said["local_bytes"] == 0
        assert_has(tmp_path / "out", weights)
        change(weights)
        manager.offload(weights)
    assert report(pull(manager.endpoint, tmp_path / "plain"))["transports"] == ""


def test_a_fall_back_in_silence_is_refused(
    manager_on_tcp: deltasync.WeightManager, weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager_on_tcp.offload(weights)
    monkeypatch.setenv("UCX_TLS", "posix,tcp")  # the agent has tcp alone
    monkeypatch.setenv("DELTASYNC_UCX_TRANSPORTS", "posix")
    done = pull(f"ucx://{manager_on_tcp.endpoint}", tmp_path / "out")
    assert done.returncode == 9, done.stderr
    assert "UCX uses tcp/lo here, and DELTASYNC_UCX_TRANSPORTS allows only posix" in done.stderr


@pytest.fixture
def manager_on_tcp(tcp: None, manager: deltasync.WeightManager) -> deltasync.WeightManager:
    return manager


def test_an_agent_that_is_killed_amid_pulls_is_found_again(
    transport: str, manager: deltasync.WeightManager, weights: Weights, tmp_path: Path
) -> None:
    """At several moments, so that some of the kills meet wire-up and others transfers."""
    manager.offload(weights)
    agent = manager.agent
    assert agent is not None
    for i in range(4):
        with start(f"ucx://{manager.endpoint}", tmp_path / f"out{i}") as pulling:
            time.sleep(0.05 + 0.06 * i)
            os.kill(agent.pid, signal.SIGKILL)
            pulling.wait(timeout=120)
        assert pulling.returncode in (0, 2)  # pulled from the next agent, or there was none yet: no crash
        said = report(pull_once_it_is_there(f"ucx://{manager.endpoint}", tmp_path / f"out{i}"))
        assert said["mode"] == "up_to_date" or said["transports"].split("/")[0] == transport
        assert_has(tmp_path / f"out{i}", weights)
    assert agent.restarts == 4


def test_a_receiver_that_is_killed_leaves_the_agent_to_others(
    transport: str, manager: deltasync.WeightManager, weights: Weights, tmp_path: Path
) -> None:
    manager.offload(weights)
    agent = manager.agent
    assert agent is not None
    for i in range(8):
        with start(f"ucx://{manager.endpoint}", tmp_path / f"killed{i}") as one:
            time.sleep(0.05 + 0.02 * i)
            one.kill()
    assert report(pull(f"ucx://{manager.endpoint}", tmp_path / "out"))["mode"] == "full"
    assert_has(tmp_path / "out", weights)
    assert agent.restarts == 0


#: A process opens UCX once, as its environment was then.
RECEIVER = """if True:
    import os, signal, sys
    import deltasync, numpy as np
    from deltasync import errors
    endpoint, agent, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with deltasync.Receiver(endpoint, local="never", timeout=60) as receiver:
        receiver.update()
        print("held", flush=True)
        version = int(sys.stdin.readline())
        os.kill(agent, signal.SIGSTOP)
        try:
            receiver.update(version, timeout=1)
        except errors.DeadlinePassed:
            print("passed", flush=True)
        finally:
            os.kill(agent, signal.SIGCONT)
        receiver.update(version, timeout=60)
        np.savez(out, **dict(receiver.arrays()))
    """


def test_an_agent_that_is_stopped_meets_the_deadline(
    transport: str, manager: deltasync.WeightManager, weights: Weights, tmp_path: Path
) -> None:
    manager.offload(weights)
    agent = manager.agent
    assert agent is not None
    out = tmp_path / "held.npz"
    arguments = [sys.executable, "-c", RECEIVER, f"ucx://{manager.endpoint}", str(agent.pid), str(out)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdin is not None and receiver.stdout is not None
        assert receiver.stdout.readline() == "held\n"
        change(weights)
        print(manager.offload(weights).version.number, file=receiver.stdin, flush=True)
        assert receiver.stdout.readline() == "passed\n"
        assert receiver.wait(120) == 0
    with np.load(out) as held:
        for name, tensor in weights.items():
            assert np.array_equal(held[name], tensor), name


def test_a_token_is_asked_for_before_anything_of_ucx(
    tcp: None, segment_name: str, weights: Weights, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    wrong = tmp_path / "wrong"
    for file, secret in ((token, "a secret of many bytes"), (wrong, "another secret of many bytes")):
        file.write_text(secret)
        file.chmod(0o600)
    with deltasync.WeightManager(weights, name=segment_name, token_file=token, agent_args=["--ucx"]) as manager:
        manager.offload(weights)
        endpoint = f"ucx://{manager.endpoint}"
        done = pull(endpoint, tmp_path / "out", "--token-file", str(wrong))
        assert done.returncode == 7, done.stderr
        assert "token" in done.stderr
        report(pull(endpoint, tmp_path / "out", "--token-file", str(token)))
        assert_has(tmp_path / "out", weights)


def test_an_agent_without_it_says_so(tcp: None, segment_name: str, weights: Weights, tmp_path: Path) -> None:
    with deltasync.WeightManager(weights, name=segment_name) as manager:
        manager.offload(weights)
        done = pull(f"ucx://{manager.endpoint}", tmp_path / "out")
        assert done.returncode == 9, done.stderr
        assert "start it with --ucx" in done.stderr


def test_it_is_refused_with_tls(tcp: None, segment_name: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    cert, key = certificates.sign("agent", "IP:127.0.0.1")
    with pytest.raises(errors.InvalidArgument, match="--ucx: UCX has no TLS"):
        deltasync.AgentProcess(segment_name, tls={"cert": cert, "key": key}, args=["--ucx"])
    done = pull("ucx://127.0.0.1:1", tmp_path / "out", "--tls-ca", str(certificates.ca))
    assert done.returncode == 1, done.stderr
    assert "UCX has no TLS" in done.stderr


def test_without_the_library_both_ends_name_it(
    segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTASYNC_UCX_LIBRARY", "libnosuchucp.so.7")
    with pytest.raises(errors.Error, match=r"--ucx: UCX: libnosuchucp\.so\.7"):
        deltasync.AgentProcess(segment_name, args=["--ucx"])
    done = pull("ucx://127.0.0.1:1", tmp_path / "out")
    assert done.returncode == 9, done.stderr
    assert "DELTASYNC_UCX_LIBRARY" in done.stderr


def test_listening_takes_no_scheme(segment_name: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="without a scheme"):
        deltasync.AgentProcess(segment_name, listen="ucx://127.0.0.1:0")


def test_a_hang_up_ends_who_has_opened_ucx(transport: str, manager: deltasync.WeightManager, weights: Weights) -> None:
    """libucs would take the signal for its debugging."""
    code = """if True:
        import os, signal, sys, deltasync
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started with
        with deltasync.Receiver(sys.argv[1]) as receiver:
            os.kill(os.getpid(), signal.SIGHUP)
        """
    manager.offload(weights)
    endpoint = "ucx://" + manager.endpoint
    done = subprocess.run([sys.executable, "-c", code, endpoint], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGHUP
    assert done.stdout == b""
