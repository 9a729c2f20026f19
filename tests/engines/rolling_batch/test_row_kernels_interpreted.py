"""tests/gpu/test_row_kernels.py in Triton's interpreter, on the CPU.

It takes a process of its own: Triton decides when it is imported whether kernels are interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_the_row_kernels_of_a_gpu_compute_what_those_of_the_cpu_do() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/gpu/test_row_kernels.py"]
    ran = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout
