"""CUDA tensors from Python without a device: over the runtime of tests/gpu/emulator, and without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from deltasync import _native

NATIVE = Path(_native.__file__).parents[2] / "python-emulated" / "_native.so"


@pytest.mark.skipif(not NATIVE.exists(), reason="built where there was no nvcc, which makes the kernels' PTX")
def test_torchs_tensors_on_a_device_arrive(segment_name: str) -> None:
    script = Path(__file__).with_name("emulated_cuda_process.py")
    ran = subprocess.run(
        [sys.executable, script, NATIVE, segment_name], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "all versions arrived\n"
