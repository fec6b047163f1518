"""The agent of one node of a fleet, and its relay, kept alive by a process that may be killed itself."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from . import _programs
from ._deadlines import left
from ._segment_files import lock_file, remove_segments
from ._status_page import cut_off
from ._tries import Restarts, Tries
from .agent import AgentProcess, end_process, make_own
from .errors import AlreadyExists, Error
from .tls import Tls

_log = logging.getLogger("deltasync.supervisor")
_T = TypeVar("_T")

_PAUSE_MAX_S = 10.0
_START_S = 60.0
#: For what was there before to end.
_FREE_S = 10.0
_LOOK_S = 0.1


@dataclass(frozen=True)
class NodeOptions:
    """What the supervisors of a fleet's nodes are made with."""

    #: Of the fleet. What another fleet of this name has left on a node is taken away.
    name: str
    #: Of this fleet, and of no other one.
    fleet: str
    host: str
    port: int
    token: str
    tls: Tls
    shm_dir: str
    agent_args: tuple[str, ...] = ()
    relay_args: tuple[str, ...] = ()


class RelayProcess:
    """``deltasync relay`` into the agent at ``socket``: started again when it ends, until :meth:`stop`; it ends with
    this process. ``parents`` are HOST:PORT, the preferred one first."""

    def __init__(
        self,
        parents: Sequence[str],
        socket: str,
        *,
        token_file: str | os.PathLike[str],
        tls: Tls,
        log_file: Path,
        args: Sequence[str] = (),
    ) -> None:
        tls_options = {"--tls-ca": tls.ca, "--tls-name": tls.name, "--tls-cert": tls.cert, "--tls-key": tls.key}
        self._command = [
            *(str(_programs.find("deltasync")), "relay"),
            *("--from", ",".join(parents), "--agent", socket, "--token-file", str(token_file)),
            *(word for option, value in tls_options.items() if value for word in (option, os.fspath(value))),
            *("--end-with", str(os.getpid())),
            *args,
        ]
        self._log_file = log_file
        self.restarts = 0
        self._ended = ""
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, name="deltasync-relay-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Of the relay's process."""
        return self._process.pid

    @property
    def error(self) -> str:
        """Why it does not run just now; empty: it does."""
        return self._ended if self._process.poll() is not None else ""

    def stop(self) -> None:
        """Ends the relay. Does nothing the second time."""
        self._ending.set()
        with self._lock:
            end_process(self._process)
        self._watcher.join()

    def _start(self) -> subprocess.Popen[bytes]:
        none = subprocess.DEVNULL
        with self._log_file.open("ab") as log:
            return subprocess.Popen(self._command, stdin=none, stdout=none, stderr=log, start_new_session=True)

    def _watch(self) -> None:
        restarts = Restarts(_log, _PAUSE_MAX_S)
        failure = ""  # of the last start
        while True:
            self._ended = failure or f"the relay ended with {self._process.wait()}: {self._last_words()}"
            if self._ending.is_set() or self._ending.wait(restarts.ended(self._ended)):
                return
            try:
                with self._lock:
                    if self._ending.is_set():
                        return
                    self._process = self._start()
                self.restarts += 1
                failure = ""
                restarts.started()
            except OSError as error:
                failure = f"the relay does not start: {error}"

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            if said := self._log_file.read_text(errors="replace").splitlines()[-2:]:
                return " ".join(said)
        return "it said nothing"


