"""Progress of a pull: who is told, what, and what a failure there costs."""

from __future__ import annotations

import asyncio
import io
import math
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltasync
import numpy as np
import pytest
from deltasync import _progress, errors
from deltasync._progress import Watch
from deltasync.prepared import Prepared

DEADLINE_S = 60.0


class HeldBack:
    """A way to an agent: each connection lets so many bytes through, and the rest once ``go`` is set."""

    def __init__(self, endpoint: str, free_bytes: int) -> None:
        host, port = endpoint.rsplit(":", 1)
        self.to = (host, int(port))
        self.free_bytes = free_bytes
        self.go = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(self.to)
            threading.Thread(target=self._copy, args=(near, far, math.inf), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, self.free_bytes), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, free: float) -> None:
        try:
            while data := source.recv(1 << 16):
                free -= len(data)
                if free < 0:
                    self.go.wait(DEADLINE_S)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other direction has closed it


@pytest.fixture
def token(tmp_path: Path) -> str:
    """The name of its file: the agent's own is not found through the way."""
    file = tmp_path / "token"
    file.write_text("a token of these tests")
    file.chmod(0o600)
    return str(file)


@pytest.fixture
def way(segment_name: str, token: str) -> Iterator[HeldBack]:
    weights = {"w": np.arange(8 << 20, dtype=np.float32).reshape(8192, 1024)}
    with deltasync.WeightManager(weights, name=segment_name, token_file=token) as manager:
        manager.offload(weights)
        way = HeldBack(manager.endpoint, 2 << 20)
        yield way
        way.listener.close()
        way.go.set()


def test_a_callable_hears_of_a_full_update_while_it_comes(way: HeldBack, token: str) -> None:
    heard: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        heard.append((done, total))
        if done > 0:
            way.go.set()

    with deltasync.Receiver(way.endpoint, token_file=token, local="never") as receiver:
        assert receiver.update(timeout=DEADLINE_S, progress=tell).mode == "full"
        assert way.go.is_set()
        assert heard == sorted(heard)
        assert 0 < next(done for done, _ in heard if done) < 32 << 20
        assert heard[-1] == (32 << 20, 32 << 20)
        heard.clear()
        assert receiver.update(timeout=DEADLINE_S, progress=tell).mode == "up_to_date"
        assert heard == []


def test_one_that_raises_ends_no_pull(way: HeldBack, token: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(done: int, total: int) -> None:
        way.go.set()
        raise RuntimeError("a full disk, say")

    with deltasync.Receiver(way.endpoint, token_file=token, local="never") as receiver:
        prepared = receiver.prepare(timeout=DEADLINE_S, progress=fail)
        prepared.wait(DEADLINE_S)
        assert receiver.commit(timeout=DEADLINE_S).mode == "full"
    assert "progress: it is shown no more" in caplog.text


def test_one_that_came_between_two_looks_is_told_of() -> None:
    assert told_of({"mode": "full", "full_bytes": 7}) == [(7, 7)]
    assert told_of({"mode": "delta", "full_bytes": 7}) == []


def told_of(report: dict[str, object]) -> list[tuple[int, int]]:
    """Of a pull that ends with this report at the first look, which sees nothing of it."""
    heard: list[tuple[int, int]] = []
    steps = Steps(1, report)
    with Watch(steps, steps.prepared, lambda done, total: heard.append((done, total))):
        steps.prepared._future.result(DEADLINE_S)
    return heard


def test_asyncio(way: HeldBack, token: str) -> None:
    heard: list[tuple[int, int]] = []
    last = threading.Event()

    def tell(done: int, total: int) -> None:
        heard.append((done, total))
        if done > 0:
            way.go.set()
        if done == total:
            last.set()

    async def run() -> None:
        async with await deltasync.AsyncReceiver.connect(way.endpoint, token_file=token, local="never") as receiver:
            with pytest.raises(errors.InvalidArgument, match="not 'yes'"):
                await receiver.update(progress="yes")  # type: ignore[arg-type]
            waiting = asyncio.create_task(receiver.update(timeout=DEADLINE_S, progress=tell))
            assert (await waiting).mode == "full"

    asyncio.run(run())
    assert last.wait(DEADLINE_S)
    assert heard == sorted(heard) and heard[-1] == (32 << 20, 32 << 20)


def test_asyncio_tells_nothing_of_a_pull_that_is_given_up(way: HeldBack, token: str) -> None:
    begun = threading.Event()

    def tell(done: int, total: int) -> None:
        begun.set()

    async def run() -> None:
        async with await deltasync.AsyncReceiver.connect(way.endpoint, token_file=token, local="never") as receiver:
            theirs = receiver.receiver.prepare(timeout=DEADLINE_S)  # which goes on
            waiting = asyncio.create_task(receiver.prepare(timeout=DEADLINE_S, progress=tell))
            assert await asyncio.to_thread(begun.wait, DEADLINE_S)
            (thread,) = (each for each in threading.enumerate() if each.name == "deltasync-progress")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(thread.join, DEADLINE_S)
            assert not thread.is_alive() and not theirs.done

    asyncio.run(run())


def test_what_shows_nothing_is_refused(way: HeldBack, token: str) -> None:
    way.go.set()
    with deltasync.Receiver(way.endpoint, token_file=token, local="never") as receiver:
        with pytest.raises(errors.InvalidArgument, match="progress: True, False or a callable, not 'yes'"):
            receiver.update(progress="yes")  # type: ignore[arg-type]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Steps:
    """A pull that is half done at each look, and ends after some."""

    timeout = DEADLINE_S

    def __init__(self, looks: int, report: dict[str, object]) -> None:
        self.looks = looks
        self.report = report
        self.prepared = Prepared(self, None, math.inf, False)  # type: ignore[arg-type]

    def _progress(self) -> tuple[int, int]:
        self.looks -= 1
        if self.looks == 0:
            self.prepared._future.set_result(self.report)
            return 0, 0
        return 3 << 20, 6 << 20


class Unlike:
    """What a program may put in the place of stderr."""

    def write(self, text: str) -> int:
        return len(text)


def bar_of(stream: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    steps = Steps(3, {"mode": "full", "full_bytes": 6 << 20})
    watch = Watch(steps, steps.prepared, True)
    if watch._thread is not None:
        watch._thread.join(DEADLINE_S)
    return stream.getvalue() if isinstance(stream, Terminal) else ""


def test_one_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(_progress, "_LEAVE_S", 0.1)
    called, go = threading.Event(), threading.Event()

    def hang(done: int, total: int) -> None:
        called.set()
        go.wait(DEADLINE_S)

    steps = Steps(2, {})
    with Watch(steps, steps.prepared, hang) as watch:
        assert called.wait(DEADLINE_S)
    assert "hang at 0x" in caplog.text and "is waited for no more" in caplog.text
    assert watch._thread is not None and watch._thread.is_alive()
    go.set()
    watch._thread.join(DEADLINE_S)
    assert not watch._thread.is_alive()


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    shown = bar_of(Terminal(), monkeypatch)
    assert "deltasync: 100%" in shown and "6.00M/6.00M" in shown
    assert "3.00M/6.00M" in shown and "  0%" not in shown, "it begins where the first look finds the pull"


def test_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    file, closed = io.StringIO(), io.StringIO()
    closed.close()
    for stream in (file, closed, Unlike(), None):
        bar_of(stream, monkeypatch)
    assert file.getvalue() == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert bar_of(Terminal(), monkeypatch) == ""
