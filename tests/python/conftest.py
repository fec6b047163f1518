"""What the tests of the Python package share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltasync
import pytest
from held_port import HeldPort

if TYPE_CHECKING:
    from control_fleet import Fleet
    from engine_rig import Rig
    from rank_fleet import Fleet as RankFleet


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines: drives the real classes of vLLM or SGLang (tools/test_engines.sh)")


_count = 0


@pytest.fixture
def segment_name() -> str:
    """A name of its own for each test's agent."""
    global _count
    _count += 1
    return f"pytest-{os.getpid()}-{_count}"


@pytest.fixture
def fleet(segment_name: str) -> Iterator[RankFleet]:
    """An engine of several ranks behind one control service."""
    pytest.importorskip("torch")
    import rank_fleet

    made = rank_fleet.Fleet(segment_name)
    yield made
    made.close()


@pytest.fixture
def fleets(segment_name: str) -> Iterator[Callable[..., Fleet]]:
    """Makes engines behind the control service; none of them has computed with weights of several versions."""
    pytest.importorskip("torch")
    from control_fleet import Fleet

    made: list[Fleet] = []

    def make(**options: Any) -> Fleet:
        made.append(Fleet(f"{segment_name}-{len(made)}", **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()
        assert fleet.engine.torn == []


@pytest.fixture
def held_port() -> Iterator[HeldPort]:
    """Where an agent of the test is started later, or again."""
    port = HeldPort()
    yield port
    port.close()


@pytest.fixture
def agent(segment_name: str) -> Iterator[deltasync.AgentProcess]:
    with deltasync.AgentProcess(segment_name) as started:
        yield started


@pytest.fixture
def shm_files() -> Iterator[set[str]]:
    """Nothing that the test made may stay in /dev/shm; what other runs of the tests have there is theirs."""
    before = {path.name for path in Path("/dev/shm").iterdir()}
    yield before
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert not [name for name in left if name.startswith(f"pytest-{os.getpid()}-")], left


@pytest.fixture
def rig(segment_name: str, shm_files: set[str]) -> Iterator[Rig]:
    """A trainer and engines beside it."""
    pytest.importorskip("torch")
    from engine_rig import Rig

    made = Rig(segment_name)
    try:
        yield made
    finally:
        made.close()
