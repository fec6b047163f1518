"""``python -m deltasync.bench`` runs, and says what it says it does."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
from deltasync import Version, VersionSpans, _programs  # noqa: E402
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


def test_ranks_that_export() -> None:
    command = [
        sys.executable,
        "-m",
        "deltasync.bench",
        "export",
        "--model-gib",
        "0.05",
        "--ranks",
        "2",
        "--rounds",
        "1",
    ]
    answer = subprocess.run([*command, "--bucket-mib", "16"], capture_output=True, text=True, timeout=240, check=True)
    said = json.loads(answer.stdout)
    model, auto, gathered = said["model_bytes"], said["auto"], said["gathered"]
    assert auto["written_bytes"] == gathered["written_bytes"] == model
    assert (auto["gather_s"], auto["sent_bytes"], auto["temporary_bytes_max"]) == (0, 0, 0)
    # Of two layers half of what attention has: experts are whole on one rank.
    assert gathered["sent_bytes"] == 2 * 4 * 1024 * 1024 and gathered["gather_s"] > 0
    assert 0 < gathered["temporary_bytes_max"] <= 2 * said["bucket_bytes"]


def test_a_pause_loses_nothing() -> None:
    env = {**os.environ, "DELTASYNC_PYTHON": sys.executable}
    command = [str(_programs.find("deltasync")), "bench", "control", "--streams", "4", "--cycles", "3", "--width", "32"]
    answer = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=True, env=env)
    said = json.loads(answer.stdout)
    assert 0 < said["pause_p50_ms"] <= said["pause_p95_ms"]
    assert said["requests"] > 0 and said["tokens"] >= said["requests"] * 32
    assert (said["requests_failed"], said["tokens_lost"], said["stale_tokens"]) == (0, 0, 0)
    assert (said["over_kept_tokens"], said["misnamed_tokens"]) == (0, 0) and said["requests_across"] > 0


def test_kept_keys_and_values_are_those_of_the_versions_that_an_answer_lists() -> None:
    said = measure(streams=4, cycles=3, mode="keep", width=32, tokens=64, between=0.1, kv="keep")
    assert said["over_kept_tokens"] > 0 and said["requests_across"] > 0
    assert (said["requests_failed"], said["tokens_lost"], said["stale_tokens"], said["misnamed_tokens"]) == (0, 0, 0, 0)


class Forgetful(Decoder):
    """Keeps what was computed with other weights."""

    def reset_caches(self, timeout: float) -> None:
        pass


def test_stale_tokens_are_counted() -> None:
    said = measure(streams=4, cycles=3, mode="keep", width=32, tokens=64, between=0.1, decoder=Forgetful)
    assert said["stale_tokens"] > 0 and said["requests_failed"] == 0


class Named(Decoder):
    """Says of all tokens that the version computed them that was live when their request began."""

    def _pass(self, slots: list[int]) -> None:
        super()._pass(slots)
        assert self.control is not None
        for slot in slots:
            if (request := self.slots[slot]) is not None:
                begun = getattr(request, "begun", None) or self.control.admit().version
                request.begun = begun  # type: ignore[attr-defined]
                request.spans = VersionSpans()
                request.spans.computed(begun, len(request.tokens))


def test_misnamed_tokens_are_counted() -> None:
    said = measure(streams=4, cycles=3, mode="keep", width=32, tokens=64, between=0.1, decoder=Named)
    assert said["misnamed_tokens"] > 0 and said["stale_tokens"] == 0


def test_versions_of_an_answer() -> None:
    spans = VersionSpans()
    assert spans.list == []
    spans.computed(Version(1, 7))
    spans.computed(Version(1, 7), 2)
    spans.computed(Version(1, 8), 0)
    spans.computed(Version(2, 7), 4)
    spans.computed(Version(2, 8, "step-8"))
    assert spans.list == [("7", 0, 3), ("7", 3, 7), ("step-8", 7, 8)]


def test_aborted_requests_have_failed() -> None:
    said = measure(streams=4, cycles=3, mode="abort", width=32, tokens=64, between=0.1)
    assert said["requests_failed"] > 0 and said["tokens_lost"] == said["stale_tokens"] == 0
