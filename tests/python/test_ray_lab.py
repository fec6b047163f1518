"""A fleet on a Ray cluster of several nodes, which are hosts of a lab (tools/lab.py). tools/test_engines.sh ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import deltasync
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray", reason="ray is not installed: tools/test_engines.sh ray")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "lab")]
from lab import Lab, Process, missing, until  # noqa: E402
from topology import Topology  # noqa: E402

DEADLINE_S = 300.0
PORT = 6379
BINARIES = Path(deltasync.__file__).parent / "bin"
NODES = ("trainer0", "trainer1", "rollout0", "rollout1")
MEMORY = "80000000"  # of an object store, the least that Ray takes

pytestmark = [pytest.mark.engines, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def environment(lab: Lab, host: str) -> dict[str, str]:
    """Hosts share a file system, so each has directories of its own for what is a node's."""
    temporary = lab.directory / host / "tmp"
    temporary.mkdir(exist_ok=True)
    modules = [*sys.path, str(ROOT / "docs/examples/ray"), str(Path(__file__).parent)]
    return {
        **{"PYTHONPATH": os.pathsep.join(modules), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        **{"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(lab.directory / host / "r"), "RAY_USAGE_STATS_ENABLED": "0"},
    }


@pytest.fixture
def cluster() -> Iterator[Lab]:
    """A head node without CPUs for actors, and four nodes with one each. All of Ray ends with its host."""
    with Lab(Topology({"hosts": [{"names": ["head", *NODES]}]}), BINARIES) as lab:
        head = lab.topology.hosts["head"].address
        for name, host in lab.topology.hosts.items():
            role = ["--head", "--port", str(PORT)] if name == "head" else ["--address", f"{head}:{PORT}"]
            argv = [
                *(str(Path(sys.executable).with_name("ray")), "start", "--block", *role),
                *("--node-ip-address", host.address, "--num-cpus", "0" if name == "head" else "1"),
                *("--object-store-memory", MEMORY, "--temp-dir", str(lab.directory / name / "r")),
                *("--disable-usage-stats", *(("--include-dashboard", "false") if name == "head" else ())),
            ]
            process = lab.run(name, "ray", argv, env=environment(lab, name))
            until(lambda p=process: started(p), f"ray on {name}", DEADLINE_S)
        yield lab


def started(process: Process) -> bool:
    said = process.log.read_text(errors="replace")
    assert process.runs, said
    return "Ray runtime started" in said


def test_a_fleet_over_hosts_whose_processes_are_killed(cluster: Lab) -> None:
    argv = [sys.executable, str(Path(__file__).with_name("ray_job.py"))]
    job = cluster.run("head", "job", argv, env=environment(cluster, "head"))
    until(lambda: not job.runs, "the job", DEADLINE_S)
    said = job.log.read_text(errors="replace")
    print(said)
    assert job.child.returncode == 0, said[-4000:]
    assert "closed" in said.splitlines()
    for host in NODES:
        left = [path.name for path in cluster.node(host).memory.glob("deltasync*")]
        left += [path.name for path in (cluster.directory / host / "tmp").glob("deltasync-ray*")]
        assert left == [], host
