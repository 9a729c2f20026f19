"""The tests of Triton kernels in tests/gpu, in Triton's interpreter on the CPU.

They take a process of their own: Triton decides when it is imported whether kernels are interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow  # more than twenty seconds of a processor

_INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


# The files, and whether some of their tests need a GPU.
FILES = {
    "test_paged_attention.py": True,
    "test_row_kernels.py": False,
    "test_one_row.py": False,
    "test_adapter_kernels.py": False,
    "test_grouped_weights.py": True,
    "test_mixed_passes.py": True,
}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> ElementTree.Element:
    """Run the tests of all files, and return their outcomes as pytest writes them."""
    pytest.importorskip("triton")
    report = tmp_path_factory.mktemp("interpreted") / "outcomes.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--junitxml", report]
    done = subprocess.run(
        [*command, *(f"tests/gpu/{name}" for name in FILES)],
        cwd=ROOT,
        env=os.environ | _INTERPRETED,
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stdout[-5000:] + done.stderr
    return ElementTree.parse(report).getroot()


@pytest.mark.parametrize("name", FILES)
def test_the_interpreter_computes_what_the_cpu_does(interpreted: ElementTree.Element, name: str) -> None:
    cases = interpreted.findall(f".//testcase[@classname='tests.gpu.{name.removesuffix('.py')}']")
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    assert not wrong, "".join("".join(case.itertext()) for case in wrong)[-5000:]
    skipped = [case for case in cases if case.find("skipped") is not None]
    assert len(skipped) < len(cases)
    assert bool(skipped) is FILES[name]
