#!/usr/bin/env python3
"""A fleet on one machine: hosts with network, memory and names of their own, links with rates, real processes, faults.

    tools/lab.py run docs/examples/lab/relays.toml [--faults FILE] [--seconds N] [--directory DIR] [--json]

A host is a set of namespaces: network, pids, mounts (its own /dev/shm), hostname, IPC. Its first process ends when the
lab does, however that ends, and takes with it all processes, links and shared memory. Nothing has a name outside.
Each host has one link to a switch, called like the host, with a rate in both directions (`tc tbf`) and, where a delay
is given, a process that holds each frame for so long. Commands run in DIR/HOST; what they print is in
DIR/HOST.NAME.log. DIR/token is a secret that hosts may share. tools/lab/topology.py has the topology's keys.

A line of a script of faults is SECONDS ACTION NAME, of a process (HOST.NAME) or a host (all of its processes):
kill, start, stop, cont, reboot (a host: killed, its /dev/shm emptied, started), cut and restore (a link; or HOST OTHER,
what goes between the two). With [check] the run ends when all that is to be the same is, byte for byte.
Exit codes: 0 done, 1 something differs, 2 the lab cannot run so."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import filecmp
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if sys.version_info < (3, 11):
    print("lab: needs Python 3.11 or later, for its tomllib", file=sys.stderr)
    sys.exit(2)
sys.path.insert(0, str(Path(__file__).resolve().parent / "demo"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lab"))
from links import Meter, table  # noqa: E402
from topology import ACTIONS, Fault, Host, LabError, Topology, read_faults  # noqa: E402

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "mount")
NEW_PIDS = 0x20000000  # CLONE_NEWPID
MTU = 9000  # of all links: a delayed one costs its process time by the frame
BURST = "128kb"  # what a link may send at once: two of the largest packets that TCP makes
END_S = 10.0
SWITCH_ADDRESS = "02:00:00:00:00:01"
# A host's first process. It ends when nobody holds the other end of its input.
BOOT = """set -e
echo "$1" > /proc/sys/kernel/hostname
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" /etc/hosts
echo up
exec cat"""

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Why no lab can be made here."""
    if os.geteuid() != 0:
        return "a lab needs root, for namespaces and links"
    if absent := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"a lab needs {', '.join(absent)} (Debian: iproute2, util-linux, mount)"
    tried = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"a lab needs namespaces, which this root may not make: {done.stderr.strip()}" if done.returncode else None


@contextlib.contextmanager
def children_in(pids: int | None) -> Iterator[None]:
    """What this thread starts is born in that pid namespace (a descriptor); None: is the first of a new one."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        failed = _libc.unshare(NEW_PIDS) if pids is None else _libc.setns(pids, NEW_PIDS)
        if failed:
            raise LabError(f"pid namespace: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        _libc.setns(own, NEW_PIDS)
        os.close(own)


class Node:
    """The namespaces of one host."""

    def __init__(self, name: str, names: Path) -> None:
        boot = ["unshare", "--net", "--mount", "--uts", "--ipc", "sh", "-c", BOOT, "sh", name, str(names)]
        pipe = subprocess.PIPE
        with children_in(None):
            self.init = subprocess.Popen(boot, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.children: list[subprocess.Popen[Any]] = []
        assert self.init.stdout is not None and self.init.stderr is not None
        if self.init.stdout.readline() != "up\n":
            raise LabError(f"host '{name}' does not start: {self.init.stderr.read().strip()}")
        self.enter = ["nsenter", "-t", str(self.init.pid), "--net"]
        self.pids = os.open(f"/proc/{self.init.pid}/ns/pid", os.O_RDONLY)
        self.network("ip", "link", "set", "lo", "up")

    def popen(self, argv: list[str], directory: Path = Path("/"), **options: Any) -> subprocess.Popen[Any]:
        """As subprocess.Popen, on this host, in a session of its own."""
        with children_in(self.pids):
            enter = [*self.enter, "--mount", "--uts", "--ipc", "--", "env", "-C", str(directory), *argv]
            child = subprocess.Popen(enter, start_new_session=True, **options)
        self.children.append(child)
        return child

    def network(self, *argv: str) -> str:
        """Runs a program of iproute2 in this host's network."""
        done = subprocess.run([*self.enter, *argv], capture_output=True, text=True, check=False)
        if done.returncode:
            raise LabError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    @property
    def memory(self) -> Path:
        """Its /dev/shm, as seen from here."""
        return Path(f"/proc/{self.init.pid}/root/dev/shm")

    def forget_memory(self) -> None:
        for path in self.memory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        self.init.kill()
        for child in self.children:  # before the first: the kernel ends that when the others have been waited for
            child.wait()
            if child.stdin is not None:
                child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # an exception came between its fork and `children`
            self.init.wait(END_S)
        for pipe in (self.init.stdin, self.init.stdout, self.init.stderr):
            assert pipe is not None
            pipe.close()
        os.close(self.pids)