class Supervisor:
    """Of one node. If its process is killed, agent and relay end with it; a new one of the same options goes on with
    the same address and segment, which it finds by files of a directory of the node. Thread-safe."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._tag = f"deltasync-ray-{os.getuid()}-{options.name}"
        self._directory = Path(tempfile.gettempdir()) / self._tag
        self._state_file = self._directory / "state.json"
        self._token_file = self._directory / "token"
        self._agent: AgentProcess | None = None
        self._relay: RelayProcess | None = None
        self._held: int | None = None  # the lock of the directory
        self._state: dict[str, Any] = {}
        self._failure = ""
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._owner_pid = os.getpid()
        atexit.register(self.stop)
        self._successor: threading.Thread | None = None
        if self._read_state().get("fleet") == options.fleet:
            self._successor = threading.Thread(target=self._go_on, name="deltasync-successor", daemon=True)
            self._successor.start()

    def start(self, timeout: float) -> dict[str, str]:
        """Starts the agent unless it runs. Where it is found: ``endpoint``, and ``socket`` for writers.

        Errors: AlreadyExists (another fleet of this name runs on this host, or the port is taken), and those of
        AgentProcess.
        """
        end = time.monotonic() + timeout
        with self._lock:
            if self._agent is None:
                self._take_directory()
                self._agent = self._start_agent(end)
                self._state["endpoint"] = self._agent.endpoint
                self._write_state()
            return {"endpoint": self._agent.endpoint, "socket": self._agent.socket}

    def follow(self, parents: Sequence[str]) -> None:
        """Relays what they serve, the first that answers, into the agent, which has been started."""
        with self._lock:
            assert self._agent is not None
            self._state["parents"] = list(parents)
            self._write_state()
            if self._relay is not None:
                self._relay.stop()
            self._relay = RelayProcess(
                parents,
                self._agent.socket,
                token_file=self._token_file,
                tls=self._options.tls,
                log_file=self._directory / "relay.log",
                args=self._options.relay_args,
            )

    def status(self) -> dict[str, Any]:
        """What deltasync.ray.NodeStatus says of the processes."""
        agent, relay = self._agent, self._relay
        errors = [self._failure, *(part.error for part in (agent, relay) if part)]
        if agent and not agent.error and agent.http_port:
            errors.append(cut_off(agent.http_port, self._options.agent_args, self._options.tls))
        return {
            "agent_pid": agent.pid if agent else None,
            "relay_pid": relay.pid if relay else None,
            "restarts": sum(part.restarts for part in (agent, relay) if part),
            "actor_restarts": self._state.get("successors", 0),
            "error": "; ".join(filter(None, errors)),
        }

    def stop(self) -> None:
        """Ends both, and leaves nothing on the node. Does nothing the second time, or in a forked child."""
        if os.getpid() != self._owner_pid or self._ending.is_set():
            return
        self._ending.set()
        atexit.unregister(self.stop)
        with self._lock:
            if self._relay is not None:
                self._relay.stop()
            if self._agent is not None:
                self._agent.stop()
            if self._held is not None:
                if self._state.get("fleet") == self._options.fleet:
                    with contextlib.suppress(OSError):  # one that another fleet of this name has by now
                        self._remove_segments()
                gone = self._directory.with_suffix(f".{self._owner_pid}")
                with contextlib.suppress(OSError):
                    self._directory.rename(gone)  # whole: the next one makes its own at once
                shutil.rmtree(gone, ignore_errors=True)
                os.close(self._held)

    def _go_on(self) -> None:
        tries = Tries(_log, f"{self._tag}: going on after the supervisor before", _PAUSE_MAX_S)
        while not self._ending.is_set():
            try:
                with self._lock:
                    if self._ending.is_set():
                        return
                    self.start(_START_S)
                    if parents := self._state.get("parents"):
                        self.follow(parents)
                    self._state["successors"] = self._state.get("successors", 0) + 1
                    self._write_state()
                self._failure = ""
                return
            except (Error, OSError) as error:
                self._failure = str(error)
                self._ending.wait(tries.failed(error))

    def _take_directory(self) -> None:
        """The lock, the state of an earlier supervisor of this fleet, and the token."""
        if self._held is None:
            try:
                self._held = self._until_free(self._lock_directory, BlockingIOError)
            except BlockingIOError:
                raise self._runs_already() from None
        self._state = self._read_state()
        if self._state.get("fleet") != self._options.fleet:
            try:
                self._until_free(self._remove_segments, BlockingIOError)
            except BlockingIOError:
                raise self._runs_already() from None
            self._state = {"fleet": self._options.fleet}
        with open(os.open(self._token_file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(self._options.token)

    def _lock_directory(self) -> int:
        while True:
            with contextlib.suppress(FileNotFoundError):  # one that closes has just taken it away
                make_own(self._directory)
                return lock_file(self._directory / "lock")

    def _runs_already(self) -> AlreadyExists:
        return AlreadyExists(
            f"a fleet '{self._options.name}' runs on this host already",
            "close that, or give name=; two nodes of Ray on one host cannot be in one fleet",
        )

    def _start_agent(self, end: float) -> AgentProcess:
        options = self._options
        return self._until_free(
            lambda: AgentProcess(
                self._tag,
                listen=self._state.get("endpoint") or f"{options.host}:{options.port}",
                socket=self._directory / "agent.sock",
                token_file=self._token_file,
                tls=options.tls,
                shm_dir=options.shm_dir,
                args=options.agent_args,
                remove_segment=False,
                timeout=left(end),
            ),
            AlreadyExists,
        )

    def _until_free(self, take: Callable[[], _T], taken: type[Exception]) -> _T:
        end = time.monotonic() + _FREE_S
        while True:
            try:
                return take()
            except taken:
                if left(end) == 0 or self._ending.wait(_LOOK_S):
                    raise

    def _read_state(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            return dict(json.loads(self._state_file.read_text()))
        return {}

    def _write_state(self) -> None:
        new = self._state_file.with_suffix(".new")
        new.write_text(json.dumps(self._state))
        new.replace(self._state_file)

    def _remove_segments(self) -> None:
        """BlockingIOError: an agent has them, of a fleet whose processes have another directory for temporary files."""
        remove_segments(self._tag, self._options.shm_dir)
