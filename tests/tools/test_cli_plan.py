"""`deltasync plan`: what it prints of a topology, and what it says of one that is wrong."""

import pathlib
import re
import subprocess
import sys
import unittest
import xml.etree.ElementTree as ET

from cli_support import CLI, MISSING, USAGE, CliTest

TOPOLOGY = """[model]
parameters = 1e9
changed = 1
[trainers]
cores = 4
link = "1gbit"
[[engines]]
name = "fleet"
count = 16
cores = 4
slower = 0.5
link = "1gbit"
"""
BENCH = """{"case": "e2e", "model_gib": 1, "threads": 4, "density": 0.01, "offload_s": 10, "commit_to_delta_s": 5, \
"pull_s": 1, "commit_s": 1, "wire_bytes": 7000000}
{"case": "full", "model_gib": 1, "threads": 2, "streams": 4, "limit_gbps": 4, "pull_gbps": 2}
"""
PAGE = pathlib.Path(__file__).parents[2] / "docs/operating/planning.md"
REPORT = pathlib.Path(__file__).resolve().parents[2] / "tools/plan_report.py"


class PlanTest(CliTest):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "fleet.toml"
        self.file.write_text(TOPOLOGY)
        self.bench = self.tmp / "bench.json"
        self.bench.write_text(BENCH)

    def test_what_is_printed(self):
        self.cli("plan", self.file)
        self.assertIn("whole model, 1.86 GiB to each of 16 engines", self.out)
        self.assertIn("bottleneck: up links of trainers", self.out)
        self.assertRegex(self.out, r"another level of relays: 4 before the fleet: 100% after \S+ s, \S+ s sooner")
        self.assertIn("(give --bench): e2e full relay", self.out)
        again = self.out
        self.cli("plan", self.file)
        self.assertEqual(self.out, again)

    def test_json(self):
        said = self.cli_json("plan", self.file, "--bench", self.bench, "--engines", 4)
        self.assertEqual((said["event"], said["mode"], said["engines"]), ("planned", "full", 16))
        self.assertEqual(said["full_bytes"], 2_000_000_000)
        self.assertEqual(said["assumed"], ["relay"])
        self.assertGreater(said["all_s"], 16 * 2e9 / 125e6)
        self.assertLessEqual(said["engines_s"], said["half_s"])
        self.assertLessEqual(said["half_s"], said["most_s"])
        self.assertAlmostEqual(sum(part["seconds"] for part in said["path"]), said["all_s"], 6)
        self.assertEqual([part["stage"] for part in said["path"][:2]], ["offload", "diff"])
        self.assertAlmostEqual(said["path"][0]["seconds"], 10 * 2e9 / 2**30, 6)  # on four cores, as measured
        self.assertEqual(said["bottleneck"]["limit"], "up links of trainers")
        self.assertEqual(said["relay_level"]["before"], "fleet")
        self.assertLess(said["relay_level"]["all_s"], said["all_s"])

    def test_the_seed_says_who_is_slower(self):
        self.file.write_text(TOPOLOGY.replace("changed = 1", "changed = 0.2"))
        first, same, other = (self.cli_json("plan", self.file, "--seed", seed) for seed in (1, 1, 2))
        self.assertEqual(first, same)
        self.assertNotEqual(first["all_s"], other["all_s"])

    def test_what_is_refused(self):
        self.file.write_text(TOPOLOGY.replace('name = "fleet"', 'form = "trainers"'))
        self.cli("plan", self.file, expect=USAGE)
        self.assertIn(f"{self.file}:8: engines: no key 'form'; there are name, ", self.err)
        self.file.write_text(TOPOLOGY)
        self.cli("plan", self.file, "--engines", 17, expect=USAGE)
        self.assertIn("has 16", self.err)
        self.cli("plan", self.file, "--engines", 0, expect=USAGE)
        self.cli("plan", self.tmp / "nothing", expect=MISSING)
        self.assertIn("nothing", self.err)
        self.cli("plan", self.tmp, expect=USAGE)
        self.assertIn("a directory", self.err)
        self.cli("plan", self.file, "--bench", self.file, expect=USAGE)
        self.assertIn("`deltasync bench CASE --json` prints one", self.err)
        self.cli("plan", expect=USAGE)

    def test_the_page(self):
        """Its topology is one, and the benchmarks that it runs are all."""
        page = PAGE.read_text()
        self.file.write_text(re.search(r"```toml[^\n]*\n(.*?)```", page, re.S)[1])
        said = self.cli_json("plan", self.file)
        self.assertEqual(said["mode"], "delta")
        self.assertIn(f"for c in {' '.join(said['assumed'])}; do", page)

    def test_the_pages_table_and_plot_are_what_is_predicted(self):
        done = subprocess.run([sys.executable, REPORT, "--check", "--cli", CLI], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        ET.parse(REPORT.parents[1] / "docs/images/plan.svg")

    def test_a_benchmark_that_is_run(self):
        done = self.cli("bench", "e2e", "--model-gib", "0.02", "--shm-dir", self.tmp, "--json", timeout=120)
        self.bench.write_text(done)
        self.assertEqual(["full", "relay"], self.cli_json("plan", self.file, "--bench", self.bench)["assumed"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
