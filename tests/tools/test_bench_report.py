"""tools/bench_report.py: what it measures, the tables and the plot that it makes of machines' files, and that others are
found."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench_report.py"
PAGE = ("before\n<!-- machines:begin -->\nold\n<!-- machines:end -->\nbetween\n<!-- peers:begin -->\nold\n<!-- peers:end -->\n"
        "after\n")
SVG = "{http://www.w3.org/2000/svg}"


class BenchReportTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.machines = pathlib.Path(directory.name) / "machines"
        self.machines.mkdir()
        self.page = pathlib.Path(directory.name) / "page.txt"
        self.page.write_text(PAGE)
        self.svg = pathlib.Path(directory.name) / "plot.svg"

    def add(self, name, processor, more=None, **ratios):
        """``ratios``: of diff at 1%, by instruction set. ``more``: other runs, of each."""
        isas = {isa: {"diff 0.01": {"ratio_to_limit": ratio}, "copy 0.01": {"form": f"form of {isa}"}, **(more or {})}
                for isa, ratio in ratios.items()}
        report = {"date": "2026-01-02", "model_gib": 2.0, "threads": 2, "machine": {"processor": processor}, "isas": isas}
        (self.machines / f"{name}.json").write_text(json.dumps(report))

    def table(self, *options, page=None):
        return subprocess.run([sys.executable, SCRIPT, "--out", self.machines, "table", "--page", page or self.page, "--svg", self.svg,
                               *options], capture_output=True, text=True, check=False)

    def rows(self, mark="machines"):
        """Of the table between these marks: what follows each row's first two cells."""
        between = self.page.read_text().partition(f"<!-- {mark}:begin -->")[2].partition(f"<!-- {mark}:end -->")[0]
        lines = [line for line in between.splitlines() if line.startswith("|")]
        return {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[3:-1]] for line in lines}

    def test_a_column_for_each_machine_and_instruction_set(self):
        self.add("b", "Second", avx2=0.5)
        self.add("a", "First", avx512=0.875, avx2=0.625)
        self.assertEqual(self.table().returncode, 0)
        rows = self.rows()
        self.assertEqual([head.split("]")[0][1:] for head in rows["figure"]],
                         ["First, avx512, 2 GiB, 2026-01-02", "First, avx2, 2 GiB, 2026-01-02", "Second, avx2, 2 GiB, 2026-01-02"])
        self.assertEqual(rows["`diff` 1%, of the limit"], ["0.88", "0.62", "0.50"])
        self.assertEqual(rows["`diff` 5%, of the limit"], ["", "", ""])  # not measured
        self.assertEqual(rows["form of the copy that was chosen"], ["form of avx512", "form of avx2", "form of avx2"])
        self.assertTrue(self.page.read_text().startswith("before\n"))
        self.assertTrue(self.page.read_text().endswith("after\n"))

    def test_a_page_with_another_table_is_found(self):
        self.add("a", "First", avx2=0.5)
        checked = self.table("--check")
        self.assertEqual(checked.returncode, 1)
        self.assertIn("run tools/bench_report.py table", checked.stderr)
        self.assertEqual(self.page.read_text(), PAGE)
        self.table()
        self.assertEqual(self.table("--check").returncode, 0)
        self.svg.write_text("another")
        checked = self.table("--check")
        self.assertEqual(checked.returncode, 1)
        self.assertIn(str(self.svg), checked.stderr)
        self.assertEqual(self.svg.read_text(), "another")

    def test_no_machine(self):
        self.table()
        self.assertEqual(self.page.read_text(), "before\n<!-- machines:begin -->\nNone was measured with all of it yet.\n"
                                                "<!-- machines:end -->\nbetween\n<!-- peers:begin -->\n<!-- peers:end -->\nafter\n")
        ET.parse(self.svg)

    def test_published_ways_of_the_machines_that_measured_them(self):
        def rows(times):
            return {"rows": [{"format": f"way {i}", "system": f"System {i}", "bits_per_change": 48, "encode_to_memcpy": time,
                              "decode_to_memcpy": time / 2} for i, time in enumerate(times)]}

        self.add("a", "First", avx2=0.5)
        self.add("b", "Second", {"baseline 0.01": rows([1, 3])}, avx2=0.5)
        self.add("c", "Third", {"baseline 0.01": rows([2.25])}, avx2=0.5)
        self.table()
        peers = self.rows("peers")
        self.assertEqual([head.split("]")[0][1:] for head in peers["format"][1:]],
                         ["Second, avx2, 2 GiB, 2026-01-02", "Third, avx2, 2 GiB, 2026-01-02"])
        self.assertEqual(peers["way 0"], ["48.00", "1.00 / 0.50", "2.25 / 1.12"])
        self.assertEqual(peers["way 1"], ["48.00", "3.00 / 1.50", ""])

    def test_the_plot_has_each_run_once(self):
        runs = {"diff 0.001": {"ratio_to_limit": 1.0, "threads": 2}, "diff 0.1": {"ratio_to_limit": 0.25, "threads": 2},
                "diff 0.01, 1 threads": {"ratio_to_limit": 0.75, "threads": 1},
                "apply 0.01, 4 threads": {"ratio_to_limit": 2.0, "threads": 4},
                "offload 0.01": {"ratio_to_memcpy": 4.0, "threads": 2}}
        self.add("a", "First & last", runs, avx2=0.5)
        self.table()
        tree = ET.parse(self.svg)
        words = [element.text for element in tree.iter(f"{SVG}text")]
        for expected in ("First & last, avx2", "elements that a step changed", "threads", "limit: one copy", "0.1%", "10%", "4"):
            self.assertIn(expected, words)
        # By density three of diff; by threads two of diff, one of apply, one of offload. The last says who it is.
        circles = [(float(c.get("cx")), float(c.get("cy"))) for c in tree.iter(f"{SVG}circle")]
        self.assertEqual(len(circles), 7 + 1)
        limits = [float(line.get("y1")) for line in tree.iter(f"{SVG}line") if line.get("class") == "limit"]
        fastest, middle, slowest = circles[0], circles[1], circles[2]
        self.assertAlmostEqual(fastest[1], limits[0])  # a share of 1
        self.assertLess(fastest[0], middle[0])
        self.assertAlmostEqual(middle[0] - fastest[0], slowest[0] - middle[0], delta=0.2)  # 0.1%, 1%, 10%: logarithmic
        of_half, of_quarter = middle[1] - fastest[1], slowest[1] - fastest[1]
        self.assertAlmostEqual(of_half / 2, of_quarter / 3, delta=0.1)
        # Faster is higher: apply's and offload's figures are times.
        apply, offload = circles[5], circles[6]
        self.assertAlmostEqual(apply[1] - limits[2], of_half, delta=0.1)
        self.assertAlmostEqual(offload[1] - limits[4], of_quarter, delta=0.1)
        self.assertEqual(len(list(tree.iter(f"{SVG}path"))), 2)  # one point makes no line

    def test_what_is_measured(self):
        """Each run once, with every instruction set: over densities, and from one thread to as many as there are cores."""
        bench = self.page.with_name("bench")
        bench.write_text("#!/bin/sh\necho \"$DELTASYNC_ISA $*\" >> \"$0.log\"\necho '{\"threads\": 2}'\n")
        bench.chmod(0o755)
        done = subprocess.run([sys.executable, SCRIPT, "--out", self.machines, "measure", "here", "--bench", bench, "--threads", "1"],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        isas = json.loads((self.machines / "here.json").read_text())["isas"]
        lines = bench.with_name("bench.log").read_text().splitlines()
        self.assertEqual(len(lines), sum(len(runs) for runs in isas.values()))
        self.assertEqual(len(lines), len(set(lines)))
        for isa, runs in isas.items():
            for key in ("diff 0.001", "apply 0.1", "baseline 0.01", f"offload 0.01, {max(2, os.cpu_count() or 1)} threads"):
                if "threads" not in key or os.cpu_count() != 1:
                    self.assertIn(key, runs)
            self.assertEqual(sum(line.startswith(f"{isa} diff --threads 1 ") for line in lines), 6)  # five, and the table's 5%

    def test_a_page_without_marks(self):
        self.page.write_text("nothing\n")
        got = self.table()
        self.assertEqual(got.returncode, 1)
        self.assertIn("machines:begin", got.stderr)
        self.assertEqual(self.page.read_text(), "nothing\n")
        self.page.write_text(PAGE.replace("peers:begin", "others"))
        self.assertIn("peers:begin", self.table().stderr)

    def test_the_manual_has_the_table_of_the_files_that_are_there(self):
        done = subprocess.run([sys.executable, SCRIPT, "table", "--check"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
