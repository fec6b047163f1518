"""tools/bench_report.py: the table that it makes of machines' files, and that a page with another one is found."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench_report.py"
PAGE = "before\n<!-- machines:begin -->\nold\n<!-- machines:end -->\nafter\n"


class BenchReportTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.machines = pathlib.Path(directory.name) / "machines"
        self.machines.mkdir()
        self.page = pathlib.Path(directory.name) / "page.txt"
        self.page.write_text(PAGE)

    def add(self, name, processor, **ratios):
        """``ratios``: of diff at 1%, by instruction set."""
        isas = {isa: {"diff 0.01": {"ratio_to_limit": ratio}, "copy 0.01": {"form": f"form of {isa}"}}
                for isa, ratio in ratios.items()}
        report = {"date": "2026-01-02", "model_gib": 2.0, "machine": {"processor": processor}, "isas": isas}
        (self.machines / f"{name}.json").write_text(json.dumps(report))

    def table(self, *options, page=None):
        return subprocess.run([sys.executable, SCRIPT, "--out", self.machines, "table", "--page", page or self.page, *options],
                              capture_output=True, text=True, check=False)

    def rows(self):
        lines = [line for line in self.page.read_text().splitlines() if line.startswith("|")]
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

    def test_no_machine(self):
        self.table()
        self.assertEqual(self.page.read_text(), "before\n<!-- machines:begin -->\nNone was measured with all of it yet.\n"
                                                "<!-- machines:end -->\nafter\n")

    def test_a_page_without_marks(self):
        self.page.write_text("nothing\n")
        got = self.table()
        self.assertEqual(got.returncode, 1)
        self.assertIn("machines:begin", got.stderr)
        self.assertEqual(self.page.read_text(), "nothing\n")

    def test_the_manual_has_the_table_of_the_files_that_are_there(self):
        done = subprocess.run([sys.executable, SCRIPT, "table", "--check"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
