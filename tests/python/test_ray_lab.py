"""A fleet on a Ray cluster of several nodes, which are hosts of a lab (tools/lab.py). tools/test_engines.sh ray."""

from __future__ import annotations

import os
import signal
import subprocess
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
        **{"RAY_memory_monitor_refresh_ms": "0"},  # the whole machine's memory is not the hosts'
        **{"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(lab.directory / host / "r"), "RAY_USAGE_STATS_ENABLED": "0"},
    }


@pytest.fixture(scope="module")
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
    assert process.runs, said(process)
    return any("Ray runtime started" in line for line in said(process))


def run(lab: Lab, what: str) -> Process:
    argv = [sys.executable, str(Path(__file__).with_name("ray_job.py")), what]
    return lab.run("head", what, argv, env=environment(lab, "head"))


def said(job: Process) -> list[str]:
    return job.log.read_text(errors="replace").splitlines()


def line(job: Process, beginning: str) -> str:
    """Waits until the job says it."""

    def there() -> list[str]:
        lines = [line for line in said(job) if line.startswith(beginning)]
        assert lines or job.runs, "\n".join(said(job)[-60:])
        return lines

    return str(until(there, f"{job.name}: {beginning}", DEADLINE_S)[0])


def left_on(lab: Lab, host: str) -> list[str]:
    segments = lab.node(host).memory.glob("deltasync*")
    return [path.name for path in [*segments, *(lab.directory / host / "tmp").glob("deltasync-ray*")]]


def programs_on(lab: Lab, host: str) -> str:
    found = lab.node(host).popen(["pgrep", "-f", "bin/deltasync"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return str(found.communicate()[0].decode())


def test_a_job_that_is_killed_leaves_no_process(cluster: Lab) -> None:
    job = run(cluster, "killed")
    line(job, "kill me")
    assert all(programs_on(cluster, host) for host in NODES)
    job.signal(signal.SIGKILL)
    for host in NODES:
        until(lambda host=host: not programs_on(cluster, host), f"{host}: an agent or relay runs", DEADLINE_S)


def test_a_fleet_whose_processes_are_killed(cluster: Lab) -> None:
    """It takes away what the job before has left."""
    job = run(cluster, "whole")
    address = line(job, "cut").split()[1].rpartition(":")[0]
    away = next(name for name, host in cluster.topology.hosts.items() if host.address == address)
    cluster.cut(away)
    (cluster.directory / "head" / "cut").touch()
    line(job, "closed")
    print("\n".join(said(job)))
    assert {host: left for host in NODES if host != away and (left := left_on(cluster, host))} == {}
