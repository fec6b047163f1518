#!/usr/bin/env python3
"""Runs trainer, agent and receiver as three processes on loopback and checks every version that arrives.

    quickstart_run.py --bin build/bin --versions DIR --out DIR

Publishes each directory below --versions as the next version, one at a time, while `pull --follow` keeps --out. For
each version the received safetensors files must have the published ones' SHA-256 and load with the safetensors
package. Exits with 1 at the first difference, with 2 if a process fails or a deadline passes. No process outlives it.
"""

import argparse
import hashlib
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

STEP_DEADLINE_S = 120  # one version, published, pulled and committed
START_DEADLINE_S = 30
STOP_DEADLINE_S = 10


class Failed(Exception):
    """A process failed or a deadline passed."""

    status = 2


class Different(Failed):
    """What arrived is not what was published."""

    status = 1


class Process:
    """A child in a session of its own, with its stdout as JSON lines and its stderr in a log file."""

    def __init__(self, name, argv, log_dir, stdin=None):
        self.name, self.log = name, log_dir / f"{name}.log"
        with self.log.open("wb") as log:
            self.child = subprocess.Popen([str(a) for a in argv], stdin=stdin or subprocess.DEVNULL, stderr=log,
                                          stdout=subprocess.PIPE, start_new_session=True)
        self.lines = queue.Queue()
        threading.Thread(target=self._read, name=f"{name}-out", daemon=True).start()

    def _read(self):
        for line in self.child.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def next_json(self, deadline):
        try:
            line = self.lines.get(timeout=max(0.001, deadline - time.monotonic()))
        except queue.Empty:
            raise Failed(f"{self.name}: nothing before the deadline{self.log_tail()}") from None
        if line is None:
            raise Failed(f"{self.name} ended with status {self.child.wait()}{self.log_tail()}")
        return json.loads(line)

    def log_tail(self):
        lines = self.log.read_text(errors="replace").splitlines()[-5:]
        return "".join(f"\n  {self.name}: {line}" for line in lines)

    def step(self):
        try:
            self.child.stdin.write(b"\n")
            self.child.stdin.flush()
        except OSError:
            pass  # it has ended; next_json says how

    def stop(self):
        """SIGTERM, then SIGKILL. Returns the exit status."""
        for sign, seconds in ((signal.SIGTERM, STOP_DEADLINE_S), (signal.SIGKILL, STOP_DEADLINE_S)):
            if self.child.poll() is not None:
                break
            os.killpg(self.child.pid, sign)
            try:
                self.child.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
        return self.child.returncode


def wait_for_file(path, process, deadline):
    while not path.exists():
        if process.child.poll() is not None:
            raise Failed(f"{process.name} ended with status {process.child.returncode}{process.log_tail()}")
        if time.monotonic() > deadline:
            raise Failed(f"{process.name}: not ready before the deadline{process.log_tail()}")
        time.sleep(0.02)
    return json.loads(path.read_text())


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check(published, received):
    """Every safetensors file equal by SHA-256 and loadable. Returns the digest's first digits of the first one."""
    import safetensors

    names = sorted(p.name for p in published.glob("*.safetensors"))
    if not names:
        raise Failed(f"{published}: no safetensors file")
    digests = []
    for name in names:
        expected, got = sha256(published / name), sha256(received / name)
        if expected != got:
            raise Different(f"{received / name}: SHA-256 {got}, published was {expected}")
        digests.append(got)
        tensors = safetensors.deserialize((received / name).read_bytes())
        if not tensors:
            raise Failed(f"{received / name}: no tensor")
    return digests[0][:12]


def mib(n):
    return f"{n / 2**20:.2f}"


def ms(seconds):
    return f"{seconds * 1e3:.1f}"


HEADER = ("version", "mode", "wire MiB", "full MiB", "wire %", "copy ms", "seal ms", "encode ms", "transfer ms",
          "commit ms", "sha256", "loads")


def row(widths, cells):
    return "  ".join(str(cell).rjust(width) for cell, width in zip(cells, widths))


