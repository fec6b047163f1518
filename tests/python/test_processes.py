"""Processes that die, fork, are interrupted: nobody hangs, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import deltasync
import numpy as np
import pytest
from deltasync import errors
from deltasync._segment_files import lock_file, remove_segments

LIMIT_S = 120.0


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited for: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rsplit(") ", 1)[1][0] not in "ZX"


#: A shell that starts a job in the background has it ignore SIGINT, and so do the job's children.
HEARS_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
#: Says so once the main thread is in the call that follows.
SAYS_WAITING = 'import threading; threading.Timer(0.3, print, ("waiting",), {"flush": True}).start()'


def script(code: str, *args: str) -> subprocess.Popen[str]:
    code = HEARS_SIGINT + code.replace("SAYS_WAITING", SAYS_WAITING)
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def weights(fill: float = 1.0) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 32), fill, np.float32)}


TRAINER = """
import json, sys, numpy as np, deltasync
w = {"w": np.ones((64, 32), np.float32)}
manager = deltasync.WeightManager(w, name=sys.argv[1])
manager.offload(w)
print(json.dumps({"agent": manager.agent.pid, "endpoint": manager.endpoint}), flush=True)
sys.stdin.read()
"""


def test_agent_ends_with_a_trainer_that_is_killed(segment_name: str, shm_files: set[str]) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, segment_name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    said = json.loads(trainer.stdout.readline())
    assert alive(said["agent"])
    trainer.kill()
    trainer.wait()
    until(lambda: not alive(said["agent"]), "the agent's end")


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGRTMIN + 1])  # which has no name
def test_agent_that_dies_is_started_again(by: int, segment_name: str) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            assert manager.agent is not None
            first = manager.agent.pid
            os.kill(first, by)
            until(lambda: manager.agent is not None and manager.agent.restarts == 1, "the agent's restart")
            assert manager.agent.pid != first
            manager.offload(weights(2.0))
            assert receiver.update(2).version.number == 2
            assert dict(receiver.arrays())["w"][0, 0] == 2.0


def test_an_agent_is_started_again_though_its_directory_was_cleared(segment_name: str) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())
        assert manager.agent is not None
        shutil.rmtree(Path(manager.socket).parent)
        os.kill(manager.agent.pid, signal.SIGKILL)
        until(lambda: manager.agent is not None and manager.agent.restarts == 1, "the agent's restart")
        manager.offload(weights(2.0))
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update(2)
            assert dict(receiver.arrays())["w"][0, 0] == 2.0


def test_a_manager_that_is_dropped_ends_its_agent(segment_name: str, shm_files: set[str]) -> None:
    manager = deltasync.WeightManager(weights(), name=segment_name)
    manager.offload(weights())
    assert manager.agent is not None
    pid, endpoint = manager.agent.pid, manager.endpoint
    child = os.fork()
    if child == 0:
        gc.freeze()
        del manager
        os._exit(0)
    os.waitpid(child, 0)
    assert alive(pid)
    with pytest.raises(errors.AlreadyExists, match="an earlier manager of this process"):
        deltasync.WeightManager(weights(), listen=endpoint)
    del manager
    gc.collect()
    until(lambda: not alive(pid), "the agent's end")
    with deltasync.WeightManager(weights(), name=segment_name, listen=endpoint) as manager:
        manager.offload(weights())


def test_a_host_that_no_name_can_be_is_the_agents_to_refuse() -> None:
    with pytest.raises(errors.Error) as refused:
        deltasync.AgentProcess(listen=f"{'a' * 70}:0")
    assert "aaaa:0" in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nobody_gets_the_port_of_an_agent_that_is_away(
    segment_name: str, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    with deltasync.AgentProcess(segment_name, listen=f"{host}:0") as agent:
        endpoint, goes_on = agent.endpoint, threading.Event()
        start = agent._start

        def start_later() -> subprocess.Popen[bytes]:
            goes_on.wait(60)
            return start()

        monkeypatch.setattr(agent, "_start", start_later)
        os.kill(agent.pid, signal.SIGKILL)
        until(lambda: agent.error != "", "its end is seen")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, agent.port))
        goes_on.set()
        until(lambda: agent.error == "", "the next agent")
        assert agent.endpoint == endpoint and agent.restarts == 1


def test_a_manager_may_be_dropped_while_its_agent_is_started_again(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the collector, in the thread that starts it."""
    agent = deltasync.AgentProcess(segment_name)
    start = agent._start

    def stop_and_start() -> subprocess.Popen[bytes]:
        agent.stop()
        started.append(start())
        return started[0]

    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(agent, "_start", stop_and_start)
    os.kill(agent.pid, signal.SIGKILL)
    until(lambda: not agent._watcher.is_alive(), "the watcher's end")
    assert all(process.poll() is not None for process in started)
    Path(f"/dev/shm/{segment_name}.lock").unlink(missing_ok=True)  # of the agent that was killed


