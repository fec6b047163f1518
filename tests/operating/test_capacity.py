"""docs/operating/capacity.md: its formulas against real processes, its worked example against the formulas."""

import json
import pathlib
import re
import resource
import subprocess
import unittest

from operating_support import AGENT, CLI, KUBERNETES, PAGES, Cleanups, Fleet, documents, until
from test_pages import table_rows

PAGE = (PAGES / "capacity.md").read_text()
MIB, GIB = 1 << 20, 1 << 30


def formulas(**known):
    """Each figure of the page's block of formulas, in bytes or as a number."""
    known = dict(known)
    for line in re.search(r"^```\n(ring .*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1].splitlines():
        name, expression = (part.strip() for part in line.split("#")[0].split("=", 1))
        for other in sorted(known, key=len, reverse=True):
            expression = expression.replace(other, str(known[other]))
        expression = re.sub(r"(\d+) MiB", lambda match: str(int(match[1]) * MIB), expression)
        assert re.fullmatch(r"[\d.e+* ]+", expression), f"{name}: {expression}"
        known[name] = eval(expression)
    return known


def value(page, name):
    return float(re.search(rf"^{name} (.*)$", page, re.MULTILINE)[1])


class ExampleTest(unittest.TestCase):
    def test_the_table_is_what_the_formulas_give_and_fits_the_manifests(self):
        figures = formulas(half=14.2 * GIB, delta=0.3 * GIB, reserve=1 * GIB, receivers_max=4096)
        self.assertIn(f"{int(figures['agent' + chr(39) + 's open files']):,}", PAGE)
        limits = self.manifest_limits()
        rows = 0
        for heading, cells in table_rows(PAGE):
            name = cells[0].split(",")[0]
            if heading != "" or name not in figures:
                continue
            with self.subTest(name):
                rows += 1
                shown = sum(float(part) for part in re.findall(r"([\d.]+) GiB", cells[1]))
                self.assertAlmostEqual(shown, figures[name] / GIB, delta=0.06)
                if cells[2]:
                    self.assertEqual({float(cells[2].removesuffix(" GiB"))}, limits[name])
                    self.assertGreaterEqual(float(cells[2].removesuffix(" GiB")), figures[name] / GIB)
        self.assertEqual(rows, 6)

    @staticmethod
    def manifest_limits():
        def gib(text):
            return float(text.removesuffix("Gi"))

        limits = {name: set() for name in ("shared memory", "agent's memory", "receiver's memory", "receiver's disk",
                                           "relay's memory")}
        for path in KUBERNETES.glob("*.yaml"):
            for document in documents(path):
                spec = document["spec"].get("template", {}).get("spec", {"containers": [], "volumes": []})
                for container in [*spec.get("initContainers", ()), *spec["containers"]]:
                    if f"{container['name']}'s memory" in limits:
                        limits[f"{container['name']}'s memory"].add(gib(container["resources"]["limits"]["memory"]))
                for volume in spec["volumes"]:
                    kind = {"shm": "shared memory", "models": "receiver's disk"}.get(volume["name"])
                    if kind:
                        limits[kind].add(gib(volume["emptyDir"]["sizeLimit"]))
        return limits


class MeasuredTest(unittest.TestCase):
    """A model of 64 MiB through an agent, a relay with an agent of its own, and a follower into a directory."""

    @classmethod
    def setUpClass(cls):
        cls.fleet = Fleet(Cleanups(cls), elements=32 << 20)
        until(lambda: value(cls.fleet.metrics("node"), "deltasync_ring_entries") >= 3, bool)
        cls.half = value(cls.fleet.metrics("trainer"), "deltasync_half_bytes")
        cls.delta = (value(cls.fleet.metrics("trainer"), "deltasync_delta_bytes_total") /
                     value(cls.fleet.metrics("trainer"), "deltasync_deltas_total"))
        cls.figures = formulas(half=cls.half, delta=cls.delta, reserve=0, receivers_max=100)

    def test_a_half_is_the_model(self):
        self.assertEqual(self.half, 2 * (32 << 20))
        told = json.loads(subprocess.run([CLI, "inspect", self.fleet.models[0], "--json"], check=True,
                                         capture_output=True).stdout)
        self.assertEqual(told["layout"]["half_bytes"], self.half)

    def test_shared_memory(self):
        for name in ("trainer", "node"):
            with self.subTest(name):
                files = [path for path in (self.fleet.tmp / name).iterdir() if ".g" in path.name]
                taken = {path.name: path.stat().st_blocks * 512 for path in files if path.is_file()}
                segment = max(taken.values())
                self.assertGreaterEqual(segment, 2 * self.half)
                self.assertLessEqual(segment, 2.02 * self.half + 4 * MIB)
                self.assertGreater(len(taken), 1, "deltas are kept beside it")
                self.assertLessEqual(sum(taken.values()), self.figures["shared memory"] + 4 * MIB)

    def test_memory(self):
        """Anonymous memory beside the constant part; and that the segment's pages are the agent's."""
        for name, child, formula in (("agent", self.fleet.trainer, "agent's memory"),
                                     ("receiver", self.fleet.follower, "receiver's memory"),
                                     ("relay", self.fleet.relay, "relay's memory")):
            with self.subTest(name):
                status = pathlib.Path(f"/proc/{child.process.pid}/status").read_text()
                taken = int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024
                if name == "agent":
                    shared = sum(int(re.search(rf"{kind}:\s+(\d+)", status)[1]) * 1024
                                 for kind in ("RssFile", "RssShmem"))
                    self.assertGreaterEqual(shared, 2 * self.half)
                    taken += self.figures["shared memory"]
                self.assertLessEqual(taken, self.figures[formula])

    def test_disk(self):
        files = {(path.stat().st_ino, path.stat().st_blocks * 512) for path in (self.fleet.tmp / "out").rglob("*")
                 if path.is_file()}
        taken = sum(size for _, size in files)
        self.assertGreaterEqual(taken, self.half)
        self.assertLessEqual(taken, self.figures["receiver's disk"] + MIB)

    def test_open_files(self):
        """The agent itself says how many it needs for 100 receivers."""
        done = subprocess.run([AGENT, "--shm-dir", self.fleet.tmp, "--receivers-max", "100"], capture_output=True,
                              text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000)))
        needed = re.search(r"--receivers-max 100 needs (\d+) open files", done.stderr)
        self.assertTrue(needed, done.stderr)
        self.assertEqual(int(needed[1]), self.figures["agent's open files"])


if __name__ == "__main__":
    unittest.main()
