"""plan_lab.py runs fleets, and asks `deltasync plan` about the same ones. What the figures are is for people to see."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from lab import missing  # noqa: E402
from plan_lab import Fleet, compare  # noqa: E402

BENCH = '{"case": "e2e", "model_gib": 0.001, "total_s": 0.002}\n'


class PlanLabTest(unittest.TestCase):
    def test_a_fleet(self) -> None:
        bench = Path(self.enterContext(tempfile.TemporaryDirectory())) / "bench.json"
        bench.write_text(BENCH)
        args = argparse.Namespace(bin=Path(os.environ["DELTASYNC_BIN"]), bench=bench, deltas=1)
        for fleet in (Fleet("parts", 2, 2, "400mbit", 6), Fleet("relays", 1, 2, "400mbit", 6, relays=(1,))):
            full, delta = compare(fleet, args)
            self.assertEqual((full["mode"], delta["mode"]), ("full", "delta"))
            self.assertGreater(full["measured"]["wire_bytes"], 6 << 20)
            self.assertLess(delta["measured"]["wire_bytes"], 1 << 20)
            for row in (full, delta):
                self.assertGreater(row["predicted_s"], 0)
                self.assertGreater(row["measured_s"], 0)


if __name__ == "__main__":
    if reason := missing():
        print(f"test_plan: skipped: {reason}")
        sys.exit(77)
    unittest.main(verbosity=2)
