"""``python -m deltasync.bench`` runs, and says what it says it does."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")


def test_a_small_run() -> None:
    command = [sys.executable, "-m", "deltasync.bench", "--tensors", "300", "--mib", "32", "--rounds", "2", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [(line["case"], line["tensors"], line["bytes"]) for line in lines] == [
        ("tensors", 300, 300 * 128),
        ("bytes", 2, 32 << 20),
    ]
    for line in lines:
        for source in ("mapping", "generator"):
            assert line[source]["python_s"] > 0 and line[source]["native_s"] > 0
            assert line[source]["ratio"] == pytest.approx(line[source]["python_s"] / line[source]["native_s"])