class Process:
    """A command of a host, which may be started again."""

    def __init__(self, name: str, node: Node, argv: list[str], log: Path, options: dict[str, Any]) -> None:
        self.name, self.node, self.argv, self.log, self.options = name, node, argv, log, options
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.child = self.node.popen(self.argv, stdout=log, stderr=log, **self.options)
        self.surprising = True  # if it ends

    @property
    def runs(self) -> bool:
        return self.child.poll() is None

    def signal(self, number: int) -> None:
        if self.runs:
            os.killpg(self.child.pid, number)
        if number == signal.SIGKILL:
            self.surprising = False
            self.child.wait()

    def last_line(self) -> str:
        return (self.log.read_text(errors="replace").splitlines() or [""])[-1]

    def say(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line.encode() + b"\n")
        self.child.stdin.flush()


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Asks again until the answer is true."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > end:
            raise LabError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)
    return answer


def different_files(published: Path, received: Path) -> list[str]:
    """Files of a model directory that another one does not have byte for byte."""
    names = sorted(path.name for path in published.glob("*"))
    if not any(name.endswith(".safetensors") for name in names):
        return [f"{published.name} (no model is published)"]
    _, differ, absent = filecmp.cmpfiles(published, received, names, shallow=False)
    return sorted(differ + absent)


