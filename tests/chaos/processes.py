"""The processes of a chaos run: each is started again when it ends, as an operator's supervisor would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

RESTART_PAUSE_S = 0.05
LINES_KEPT = 40


class Process:
    """One supervised process. `heard` gets each line of its standard output."""

    def __init__(
        self,
        name: str,
        command: Callable[[], list[str]],
        heard: Callable[[str], None] = lambda line: None,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self.command = command
        self.heard = heard
        self.log = log
        self.environment: dict[str, str] = {}
        self.child: asyncio.subprocess.Process | None = None
        self.started = asyncio.Event()
        self.stopped_until = 0.0
        self.killed = False  # by the run, so that its end is no surprise
        self.last_said = time.monotonic()
        self.last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self.surprises: list[str] = []
        self.starts = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name=self.name)

    async def _supervise(self) -> None:
        while not self._closing:
            self.killed = False
            self.child = await asyncio.create_subprocess_exec(
                *self.command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **self.environment},
                limit=1 << 20,
            )
            self.starts += 1
            self.started.set()
            assert self.child.stdout is not None and self.child.stderr is not None
            await asyncio.gather(self._read(self.child.stdout, self.heard), self._read(self.child.stderr, None))
            code = await self.child.wait()
            self.started.clear()
            if not self.killed and not self._closing:
                tail = " | ".join(list(self.last_lines)[-3:])
                self.surprises.append(f"{self.name} ended by itself with {code}: {tail}")
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _read(self, stream: asyncio.StreamReader, heard: Callable[[str], None] | None) -> None:
        while raw := await stream.readline():
            line = raw.decode(errors="replace").rstrip()
            self.last_said = time.monotonic()
            self.last_lines.append(line)
            if self.log is not None:
                with self.log.open("a") as out:
                    out.write(f"{time.monotonic():.3f} {line}\n")
            if heard is not None:
                heard(line)

    @property
    def runs(self) -> bool:
        return self.child is not None and self.child.returncode is None

    def signal(self, number: int) -> bool:
        """False if there is nobody to be hit."""
        if not self.runs:
            return False
        assert self.child is not None
        if number == signal.SIGKILL:
            self.killed = True
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(number)
            return True
        return False

    async def stop_for(self, seconds: float) -> None:
        """SIGSTOP, then SIGCONT."""
        child = self.child
        if not self.signal(signal.SIGSTOP) or child is None:
            return
        self.stopped_until = time.monotonic() + seconds
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)

    def say(self, line: str) -> None:
        if self.runs and self.child is not None and self.child.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self.child.stdin.write(line.encode() + b"\n")

    async def close(self) -> None:
        self._closing = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        if self._task is not None:
            await self._task
