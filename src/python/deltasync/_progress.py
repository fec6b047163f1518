"""Showing how far a full update is, while it comes."""

from __future__ import annotations

import concurrent.futures
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from .errors import InvalidArgument
from .prepared import Prepared

_log = logging.getLogger("deltasync.rollout")

#: Whether to show it, or who gets the bytes that are verified, and all of them.
ProgressLike = bool | Callable[[int, int], object]

#: Between two looks.
_LOOK_S = 0.2
#: For a callable to return, once there is nothing more to tell.
_LEAVE_S = 5.0


class _Puller(Protocol):
    def _progress(self) -> tuple[int, int]: ...


class _Bar:
    """tqdm's, from the first bytes on."""

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            # What an earlier pull verified is not of this one's speed.
            self._bar = self._tqdm(
                initial=done, total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="deltasync"
            )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _is_terminal(stream: Any) -> bool:
    """A daemon has no stderr, a program's own may lack isatty(), and that of one that is closed raises."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _bar() -> _Bar | None:
    if not _is_terminal(sys.stderr):
        return None
    try:
        return _Bar(importlib.import_module("tqdm").tqdm)
    except ImportError:
        return None


class Watch:
    """A thread that tells of a pull until it ends, or until this is left; none if nobody is to be told."""

    def __init__(self, receiver: _Puller, prepared: Prepared, progress: ProgressLike) -> None:
        if not isinstance(progress, bool) and not callable(progress):
            raise InvalidArgument(f"progress: True, False or a callable, not {progress!r}")
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        bar = _bar() if progress is True else None
        self._tell = tell = bar if bar is not None else progress
        if isinstance(tell, bool):
            return
        self._thread = threading.Thread(
            target=self._watch, args=(receiver, prepared, tell, bar), name="deltasync-progress", daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """Ends the thread soon, and waits for nothing."""
        self._left.set()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._thread is None:
            return
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():
            _log.warning("progress: %r does not return, and is waited for no more", self._tell)

    def _watch(
        self, receiver: _Puller, prepared: Prepared, tell: Callable[[int, int], object], bar: _Bar | None
    ) -> None:
        try:
            while not self._left.is_set() and not prepared.done:
                done, total = receiver._progress()
                if total > 0:
                    tell(done, total)
                concurrent.futures.wait([prepared._future], _LOOK_S)
            if prepared.done and not prepared.failed:
                report = prepared._future.result()
                if report["mode"] == "full":  # which may have come between two looks
                    tell(report["full_bytes"], report["full_bytes"])
        except Exception:
            _log.exception("progress: it is shown no more")  # the pull goes on
        finally:
            if bar is not None:
                bar.close()
