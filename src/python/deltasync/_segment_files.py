"""What an agent leaves in the directory of its segments if it is killed, or ends before it comes to that."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path


def remove_segments(name: str, directory: str | os.PathLike[str]) -> None:
    """Of the agent of this name, with what stands beside them. BlockingIOError: it runs, as of another process."""
    own = re.compile(rf"{re.escape(name)}\.(g\d+(\.d\d+)?|lock)")  # agents' names may have dots

    def found() -> list[Path]:
        return [path for path in Path(directory).glob(f"{name}.*") if own.fullmatch(path.name)]

    if not found():
        return
    lock = Path(directory) / f"{name}.lock"
    held = lock_file(lock)
    try:
        for path in found():
            if path != lock:
                with contextlib.suppress(OSError):
                    path.unlink()
        lock.unlink()
    finally:
        os.close(held)


def lock_file(file: Path) -> int:
    """Made if it is not there; free when what is returned is closed. BlockingIOError: another process has it."""
    while True:
        held = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), file.lstat()):
                    return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)  # of a file that has been removed, which excludes nobody who comes later
