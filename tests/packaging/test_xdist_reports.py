"""Processes of pytest-xdist send fewer reports: what is shown of a run stays the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import TESTS

OUTCOMES = """\
import pytest

@pytest.fixture
def printed():
    print("from a set-up")
    yield
    print("from an end")

@pytest.fixture
def broken():
    raise ValueError("a set-up")

@pytest.fixture
def unfinished():
    yield
    raise ValueError("an end")

def test_passes(printed): pass
def test_fails(printed): assert False
def test_has_a_broken_set_up(broken): pass
def test_has_a_broken_end(unfinished): pass
def test_skips(): pytest.skip("a reason")
@pytest.mark.xfail
def test_fails_as_expected(): assert False
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--durations=0", "-vv"), ("--setup-show",)], ids=["usual", "detailed", "set-ups"]
)
def test_a_run_in_other_processes_shows_what_one_in_this_process_shows(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(TESTS / "support")}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "xdist_reports", "-n1", "-rA", *options]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    assert "1 failed, 2 passed, 1 skipped, 1 xfailed, 2 errors" in lines[-1]
    assert any(line.startswith("SKIPPED [1] test_outcomes.py:") and line.endswith(": a reason") for line in lines)
    assert "FAILED test_outcomes.py::test_fails - assert False" in lines
    assert "ERROR test_outcomes.py::test_has_a_broken_set_up - ValueError: a set-up" in lines
    assert "ERROR test_outcomes.py::test_has_a_broken_end - ValueError: an end" in lines
    assert "from a set-up" in lines  # -rA shows what a test that passes has printed
    assert lines.count("from an end") == 2
    assert any("s setup  " in line for line in lines) == ("--durations=0" in options)
