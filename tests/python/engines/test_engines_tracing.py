"""The loaders of real engines, traced: a replay gives their parameters bit for bit, on every rank."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from checkpoints import shapes
from engine_support import dtype_of

pytestmark = pytest.mark.engines

HERE = pathlib.Path(__file__).parent
DEADLINE_S = 300


def installed(engine):
    """By its metadata: a stub of the module does not count."""
    try:
        importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("torch") is not None


def run_ranks(engine, model, ranks, mode):
    """The reports of one process per rank. All of them are ended if one fails, or at the deadline."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "trace_rank.py"), engine, model, str(ranks)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(ranks)
    ]
    reports = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=DEADLINE_S)
            lines = [line for line in output.splitlines() if line.startswith("REPORT ")]
            assert process.returncode == 0 and lines, output[-4000:]
            reports.append(json.loads(lines[-1].removeprefix("REPORT ")))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return reports


def covered(slices):
    """Elements of each tensor that at least one of the (tensor, row, col, rows, cols) has."""
    found = {}
    for tensor, row, col, rows, cols in slices:
        found.setdefault(tensor, set()).update((r, c) for r in range(row, row + rows) for c in range(col, col + cols))
    return {tensor: len(elements) for tensor, elements in found.items()}


CASES = [
    ("qwen3", 1, "tp", 25),
    ("qwen3_tied", 1, "tp", 24),
    ("qwen3_moe", 1, "tp", 69),
    ("qwen3", 2, "tp", 25),
    ("qwen3_moe", 2, "tp", 69),
    ("qwen3_moe", 2, "ep", 69),
    ("qwen3_fp8", 1, "tp", 39),
    ("qwen3_fp8", 2, "tp", 39),
    ("qwen3_moe_fp8", 1, "tp", 125),
]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("model", "ranks", "mode", "tensors"), CASES)
def test_replay_is_the_loader(engine, model, ranks, mode, tensors):
    if not installed(engine):
        pytest.skip(f"{engine} is not installed here: tools/test_engines.sh {engine}")
    reports = run_ranks(engine, model, ranks, mode)
    for report in reports:
        assert report["changed_by_trace"] == []
        assert report["loader_repeats"] == []
        assert report["differing_after_replay"] == []
        assert report["reload"] == {} and report["unproved"] == []
        assert report["leaves"] == report["placed"]
        assert report["current"] and report["unfilled"] == {}
        remote = tensors - report["placed"]
        # Of two ranks each has half of the experts, three tensors each in two layers.
        assert remote == len(report["unplaced"]) == (3 * 8 // 2 * 2 if mode == "ep" else 0)
        assert len(report["slices"]) == report["placed"]
        assert report["placed_bytes"] == sum(
            dtype_of(name, shapes(model)).itemsize * rows * cols for name, _, _, rows, cols in report["slices"]
        )
    elements = {}
    for name, shape in shapes(model).items():
        elements[name] = 1
        for size in shape:
            elements[name] *= size
    assert len(elements) == tensors
    assert covered(tuple(slice_) for report in reports for slice_ in report["slices"]) == elements


#: What SGLang's loader does beyond copies with latent attention: joins two projections, derives absorbed weights.
SGLANG_RELOADS = {
    "q_a_proj": "cat",
    "kv_a_proj_with_mqa": "cat",
    "kv_b_proj": "model.layers.{}.self_attn.w_kc is derived from it",
}
SGLANG_WRITES = ("fused_qkv_a_proj_with_mqa.weight", "kv_b_proj.weight", "w_kc", "w_vc")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_latent_attention(engine):
    if not installed(engine):
        pytest.skip(f"{engine} is not installed here: tools/test_engines.sh {engine}")
    (report,) = run_ranks(engine, "deepseek_v3", 1, "tp")
    reloads, writes = (SGLANG_RELOADS, SGLANG_WRITES) if engine == "sglang" else ({}, ())
    assert report["reload"] == {
        f"model.layers.{layer}.self_attn.{name}.weight": reason.format(layer)
        for layer in range(2)
        for name, reason in reloads.items()
    }
    # The replay leaves out these, and nothing else.
    assert report["differing_after_replay"] == sorted(
        f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in writes
    )
    assert report["changed_by_trace"] == report["loader_repeats"] == report["unproved"] == report["unplaced"] == []
    assert report["unfilled"] == {}
    assert report["placed"] == report["leaves"] == len(shapes("deepseek_v3")) - len(report["reload"])