def test_what_an_agent_leaves_that_is_killed_goes_with_the_manager(
    segment_name: str, shm_files: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltasync.agent, "_END_S", 0.2)
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        assert manager.agent is not None
        manager.offload(weights())
        os.kill(manager.agent.pid, signal.SIGSTOP)  # so that it does not end when it is asked to


def test_only_the_files_of_an_agent_that_ended_are_removed(tmp_path: Path) -> None:
    own = ["a.g1", "a.g1.d0", "a.g12.d3", "a.lock"]
    others = ["a.b.g1", "a.b.lock", "ab.g1", "a.g1.txt", "b.g1"]
    for name in (*own, *others):
        (tmp_path / name).touch()
    held = lock_file(tmp_path / "a.lock")
    with pytest.raises(BlockingIOError):
        remove_segments("a", tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(own + others)
    os.close(held)
    remove_segments("a", tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    remove_segments("a", tmp_path)


def test_second_agent_of_a_name_says_who_has_it(agent: deltasync.AgentProcess) -> None:
    with pytest.raises(errors.AlreadyExists, match=str(agent.pid)):
        deltasync.AgentProcess(agent.name)


def test_wrong_option_fails_at_once() -> None:
    with pytest.raises(errors.InvalidArgument, match="exit code 1"):
        deltasync.AgentProcess("x", args=["--no-such-option"])


def test_a_directory_for_temporary_files_may_be_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(errors.InvalidArgument, match="set TMPDIR to a shorter directory"):
        deltasync.AgentProcess()


INTERRUPTED = """
import sys, deltasync
receiver = deltasync.Receiver(sys.argv[1])
try:
    SAYS_WAITING
    receiver.update(99, timeout=600) if sys.argv[2] == "update" else receiver._bound.native.pull(99, timeout=600)
except KeyboardInterrupt:
    receiver.close()
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("call", ["update", "native"])
def test_ctrl_c_ends_a_wait(segment_name: str, call: str) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())
        waiter = script(INTERRUPTED, manager.endpoint, call)
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "waiting\n"
        waiter.send_signal(signal.SIGINT)
        out, err = waiter.communicate(timeout=LIMIT_S)
        assert (out, waiter.returncode) == ("interrupted\n", 0), err


#: Two writers of one version, of which the second keeps the first waiting.
WRITERS = """
import sys, threading, numpy as np, deltasync
from deltasync._native import Batch, Version, Writer
from deltasync.layouts import layout_of
half = np.zeros((4, 8), np.float32)
layout, sidecar = layout_of({"w": np.zeros((8, 8), np.float32)})
with deltasync.AgentProcess(sys.argv[1]) as agent:
    writers = [Writer.attach(layout, sidecar, agent.socket, index=i, writers=2) for i in range(2)]
    plans = [Batch(), Batch()]
    for i in range(2):
        plans[i].add(0, 4 * i, 0, 4, 8, half.ctypes.data)
    try:
        if sys.argv[2] == "commit":
            other = threading.Thread(target=writers[1].register_plan, args=(plans[1],))
            other.start()
            writers[0].register_plan(plans[0])
            other.join()
            for i in range(2):
                writers[i].begin(Version(7, 1))
                writers[i].write_batch(plans[i])
        SAYS_WAITING
        writers[0].commit(600) if sys.argv[2] == "commit" else writers[0].register_plan(plans[0], 600)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    del writers
"""


@pytest.mark.parametrize("call", ["register_plan", "commit"])
def test_ctrl_c_ends_the_wait_for_another_writer(segment_name: str, call: str) -> None:
    waiter = script(WRITERS, segment_name, call)
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "waiting\n"
    waiter.send_signal(signal.SIGINT)
    out, err = waiter.communicate(timeout=LIMIT_S)
    assert (out, waiter.returncode) == ("interrupted\n", 0), err


def test_a_handler_of_a_signal_does_not_call_a_writer_that_is_in_a_call(segment_name: str) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        version = manager.offload(weights()).version
        refused: list[Exception] = []

        def handler(*_: object) -> None:
            try:
                manager.offload(weights(2.0))
            except Exception as e:
                refused.append(e)

        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(errors.DeadlinePassed):
                manager.wait_ready(deltasync.Version(version.epoch, version.number + 1), timeout=1.0)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert [type(e) for e in refused] == [errors.InvalidArgument]
        assert "under way" in str(refused[0])
        assert manager.offload(weights(2.0)).version.number == 2


def test_ctrl_c_ends_the_wait_for_an_agent() -> None:
    code = """
import deltasync
try:
    SAYS_WAITING
    deltasync.WeightManager({}, agent="/tmp/there-is-no-such.sock", timeout=600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    code = code.replace("{}", '{"w": __import__("numpy").ones(3)}')
    waiter = script(code)
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "waiting\n"
    waiter.send_signal(signal.SIGINT)
    out, err = waiter.communicate(timeout=LIMIT_S)
    assert out == "interrupted\n", err


def test_forked_child_disturbs_nobody_and_may_have_its_own(segment_name: str) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    manager.offload(weights())
                except errors.InvalidArgument as error:
                    code = 0 if "forked" in str(error) else 2
                with deltasync.Receiver(manager.endpoint) as receiver:
                    receiver.update()
                manager.close()
            except BaseException:
                code = 3
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert manager.agent is not None
        assert alive(manager.agent.pid)
        manager.offload(weights(3.0))
        manager.wait_ready()


def test_no_agent_there_is_said_by_the_deadline() -> None:
    with pytest.raises(errors.ConnectionFailed, match="127.0.0.1:1"):
        deltasync.Receiver("127.0.0.1:1", timeout=0.3)
    with pytest.raises(ConnectionError, match="no-such"):
        deltasync.WeightManager(weights(), agent="/tmp/no-such.sock", timeout=0.3)


def test_wrong_token_is_refused(segment_name: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the right horse, with a battery\n")
    token.chmod(0o600)
    with deltasync.WeightManager(weights(), name=segment_name, token_file=token) as manager:
        manager.offload(weights())
        with pytest.raises(errors.Unauthenticated):
            deltasync.Receiver(manager.endpoint, token="wrong", timeout=5)
        with deltasync.Receiver(manager.endpoint, token_file=token) as receiver:
            assert receiver.update().version.number == 1


@pytest.mark.parametrize("wait", ["", "receiver.prepare(99, timeout=600)"])
def test_process_ends_with_an_open_receiver(segment_name: str, wait: str) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())
        code = f"import sys, deltasync\nreceiver = deltasync.Receiver(sys.argv[1], background={not wait})\n{wait}"
        out, err = script(code, manager.endpoint).communicate(timeout=LIMIT_S)
        assert (out, err) == ("", "")


#: Ends while threads that it does not wait for come back into Python.
POLLS = """
import sys, threading, time, deltasync
receiver = deltasync.Receiver(sys.argv[1])
def poll():
    while True:
        receiver.lag()
for _ in range(4):
    threading.Thread(target=poll, daemon=True).start()
time.sleep(0.3)
"""


def test_process_ends_while_daemon_threads_call(segment_name: str) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())
        ended = script(POLLS, manager.endpoint)
        _, err = ended.communicate(timeout=LIMIT_S)
        assert ended.returncode == 0, err


def test_close_ends_though_an_interrupt_kept_the_lock(segment_name: str) -> None:
    """A Ctrl-C between a lock and the try that gives it back cannot be sent on purpose: what it leaves can."""
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())
        code = """
import sys, deltasync
receiver = deltasync.Receiver(sys.argv[1])
receiver._bound.lock.acquire()
receiver.prepare()
receiver.close()
print("closed")
"""
        out, err = script(code, manager.endpoint).communicate(timeout=LIMIT_S)
        assert (out, err) == ("closed\n", "")


def test_forked_child_that_exits_leaves_the_agent_its_directory(segment_name: str) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())
        with deltasync.Receiver(manager.endpoint, background=True) as receiver:
            receiver.commit()
            child = os.fork()
            if child == 0:
                code = 1
                gc.freeze()  # of what other tests left, torch's TCPStore crashes a forked child that destroys it
                try:
                    receiver.cancel()
                    receiver.close()
                    receiver.attest(timeout=1)
                except errors.InvalidArgument:
                    code = 0
                finally:
                    try:
                        sys.exit(code)
                    finally:
                        del manager.agent._directory
                        gc.collect()
                        os._exit(code)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert Path(manager.socket).exists()
            manager.offload(weights(2.0))
            report = receiver.commit(timeout=30)
            assert (report.version.number, report.replans) == (2, 0)


