"""Real Ray actors on one machine (tools/test_engines.sh ray)."""

from __future__ import annotations

import importlib.util
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not installed")

from deltasync import errors  # noqa: E402
from deltasync.adapters.ray import find_endpoint, publish_endpoint, withdraw_endpoint  # noqa: E402

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    paths = [path for path in sys.path if (Path(path) / "deltasync").is_dir()]
    variables = {"PYTHONPATH": os.pathsep.join([*paths, str(Path(__file__).parent)])}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


@pytest.fixture
def name() -> str:
    return f"policy-{uuid.uuid4().hex}"


def tool() -> Any:
    path = Path(__file__).parents[3] / "tools" / "demo" / "ray_pair.py"
    spec = importlib.util.spec_from_file_location("ray_pair", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_pair_of_actors_that_find_each_other(cluster: None, name: str, shm_files: set[str]) -> None:
    assert tool().main(name, 4) == ["full", "delta", "delta", "delta"]


def test_a_name_is_found_from_another_process_and_the_last_one_counts(cluster: None, name: str) -> None:
    @ray.remote
    def look() -> tuple[str, str]:
        return tuple(find_endpoint(name, 30))

    waiting = look.remote()
    publish_endpoint(name, "10.0.0.1:7070", token="secret")
    assert ray.get(waiting, timeout=60) == ("10.0.0.1:7070", "secret")
    publish_endpoint(name, "10.0.0.2:7070")
    assert find_endpoint(name, 30).address == "10.0.0.2:7070"


@pytest.mark.parametrize(
    ("endpoint", "nodes", "reachable"),
    [
        ("0.0.0.0:7070", 1, False),
        ("[::]:7070", 1, False),
        ("127.0.0.1:7070", 1, True),
        ("127.0.0.1:7070", 2, False),
        ("localhost:7070", 2, False),
        ("[::1]:7070", 2, False),
        ("10.0.0.1:7070", 2, True),
        ("trainer:7070", 2, True),
    ],
)
def test_an_address_that_others_cannot_reach_is_refused(
    cluster: None, name: str, endpoint: str, nodes: int, reachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}] * nodes + [{"Alive": False}])
    if reachable:
        publish_endpoint(name, endpoint)
        return
    with pytest.raises(errors.InvalidArgument, match="node_address"):
        publish_endpoint(name, endpoint)


def test_a_name_that_nobody_publishes_is_named_at_the_deadline(cluster: None, name: str) -> None:
    publish_endpoint(name, "10.0.0.1:7070")
    withdraw_endpoint(name)
    with pytest.raises(errors.NotFound, match=name):
        find_endpoint(name, 0.2)


def test_one_that_waits_keeps_nobody_else_waiting(cluster: None, name: str) -> None:
    @ray.remote(num_cpus=0)
    def look() -> str:
        return find_endpoint(f"{name}-late", 60).address

    waiting = [look.remote() for _ in range(3)]
    publish_endpoint(name, "10.0.0.1:7070")
    assert find_endpoint(name, 30).address == "10.0.0.1:7070"
    publish_endpoint(f"{name}-late", "10.0.0.3:7070")
    assert ray.get(waiting, timeout=60) == ["10.0.0.3:7070"] * 3
