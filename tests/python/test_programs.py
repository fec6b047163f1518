"""Where the programs of the package are looked for."""

from __future__ import annotations

import tempfile
from pathlib import Path

import deltasync
import pytest
from deltasync import _programs, errors


def made(directory: Path, content: bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "deltasync-agent"
    program.write_bytes(content)
    program.chmod(0o755)
    return program


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltasync, "__path__", [str(tmp_path / "sources"), str(tmp_path / "installed")])
    monkeypatch.setattr(_programs, "__file__", str(tmp_path / "sources" / "_programs.py"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'scripts'}:{tmp_path / 'usr'}")
    made(tmp_path / "scripts", b"#!/bin/sh\n")


def test_a_console_script_is_not_its_own_program(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound, match="nor on PATH"):
        _programs.find("deltasync-agent")
    program = made(tmp_path / "usr", b"\x7fELF")
    assert _programs.find("deltasync-agent") == program


def test_each_directory_of_the_package_is_looked_at(tmp_path: Path) -> None:
    program = made(tmp_path / "installed" / "bin", b"\x7fELF")
    assert _programs.find("deltasync-agent") == program


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASYNC_BIN", "/nowhere")
    with pytest.raises(errors.NotFound, match=r"DELTASYNC_BIN='/nowhere'.*\(unset it"):
        _programs.find("deltasync-agent")


def test_an_agent_that_is_not_there_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    with pytest.raises(errors.NotFound):
        deltasync.AgentProcess()
    assert set(tmp_path.iterdir()) == before