def test_forked_child_leaves_the_staged_directory_alone(segment_name: str, tmp_path: Path) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())
        receiver = deltasync.Receiver(manager.endpoint, directory=tmp_path / "out")
        prepared = receiver.prepare()
        prepared.wait(LIMIT_S)
        held = [receiver, prepared]
        staged = sorted(tmp_path.rglob("*.safetensors"))
        assert staged
        del receiver, prepared
        child = os.fork()
        if child == 0:
            gc.freeze()  # as above
            held.clear()
            gc.unfreeze()
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sorted(tmp_path.rglob("*.safetensors")) == staged
        held.clear()
        gc.collect()
        assert not list(tmp_path.rglob("*.safetensors"))  # which the child would have done


def test_default_numbers_go_on_after_an_interrupt_behind_the_commit(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        manager.offload(weights())

        class Interrupted:
            def __init__(self, writer: object) -> None:
                self.writer = writer

            def __getattr__(self, name: str) -> object:
                return getattr(self.writer, name)

            def commit(self, timeout: float) -> None:
                self.writer.commit(timeout)  # type: ignore[attr-defined]
                raise KeyboardInterrupt

        monkeypatch.setattr(manager, "_writer", Interrupted(manager._writer))
        with pytest.raises(KeyboardInterrupt):
            manager.offload(weights(2.0))
        monkeypatch.undo()
        assert manager.version is not None and manager.version.number == 2
        assert manager.offload(weights(3.0)).version.number == 3
    with pytest.raises(errors.InvalidArgument, match="closed"):
        manager.offload(weights())
    with pytest.raises(errors.InvalidArgument, match="closed"):
        manager.wait_ready()


def test_an_interrupt_in_any_call_of_an_offload_leaves_the_manager_usable(segment_name: str) -> None:
    offload = deltasync.WeightManager.offload.__code__

    def interrupted(manager: deltasync.WeightManager, number: int) -> bool:
        """Whether an offload makes as many calls; the one of this number ends in its beginning."""
        calls = 0

        def interrupt(frame: types.FrameType, event: str, _: object) -> None:
            nonlocal calls
            if event == "call" and frame.f_back is not None and frame.f_back.f_code is offload:
                calls += 1
                if calls == number:
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            manager.offload(weights())
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    number = 1
    with deltasync.WeightManager(weights(), name=segment_name) as manager:
        while interrupted(manager, number):
            manager.offload(weights())
            number += 1
    assert number > 5


def _pull_in_a_spawned_worker(endpoint: str) -> float:
    with deltasync.Receiver(endpoint) as receiver:
        receiver.update()
        return float(next(receiver.arrays())[1].flat[0])


def test_spawned_workers_have_their_own(segment_name: str) -> None:
    with deltasync.WeightManager(weights(2.0), name=segment_name) as manager:
        manager.offload(weights(2.0))
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            assert pool.map(_pull_in_a_spawned_worker, [manager.endpoint] * 3) == [2.0] * 3
        manager.offload(weights(3.0))
