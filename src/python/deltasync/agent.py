"""Starts the agent beside a trainer, watches it, and starts it again if it dies."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket as socket_module
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import _checks, _native, _programs
from ._deadlines import seconds
from ._segment_files import remove_segments
from ._tries import Restarts
from .errors import ConnectionFailed, DeadlinePassed, Error, InvalidArgument, NotFound, PermissionDenied, from_code
from .tls import Tls, TlsLike

_log = logging.getLogger("deltasync.agent")

#: Where receivers find an agent that was told no place: on this host, at a free port.
LISTEN = "127.0.0.1:0"
_LOOK_S = 0.02
_END_S = 6.0
#: What deltasync-agent's exit codes mean (deltasync-agent --help).
_EXIT_CODES = {1: "invalid_argument", 2: "already_exists", 3: "permission", 4: "no_space"}
#: What its log line says of the cause.
_FAILED = re.compile(r'agent_failed error="(?P<why>.*)"$')
_PORT_TAKEN = (
    "another process has this port, or an earlier manager of this process: close() it; "
    "else give another in listen=HOST:PORT, or 0 for a free one"
)
#: What helps, by what the agent said.
_REMEDIES = (
    ("beyond loopback needs a token", "give token_file=, a file that receivers have too, or listen on 127.0.0.1"),
    ("Address already in use", _PORT_TAKEN),
    ("another agent owns", "give another name=, or none for a free one"),
    ("not expected", "agent_args= takes options that `deltasync-agent --help` lists"),
    ("socket path", "set TMPDIR to a shorter directory"),
    ("Host not found", "give an address of this host in listen=HOST:PORT"),
)
#: The longest pause before an agent that has died is started again.
_PAUSE_MAX_S = 10.0


class AgentProcess:
    """A ``deltasync-agent`` of this process: ended by :meth:`stop`, at exit, and when this process dies.

    An agent that dies is started again on the same port and socket; the segment outlives it, so writers go on, and
    receivers find the same versions. One that dies soon after each start waits longer each time, up to 10 s, and the
    log has how often in a row, and its last words. Thread-safe. Forked children have no part in it.

    ``name`` names the segment (``SHM_DIR/NAME.gN``); without it a free name is made, so that jobs share a node.
    ``listen`` is HOST:PORT for receivers (port 0: a free one, kept over restarts). Beyond loopback a ``token_file`` is
    needed, or ``tls`` with a CA; on loopback receivers of this user need none, and other users are refused. ``args``
    are further options of ``deltasync-agent``. ``socket``: path of the trainers' socket; by default in a temporary
    directory. ``shm_dir``: where the segment is, /dev/shm by default. It is removed with the agent, unless
    ``remove_segment`` is false: then the next agent of the name serves its version again. ``timeout``: in seconds,
    until the agent is ready.

    Errors: NotFound (a token file or a directory that is not there), AlreadyExists (the name or the port is taken),
    InvalidArgument, PermissionDenied, NoSpace, DeadlinePassed; each with what helps.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        listen: str = LISTEN,
        socket: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls: TlsLike = None,
        shm_dir: str | os.PathLike[str] | None = None,
        args: Iterable[str] = (),
        remove_segment: bool = True,
        timeout: float = 60.0,
    ) -> None:
        self._owner_pid = os.getpid()
        end = time.monotonic() + seconds("agent", timeout)
        _check_places(listen, token_file, shm_dir)
        if isinstance(args, str) or not isinstance(args, Iterable):
            raise InvalidArgument(f"agent_args={args!r:.40} is no list of options", 'such as ["--threads", "4"]')
        tls_args = Tls.of(tls)._of_agent()
        if name is not None:
            _checks.text("name", name)
        else:
            name = f"deltasync-{self._owner_pid}-{secrets.token_hex(4)}"  # other containers have the same pids
        program = _programs.find("deltasync-agent")
        directory = self._directory = Path(tempfile.mkdtemp(prefix="deltasync-"))  # a forked child leaves it alone
        self._ready_file = directory / "ready.json"
        self._stderr_file = directory / "agent.log"
        self.name = name
        self._shm_dir = os.fspath(shm_dir or "/dev/shm") if remove_segment else None
        self._held_port, self._listen = _hold_port(listen)
        self._command = [
            str(program),
            *("--name", name),
            *("--socket", str(socket or directory / "agent.sock")),
            *("--ready-file", str(self._ready_file)),
            *("--end-with", str(self._owner_pid)),
            *(("--token-file", str(token_file)) if token_file else ()),
            *tls_args,
            *(("--shm-dir", str(shm_dir)) if shm_dir else ()),
            *(("--remove-segment-on-exit",) if remove_segment else ()),
            *map(str, args),
        ]
        self.restarts = 0
        #: Why it does not run just now; empty: it does.
        self.error = ""
        self._lock = threading.RLock()  # the collector may call stop() of a dropped manager in any thread
        self._ending = threading.Event()
        try:
            self._process = self._start()
            self._ready = self._wait_ready(self._process, end)
        except BaseException:
            self._kill()
            self._release_places()
            raise
        host = listen.rsplit(":", 1)[0]
        self._listen = f"{host}:{self._ready['port']}"
        self._watcher = threading.Thread(target=self._watch, name="deltasync-agent-watch", daemon=True)
        self._watcher.start()
        atexit.register(self.stop)

    @property
    def socket(self) -> str:
        """The Unix socket for writers."""
        return str(self._ready["socket"])

    @property
    def port(self) -> int:
        """Of receivers."""
        return int(self._ready["port"])

    @property
    def endpoint(self) -> str:
        """HOST:PORT for receivers, as this host sees it."""
        return self._listen

    @property
    def http_port(self) -> int | None:
        """Of the status pages."""
        port = self._ready.get("http_port")
        return int(port) if port else None

    @property
    def pid(self) -> int:
        """Of the agent's process."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What the agent has written to stderr so far."""
        with contextlib.suppress(OSError):
            return self._stderr_file.read_text(errors="replace")
        return ""

    def stop(self) -> None:
        """Ends the agent. Does nothing the second time, or in a forked child."""
        if os.getpid() != self._owner_pid or self._ending.is_set():
            return
        self._ending.set()
        atexit.unregister(self.stop)
        with self._lock:
            self._kill()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_END_S)
        if self._shm_dir is not None:
            with contextlib.suppress(OSError):  # another agent has this name by now
                remove_segments(self.name, self._shm_dir)  # which one that was killed has left
        self._release_places()

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> subprocess.Popen[bytes]:
        make_own(self._directory)  # again: who clears directories for temporary files may have taken it away
        self._ready_file.unlink(missing_ok=True)
        with self._stderr_file.open("ab") as log:
            return subprocess.Popen(
                [*self._command, "--listen", self._listen],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the trainer, which ends the agent when it is done with it
            )

    def _wait_ready(self, process: subprocess.Popen[bytes], until: float) -> dict[str, Any]:
        while not self._ending.is_set():
            with contextlib.suppress(OSError, json.JSONDecodeError):
                ready = json.loads(self._ready_file.read_text())
                if ready.get("pid") == process.pid:
                    return dict(ready)
            status = process.poll()
            if status is not None:
                raise self._failure(status)
            if time.monotonic() > until:
                raise DeadlinePassed(
                    f"agent {self.name}: started, but not ready by the deadline\n{self.log}", "give a larger timeout"
                )
            time.sleep(_LOOK_S)
        raise ConnectionFailed(f"agent {self.name}: stopped while it was starting")

    def _failure(self, status: int) -> Error:
        lines = self.log.strip().splitlines()
        why = lines[-1] if lines else "it said nothing"
        if said := _FAILED.search(why):
            why = said["why"].replace('\\"', '"')
        names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        how = f"signal {names.get(-status, -status)}" if status < 0 else f"exit code {status}"
        code = _EXIT_CODES.get(status, "peer_died")
        remedy = next((remedy for text, remedy in _REMEDIES if text in why), None)
        return from_code(code, f"agent {self.name} ended with {how}: {why}", remedy)

    def _watch(self) -> None:
        restarts = Restarts(_log, _PAUSE_MAX_S)
        unstarted: Exception | None = None
        while True:
            status = self._process.wait()  # also one that was not ready in time
            if self._ending.is_set():
                return
            self.error = str(unstarted or self._failure(status))
            if self._ending.wait(restarts.ended(self.error)):
                return
            unstarted = None
            try:
                with self._lock:
                    if self._ending.is_set():
                        return
                    process = self._process = self._start()
            except (Error, OSError) as error:
                unstarted = error
                continue
            try:
                self._ready = self._wait_ready(process, time.monotonic() + 60)
                self.restarts += 1
                self.error = ""
                restarts.started()
            except Error as error:
                self.error = str(error)
                if self._ending.is_set():
                    self._kill()

    def _release_places(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._held_port is not None:
            self._held_port.close()

    def _kill(self) -> None:
        end_process(getattr(self, "_process", None))


def _hold_port(listen: str) -> tuple[socket_module.socket | None, str]:
    """A socket that is bound there and does not listen, and the place with its port. Nobody else gets the port while an
    agent is away, and agents may listen there all the same (SO_REUSEADDR). None where that cannot be: what is wrong
    with the place, the agent says."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket_module.getaddrinfo(
            host.strip("[]"), int(port), type=socket_module.SOCK_STREAM, flags=socket_module.AI_PASSIVE
        )[0]
        held = socket_module.socket(family, kind, protocol)
    except (OSError, UnicodeError):  # UnicodeError: of a host that no name can be
        return None, listen
    try:
        held.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError:
        held.close()
        return None, listen
    return held, f"{host}:{held.getsockname()[1]}"


def make_own(directory: Path) -> None:
    """Makes it, of mode 0700. PermissionDenied: what is there is a link, or open to others, who could change what it
    has."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionDenied(
            f"{directory} is a link, another user's, or open to others", "remove it, or give another name="
        )


