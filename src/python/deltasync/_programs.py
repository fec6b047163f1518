"""The programs that the wheel carries: ``deltasync-agent`` and ``deltasync``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from .errors import NotFound


def find(program: str) -> Path:
    """Where ``program`` is: in ``$DELTASYNC_BIN``, in the package, or on ``PATH``. NotFound names where it looked."""
    chosen = os.environ.get("DELTASYNC_BIN")
    directories = [Path(chosen)] if chosen else [Path(__file__).parent / "bin"]
    for directory in directories:
        if os.access(directory / program, os.X_OK):
            return directory / program
    found = None if chosen else shutil.which(program)
    if found is None:
        raise NotFound(f"{program} is neither in {directories[0]} nor on PATH")
    return Path(found)


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
