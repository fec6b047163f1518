"""What tests of the command line share: small models, exit codes, and processes that never outlive a test."""

import hashlib
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))
from held_port import HeldPort  # noqa: E402

BIN = pathlib.Path(os.environ["DELTASYNC_BIN"])
CLI = BIN / "deltasync"
USAGE, CONNECTION, NOT_VERIFIED, DEADLINE, NO_SPACE, VERSION, ACCESS, MISSING, UNSUPPORTED, OTHER = range(1, 11)

DEADLINE_S = float(os.environ.get("DELTASYNC_TEST_DEADLINE_S", "60"))


def write_model(directory, tensors, metadata=None, config="{}"):
    """tensors: name → (dtype, shape, bytes)."""
    directory.mkdir(parents=True, exist_ok=True)
    header, at = {"__metadata__": metadata or {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    (directory / "config.json").write_text(config)
    return directory


def bf16_words(n, seed):
    """n bf16 bit patterns around 0.02, by a small generator of our own."""
    state, out = seed * 2654435761 % 2**32 or 1, []
    for _ in range(n):
        state = (state * 1664525 + 1013904223) % 2**32
        out.append(0x3C00 + (state >> 16) % 0x200 + (0x8000 if state & 0x8000 else 0))
    return out


def pack_u16(words):
    return struct.pack(f"<{len(words)}H", *words)


class Child:
    """A process in a group of its own, killed with it at the latest when the test ends."""

    def __init__(self, test, argv, **options):
        self.process = subprocess.Popen([str(a) for a in argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        start_new_session=True, **options)
        test.addCleanup(self.kill)

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def line(self):
        """The next JSON line of its stdout. The test's own time limit bounds the wait."""
        text = self.process.stdout.readline()
        if not text:
            raise AssertionError(f"ended: {self.process.communicate()[1].decode()}")
        return json.loads(text)

    def log_line(self):
        """The next line of its stderr."""
        return self.process.stderr.readline().decode()

    def end(self, sign=None):
        """Optionally signals it, then waits. Returns (exit status, stdout, stderr)."""
        if sign is not None:
            os.killpg(self.process.pid, sign)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out.decode(), err.decode()


    def wait_for_signals(self, field, sign, there=True):
        """Until /proc says that it catches (SigCgt), blocks (SigBlk) or ignores (SigIgn) a signal, or no longer does."""
        end = time.monotonic() + DEADLINE_S
        while True:
            status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
            mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith(field + ":")), 16)
            if bool(mask >> (sign - 1) & 1) == there:
                return
            if time.monotonic() > end:
                raise AssertionError(f"{field} is {mask:x}")
            time.sleep(0.005)


class Agent(Child):
    def __init__(self, test, binary, directory, *options, shm_dir=None, listen="127.0.0.1:0"):
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.socket = self.directory / "agent.sock"
        ready = self.directory / "ready.json"
        super().__init__(test, [binary, "--name", "cli", "--shm-dir", shm_dir or self.directory, "--socket", self.socket, "--listen",
                                listen, "--http", "127.0.0.1:0", "--ready-file", ready, "--log-level", "warn",
                                "--remove-segment-on-exit", "--end-with", os.getpid(), *options])
        end = time.monotonic() + DEADLINE_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"agent not ready: {self.process.poll()}")
            time.sleep(0.02)
        self.ready = json.loads(ready.read_text())
        self.endpoint = f"127.0.0.1:{self.ready['port']}"
        self.http = f"127.0.0.1:{self.ready['http_port']}"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class CliTest(unittest.TestCase):
    def held_port(self):
        """Where agents of this test are started again."""
        port = HeldPort()
        self.addCleanup(port.close)
        return port

    def setUp(self):
        self.tmp = pathlib.Path(tempfile.mkdtemp(prefix="deltasync-cli-"))
        self.addCleanup(shutil.rmtree, self.tmp, ignore_errors=True)

    def cli(self, *argv, expect=0, **options):
        options.setdefault("timeout", DEADLINE_S)
        done = subprocess.run([str(CLI), *map(str, argv)], stdin=subprocess.DEVNULL, capture_output=True, **options)
        self.out, self.err = done.stdout.decode(), done.stderr.decode()
        self.assertEqual(done.returncode, expect, f"deltasync {argv}\n{self.out}\n{self.err}")
        return self.out

    def cli_json(self, *argv, **options):
        return json.loads(self.cli(*argv, "--json", **options))

    def model(self, name, change=lambda words: words, extra=(), **options):
        """Two bf16 tensors and an int64 one; `change` edits the words of the first."""
        words = change(bf16_words(4096, 1))
        tensors = {"layer.weight": ("BF16", [64, 64], pack_u16(words)),
                   "layer.bias": ("BF16", [100], pack_u16(bf16_words(100, 2))),
                   "positions": ("I64", [1, 4], bytes(range(32)))}
        for extra_name in extra:
            tensors[extra_name] = ("BF16", [2], pack_u16([1, 2]))
        return write_model(self.tmp / name, tensors, **options)

    def successive(self, count):
        def step(number):
            def change(words):
                for i in range(number):
                    words[i * 37 % 4096] += 1
                return words

            return change

        return [self.model(f"step_{i}", step(i)) for i in range(count)]
