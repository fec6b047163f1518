"""Trainers on several nodes: four ranks under torchrun take themselves for ones of two to four (nodes_worker.py)."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltasync import _nodes
from deltasync._nodes import Rectangle, advertised
from deltasync.errors import InvalidArgument
from torch_ranks import require_ok, what_ranks_found

CHECKS = [
    *("fsdp", "fsdp, a rank a node", "hsdp, a replica a node", "hsdp, replicas over nodes", "hsdp, all replicas"),
    *("tensor parallel", "tensor parallel, all replicas", "transformers"),
    *("rank 0 fails", "rank 3 fails", "holes", "again", "killed", "beginnings"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    pytest.importorskip("torch")
    report = tmp_path_factory.mktemp("nodes") / "report"
    return what_ranks_found(Path(__file__).with_name("nodes_worker.py"), 4, report, "pytest-nodes")


@pytest.mark.parametrize("check", CHECKS)
def test_four_ranks(found: list[dict[str, str]], check: str, shm_files: set[str]) -> None:
    require_ok(found, check)


def test_where_receivers_reach_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nodes, "own_address", lambda: "10.0.0.1")
    assert advertised(None, "127.0.0.1:5", 1) == "127.0.0.1:5"
    assert advertised(None, "0.0.0.0:5", 1) == "10.0.0.1:5"
    assert advertised(None, None, 1) is None
    assert advertised(None, "0.0.0.0:5", 2) == "10.0.0.1:5"
    assert advertised(None, "[::]:5", 2) == "10.0.0.1:5"
    assert advertised(None, "10.1.0.1:5", 2) == "10.1.0.1:5"
    assert advertised("node1", "0.0.0.0:5", 2) == "node1:5"
    assert advertised("node1:6", "0.0.0.0:5", 2) == "node1:6"
    assert advertised("fe80::1", "0.0.0.0:5", 2) == "[fe80::1]:5"
    assert advertised("[fe80::1]", "0.0.0.0:5", 2) == "[fe80::1]:5"
    assert advertised("[fe80::1]:6", None, 1) == "[fe80::1]:6"
    with pytest.raises(InvalidArgument, match="on 2 nodes without advertise="):
        advertised(None, None, 2)
    for listen in ("127.0.0.1:5", "localhost:5", "[::1]:5"):
        with pytest.raises(InvalidArgument, match=r'listen="0.0.0.0:7070" and token_file'):
            advertised(None, listen, 2)
    with pytest.raises(InvalidArgument, match="the port is needed"):
        advertised("node1", None, 2)
    for wrong in ("", ":5", "node1:x", "node1:70000"):
        with pytest.raises(InvalidArgument, match="is not HOST:PORT"):
            advertised(wrong, "0.0.0.0:5", 2)


def test_this_host_on_its_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nodes.socket, "gethostname", lambda: "its-name")
    for master in ("127.0.0.1", "localhost", "no such host"):
        monkeypatch.setenv("MASTER_ADDR", master)
        assert _nodes.own_address() == "its-name"
    monkeypatch.delenv("MASTER_ADDR")
    assert _nodes.own_address() == "its-name"


@pytest.mark.parametrize(
    ("hosts", "names"), [(["a", "b"], ["a", "b"]), (["a", "a"], ["a-0", "a-1"]), (["a", "a", "a-1"], None)]
)
def test_nodes_have_different_names(hosts: list[str], names: list[str] | None) -> None:
    said = [f"{host} boot-{i}" for i, host in enumerate(hosts)]
    group: Any = SimpleNamespace(size=len(hosts), rank=0, gather=lambda *_: said)
    made = _nodes.Nodes(group, 1.0).names
    assert len(set(made)) == len(hosts) and made == (names or made)


def test_rectangles_travel_as_they_are() -> None:
    rng = random.Random(5)
    for _ in range(50):
        lists: list[list[Rectangle]] = [
            [tuple(rng.randrange(2**40) for _ in range(5)) for _ in range(rng.randrange(4))]  # type: ignore[misc]
            for _ in range(rng.randrange(1, 5))
        ]
        assert _nodes._unpack(_nodes._pack(lists)) == lists
