"""Topologies and scripts of faults that are wrong, and machines that can make no lab: what the user is told."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path[:0] = [str(TOOLS), str(TOOLS / "lab")]
from lab import Lab  # noqa: E402
from topology import LabError, Topology, read_faults  # noqa: E402

GOOD = '[[hosts]]\nnames = ["a", "b"]\nrate = "1gbit"\nrun.agent = "sleep 1"\n'


class TopologyTest(unittest.TestCase):
    def setUp(self) -> None:
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def refused(self, topology: str, faults: str = "") -> str:
        """What both files' readers say."""
        (self.directory / "t.toml").write_text(topology)
        (self.directory / "faults").write_text(faults)
        with self.assertRaises(LabError) as caught:
            read_faults(self.directory / "faults", Topology.load(self.directory / "t.toml"))
        return str(caught.exception)

    def told(self, path: str) -> str:
        """What `run` tells of a machine that has these programs."""
        (self.directory / "t.toml").write_text(GOOD)
        argv = [sys.executable, str(TOOLS / "lab.py"), "run", str(self.directory / "t.toml")]
        done = subprocess.run(argv, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 2, done.stderr)
        return done.stderr

    def test_topologies(self) -> None:
        for text, said in {
            "": "t.toml: topology: 'hosts' is missing",
            "hosts = 1": "'hosts' is 1",
            "hosts = [": "t.toml: ",
            GOOD + "speed = 1": "hosts: no key 'speed'; there are names, rate, delay_ms, run",
            GOOD + GOOD: "two are called 'a'",
            GOOD.replace('"a"', '"Rollout_1"'): "'Rollout_1' is no name",
            GOOD.replace('"a"', '"a-name-of-sixteen"'): "is no name",
            GOOD.replace('"a"', '"switch"'): "'switch' is no name",
            GOOD + "[models]\nmib = 1\nversions = 2": "models: 'changed' is missing",
            GOOD + '[check]\npublished = "p"\nreceived = "r"\nhosts = ["c"]': "check: no host 'c'; there are a, b",
        }.items():
            self.assertIn(said, self.refused(text), text)

    def test_faults(self) -> None:
        for line, said in {
            "soon kill a": "faults:2: could not convert",
            "1": "no action ''; there are kill",
            "1 break a": "no action 'break'",
            "1 kill a b": "kill has 2 names",
            "1 cut": "cut has 0 names",
            "1 kill a.relay": "kill: no 'a.relay'; there are a, a.agent, b, b.agent",
            "1 cut a.agent": "cut: no 'a.agent'; there are a, b",
        }.items():
            self.assertIn(said, self.refused(GOOD, f"# none\n{line}\n"), line)

    def test_a_user_who_is_not_root(self) -> None:
        self.enterContext(mock.patch("os.geteuid", return_value=1000))
        with self.assertRaisesRegex(LabError, "^a lab needs root, for namespaces and links$"):
            Lab(Topology({"hosts": []}), self.directory).__enter__()

    @unittest.skipIf(os.geteuid() != 0, "root is told first that it is not root")
    def test_a_machine_without_iproute2(self) -> None:
        for program in ("nsenter", "unshare", "mount"):
            (self.directory / program).symlink_to("/bin/true")
        said = self.told(str(self.directory))
        self.assertIn("lab: a lab needs ip, tc (Debian: iproute2", said)

    @unittest.skipIf(os.geteuid() != 0, "root is told first that it is not root")
    def test_a_root_who_may_make_no_namespace(self) -> None:
        refuses = self.directory / "unshare"
        refuses.write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n")
        refuses.chmod(0o755)
        said = self.told(f"{self.directory}:{os.environ['PATH']}")
        self.assertIn("which this root may not make: unshare failed: Operation not permitted", said)


if __name__ == "__main__":
    unittest.main(verbosity=2)