def run(args, run_dir, processes):
    versions = sorted(p for p in args.versions.iterdir() if p.is_dir())
    if not versions:
        raise Failed(f"{args.versions}: no version")
    shutil.rmtree(args.out, ignore_errors=True)
    name = f"quickstart-{os.getpid()}"
    model_bytes = sum(p.stat().st_size for p in versions[0].glob("*.safetensors"))
    shm = pathlib.Path("/dev/shm")
    if not shm.is_dir() or shutil.disk_usage(shm).free < 2 * model_bytes + (64 << 20):
        shm = run_dir  # a container's small /dev/shm: an ordinary file works too

    agent = Process("agent", [args.bin / "deltasync-agent", "--name", name, "--shm-dir", shm, "--socket",
                              run_dir / "agent.sock", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
                              "--ready-file", run_dir / "ready.json", "--remove-segment-on-exit"], run_dir)
    processes.append(agent)
    ready = wait_for_file(run_dir / "ready.json", agent, time.monotonic() + START_DEADLINE_S)

    trainer = Process("trainer", [args.bin / "deltasync", "publish", "--agent", run_dir / "agent.sock", "--json",
                                  "--step-on-stdin", "--deadline-s", STEP_DEADLINE_S, "--model", *versions], run_dir,
                      stdin=subprocess.PIPE)
    processes.insert(0, trainer)
    receiver = Process("receiver", [args.bin / "deltasync", "pull", "--from", f"127.0.0.1:{ready['port']}", "--out",
                                    args.out, "--follow", "--count", len(versions), "--json", "--deadline-s",
                                    STEP_DEADLINE_S], run_dir)
    processes.insert(0, receiver)
    print(f"quickstart: agent pid {agent.child.pid}, trainer pid {trainer.child.pid}, "
          f"receiver pid {receiver.child.pid}", flush=True)

    widths = [max(len(title), 9) for title in HEADER]
    widths[0], widths[10] = 10, 12
    print(row(widths, HEADER), flush=True)
    wire = full = 0
    for version in versions:
        deadline = time.monotonic() + STEP_DEADLINE_S
        trainer.step()
        out = trainer.next_json(deadline)
        got = receiver.next_json(deadline)
        if got["id"] != out["id"] or got["label"] != version.name:
            raise Different(f"published {out['id']} ({version.name}), received {got['id']} ({got['label']})")
        digest = check(version, args.out / "current")
        wire, full = wire + got["wire_bytes"], full + got["full_bytes"]
        print(row(widths, (version.name, got["mode"], mib(got["wire_bytes"]), mib(got["full_bytes"]),
                           f"{100 * got['wire_bytes'] / got['full_bytes']:.2f}", ms(out["copy_s"]), ms(out["seal_s"]),
                           ms(out["ready_s"]), ms(got["transfer_s"]), ms(got["commit_s"]), digest, "yes")), flush=True)

    for process in (trainer, receiver):  # both have done all that they were asked for
        try:
            status = process.child.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{process.name} does not end{process.log_tail()}") from None
        if status != 0:
            raise Failed(f"{process.name} ended with status {status}{process.log_tail()}")
    if (status := agent.stop()) != 0:
        raise Failed(f"agent ended with status {status} after SIGTERM{agent.log_tail()}")
    print(f"quickstart: {len(versions)} versions, every file bit for bit as published (SHA-256) and loaded with the "
          f"safetensors package; {mib(wire)} MiB on the wire instead of {mib(full)} MiB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--versions", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    args = parser.parse_args()

    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda number, frame: sys.exit(128 + number))
    processes = []  # in the order in which they are to be stopped
    # A short path: a Unix socket's name has at most 107 bytes.
    run_dir = pathlib.Path(tempfile.mkdtemp(prefix="deltasync-quickstart-"))
    try:
        run(args, run_dir, processes)
        return 0
    except Failed as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return error.status
    finally:
        for process in processes:
            process.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
