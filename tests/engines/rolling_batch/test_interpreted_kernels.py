"""The tests of Triton kernels in tests/gpu, in Triton's interpreter on the CPU.

They take a process of their own: Triton decides when it is imported whether kernels are interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT

_INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("name", "some_need_a_gpu"),
    [
        ("test_paged_attention.py", True),
        ("test_row_kernels.py", False),
        ("test_one_row.py", False),
        ("test_adapter_kernels.py", False),
    ],
)
def test_the_interpreter_computes_what_the_cpu_does(name: str, some_need_a_gpu: bool) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"tests/gpu/{name}"],
        cwd=ROOT,
        env=os.environ | _INTERPRETED,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert " passed" in done.stdout
    assert ("skipped" in done.stdout) is some_need_a_gpu
