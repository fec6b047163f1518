"""The programs that the wheel carries: ``deltasync-agent`` and ``deltasync``."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from .errors import NotFound


def find(program: str) -> Path:
    """Where ``program`` is: in ``$DELTASYNC_BIN``, in the package, or on ``PATH``. NotFound names where it looked."""
    chosen = os.environ.get("DELTASYNC_BIN")
    # A package that is installed for editing is in several directories.
    directories = (
        [Path(chosen)] if chosen else [Path(directory) / "bin" for directory in sys.modules["deltasync"].__path__]
    )
    for directory in directories:
        if os.access(directory / program, os.X_OK):
            return directory / program
    if chosen:
        raise NotFound(
            f"DELTASYNC_BIN='{chosen}': {program} is not there",
            "unset it, or name the directory that has deltasync-agent",
        )
    for entry in os.get_exec_path():
        path = Path(entry) / program
        if os.access(path, os.X_OK) and _is_elf(path):
            return path
    raise NotFound(f"{program} is neither in {', '.join(map(str, directories))} nor on PATH")


def _is_elf(path: Path) -> bool:
    """Not the console script of this name, which would start itself for ever."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
    return False


def _become(program: str) -> NoReturn:
    path = find(program)
    os.environ.setdefault("DELTASYNC_PYTHON", sys.executable)  # bench control
    os.execv(path, [program, *sys.argv[1:]])


def agent_main() -> NoReturn:
    """The console script ``deltasync-agent``."""
    _become("deltasync-agent")


def cli_main() -> NoReturn:
    """The console script ``deltasync``."""
    _become("deltasync")
