"""``python -m deltasync.bench`` runs, and says what it says it does."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
from deltasync import _programs  # noqa: E402
from deltasync._bench_control import Decoder, measure  # noqa: E402


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


def test_a_pause_loses_nothing() -> None:
    env = {**os.environ, "DELTASYNC_PYTHON": sys.executable}
    command = [str(_programs.find("deltasync")), "bench", "control", "--streams", "4", "--cycles", "3", "--width", "32"]
    answer = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=True, env=env)
    said = json.loads(answer.stdout)
    assert 0 < said["pause_p50_ms"] <= said["pause_p95_ms"]
    assert said["requests"] > 0 and said["tokens"] >= said["requests"] * 32
    assert (said["requests_failed"], said["tokens_lost"], said["stale_tokens"]) == (0, 0, 0)


class Forgetful(Decoder):
    """Keeps what was computed with other weights."""

    def reset_caches(self, timeout: float) -> None:
        pass


def test_stale_tokens_are_counted() -> None:
    said = measure(streams=4, cycles=3, mode="keep", width=32, tokens=64, between=0.1, decoder=Forgetful)
    assert said["stale_tokens"] > 0 and said["requests_failed"] == 0


def test_aborted_requests_have_failed() -> None:
    said = measure(streams=4, cycles=3, mode="abort", width=32, tokens=64, between=0.1)
    assert said["requests_failed"] > 0 and said["tokens_lost"] == said["stale_tokens"] == 0
