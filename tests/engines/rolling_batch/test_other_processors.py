"""Kernels compiled for processors without what this one may have: tests of other modules, in a process for each kind.

What is compiled for them has names of its own, and is kept from one run of the tests to the next.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import llvmlite.binding
import pytest
from paths import ROOT

pytestmark = [
    pytest.mark.slow,  # half a minute of a processor
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="the instruction sets of other processors are not hidden"
    ),
]

_HERE = Path(__file__).parent
_SUPPORT = ROOT / "tests" / "support"


class Processor(NamedTuple):
    variables: dict[str, str]
    tests: dict[str, str]
    """Which tests of a module run, as the option -k of pytest says it."""
    plugin: str | None = None
    """What emulates instructions that this processor lacks."""
    needs: tuple[str, ...] = ()
    """The instruction sets that are not emulated."""


PROCESSORS = {
    "short vectors, no VNNI and no products of bfloat16": Processor(
        {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        {
            "test_linears": "bias or bits or chosen",
            "test_block_linears": "multiplies or bits",
            "test_int8_activations": "(rounded_inputs and 512-100-6) or bits",
        },
    ),
    "no vectors that are asked for": Processor(
        {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, {"test_attention": "may_see"}
    ),
    "tile registers of AMX": Processor(
        {"PYTHONPATH": str(_SUPPORT)},
        {
            "test_linears": "bias or bits",
            "test_block_linears": "(multiplies and dtype0 and (512-100-5 or 33 or 600)) or bits",
            "test_int8_tiles": "test",
            "test_attention": "may_see and dtype1 and shape1",
        },
        plugin="emulated_tiles",
        needs=("avx512bw", "avx512vnni", "avx512bf16"),
    ),
}


@pytest.fixture(scope="module")
def outcomes_of(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[ElementTree.Element]:
    return functools.partial(_outcomes, tmp_path_factory.mktemp("processors"))


@functools.cache
def _outcomes(directory: Path, processor: str) -> ElementTree.Element:
    """Run the tests for a processor, and return their outcomes as pytest writes them."""
    variables, tests, plugin, needs = PROCESSORS[processor]
    features = llvmlite.binding.get_host_cpu_features()
    if missing := [name for name in needs if not features.get(name)]:
        pytest.skip(f"this processor lacks {missing}")
    if plugin is not None and features.get("amx-bf16"):
        pytest.skip("this processor has tile registers: the tests use them as they are")
    report = directory / f"{processor}.xml"
    chosen = " or ".join(f"({module}.py and ({names}))" for module, names in tests.items())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--junitxml", report]
    plugins = () if plugin is None else ("-p", plugin)
    done = subprocess.run(
        [*command, *plugins, "-k", chosen, *(_HERE / f"{module}.py" for module in tests)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert report.exists(), done.stdout[-5000:] + done.stderr
    assert done.returncode in (0, 1), done.stdout[-5000:] + done.stderr  # the second: a test has failed
    return ElementTree.parse(report).getroot()


@pytest.mark.parametrize(
    ("processor", "module"), [(name, module) for name, processor in PROCESSORS.items() for module in processor.tests]
)
def test_it_computes_the_same(outcomes_of: functools.partial[ElementTree.Element], processor: str, module: str) -> None:
    cases = outcomes_of(processor).findall(f".//testcase[@classname='tests.engines.rolling_batch.{module}']")
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    assert not wrong, "".join("".join(case.itertext()) for case in wrong)[-5000:]
    assert cases
    assert not any(case.find("skipped") is not None for case in cases)