def end_process(process: subprocess.Popen[bytes] | None) -> None:
    """Asks it to end, and kills it if it does not."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_SAME_TOKEN = "trainer and receivers need the same: `(umask 77; openssl rand -hex 32 > FILE)` makes one"


def read_token(token_file: str | os.PathLike[str]) -> str:
    """What both sides prove that they have. NotFound, InvalidArgument (too short), PermissionDenied (others may read
    it, or it is another user's)."""
    try:
        path = os.fspath(token_file)
    except TypeError:
        raise InvalidArgument(f"token_file={token_file!r:.40} is no path", _SAME_TOKEN) from None
    try:
        return _native.read_token_file(path)
    except Error as error:
        why = error.message.removeprefix(f"token file {path}: ")
        raise type(error)(f"token_file='{path}': {why}", _SAME_TOKEN) from None


def _check_places(
    listen: str, token_file: str | os.PathLike[str] | None, shm_dir: str | os.PathLike[str] | None
) -> None:
    """What can be said better here than by a process that ends."""
    host, _, port = listen.rpartition(":") if isinstance(listen, str) else ("", "", "")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"listen={listen!r:.80} is not HOST:PORT, such as 127.0.0.1:7070 (port 0: a free one)")
    if token_file is not None:
        read_token(token_file)
    if shm_dir is not None and not Path(_checks.path("shm_dir", shm_dir)).is_dir():
        raise NotFound(f"shm_dir='{shm_dir}': there is no such directory", "make it, or give none for /dev/shm")


def check_none_given(options: Mapping[str, Any], agent_args: Any) -> None:
    """InvalidArgument if an option is given that an agent has from its start on."""
    given = {**options, "listen": options["listen"] if options["listen"] != LISTEN else None}
    named = [f"{option}=" for option, value in {**given, "agent_args": agent_args or None}.items() if value is not None]
    if named:
        raise InvalidArgument(
            f"WeightManager: {', '.join(named)} beside agent=, whose agent runs already with options of its own",
            "start that agent with these; without agent= one is started with them",
        )