class Lab:
    """The hosts of a topology while it is entered."""

    def __init__(self, topology: Topology, binaries: Path, directory: Path | None = None) -> None:
        self.topology = topology
        self.binaries = binaries.resolve()
        self.kept = directory
        self.nodes: dict[str, Node] = {}
        self.processes: dict[str, Process] = {}
        self.meter: Meter | None = None

    def __enter__(self) -> Lab:
        if reason := missing():
            raise LabError(reason)
        self.directory = (self.kept or Path(tempfile.mkdtemp(prefix="lab-"))).resolve()
        try:
            self._make_files()
            self._make_switch()
            rates = {host.name: self._make_host(host) for host in self.topology.hosts.values()}
            self.meter = Meter(self.switch.init.pid, rates)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.meter is not None:
            self.meter.close()
        for node in self.nodes.values():
            node.close()
        self.nodes.clear()
        if self.kept is None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _make_files(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in self.topology.hosts:
            try:
                (self.directory / name / "run").mkdir(parents=True, mode=0o700)
            except FileExistsError:
                raise LabError(f"{self.directory} has the files of another run; name a new directory") from None
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.topology.hosts.values())]
        (self.directory / "names").write_text("\n".join(lines) + "\n")
        token = self.directory / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        if self.topology.models is not None:
            from model_steps import write_random_steps  # type: ignore[import-not-found]

            write_random_steps(self.directory / "models", *self.topology.models)

    def _make_switch(self) -> None:
        self.switch = self.nodes["switch"] = Node("switch", self.directory / "names")
        self.switch.network("ip", "link", "add", "switch", "address", SWITCH_ADDRESS, "type", "bridge")
        self.switch.network("ip", "link", "set", "switch", "mtu", str(MTU), "up")

    def _make_host(self, host: Host) -> float | None:
        """The rate of its link, in bits a second."""
        node = self.nodes[host.name] = Node(host.name, self.directory / "names")
        pid, mtu = str(node.init.pid), str(MTU)
        if host.delay_ms:
            self._hold_frames(host)
            self.switch.network("ip", "link", "set", "eth0", "netns", pid)
        else:
            peer = ["type", "veth", "peer", "name", "eth0", "netns", pid]
            self.switch.network("ip", "link", "add", "name", host.name, *peer)
        node.network("ip", "address", "add", f"{host.address}/16", "dev", "eth0")
        node.network("ip", "link", "set", "eth0", "mtu", mtu, "up")
        self.switch.network("ip", "link", "set", "dev", host.name, "mtu", mtu, "master", "switch", "up")
        if host.rate is None:
            return None
        limit = ["root", "tbf", "rate", host.rate, "burst", BURST, "latency", "100ms"]
        try:
            node.network("tc", "qdisc", "add", "dev", "eth0", *limit)
            self.switch.network("tc", "qdisc", "add", "dev", host.name, *limit)
        except LabError as error:
            raise LabError(f"host '{host.name}': rate '{host.rate}': {error}") from None
        found = json.loads(self.switch.network("tc", "-j", "qdisc", "show", "dev", host.name))
        return 8.0 * float(found[0]["options"]["rate"])

    def _hold_frames(self, host: Host) -> None:
        program = str(Path(__file__).resolve().parent / "lab" / "delay_line.py")
        argv = [sys.executable, program, host.name, str(host.delay_ms)]
        child = self.switch.popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert child.stdout is not None
        with child.stdout:
            if (said := child.stdout.readline()) != b"up\n":
                raise LabError(f"host '{host.name}': no delay: {(said + child.stdout.read()).decode().strip()}")

    # ---- processes ----

    def node(self, host: str) -> Node:
        if host not in self.topology.hosts:
            raise LabError(f"no host '{host}'; there are {', '.join(self.topology.hosts)}")
        return self.nodes[host]

    def run(self, host: str, name: str, command: str | list[str], **options: Any) -> Process:
        """Starts a process HOST.NAME. Options as of subprocess.Popen."""
        node, full = self.node(host), f"{host}.{name}"
        if full in self.processes:
            raise LabError(f"there is a process '{full}' already")
        argv = shlex.split(command) if isinstance(command, str) else command
        path = f"{self.binaries}:{os.environ['PATH']}"
        if not shutil.which(argv[0], path=path):
            raise LabError(f"process '{full}': no program {argv[0]} in {path}")
        here = self.directory / host
        options = {"stdin": subprocess.DEVNULL, **options, "directory": here}
        options["env"] = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(here / "run"), **options.get("env", {})}
        process = Process(full, node, argv, self.directory / f"{full}.log", options)
        self.processes[full] = process
        return process

    def run_all(self) -> None:
        """What the topology says."""
        for host in self.topology.hosts.values():
            for name, command in host.commands.items():
                self.run(host.name, name, command)

    def named(self, name: str) -> list[Process]:
        """A process, or all of a host."""
        if name in self.processes:
            return [self.processes[name]]
        if name in self.topology.hosts:
            return [process for process in self.processes.values() if process.node is self.nodes[name]]
        raise LabError(f"no process or host '{name}'; there are {', '.join([*self.topology.hosts, *self.processes])}")

    # ---- faults ----

    def _signal(self, name: str, number: int) -> None:
        for process in self.named(name):
            process.signal(number)

    def kill(self, name: str) -> None:
        self._signal(name, signal.SIGKILL)

    def stop(self, name: str) -> None:
        self._signal(name, signal.SIGSTOP)

    def cont(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def start(self, name: str) -> None:
        """Those that do not run, with the command that they had."""
        for process in self.named(name):
            if not process.runs:
                process.start()

    def reboot(self, host: str) -> None:
        """All of its processes are killed and started again, with an empty /dev/shm."""
        node = self.node(host)
        self.kill(host)
        node.forget_memory()
        self.start(host)

    def cut(self, link: str, other: str | None = None) -> None:
        """Nothing passes this link any more, or nothing between two hosts."""
        if other is None:
            self.node(link)
            self.switch.network("ip", "link", "set", "dev", link, "down")
            return
        for a, b in ((link, other), (other, link)):  # what they send to each other goes to the switch itself, and ends
            wrong = ["lladdr", SWITCH_ADDRESS, "nud", "permanent"]
            self.node(a).network("ip", "neigh", "replace", self._address(b), *wrong, "dev", "eth0")

    def restore(self, link: str, other: str | None = None) -> None:
        """What `cut` with the same names did."""
        if other is None:
            self.node(link)
            self.switch.network("ip", "link", "set", "dev", link, "up")
            return
        for a, b in ((link, other), (other, link)):
            self.node(a).network("ip", "neigh", "del", self._address(b), "dev", "eth0")

    def _address(self, host: str) -> str:
        self.node(host)
        return self.topology.hosts[host].address

    def do(self, fault: Fault) -> None:
        getattr(self, fault.action)(*fault.names)

    # ---- what came of it ----

    def report(self) -> dict[str, Any]:
        """Bytes and busy time of each link so far; of a host, up is what it sends."""
        assert self.meter is not None
        return self.meter.report()

    def bytes_to(self, host: str) -> int:
        assert self.meter is not None
        return self.meter.read()[host][1]

    def differing(self) -> dict[str, list[str]]:
        """By host of [check], the files that are not what was published."""
        check = self.topology.check
        if check is None:
            return {}
        wanted = self.directory / check.published
        found = {host: different_files(wanted, self.directory / host / check.received) for host in check.hosts}
        return {host: files for host, files in found.items() if files}

    def ended(self) -> dict[str, str]:
        """Processes that ended by themselves with an error: the code, and the last line of the log."""
        ended = [process for process in self.processes.values() if process.surprising and process.child.poll()]
        return {process.name: f"{process.child.returncode}: {process.last_line()}" for process in ended}


class Ended(threading.Event):
    """A signal that asks for the end. It raises nothing where a process is just being made."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._heard)

    def _heard(self, number: int, _: object) -> None:
        self.number = number
        self.set()

    def sleep(self, seconds: float) -> None:
        if self.wait(max(0.0, seconds)):
            sys.exit(128 + self.number)


def play(lab: Lab, faults: list[Fault], seconds: float, ended: Ended) -> dict[str, Any]:
    began = time.monotonic()
    lab.run_all()
    for fault in faults:
        ended.sleep(began + fault.at_s - time.monotonic())
        tell(f"{time.monotonic() - began:.1f} s: {fault.action} {' '.join(fault.names)}")
        lab.do(fault)
    while time.monotonic() < began + seconds and (lab.topology.check is None or lab.differing()):
        ended.sleep(0.02)
    return {**lab.report(), "differing": lab.differing(), "ended": lab.ended()}


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser.add_subparsers(dest="command", required=True).add_parser("run", help="run a topology")
    run.add_argument("topology", type=Path)
    run.add_argument("--faults", type=Path, help=f"lines: SECONDS {'|'.join(ACTIONS)} NAME [OTHER]")
    run.add_argument("--seconds", type=float, default=60, help="ends at the latest after (default 60)")
    run.add_argument("--bin", type=Path, default=Path("build/bin"), help="where the programs are, before PATH")
    run.add_argument("--directory", type=Path, help="where files and logs are kept (default: nowhere)")
    run.add_argument("--json", action="store_true", help="the report as one JSON object")
    args = parser.parse_args()
    ended = Ended()
    try:
        topology = Topology.load(args.topology)
        faults = read_faults(args.faults, topology) if args.faults else []
        with Lab(topology, args.bin, args.directory) as lab:
            for name, node in lab.nodes.items():
                tell(f"host {name}: pid {node.init.pid} (nsenter -a -t {node.init.pid})")
            report = play(lab, faults, args.seconds, ended)
    except (LabError, OSError) as error:
        tell(f"lab: {error}")
        return 2
    print(json.dumps(report) if args.json else table(report), flush=True)
    for name, code in report["ended"].items():
        tell(f"lab: {name} ended by itself with {code}")
    for host, files in report["differing"].items():
        tell(f"lab: host '{host}' does not have {', '.join(files)} as published")
    return 1 if report["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
