"""`python -m scripts.gpu_check`: its dry run on the processor, and what it makes of a profile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_servers import run_python

from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check.__main__ import Section, run
from scripts.gpu_check.report import tables
from scripts.gpu_check.timeline import busy_and_gaps


def run_fork(command: Sequence[str], env: Mapping[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of Python as subprocess.run does, as a fork that has imported transformers."""
    return run_python(command[1:], env, "transformers")


@pytest.mark.slow
def test_a_dry_run_measures_and_prints_a_table(
    demo_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = ["demo-ours", "demo-step", "demo-mixed", "demo-penalties", "demo-w4a16", "demo-fp8-blocks"]
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--dry-run", "--out", str(tmp_path), *sections])
    monkeypatch.setattr(subprocess, "run", run_fork)
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    for name in ("demo-ours", "demo-w4a16", "demo-fp8-blocks"):
        assert f"| {name} |" in printed
    assert "demo-step: 2 requests, " in printed
    assert "| demo-mixed, 2 decode | tokens/s |" in printed
    assert "| prompts of 5, eager |" in printed
    assert "demo-penalties: 2 requests with prompts of 8 tokens, a step takes " in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["demo-ours"]["rates"]) == {"1", "2"}


def test_a_section_that_does_not_exist_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "scripts.gpu_check", "--dry-run", "demo-theirs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no such section: demo-theirs; there are " in done.stderr


@pytest.mark.slow
def test_a_section_that_fails_or_hangs_costs_its_own_figures_only() -> None:
    python = [sys.executable, "-c"]
    failed = run(Section("failed", 30, [*python, "import sys; sys.exit('no such card')"]))
    assert failed["error"] == "exit code 1"
    hung = run(Section("hung", 5, ["sh", "-c", "printf 'one\\ntwo' >&2; exec sleep 60"]))  # sh starts at once
    assert hung == {"error": "took more than 5 s", "output": "one\ntwo"}
    good = run(Section("good", 30, [*python, 'print(\'{"rates": {"8": 12.4}}\')']))
    printed = tables({"failed": failed, "hung": hung, "good": good})
    assert "failed failed, exit code 1\nno such card" in printed
    assert "| good | 12 |" in printed


def test_gaps_are_the_times_in_which_no_kernel_runs() -> None:
    busy, gaps = busy_and_gaps([(10.0, 12.0), (0.0, 4.0), (3.0, 5.0), (11.0, 15.0), (12.0, 13.0), (15.0, 16.0)])
    assert (busy, gaps) == (11.0, [5.0])
